package chunk

import (
	"fmt"
	"math"
)

const (
	rowAlign  = 64   // a row begins on a cache line, no two ranks share one
	pageAlign = 4096 // what direct I/O wants

	// maxPayload bounds P. It is far above any chunk, and far below where sums of
	// offsets could overflow.
	maxPayload = 1 << 36
)

// Layout says where the bytes of a chunk lie. It is the same for every chunk of a
// namespace.
type Layout struct {
	ChunkTokens  int
	Groups       []GroupLayout
	PayloadBytes int64 // the groups
	PaddedBytes  int64 // P: the payload and zeros up to a multiple of 4096; the bytes of a slot
	FileBytes    int64 // P and the footer page
}

// GroupLayout is one KV group of the payload: Rows rows that begin RowStride bytes
// apart, the first Offset bytes into the payload. Only RowBytes of each row are
// used, what is left is zero.
type GroupLayout struct {
	Kind          uint32
	Rows          int
	RowBytes      int
	RowStride     int
	TokensPerRow  int
	Offset        int64
	RegionOffsets []int // byte offset in the row of Namespace.Groups[g].Regions[i]
}

// Layout computes where the bytes of a chunk of this namespace lie. Regions need
// not be in row order; RegionOffsets follows the order they have in n.
func (n *Namespace) Layout() (*Layout, error) {
	if err := n.check(); err != nil {
		return nil, err
	}
	l := &Layout{ChunkTokens: n.ChunkTokens, Groups: make([]GroupLayout, len(n.Groups))}
	for i := range n.Groups {
		g := &n.Groups[i]
		kind, _ := kindNumber(g.Kind)
		out := &l.Groups[i]
		*out = GroupLayout{
			Kind:          kind,
			Rows:          n.ChunkTokens / g.TokensPerRow,
			TokensPerRow:  g.TokensPerRow,
			Offset:        l.PayloadBytes,
			RegionOffsets: make([]int, len(g.Regions)),
		}
		var width int64
		for _, r := range g.rowOrder() {
			out.RegionOffsets[r] = int(width)
			width += int64(g.Regions[r].Bytes)
			if width > math.MaxInt32-rowAlign {
				return nil, fmt.Errorf("group %d: a row of more than 2 GiB: %w", i, ErrTooLarge)
			}
		}
		stride := (width + rowAlign - 1) / rowAlign * rowAlign
		out.RowBytes, out.RowStride = int(width), int(stride)
		l.PayloadBytes += int64(out.Rows) * stride // at most 2^20 * 2^31
		if l.PayloadBytes > maxPayload {
			return nil, fmt.Errorf("more than %d bytes, lower chunk_tokens: %w", int64(maxPayload), ErrTooLarge)
		}
	}
	l.PaddedBytes = (l.PayloadBytes + pageAlign - 1) / pageAlign * pageAlign
	l.FileBytes = l.PaddedBytes + FooterBytes
	return l, nil
}
