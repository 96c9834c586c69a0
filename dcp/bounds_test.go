package dcp

import (
	"bytes"
	"math"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// bench is a small world in which one thing at a time is made wrong.
type bench struct {
	g       Geometry
	e       *engine
	slot    []byte
	ordinal int
	clip    Span
	blocks  []uint32
	first   int
}

func newBench() *bench {
	g := Geometry{D: 2, I: 2, B: 4, C: 12, Rank: 1}
	e := newEngine(g, smallGroups(g.C), 48, rand.New(rand.NewPCG(1, 1)))
	e.fill(48)
	for gi := range e.cols {
		for ri := range e.cols[gi].Regions {
			e.cols[gi].Regions[ri].TokenStride = max(e.cols[gi].Regions[ri].TokenStride, 1)
		}
	}
	// Chunk 1 is tokens 12 to 23: virtual blocks 1 and 2.
	return &bench{g: g, e: e, slot: bytes.Repeat([]byte{slotFill}, slotBytes(smallGroups(g.C), g.C)), ordinal: 1, clip: Span{0, 48}, blocks: e.table[1:3], first: 1}
}

func TestWhatDoesNotFitIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		change func(b *bench)
		want   error
	}{
		"geometry":             {func(b *bench) { b.g.I = 3 }, ErrGeometry},
		"negative ordinal":     {func(b *bench) { b.ordinal = -1 }, ErrGeometry},
		"huge ordinal":         {func(b *bench) { b.ordinal = math.MaxUint32 + 1 }, ErrGeometry},
		"rows of 3 tokens":     {func(b *bench) { b.e.cols[0].TokensPerRow = 3 }, ErrGeometry},
		"rows of no tokens":    {func(b *bench) { b.e.cols[0].TokensPerRow = 0 }, ErrGeometry},
		"opaque, I below B":    {func(b *bench) { b.e.cols[0].TokensPerRow = 4 }, ErrGeometry},
		"opaque, all rows":     {func(b *bench) { b.e.cols[0].TokensPerRow = 4; b.g.I = 4; b.e.cols[0].AllRows = true }, ErrGeometry},
		"pages of too few":     {func(b *bench) { b.e.cols[0].AllRows = true }, ErrRegion},
		"opaque, page cut":     {func(b *bench) { b.e.cols[0].TokensPerRow = 4; b.g.I = 4; b.g.C = 10 }, ErrGeometry},
		"slot a byte short":    {func(b *bench) { b.slot = b.slot[:len(b.slot)-14] }, ErrSlot},
		"no slot":              {func(b *bench) { b.slot = b.slot[:0] }, ErrSlot},
		"negative offset":      {func(b *bench) { b.e.cols[1].Offset = -1 }, ErrSlot},
		"offset beyond slot":   {func(b *bench) { b.e.cols[1].Offset = math.MaxInt }, ErrSlot},
		"huge row stride":      {func(b *bench) { b.e.cols[1].RowStride = math.MaxInt }, ErrSlot},
		"row stride 0":         {func(b *bench) { b.e.cols[1].RowStride = 0 }, ErrRegion},
		"row stride negative":  {func(b *bench) { b.e.cols[1].RowStride = -2 }, ErrRegion},
		"no base":              {func(b *bench) { b.e.cols[1].Regions[0].Base = nil }, ErrRegion},
		"no blocks":            {func(b *bench) { b.e.cols[1].Regions[0].Blocks = 0 }, ErrRegion},
		"too many blocks":      {func(b *bench) { b.e.cols[1].Regions[0].Blocks = math.MaxInt }, ErrRegion},
		"no bytes":             {func(b *bench) { b.e.cols[1].Regions[0].Bytes = 0 }, ErrRegion},
		"wider than the row":   {func(b *bench) { b.e.cols[1].Regions[0].Bytes = 3 }, ErrRegion},
		"huge width":           {func(b *bench) { b.e.cols[1].Regions[0].Bytes = math.MaxInt }, ErrRegion},
		"outside the row":      {func(b *bench) { b.e.cols[1].Regions[0].RowOffset = 1 }, ErrRegion},
		"negative row offset":  {func(b *bench) { b.e.cols[1].Regions[0].RowOffset = -1 }, ErrRegion},
		"huge row offset":      {func(b *bench) { b.e.cols[1].Regions[0].RowOffset = math.MaxInt }, ErrRegion},
		"negative strides":     {func(b *bench) { b.e.cols[1].Regions[0].BlockStride = -8 }, ErrRegion},
		"negative tokens":      {func(b *bench) { b.e.cols[1].Regions[0].TokenStride = -2 }, ErrRegion},
		"tokens overlap":       {func(b *bench) { b.e.cols[1].Regions[0].TokenStride = 1 }, ErrRegion},
		"blocks overlap":       {func(b *bench) { b.e.cols[1].Regions[0].BlockStride = 7 }, ErrRegion},
		"no token stride":      {func(b *bench) { b.e.cols[1].Regions[0].TokenStride = 0 }, ErrRegion},
		"huge block stride":    {func(b *bench) { b.e.cols[1].Regions[0].BlockStride = math.MaxInt64 }, ErrRegion},
		"stride that wraps":    {func(b *bench) { b.e.cols[1].Regions[0].BlockStride = math.MaxInt64/4 + 1 }, ErrRegion},
		"huge token stride":    {func(b *bench) { b.e.cols[1].Regions[0].TokenStride = math.MaxInt64 / 2 }, ErrRegion},
		"no table":             {func(b *bench) { b.blocks = nil }, ErrTable},
		"short table":          {func(b *bench) { b.blocks = b.blocks[:1] }, ErrTable},
		"table begins late":    {func(b *bench) { b.first = 2 }, ErrTable},
		"table ends early":     {func(b *bench) { b.first = 0 }, ErrTable},
		"negative first block": {func(b *bench) { b.first = -1 }, ErrTable},
		"first block wraps":    {func(b *bench) { b.first = math.MinInt }, ErrTable},
		"block id":             {func(b *bench) { b.blocks = []uint32{0, uint32(b.e.blocks)} }, ErrBlock},
		"highest block id":     {func(b *bench) { b.blocks = []uint32{math.MaxUint32, 0} }, ErrBlock},
		"one short region":     {func(b *bench) { b.e.cols[2].Regions[0].Blocks = int(max(b.blocks[0], b.blocks[1])) }, ErrBlock},
		"negative clip":        {func(b *bench) { b.clip = Span{-1, 20} }, ErrClip},
		"negative tokens clip": {func(b *bench) { b.clip = Span{0, -1} }, ErrClip},
		"clip that wraps":      {func(b *bench) { b.clip = Span{13, math.MaxInt} }, ErrClip},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench()
			pages := clonePages(b.e.pages)
			c.change(b)
			require.ErrorIs(t, Scatter(b.slot, b.g, b.e.cols, b.ordinal, b.clip, b.blocks, b.first, nil), c.want)
			require.Equal(t, pages, b.e.pages, "nothing is copied before all is checked")
			if c.want == ErrClip {
				return
			}
			require.ErrorIs(t, Gather(b.slot, b.g, b.e.cols, b.ordinal, b.blocks, b.first, nil), c.want)
			require.Equal(t, bytes.Repeat([]byte{slotFill}, len(b.slot)), b.slot)
		})
	}
	b := newBench()
	require.NoError(t, Gather(b.slot, b.g, b.e.cols, b.ordinal, b.blocks, b.first, nil))
	require.NoError(t, Scatter(b.slot, b.g, b.e.cols, b.ordinal, b.clip, b.blocks, b.first, nil))
}

