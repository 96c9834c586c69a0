package dcp

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// The position oracle. Every byte of every page is a function of its region, its
// global token (its global block where pages are opaque) and its place in there.
// What Gather and Scatter must do to slot and pages is computed a byte at a time
// from the formula alone, and every byte of the memory is compared, also those that
// nobody may touch.
//
// Each of these mutants of copy.go makes tests here fail, and was tried:
//   - no clip: lo, hi := start, start+g.C
//   - rank 0 for all: g.Rank = 0 in newRun
//   - interleave taken for 1, or for B
//   - block table indexed from 0 instead of firstBlock
//   - place in the block, or in the stripe, not carried on from the first token
//   - merged copies for rows that are padded
//   - Skip ignored by Gather, or honoured by Scatter
//   - begun lines: kept for a region behind a gap, or for one that is not written past
//     the cache; those of one token given to another; kept by the last token of a tile
//   - AllRows ignored; Gather of all rows instead of the rank's own; Scatter of the
//     rank's own rows instead of all; places in the page counted by the rank's tokens

const (
	slotFill = 0xEE
	pageFill = 0xDD
)

// shape is a region without its memory.
type shape struct {
	bytes      int
	rowOffset  int
	blockMajor bool // [B, blocks, ...] instead of [blocks, B, ...]
	gap        int  // bytes between tokens that belong to somebody else
}

// group is one Columns without its memory.
type group struct {
	offset, rowStride, tokensPerRow int
	shapes                          []shape
	allRows                         bool
}

func (gr *group) rows(c int) int { return c / gr.tokensPerRow }

// value is what byte b of a region has at a token.
func value(groupIndex, region, token, b int) byte {
	x := uint32(groupIndex*7919+region*104729+token*1299709+b*15485863) + 12345
	x ^= x >> 15
	x *= 0x2c1b3c6d
	x ^= x >> 12
	return byte(x)
}

// engine is the memory of one rank.
type engine struct {
	g      Geometry
	groups []group
	blocks int
	table  []uint32 // of the whole prefix
	pages  [][][]byte
	cols   []Columns
}

func newEngine(g Geometry, groups []group, tokens int, rng *rand.Rand) *engine {
	e := &engine{g: g, groups: groups}
	need := (tokens + g.B*g.D - 1) / (g.B * g.D)
	e.blocks = need + 3
	for _, id := range rng.Perm(e.blocks)[:need] {
		e.table = append(e.table, uint32(id))
	}
	for _, gr := range groups {
		c := Columns{Offset: gr.offset, RowStride: gr.rowStride, TokensPerRow: gr.tokensPerRow, AllRows: gr.allRows}
		var pages [][]byte
		for _, s := range gr.shapes {
			perBlock := g.B / gr.tokensPerRow
			if gr.allRows {
				perBlock = g.B * g.D
			}
			r := Region{Blocks: e.blocks, Bytes: s.bytes, RowOffset: s.rowOffset}
			step := int64(s.bytes + s.gap)
			if s.blockMajor {
				r.BlockStride, r.TokenStride = step, step*int64(e.blocks)
			} else {
				r.BlockStride, r.TokenStride = step*int64(perBlock)+int64(s.gap), step
			}
			mem := bytes.Repeat([]byte{pageFill}, int(int64(e.blocks-1)*r.BlockStride+int64(perBlock-1)*r.TokenStride)+s.bytes+s.gap)
			r.Base = unsafe.Pointer(unsafe.SliceData(mem))
			if perBlock == 1 && rng.IntN(2) == 0 {
				r.TokenStride = -1 // nobody may look at it
			}
			c.Regions = append(c.Regions, r)
			pages = append(pages, mem)
		}
		e.cols = append(e.cols, c)
		e.pages = append(e.pages, pages)
	}
	return e
}

// place is the index in a region's memory of a token, if this rank has it.
func (e *engine) place(gi, ri, token int) (int, bool) {
	vb, rank, local := where(e.g.D, e.g.I, e.g.B, token)
	r := e.cols[gi].Regions[ri]
	at := int(e.table[vb]) * int(r.BlockStride)
	switch {
	case e.groups[gi].allRows:
		if tokens := e.g.B * e.g.D; tokens > 1 {
			at += token % tokens * int(r.TokenStride)
		}
	case rank != e.g.Rank:
		return 0, false
	case e.groups[gi].tokensPerRow == 1 && e.g.B > 1:
		at += local * int(r.TokenStride)
	}
	return at, true
}

