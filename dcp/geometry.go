// Package dcp knows where tokens lie when decode context parallelism spreads them
// over ranks, and copies a rank's tokens between its pages and the slot of a chunk.
//
// It is arithmetic and copying: no state, no allocation that outlives a call,
// nothing of the rest of the library. Every function may be called from any number
// of threads, as long as no two write the same bytes.
package dcp

import "fmt"

const (
	maxRanks  = 64      // as many as a mask has bits
	maxTokens = 1 << 24 // bounds I, B and C, so that products with an ordinal fit 63 bits
)

// Geometry says how tokens are spread. I consecutive tokens stay on one rank, B of
// them make a block of one rank, B*D a virtual block that has one id on all ranks.
type Geometry struct {
	D    int // ranks that share the tokens
	I    int // interleave, divides B
	B    int // tokens of a block on one rank
	C    int // tokens of a chunk
	Rank int // whose part Gather and Scatter copy
}

// Validate says whether the other methods, which check nothing, may be used.
func (g Geometry) Validate() error {
	switch {
	case g.D < 1 || g.D > maxRanks:
		return fmt.Errorf("%w: D is %d, must be 1 to %d", ErrGeometry, g.D, maxRanks)
	case g.I < 1 || g.I > maxTokens || g.B < 1 || g.B > maxTokens || g.C < 1 || g.C > maxTokens:
		return fmt.Errorf("%w: I %d, B %d and C %d must be 1 to %d", ErrGeometry, g.I, g.B, g.C, maxTokens)
	case g.B%g.I != 0:
		return fmt.Errorf("%w: the interleave %d does not divide the block size %d", ErrGeometry, g.I, g.B)
	case g.Rank < 0 || g.Rank >= g.D:
		return fmt.Errorf("%w: rank %d of %d", ErrGeometry, g.Rank, g.D)
	}
	return nil
}

// VirtualBlock is how many tokens one block id covers over all ranks.
func (g Geometry) VirtualBlock() int { return g.B * g.D }

// Locate gives the virtual block of token p, the rank that holds it, and its place
// in that rank's block.
func (g Geometry) Locate(p int) (block, rank, local int) {
	v := g.VirtualBlock()
	o := p % v
	return p / v, (o / g.I) % g.D, (o/(g.D*g.I))*g.I + o%g.I
}

// Global is the inverse of Locate.
func (g Geometry) Global(block, rank, local int) int {
	return block*g.VirtualBlock() + ((local/g.I)*g.D+rank)*g.I + local%g.I
}

// LocalTokens is how many of the first n tokens of a prefix lie on a rank. It is
// also the index, among the tokens of that rank, of the first one that is not
// below n.
func (g Geometry) LocalTokens(n, rank int) int {
	base := n / g.I / g.D * g.I
	return base + min(max(n-base*g.D-rank*g.I, 0), g.I)
}

// Parts is the set of ranks that hold tokens of a chunk, rank r as bit r. With
// D*I > C these are not all of them, and not the same for every ordinal.
func (g Geometry) Parts(ordinal int) uint64 {
	first := ordinal * g.C / g.I
	last := (ordinal*g.C + g.C - 1) / g.I
	if last-first+1 >= g.D {
		return ^uint64(0) >> (maxRanks - g.D)
	}
	var mask uint64
	for s := first; s <= last; s++ {
		mask |= 1 << (s % g.D)
	}
	return mask
}