func TestClipMayNotCutAnOpaquePage(t *testing.T) {
	g := Geometry{D: 1, I: 1, B: 4, C: 8}
	groups := []group{{rowStride: 8, tokensPerRow: 4, shapes: []shape{{bytes: 8}}}}
	e := newEngine(g, groups, 16, rand.New(rand.NewPCG(1, 1)))
	slot := make([]byte, 16)
	for _, clip := range []Span{{9, 7}, {8, 3}, {10, 1}, {0, 11}} {
		require.ErrorIs(t, Scatter(slot, g, e.cols, 1, clip, e.table, 0, nil), ErrClip)
	}
	require.NoError(t, Scatter(slot, g, e.cols, 1, Span{5, 100}, e.table, 0, nil), "the chunk's own ends are no cut")
}

// A rank that has nothing of a chunk needs no blocks for it.
func TestRankWithoutRowsNeedsNoTable(t *testing.T) {
	g := Geometry{D: 4, I: 8, B: 8, C: 8, Rank: 2}
	groups := smallGroups(g.C)[:3] // of the others it has all rows
	e := newEngine(g, groups, 32, rand.New(rand.NewPCG(1, 1)))
	slot := make([]byte, slotBytes(groups, g.C))
	require.Equal(t, uint64(1), g.Parts(0))
	require.NoError(t, Gather(slot, g, e.cols, 0, nil, 0, nil))
	require.NoError(t, Scatter(slot, g, e.cols, 0, Span{0, 8}, nil, 0, nil))
	require.ErrorIs(t, Gather(slot, g, e.cols, 2, nil, 0, nil), ErrTable)
}