// each calls visit for every byte of every region that this rank has of the rows of
// tokens [lo, hi), with its place in the pages and in the slot of the chunk at start.
func (e *engine) each(start, lo, hi int, visit func(gi, ri, token, b, page, slot int)) {
	for gi, gr := range e.groups {
		for ri, s := range gr.shapes {
			for token := lo; token < hi; token++ {
				if token%gr.tokensPerRow != 0 {
					continue // a row is an opaque page, counted at its first token
				}
				page, mine := e.place(gi, ri, token)
				if !mine {
					continue
				}
				row := (token - start) / gr.tokensPerRow
				for b := range s.bytes {
					visit(gi, ri, token, b, page+b, gr.offset+row*gr.rowStride+s.rowOffset+b)
				}
			}
		}
	}
}

// fill writes what prefill would have computed.
func (e *engine) fill(tokens int) {
	e.each(0, 0, tokens, func(gi, ri, token, b, page, _ int) { e.pages[gi][ri][page] = value(gi, ri, token, b) })
}

func (e *engine) clear() {
	for _, pages := range e.pages {
		for _, mem := range pages {
			for i := range mem {
				mem[i] = pageFill
			}
		}
	}
}

func clonePages(pages [][][]byte) [][][]byte {
	out := make([][][]byte, len(pages))
	for i := range pages {
		for _, mem := range pages[i] {
			out[i] = append(out[i], bytes.Clone(mem))
		}
	}
	return out
}

// tableFor gives the blocks of tokens [lo, hi) and as first entry, when there is
// one before, an id that is not possible: nobody may look at what is not needed.
func (e *engine) tableFor(lo, hi int) (blocks []uint32, first int) {
	v := e.g.B * e.g.D
	first = lo / v
	blocks = append(blocks, e.table[first:(hi+v-1)/v]...)
	if first > 0 {
		first--
		blocks = append([]uint32{math.MaxUint32}, blocks...)
	}
	return append(blocks, math.MaxUint32), first
}

func slotBytes(groups []group, c int) int {
	last := groups[len(groups)-1]
	return last.offset + last.rows(c)*last.rowStride + 13
}

// store gathers a chunk over all ranks and compares the slot after each of them.
func store(t require.TestingT, g Geometry, groups []group, ordinal int, rng *rand.Rand) []byte {
	start, end := ordinal*g.C, (ordinal+1)*g.C
	slot := bytes.Repeat([]byte{slotFill}, slotBytes(groups, g.C))
	want := bytes.Clone(slot)
	for _, rank := range rng.Perm(g.D) {
		g.Rank = rank
		e := newEngine(g, groups, end, rng)
		e.fill(end)
		before := clonePages(e.pages)
		blocks, first := e.tableFor(start, end)
		require.NoError(t, Gather(slot, g, e.cols, ordinal, blocks, first, nil))
		e.each(start, start, end, func(gi, ri, token, b, _, at int) {
			// Of rows that every rank has, each writes those that are its own.
			if _, owner, _ := where(g.D, g.I, g.B, token); owner == rank {
				want[at] = value(gi, ri, token, b)
			}
		})
		if !bytes.Equal(want, slot) {
			require.Equal(t, want, slot, "%+v ordinal %d", g, ordinal)
		}
		require.Equal(t, before, e.pages, "Gather only reads pages")
	}
	return slot
}

// load scatters the part of a chunk inside clip for each rank and compares all pages.
func load(t require.TestingT, slot []byte, g Geometry, groups []group, ordinal int, clip Span, rng *rand.Rand) {
	for rank := range g.D {
		g.Rank = rank
		loadRank(t, slot, newEngine(g, groups, (ordinal+1)*g.C, rng), ordinal, clip)
	}
}

