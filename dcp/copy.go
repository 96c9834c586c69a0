package dcp

import (
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/kvtier/kvtier/internal/steps"
)

const (
	// A tile is some rank-local tokens of one block by all regions: long enough that
	// the pages are read in runs, short enough that the rows it touches, about
	// tileBytes, stay in the cache until all regions are in.
	tileMin   = 8
	tileMax   = 64
	tileBytes = 320 << 10

	// pieceBytes is how much is copied between two looks at the stop flag.
	pieceBytes = 1 << 20
)

// Span is a range of tokens, in absolute positions of the prefix.
type Span struct {
	First  int
	Tokens int
}

// Gather copies this rank's rows of a chunk from its pages into the slot. slot is
// the whole slot; only bytes of this rank's rows, and in them only those of its
// regions, are written. blocks[i] is the block id of virtual block firstBlock+i.
//
// stop, which may be nil, is looked at at least once a MiB; when it is set, Gather
// returns ErrStopped and the slot holds some of the rows. After any other error the
// slot is as it was.
func Gather(slot []byte, g Geometry, cols []Columns, ordinal int, blocks []uint32, firstBlock int, stop *atomic.Bool) error {
	return transfer(slot, g, cols, ordinal, Span{0, math.MaxInt}, blocks, firstBlock, stop, true)
}

// Scatter copies this rank's rows of a chunk from the slot into its pages, but only
// the tokens inside clip: what lies in the pages before and after it is in use by
// others and keeps every byte. blocks need only cover the virtual blocks in which
// this rank has tokens of the chunk inside clip. For opaque pages a clip that cuts
// through a page is an error.
//
// stop is as for Gather; after ErrStopped some of the pages are written.
func Scatter(slot []byte, g Geometry, cols []Columns, ordinal int, clip Span, blocks []uint32, firstBlock int, stop *atomic.Bool) error {
	return transfer(slot, g, cols, ordinal, clip, blocks, firstBlock, stop, false)
}

func transfer(slot []byte, g Geometry, cols []Columns, ordinal int, clip Span, blocks []uint32, firstBlock int, stop *atomic.Bool, toSlot bool) error {
	if err := Fits(g, cols, len(slot)); err != nil {
		return err
	}
	if ordinal < 0 || int64(ordinal) > math.MaxUint32 {
		return fmt.Errorf("%w: ordinal %d", ErrGeometry, ordinal)
	}
	if clip.First < 0 || clip.Tokens < 0 || clip.First > math.MaxInt-clip.Tokens {
		return fmt.Errorf("%w: %d tokens from %d on", ErrClip, clip.Tokens, clip.First)
	}
	start := ordinal * g.C
	lo, hi := max(start, clip.First), min(start+g.C, clip.First+clip.Tokens)
	if lo >= hi {
		return nil
	}
	runs := make([]run, len(cols))
	for i := range cols {
		c := &cols[i]
		if c.Skip && toSlot {
			continue
		}
		r, err := newRun(g, c, start, lo, hi, toSlot)
		if err == nil {
			err = r.check(c, blocks, firstBlock)
		}
		if err != nil {
			return fmt.Errorf("columns %d: %w", i, err)
		}
		runs[i] = r
	}
	m := mover{slot: unsafe.Pointer(unsafe.SliceData(slot)), stop: stop, toSlot: toSlot}
	total := 0
	for i := range cols {
		total += (runs[i].end - runs[i].from) * cols[i].width()
	}
	if m.stream = vectors && total >= streamBytes; m.stream {
		defer fence()
	}
	for i := range cols {
		if !m.columns(&cols[i], runs[i], blocks, firstBlock) {
			return ErrStopped
		}
	}
	return nil
}

