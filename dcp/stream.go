package dcp

import "unsafe"

// What is written in a call that moves much does not go through the cache: nobody
// would find it there afterwards, and lines that are written whole need not be read
// before. The order in which regions and tokens come is made for that.

// streamBytes is from how many bytes of one call on: about what a core has cache of its
// own, and where memmove does the same. Only tests change it.
var streamBytes = 1 << 20

const (
	lineBytes = 64

	// aheadLines of the next region are asked for while one is copied: so far the
	// processor does not look ahead by itself.
	aheadLines = 8
)

// carry holds the begun lines of a tile, one for each token.
type carry [tileMax][lineBytes / 8]uint64

func (c *carry) of(token int) unsafe.Pointer { return unsafe.Pointer(&c[token]) }

// streamTile is how many tokens are copied together. Reading from the pages wants long
// runs, and of the rows nothing but begun lines has to stay in the cache. Reading from
// the rows wants all their regions soon, before what was fetched with one is gone.
func (m *mover) streamTile(c *Columns) int {
	if !m.toSlot {
		return tileMin
	}
	widest := 1
	for i := range c.Regions {
		widest = max(widest, c.Regions[i].Bytes)
	}
	return min(max(pieceBytes/widest, tileMin), tileMax)
}

// streamRegion is region for what goes past the cache. It tells false, and has copied
// nothing, when this cannot.
func (m *mover) streamRegion(c *Columns, i int, t *tile) bool {
	r := &c.Regions[i]
	slotStep, pageStep := t.rowStep*c.RowStride, t.placeStep*int(r.TokenStride)
	page, slot := m.addresses(c, r, t)
	switch {
	case m.toSlot && !m.lines(c, i, t), !m.toSlot && !streams(page, pageStep, r.Bytes):
		return false
	case pageStep == r.Bytes && slotStep == r.Bytes:
		for j := range t.nruns {
			u := &t.runs[j]
			dst, src := m.direction(unsafe.Add(page, u.place*pageStep), unsafe.Add(slot, u.row*slotStep))
			streamRows(dst, src, 1, 0, 0, u.n*r.Bytes, nil, 0, false, false)
		}
	case m.toSlot:
		m.streamToSlot(c, i, t)
	default:
		m.streamToPage(c, r, t)
	}
	return true
}

// lines tells whether what region i has of the rows is written past the cache.
func (m *mover) lines(c *Columns, i int, t *tile) bool {
	if i < 0 || i >= len(c.Regions) {
		return false
	}
	r := &c.Regions[i]
	return t.n*r.Bytes <= pieceBytes && streams(unsafe.Add(m.slot, c.Offset+r.RowOffset), c.RowStride, r.Bytes)
}

// meets tells whether region i ends where the next one begins, in the same line of
// the row, and both are written past the cache.
func (m *mover) meets(c *Columns, i int, t *tile) bool {
	return m.lines(c, i, t) && m.lines(c, i+1, t) && c.Regions[i].RowOffset+c.Regions[i].Bytes == c.Regions[i+1].RowOffset
}

// streamToSlot hands the begun line of every row on to the next region.
func (m *mover) streamToSlot(c *Columns, i int, t *tile) {
	if i+1 < len(c.Regions) {
		next := &c.Regions[i+1]
		page, _ := m.addresses(c, next, t)
		prefetch(unsafe.Add(page, t.runs[0].place*int(next.TokenStride)), min(aheadLines, t.n*next.Bytes/lineBytes+1))
	}
	r := &c.Regions[i]
	join, keep := m.meets(c, i-1, t), m.meets(c, i, t)
	page, slot := m.addresses(c, r, t)
	token := 0
	for j := range t.nruns {
		u := &t.runs[j]
		p, s := unsafe.Add(page, u.place*int(r.TokenStride)), unsafe.Add(slot, u.row*c.RowStride)
		streamRows(s, p, u.n, t.rowStep*c.RowStride, t.placeStep*int(r.TokenStride), r.Bytes, m.carry.of(token), lineBytes, join, keep)
		token += u.n
	}
}

// streamToPage hands the begun line of every token on to the next token where these
// follow one another without gaps, which is then so from one run to the next, too.
func (m *mover) streamToPage(c *Columns, r *Region, t *tile) {
	page, slot := m.addresses(c, r, t)
	pageStep, slotStep := t.placeStep*int(r.TokenStride), t.rowStep*c.RowStride
	dense := pageStep == r.Bytes
	left := t.n
	for j := range t.nruns {
		u := &t.runs[j]
		p, s := unsafe.Add(page, u.place*int(r.TokenStride)), unsafe.Add(slot, u.row*c.RowStride)
		for n := u.n; n > 0; {
			// All but the first and the last token of the tile are alike.
			first, last := left == t.n, left == 1
			k := n
			switch {
			case !dense:
			case first || last:
				k = 1
			case n == left:
				k--
			}
			streamRows(p, s, k, pageStep, slotStep, r.Bytes, m.carry.of(0), 0, dense && !first, dense && !last)
			p, s = unsafe.Add(p, k*pageStep), unsafe.Add(s, k*slotStep)
			n, left = n-k, left-k
		}
	}
}