func TestStopIsSeenBeforeTheFirstByte(t *testing.T) {
	b := newBench()
	pages := clonePages(b.e.pages)
	var stop atomic.Bool
	stop.Store(true)
	require.ErrorIs(t, Gather(b.slot, b.g, b.e.cols, b.ordinal, b.blocks, b.first, &stop), ErrStopped)
	require.Equal(t, bytes.Repeat([]byte{slotFill}, len(b.slot)), b.slot)
	require.ErrorIs(t, Scatter(b.slot, b.g, b.e.cols, b.ordinal, b.clip, b.blocks, b.first, &stop), ErrStopped)
	require.Equal(t, pages, b.e.pages)
}

// Whatever was copied before, after the flag is set at most one more MiB is.
func TestAtMostAMiBAfterStop(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var stop atomic.Bool
		m := mover{stop: &stop}
		sizes := rapid.IntRange(1, pieceBytes)
		for range rapid.IntRange(0, 20).Draw(t, "before") {
			require.True(t, m.may(sizes.Draw(t, "n")))
		}
		stop.Store(true)
		after := 0
		for n := sizes.Draw(t, "n"); m.may(n); n = sizes.Draw(t, "n") {
			after += n
		}
		require.LessOrEqual(t, after, pieceBytes)
	})
}

// Tokens and opaque pages of more than a piece go in several.
func TestWideRegions(t *testing.T) {
	const width = pieceBytes*5/2 + 3
	rng := rand.New(rand.NewPCG(1, 1))
	for _, g := range []Geometry{{D: 1, I: 1, B: 2, C: 2}, {D: 2, I: 2, B: 2, C: 4}} {
		for _, tokensPerRow := range []int{1, 2} {
			groups := []group{{rowStride: width + 61, tokensPerRow: tokensPerRow, shapes: []shape{{bytes: width}}}}
			slot := store(t, g, groups, 1, rng)
			load(t, slot, g, groups, 1, Span{g.C, 2}, rng)
		}
	}
	// Several tokens that only together are more than a piece.
	g := Geometry{D: 2, I: 4, B: 16, C: 32}
	groups := []group{{rowStride: pieceBytes / 10, tokensPerRow: 1, shapes: []shape{{bytes: pieceBytes / 10}}}}
	load(t, store(t, g, groups, 0, rng), g, groups, 0, Span{1, 29}, rng)
}

func TestRegionMayEndWhereMemoryEnds(t *testing.T) {
	mem := make([]byte, 3*16-6)
	r := Region{Base: unsafe.Pointer(&mem[0]), Blocks: 3, BlockStride: 16, TokenStride: 2, Bytes: 2}
	c := Columns{RowStride: 2, TokensPerRow: 1, Regions: []Region{r}}
	slot := []byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}
	require.NoError(t, Scatter(slot, Geometry{D: 1, I: 1, B: 5, C: 5}, []Columns{c}, 0, Span{0, 5}, []uint32{2}, 0, nil))
	require.Equal(t, slot, mem[32:42])
}