// run is the tokens of one rank that are to be copied: those with the rank-local
// indices from up to end. Where pages are opaque, a "token" is a page.
type run struct {
	from, end int
	row       int // of the first one in the chunk
	inStripe  int // place of the first one in its stripe of consecutive tokens
	stripe    int // tokens of a stripe
	jump      int // from the last row of a stripe to the first of this rank's next one
	block     int // tokens of a block

	// span is 0, or how many tokens a page has that holds all rows: the tokens of the
	// run then lie in it as far apart as in the slot. start is the first token of the
	// chunk.
	span, start int
}

// newRun finds the tokens of [lo, hi), which lies inside the chunk that begins at
// start. All divisions are here.
func newRun(g Geometry, c *Columns, start, lo, hi int, toSlot bool) (run, error) {
	allRows := c.AllRows && g.D > 1
	virtual := g.VirtualBlock()
	if allRows && !toSlot {
		g = Geometry{D: 1, I: virtual, B: virtual, C: g.C}
	}
	if c.opaque(g) {
		if lo%g.B != 0 || hi%g.B != 0 {
			return run{}, fmt.Errorf("%w: tokens %d to %d cut an opaque page of %d tokens", ErrClip, lo, hi, g.B)
		}
		start, lo, hi = start/g.B, lo/g.B, hi/g.B
		g = Geometry{D: g.D, I: 1, B: 1, C: g.C / g.B, Rank: g.Rank}
	}
	if g.D == 1 {
		g.I = g.B // whoever has all tokens has them in whole blocks
	}
	r := run{from: g.LocalTokens(lo, g.Rank), end: g.LocalTokens(hi, g.Rank), stripe: g.I, jump: (g.D-1)*g.I + 1, block: g.B}
	if r.from < r.end {
		r.row = g.Global(r.from/g.B, g.Rank, r.from%g.B) - start
		r.inStripe = r.from % g.I
		if allRows && toSlot {
			r.span, r.start = virtual, start
		}
	}
	return r, nil
}

// check makes sure that every block that the run touches is in the table and in the
// pages of every region.
func (r *run) check(c *Columns, blocks []uint32, firstBlock int) error {
	if r.from == r.end || len(c.Regions) == 0 {
		return nil
	}
	first, last := r.from/r.block, (r.end-1)/r.block
	if firstBlock < 0 || first < firstBlock || last-firstBlock >= len(blocks) {
		return fmt.Errorf("%w: virtual blocks %d to %d are needed, %d from %d on are there", ErrTable, first, last, len(blocks), firstBlock)
	}
	highest := slices.Max(blocks[first-firstBlock : last-firstBlock+1])
	for i := range c.Regions {
		if int64(highest) >= int64(c.Regions[i].Blocks) {
			return fmt.Errorf("%w: id %d, region %d has %d blocks", ErrBlock, highest, i, c.Regions[i].Blocks)
		}
	}
	return nil
}

// mover copies between one slot and pages. Everything it is told to copy has been
// checked.
type mover struct {
	slot   unsafe.Pointer
	stop   *atomic.Bool
	left   int // bytes until the next look at stop
	toSlot bool
	stream bool // past the cache, see streamBytes
	carry  carry
}

// tile is some consecutive tokens of one rank in one block.
type tile struct {
	runs [tileMax]struct {
		row, place int // of the first token: in the chunk, and in the block
		n          int
	}
	nruns              int
	n                  int   // tokens of all runs
	rowStep, placeStep int   // from one token of a run to the next
	id                 int64 // of the block
}

