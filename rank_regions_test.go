package kvtier

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/dcp"
)

// Heads of a token that lie together, in the page and in the row, are one copy.
func TestNeighbouringRegionsAreJoined(t *testing.T) {
	page := make([]byte, 4096)
	at := func(offset, row, bytes int, strides ...int64) dcp.Region {
		s := append(strides, 1024, 256)
		return dcp.Region{Base: unsafe.Pointer(&page[offset]), Blocks: 4, BlockStride: s[0], TokenStride: s[1], Bytes: bytes, RowOffset: row}
	}
	join := func(regions ...dcp.Region) []dcp.Region {
		var out []dcp.Region
		for _, r := range regions {
			out = joined(out, r)
		}
		return out
	}
	first := at(0, 128, 64)
	require.Equal(t, []dcp.Region{at(0, 128, 192)}, join(first, at(64, 192, 64), at(128, 256, 64)))
	for name, other := range map[string]dcp.Region{
		"a gap in the page":     at(96, 192, 64),
		"a gap in the row":      at(64, 256, 64),
		"before it in the row":  at(64, 64, 64),
		"another block stride":  at(64, 192, 64, 2048),
		"another token stride":  at(64, 192, 64, 1024, 128),
		"the same place again":  first,
		"before it in the page": at(0, 192, 64),
	} {
		require.Equal(t, []dcp.Region{first, other}, join(first, other), name)
	}
}
