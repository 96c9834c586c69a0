package dcp

import (
	"bytes"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Both ways to copy pieces, of any width, place and distance, against a loop over
// bytes. What lies between the pieces keeps its bytes.
func TestPiecesAgainstALoop(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		width := rapid.OneOf(rapid.SampledFrom([]int{1, 2, 4, 8, 16, 32, 48, 64, 80, 128, 132, 256, 272, 432, 576, 656, 1152}), rapid.IntRange(1, 700)).Draw(t, "width")
		n := rapid.IntRange(0, 9).Draw(t, "n")
		step := func(name string) int {
			return width + rapid.OneOf(rapid.SampledFrom([]int{0, 16, 64, 1024}), rapid.IntRange(0, 200)).Draw(t, name)
		}
		dstStep, srcStep := step("dst step"), step("src step")
		dstAt, srcAt := rapid.IntRange(0, 80).Draw(t, "dst at"), rapid.IntRange(0, 80).Draw(t, "src at")
		if rapid.Bool().Draw(t, "aligned") {
			dstAt &^= 15
		}
		dst, src := make([]byte, dstAt+n*dstStep+width+80), make([]byte, srcAt+n*srcStep+width+80)
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		for i := range src {
			src[i] = byte(rng.Uint32())
		}
		want := bytes.Clone(dst)
		for i := range n {
			for b := range width {
				want[dstAt+i*dstStep+b] = src[srcAt+i*srcStep+b]
			}
		}
		to, from := unsafe.Pointer(&dst[dstAt]), unsafe.Pointer(&src[srcAt])
		copyRows(to, from, n, dstStep, srcStep, width)
		require.Equal(t, want, dst)
		if streams(to, dstStep, width) {
			clear(dst)
			streamRows(to, from, n, dstStep, srcStep, width, nil, 0, false, false)
			fence()
			require.Equal(t, want, dst)
		}
	})
}

// Chunks so large that their bytes go past the cache: the widths of models, a row that
// is one region without gaps, pages that have all rows.
func TestLargeChunksAgainstTheFormula(t *testing.T) {
	rng := rand.New(rand.NewPCG(6, 1))
	for _, g := range []Geometry{{D: 1, I: 1, B: 64, C: 128}, {D: 2, I: 1, B: 64, C: 180}, {D: 3, I: 5, B: 15, C: 250}} {
		a := group{tokensPerRow: 1}
		width := 0
		for _, w := range []int{4096, 656, 4096, 432, 1 << 18, 6144, 128, 4, 4} {
			a.shapes = append(a.shapes, shape{bytes: w, rowOffset: width, gap: 16 * (width / 656 % 2)})
			width += w
		}
		a.rowStride = (width + 63) / 64 * 64
		b := group{offset: g.C * a.rowStride, rowStride: 16384, tokensPerRow: 1, shapes: []shape{{bytes: 16384}}}
		c := group{offset: b.offset + g.C*b.rowStride, rowStride: 1152, tokensPerRow: 1, allRows: true, shapes: []shape{{bytes: 1152}}}
		groups := []group{a, b, c}
		require.Greater(t, g.C/g.D*(width+16384+1152), streamBytes+40<<10)
		slot := store(t, g, groups, 1, rng)
		g.Rank = g.D - 1
		loadRank(t, slot, newEngine(g, groups, 2*g.C, rng), 1, Span{0, 2*g.C - 1})
	}
}