// columns copies one run, tile by tile. It tells false when it was stopped.
func (m *mover) columns(c *Columns, r run, blocks []uint32, firstBlock int) bool {
	if r.from == r.end || len(c.Regions) == 0 {
		return true
	}
	limit := c.tile()
	if m.stream {
		limit = m.streamTile(c)
	}
	vb, at := r.from/r.block, r.from%r.block
	t := tile{rowStep: 1, placeStep: 1}
	stripe := r.stripe
	if stripe == 1 {
		// Single tokens, evenly apart: one run for all of a tile.
		stripe, t.rowStep = math.MaxInt, r.jump
		if r.span > 0 {
			t.placeStep = r.jump
		}
	}
	row, inStripe := r.row, r.inStripe
	for left := r.end - r.from; left > 0; left -= t.n {
		t.id = int64(blocks[vb-firstBlock])
		t.nruns, t.n = 0, 0
		for end := min(limit, left, r.block-at); t.n < end; t.nruns++ {
			u := &t.runs[t.nruns]
			u.row, u.place = row, at+t.n
			if r.span > 0 {
				u.place = r.start + row - vb*r.span
			}
			u.n = min(stripe-inStripe, end-t.n)
			t.n += u.n
			row += u.n * t.rowStep
			if inStripe += u.n; inStripe == stripe {
				inStripe = 0
				row += r.jump - 1
			}
		}
		for i := range c.Regions {
			if !m.region(c, i, &t) {
				return false
			}
		}
		if at += t.n; at == r.block {
			at = 0
			vb++
		}
	}
	return true
}

// tile is how many tokens of these columns are copied together.
func (c *Columns) tile() int {
	return min(max(tileBytes/c.width()/tileMin*tileMin, tileMin), tileMax)
}

// width is how many bytes of a row are of these columns.
func (c *Columns) width() int {
	width := 0
	for i := range c.Regions {
		width += c.Regions[i].Bytes
	}
	return width
}

// addresses are those of a region in the block of the tile and in row 0 of the slot.
func (m *mover) addresses(c *Columns, r *Region, t *tile) (page, slot unsafe.Pointer) {
	return unsafe.Add(r.Base, t.id*r.BlockStride), unsafe.Add(m.slot, c.Offset+r.RowOffset)
}

// direction puts what is written first.
func (m *mover) direction(page, slot unsafe.Pointer) (dst, src unsafe.Pointer) {
	if m.toSlot {
		return slot, page
	}
	return page, slot
}

// region copies what region i has of a tile.
func (m *mover) region(c *Columns, i int, t *tile) bool {
	r := &c.Regions[i]
	whole := t.n*r.Bytes <= pieceBytes
	if whole && !m.may(t.n*r.Bytes) {
		return false
	}
	if whole && m.stream && m.streamRegion(c, i, t) {
		return true
	}
	page, slot := m.addresses(c, r, t)
	tokenStride := int(r.TokenStride)
	for j := range t.nruns {
		u := &t.runs[j]
		p, s := unsafe.Add(page, u.place*tokenStride), unsafe.Add(slot, u.row*c.RowStride)
		pageStep, slotStep := t.placeStep*tokenStride, t.rowStep*c.RowStride
		switch {
		case !whole:
			for k := range u.n {
				if !m.pieces(unsafe.Add(p, k*pageStep), unsafe.Add(s, k*slotStep), r.Bytes) {
					return false
				}
			}
		case pageStep == r.Bytes && slotStep == r.Bytes:
			// Without gaps on both sides: one piece.
			dst, src := m.direction(p, s)
			move(dst, src, u.n*r.Bytes)
		case m.toSlot:
			copyRows(s, p, u.n, slotStep, pageStep, r.Bytes)
		default:
			copyRows(p, s, u.n, pageStep, slotStep, r.Bytes)
		}
	}
	return true
}

// pieces copies one token, or opaque page, of any width.
func (m *mover) pieces(page, slot unsafe.Pointer, width int) bool {
	for done := 0; done < width; {
		n := min(width-done, pieceBytes)
		if !m.may(n) {
			return false
		}
		dst, src := m.direction(unsafe.Add(page, done), unsafe.Add(slot, done))
		move(dst, src, n)
		done += n
	}
	return true
}

// may tells whether n more bytes, at most pieceBytes, are to be copied.
func (m *mover) may(n int) bool {
	if m.left < n {
		steps.At(steps.CopyPiece)
		if m.stop != nil && m.stop.Load() {
			return false
		}
		m.left = pieceBytes
	}
	m.left -= n
	return true
}