func loadRank(t require.TestingT, slot []byte, e *engine, ordinal int, clip Span) {
	start, end := ordinal*e.g.C, (ordinal+1)*e.g.C
	lo, hi := max(start, clip.First), min(end, clip.First+clip.Tokens)
	want := clonePages(e.pages)
	var blocks []uint32
	var first int
	if lo < hi {
		blocks, first = e.tableFor(lo, hi)
	}
	e.each(start, lo, hi, func(gi, ri, token, b, page, _ int) { want[gi][ri][page] = value(gi, ri, token, b) })
	before := bytes.Clone(slot)
	require.NoError(t, Scatter(slot, e.g, e.cols, ordinal, clip, blocks, first, nil))
	for gi := range want {
		for ri := range want[gi] {
			if !bytes.Equal(want[gi][ri], e.pages[gi][ri]) {
				require.Equal(t, want[gi][ri], e.pages[gi][ri], "%+v ordinal %d clip %+v group %d region %d", e.g, ordinal, clip, gi, ri)
			}
		}
	}
	require.True(t, bytes.Equal(before, slot), "Scatter only reads the slot")
}

// smallGroups have a padded row, a row that is one region without a gap (merged
// copies), a row of one region whose pages have gaps, and the same two of pages that
// hold all rows.
func smallGroups(c int) []group {
	a := group{offset: 3, rowStride: 8, tokensPerRow: 1, shapes: []shape{
		{bytes: 3, rowOffset: 0}, {bytes: 2, rowOffset: 3, blockMajor: true, gap: 1}, {bytes: 1, rowOffset: 6}}}
	b := group{offset: a.offset + c*a.rowStride, rowStride: 2, tokensPerRow: 1, shapes: []shape{{bytes: 2}}}
	d := group{offset: b.offset + c*b.rowStride, rowStride: 2, tokensPerRow: 1, shapes: []shape{{bytes: 2, gap: 1}}}
	e := group{offset: d.offset + c*d.rowStride, rowStride: 6, tokensPerRow: 1, allRows: true, shapes: []shape{
		{bytes: 4, rowOffset: 0}, {bytes: 1, rowOffset: 5, gap: 2}}}
	f := group{offset: e.offset + c*e.rowStride, rowStride: 2, tokensPerRow: 1, allRows: true, shapes: []shape{{bytes: 2}}}
	return []group{a, b, d, e, f}
}

func TestGatherAgainstTheFormula(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	small(4, 4, 11, func(g Geometry) {
		for ordinal := range 4 {
			store(t, g, smallGroups(g.C), ordinal, rng)
		}
	})
}

func TestScatterAgainstTheFormulaWithEveryClip(t *testing.T) {
	rng := rand.New(rand.NewPCG(2, 1))
	stored := map[[2]int][]byte{}
	small(4, 4, 9, func(g Geometry) {
		groups := smallGroups(g.C)
		for ordinal := range 3 {
			slot := stored[[2]int{g.C, ordinal}]
			if slot == nil {
				// Stored under a topology that has nothing to do with the ones it is loaded under.
				slot = store(t, Geometry{D: 3, I: 2, B: 4, C: g.C}, groups, ordinal, rng)
				stored[[2]int{g.C, ordinal}] = slot
			}
			start := ordinal * g.C
			for rank := range g.D {
				g.Rank = rank
				e := newEngine(g, groups, start+g.C, rng)
				for from := max(0, start-1); from <= start+g.C+1; from++ {
					for to := from; to <= start+g.C+2; to++ {
						e.clear()
						loadRank(t, slot, e, ordinal, Span{from, to - from})
					}
				}
			}
		}
	})
}

func TestOpaquePagesAgainstTheFormula(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 1))
	for d := 1; d <= 4; d++ {
		for b := 1; b <= 4; b++ {
			for i := 1; i <= b; i++ {
				if b%i != 0 || d > 1 && i != b {
					continue
				}
				for blocks := 1; blocks <= 5; blocks++ {
					g := Geometry{D: d, I: i, B: b, C: blocks * b}
					groups := []group{{offset: 1, rowStride: 9, tokensPerRow: b, shapes: []shape{{bytes: 5, rowOffset: 1}, {bytes: 3, rowOffset: 6, gap: 2}}}}
					for ordinal := range 3 {
						slot := store(t, g, groups, ordinal, rng)
						for from := 0; from <= blocks; from++ {
							for to := from; to <= blocks; to++ {
								load(t, slot, g, groups, ordinal, Span{ordinal*g.C + from*b, (to - from) * b}, rng)
							}
						}
					}
				}
			}
		}
	}
}

