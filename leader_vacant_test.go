package kvtier

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A leader lives longer than engines. Of those that have gone it keeps what they have
// stored, and nothing of those that stored nothing.
func TestNamespaceThatHoldsNothingEnds(t *testing.T) {
	r := newLeaderRig(t)
	open := func() int {
		r.l.mu.Lock()
		defer r.l.mu.Unlock()
		return len(r.l.spaces)
	}
	empty := r.join("empty", 1, 1)
	require.Equal(t, 1, open())
	leave(empty)
	require.Eventually(t, func() bool { return open() == 0 && r.l.pool.Used() == 0 }, patience, time.Millisecond,
		"the arena of a namespace without a chunk stays")

	g := r.join("engine", 1, 1)
	keys := g.chain(1, 2)
	g.store(keys, 0)
	leave(g)
	r.l.tick()
	require.Equal(t, 1, open(), "chunks in DRAM outlive the engine")
	again := r.join("engine again", 1, 1)
	require.True(t, again.state(keys[1]))
}

// An engine that comes back at once finds the memory of its own namespace given back.
func TestNamespaceComesBackWhileItEnds(t *testing.T) {
	r := newLeaderRig(t)
	for range 200 {
		leave(r.join("engine", 1, 1)) // fails when it is refused
		r.l.tick()
	}
}

func leave(g *rigGroup) {
	for _, rank := range g.ranks {
		rank.goodbye()
		rank.dead()
	}
	g.coord.goodbye()
	g.coord.dead()
}
