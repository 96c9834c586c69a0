package ranks

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// four ranks, each a process, two regions; a chunk of 24 tokens begins inside blocks.
var four = shape{D: 4, I: 2, B: 8, C: 24, Blocks: 64, Widths: []int{48, 17}}

// What four processes store, they and others load.
func TestProcessesStoreAndLoad(t *testing.T) {
	r := root{dir: t.TempDir(), slots: 64}
	c := open(t, r.config("leader"))
	g := newGroup(t, c, "four", four, r.config)
	p := g.newPrefix(1, 10, 0)
	g.store(p)
	g.load(p)
	for i, s := range []shape{{D: 2, I: 4, B: 8}, {D: 1, I: 16, B: 16}, {D: 8, I: 1, B: 4}} {
		s.C, s.Blocks, s.Widths = four.C, 64, four.Widths
		other := newGroup(t, c, string(rune('a'+i)), s, r.config)
		require.Equal(t, g.fp, other.fp)
		other.load(other.newPrefix(1, 10, 3))
	}
	requireQuiet(t, c)
}
