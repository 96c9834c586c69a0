package dcp

import (
	"fmt"
	"math"
	"unsafe"
)

// maxExtent bounds how far a region reaches from its base: what user space can
// address.
const maxExtent = 1 << 47

// Region is one independently addressable piece of the pages of a rank, and its
// place in the row. The memory stays the caller's; it must be mapped for the whole
// extent (Blocks blocks of B tokens) during every copy.
type Region struct {
	Base        unsafe.Pointer // token 0 of block 0
	Blocks      int            // block ids are below this
	BlockStride int64          // bytes from one block to the next
	TokenStride int64          // bytes from one token to the next in a block; not used by opaque pages
	Bytes       int            // of one token; of one block by opaque pages
	RowOffset   int            // byte offset in the row
}

// Columns is one KV group of a chunk as one rank sees it: which bytes of the rows
// are its regions. A group may be split into several Columns.
type Columns struct {
	Offset       int // where the rows of the group begin in the slot
	RowStride    int // bytes from one row to the next
	TokensPerRow int // 1, or B for opaque pages
	Regions      []Region
	Skip         bool // replicated data that another rank writes: Gather leaves it out

	// AllRows: these regions are not spread over the ranks. Every rank has every
	// token, a page holds all B*D tokens of its block id in order. Scatter brings all
	// rows to every rank; Gather takes from each rank only the rows that the geometry
	// gives to it, so that every row has one writer. Not for opaque pages.
	AllRows bool
}

// opaque tells that a page is one row: nothing inside it can be addressed.
func (c *Columns) opaque(g Geometry) bool { return c.TokensPerRow == g.B && g.B > 1 }

// Fits checks what does not change from one chunk to the next: the geometry, the
// regions, and that the rows lie inside a slot of slotBytes. Gather and Scatter
// check it too; at registration it names what has to be refused.
func Fits(g Geometry, cols []Columns, slotBytes int) error {
	if err := g.Validate(); err != nil {
		return err
	}
	for i := range cols {
		c := &cols[i]
		if err := c.fits(g, slotBytes); err != nil {
			return fmt.Errorf("columns %d: %w", i, err)
		}
	}
	return nil
}

func (c *Columns) fits(g Geometry, slotBytes int) error {
	opaque := c.opaque(g)
	switch {
	case c.TokensPerRow != 1 && !opaque:
		return fmt.Errorf("%w: rows of %d tokens, must be 1 or the block size %d", ErrGeometry, c.TokensPerRow, g.B)
	case opaque && g.C%g.B != 0:
		return fmt.Errorf("%w: opaque pages of %d tokens need a chunk size that is a multiple, not %d", ErrGeometry, g.B, g.C)
	case opaque && g.D > 1 && c.AllRows:
		return fmt.Errorf("%w: opaque pages that hold the rows of all %d ranks", ErrGeometry, g.D)
	case opaque && g.D > 1 && g.I != g.B:
		return fmt.Errorf("%w: opaque pages over %d ranks need an interleave of one block of %d tokens, not %d", ErrGeometry, g.D, g.B, g.I)
	case c.RowStride < 1:
		return fmt.Errorf("%w: row stride %d", ErrRegion, c.RowStride)
	case c.Offset < 0 || c.Offset > slotBytes || g.C/c.TokensPerRow > (slotBytes-c.Offset)/c.RowStride:
		return fmt.Errorf("%w: %d rows of %d bytes from %d on, slot of %d bytes", ErrSlot, g.C/c.TokensPerRow, c.RowStride, c.Offset, slotBytes)
	}
	tokens := g.B
	switch {
	case opaque:
		tokens = 1
	case c.AllRows:
		tokens = g.VirtualBlock()
	}
	for i := range c.Regions {
		if err := c.Regions[i].fits(tokens, c.RowStride); err != nil {
			return fmt.Errorf("region %d: %w", i, err)
		}
	}
	return nil
}

// fits checks a region whose blocks have so many separately addressable tokens.
func (r *Region) fits(tokens, rowStride int) error {
	width := int64(r.Bytes)
	switch {
	case r.Base == nil:
		return fmt.Errorf("%w: no base address", ErrRegion)
	case r.Blocks < 1 || int64(r.Blocks) > math.MaxUint32+1:
		return fmt.Errorf("%w: %d blocks", ErrRegion, r.Blocks)
	case r.Bytes < 1 || r.RowOffset < 0 || r.RowOffset > rowStride || r.Bytes > rowStride-r.RowOffset:
		return fmt.Errorf("%w: %d bytes at %d of a row of %d", ErrRegion, r.Bytes, r.RowOffset, rowStride)
	}
	blockSteps, tokenSteps := int64(r.Blocks-1), int64(tokens-1)
	blockReach, ok1 := reach(blockSteps, r.BlockStride)
	tokenReach, ok2 := reach(tokenSteps, r.TokenStride)
	if !ok1 || !ok2 || blockReach+tokenReach > maxExtent-width || uintptr(r.Base) > math.MaxUint64-maxExtent {
		return fmt.Errorf("%w: %d blocks %d bytes apart of %d tokens %d bytes apart", ErrRegion, r.Blocks, r.BlockStride, tokens, r.TokenStride)
	}
	// Tokens inside blocks, or (as in [B, blocks, ...]) blocks inside tokens. Anything
	// else would write one token over another.
	tokenMajor := (tokenSteps == 0 || r.TokenStride >= width) && (blockSteps == 0 || r.BlockStride >= tokenReach+width)
	blockMajor := (blockSteps == 0 || r.BlockStride >= width) && (tokenSteps == 0 || r.TokenStride >= blockReach+width)
	if !tokenMajor && !blockMajor {
		return fmt.Errorf("%w: tokens of %d bytes overlap with strides of %d and %d", ErrRegion, r.Bytes, r.BlockStride, r.TokenStride)
	}
	return nil
}

// reach is steps*stride, unless that is not an extent that memory can have.
func reach(steps, stride int64) (int64, bool) {
	if steps == 0 {
		return 0, true
	}
	if stride < 0 || stride > maxExtent/steps {
		return 0, false
	}
	return steps * stride, true
}