// Rows and opaque pages in one call: a group of each.
func TestOpaquePagesBesideRows(t *testing.T) {
	rng := rand.New(rand.NewPCG(4, 1))
	g := Geometry{D: 2, I: 4, B: 4, C: 12}
	groups := []group{
		{offset: 0, rowStride: 8, tokensPerRow: 1, shapes: []shape{{bytes: 7}}},
		{offset: 96, rowStride: 16, tokensPerRow: 4, shapes: []shape{{bytes: 16}}},
	}
	for ordinal := range 3 {
		slot := store(t, g, groups, ordinal, rng)
		load(t, slot, g, groups, ordinal, Span{ordinal*12 + 4, 4}, rng)
	}
}

// Large and uneven numbers, drawn: several layers of widths as models have them,
// copied through the cache or past it, stored under one topology, loaded under another with a ragged clip, the last block
// partly filled.
func TestAnyTopologyToAnyOther(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := rapid.OneOf(rapid.SampledFrom([]int{64, 256}), rapid.IntRange(1, 300)).Draw(t, "C")
		draw := func(name string) Geometry {
			b := rapid.SampledFrom([]int{1, 2, 12, 16, 48, 64, 128}).Draw(t, name+" B")
			var divisors []int
			for i := 1; i <= b; i++ {
				if b%i == 0 {
					divisors = append(divisors, i)
				}
			}
			return Geometry{D: rapid.SampledFrom([]int{1, 2, 3, 4, 8, 64}).Draw(t, name+" D"), I: rapid.SampledFrom(divisors).Draw(t, name+" I"), B: b, C: c}
		}
		from, to := draw("from"), draw("to")
		if rapid.Bool().Draw(t, "past the cache") {
			defer func(bytes int) { streamBytes = bytes }(streamBytes)
			streamBytes = 0
		}
		ordinal := rapid.IntRange(0, 5).Draw(t, "ordinal")
		var groups []group
		offset := 0
		for gi := range rapid.IntRange(1, 2).Draw(t, "groups") {
			gr := group{offset: offset, tokensPerRow: 1, allRows: rapid.Bool().Draw(t, "all rows")}
			width := 0
			for ri := range rapid.IntRange(1, 6).Draw(t, "regions") {
				w := rapid.SampledFrom([]int{1, 4, 16, 64, 80, 132, 432, 656}).Draw(t, fmt.Sprintf("width %d.%d", gi, ri))
				gr.shapes = append(gr.shapes, shape{bytes: w, rowOffset: width, blockMajor: rapid.Bool().Draw(t, "block major"), gap: rapid.SampledFrom([]int{0, 0, 3, 16}).Draw(t, "gap")})
				width += w + rapid.SampledFrom([]int{0, 0, 0, 16}).Draw(t, "row gap")
			}
			gr.rowStride = (width + 63) / 64 * 64
			offset += c * gr.rowStride
			groups = append(groups, gr)
		}
		clip := Span{rapid.IntRange(0, (ordinal+1)*c).Draw(t, "first"), rapid.IntRange(0, 2*c).Draw(t, "tokens")}
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		slot := store(t, from, groups, ordinal, rng)
		load(t, slot, to, groups, ordinal, clip, rng)
	})
}

// Replicated data is written by one rank and read by all.
func TestSkippedColumnsAreReadOnly(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 1))
	g := Geometry{D: 1, I: 1, B: 4, C: 8}
	groups := smallGroups(g.C)
	e := newEngine(g, groups, 8, rng)
	e.fill(8)
	e.cols[1].Skip = true
	slot := bytes.Repeat([]byte{slotFill}, slotBytes(groups, g.C))
	require.NoError(t, Gather(slot, g, e.cols, 0, e.table, 0, nil))
	skipped := slot[groups[1].offset:groups[2].offset]
	require.Equal(t, bytes.Repeat([]byte{slotFill}, len(skipped)), skipped)
	e.cols[1].Skip = false
	require.NoError(t, Gather(slot, g, e.cols, 0, e.table, 0, nil))
	e.cols[1].Skip = true
	e.clear()
	loadRank(t, slot, e, 0, Span{0, 8})
}
