package dcp

import (
	"math/bits"
	"testing"

	"github.com/stretchr/testify/require"
)

// where is the formula itself, for one token, written down once more so that the
// tests do not ask the code what is right.
func where(d, i, b, p int) (vb, rank, local int) {
	v := b * d
	o := p % v
	return p / v, (o / i) % d, (o/(d*i))*i + o%i
}

// small visits every geometry with small numbers. Among them are D*I > C, and C that
// neither divides V nor is divided by it.
func small(maxD, maxB, maxC int, visit func(g Geometry)) {
	for d := 1; d <= maxD; d++ {
		for b := 1; b <= maxB; b++ {
			for i := 1; i <= b; i++ {
				if b%i != 0 {
					continue
				}
				for c := 1; c <= maxC; c++ {
					visit(Geometry{D: d, I: i, B: b, C: c})
				}
			}
		}
	}
}

func TestTokensHaveOnePlace(t *testing.T) {
	small(5, 6, 1, func(g Geometry) {
		require.NoError(t, g.Validate())
		n := 3*g.VirtualBlock() + 1
		held := make([]int, g.D)
		for p := range n {
			for r := range g.D {
				require.Equal(t, held[r], g.LocalTokens(p, r), "%+v: tokens of %d on rank %d", g, p, r)
			}
			block, rank, local := g.Locate(p)
			vb, r, l := where(g.D, g.I, g.B, p)
			require.Equal(t, [3]int{vb, r, l}, [3]int{block, rank, local})
			require.Less(t, local, g.B)
			require.Equal(t, p, g.Global(block, rank, local))
			require.Equal(t, held[rank], block*g.B+local, "a rank's tokens fill its blocks in order")
			held[rank]++
		}
	})
}

func TestPartsAreTheRanksThatHoldRows(t *testing.T) {
	small(5, 6, 14, func(g Geometry) {
		for ordinal := range 12 {
			var want uint64
			for p := ordinal * g.C; p < (ordinal+1)*g.C; p++ {
				_, r, _ := where(g.D, g.I, g.B, p)
				want |= 1 << r
			}
			require.Equal(t, want, g.Parts(ordinal), "%+v ordinal %d", g, ordinal)
		}
	})
	require.Equal(t, ^uint64(0), Geometry{D: 64, I: 1, B: 16, C: 256}.Parts(1<<31))
	require.Equal(t, 1, bits.OnesCount64(Geometry{D: 64, I: 1, B: 16, C: 1}.Parts(1<<31)))
}

func TestImpossibleGeometriesAreRefused(t *testing.T) {
	for name, g := range map[string]Geometry{
		"nothing":             {},
		"no ranks":            {D: 0, I: 1, B: 1, C: 1},
		"65 ranks":            {D: 65, I: 1, B: 1, C: 1},
		"no interleave":       {D: 1, I: 0, B: 1, C: 1},
		"no block":            {D: 1, I: 1, B: 0, C: 1},
		"no chunk":            {D: 1, I: 1, B: 1, C: 0},
		"interleave above B":  {D: 2, I: 32, B: 16, C: 256},
		"interleave cuts B":   {D: 2, I: 3, B: 16, C: 256},
		"negative interleave": {D: 2, I: -1, B: 16, C: 256},
		"huge B":              {D: 2, I: 1, B: maxTokens + 1, C: 256},
		"huge C":              {D: 2, I: 1, B: 16, C: maxTokens + 1},
		"rank too high":       {D: 2, I: 1, B: 16, C: 256, Rank: 2},
		"negative rank":       {D: 2, I: 1, B: 16, C: 256, Rank: -1},
	} {
		require.ErrorIs(t, g.Validate(), ErrGeometry, name)
		require.ErrorIs(t, Fits(g, nil, 0), ErrGeometry, name)
	}
}
