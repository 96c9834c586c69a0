//go:build ranksteps

package ranks

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/steps"
)

// copies asks every rank how often it came to a step.
func (g *group) copies(step string) []int {
	g.t.Helper()
	var out []int
	for _, r := range g.ranks {
		out = append(out, int(r.call(request{Cmd: "count", Step: step}).Sum))
	}
	return out
}

// What a chunk costs: with one rank nothing is gathered, sent or started that would not
// be there without other ranks, and with four each of them does the same.
func TestMessagesAndCopiesPerChunk(t *testing.T) {
	for _, s := range []shape{
		{D: 1, I: 16, B: 16, C: 24, Blocks: 32, Widths: []int{48, 17}},
		{D: 4, I: 2, B: 8, C: 24, Blocks: 32, Widths: []int{48, 17}},
	} {
		r := root{dir: t.TempDir(), slots: 128}
		c := open(t, r.config("leader"))
		g := newGroup(t, c, "group", s, r.config)
		g.store(g.newPrefix(9, 10, 0)) // the arena has grown
		p := g.newPrefix(1, 10, 0)
		g.fill(p)

		before, stored := g.requests(c), g.copies(steps.StoreChunk)
		op, _ := g.begin(p, 0)
		require.Len(t, op.Grants, 10)
		for _, rank := range g.ranks {
			rank.call(request{Cmd: "store", Store: &op})
		}
		// One message of each rank and one of the coordinator for all chunks.
		g.requireRanks(c, before, map[string]int{"STORE_DONE": 1})
		require.Equal(t, map[string]int{"STORE_BEGIN": 1}, g.requests(c).since(before).Coordinator)
		for i, n := range g.copies(steps.StoreChunk) {
			require.Equal(t, 10, n-stored[i], "each rank copies its part of a chunk once")
		}
		g.held(p, 10)

		before, stored = g.requests(c), g.copies(steps.LoadChunk)
		load := g.plan(p)
		require.LessOrEqual(t, len(load.Verdicts), 128/8, "it is one window")
		e := g.loadAll(load)
		require.Equal(t, load.Tokens, e.Tokens)
		// The chunks are given back together, and the end is said.
		g.requireRanks(c, before, map[string]int{"LOAD_DONE": 2})
		require.Equal(t, map[string]int{"LEASE": 1, "LOAD_BEGIN": 1}, g.requests(c).since(before).Coordinator)
		for i, n := range g.copies(steps.LoadChunk) {
			require.Equal(t, 10, n-stored[i])
		}
		requireQuiet(t, c)
	}
}
