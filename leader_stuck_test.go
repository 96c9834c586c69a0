package kvtier

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/tier"
)

// A rank that is stopped inside of one copy keeps the slots of that operation, and its
// engine gets no others: they would all be kept like these.
func TestStuckRankGetsNoMoreSlots(t *testing.T) {
	r := newLeaderRig(t, withoutDisk, withSlots(32))
	g, other := r.join("a", 2, 2), r.join("b", 1, 1)
	g.grow()
	stopped := true // guarded by the leader's lock
	g.ranks[0].watchCopies(func() bool { return false })
	g.ranks[1].watchCopies(func() bool { return stopped })

	rn := g.runOf(g.chain(1, 3), 0)
	vs := g.begin(r.op(), rn)
	require.Equal(t, repeat(wire.Granted, 3), codes(vs))
	r.advance(119 * time.Second)
	later := r.op()
	late := g.begin(later, g.runOf(g.chain(2, 3), 0))
	require.Equal(t, repeat(wire.Granted, 3), codes(late), "its time is not over")
	r.call(g.coord, &wire.Request{Type: wire.Cancel, Op: later})
	r.advance(2 * time.Second)
	r.advance(time.Second)

	for range 40 { // hours, and far more chunks than there are slots
		require.Equal(t, repeat(wire.Declined, 5), codes(g.begin(r.op(), g.runOf(g.chain(3, 5), 0))))
		r.advance(5 * time.Minute)
	}
	require.Equal(t, 6, g.counts()[tier.Draining])
	require.EqualValues(t, 200, r.l.count.Stores.Stuck)
	require.Zero(t, r.l.count.Stores.Expired-3)

	// The other engine has the rest, and what it stores the first one loads.
	keys := other.chain(4, 20)
	other.store(keys, 0)
	require.Equal(t, repeat(wire.Have, 20), codes(g.begin(r.op(), g.runOf(keys, 0))))
	require.Equal(t, repeat(wire.Ready, 20), g.loadAll(0, g.runOf(keys, 0)))

	// It goes on.
	r.l.lock()
	stopped = false
	r.l.unlock()
	r.advance(time.Second)
	require.Zero(t, g.counts()[tier.Draining])
	g.store(g.chain(3, 5), 0)
	r.quiet()
}

// A part that was given up early counts, too, when its time is over.
func TestCancelledStoresOfAStuckRankCount(t *testing.T) {
	r := newLeaderRig(t, withoutDisk, withSlots(32))
	g := r.join("a", 1, 1)
	g.grow()
	g.ranks[0].watchCopies(func() bool { return true })
	op := r.op()
	require.Equal(t, repeat(wire.Granted, 3), codes(g.begin(op, g.runOf(g.chain(1, 3), 0))))
	r.call(g.coord, &wire.Request{Type: wire.Cancel, Op: op})
	r.advance(time.Second)
	op = r.op()
	require.Equal(t, repeat(wire.Granted, 3), codes(g.begin(op, g.runOf(g.chain(2, 3), 0))), "a copy may take its time")
	r.call(g.coord, &wire.Request{Type: wire.Cancel, Op: op})
	r.advance(2 * time.Minute)
	require.Equal(t, repeat(wire.Declined, 3), codes(g.begin(r.op(), g.runOf(g.chain(3, 3), 0))))
	g.ranks[0].gone()
	g.ranks[0].dead()
	r.quiet()
}

// A successor of a stopped rank is not held to account for it.
func TestStuckRankIsFollowed(t *testing.T) {
	r := newLeaderRig(t, withoutDisk)
	g := r.join("a", 1, 1)
	old := g.ranks[0]
	old.watchCopies(func() bool { return true })
	require.Equal(t, repeat(wire.Granted, 2), codes(g.begin(r.op(), g.runOf(g.chain(1, 2), 0))))
	r.advance(3 * time.Minute)
	r.advance(time.Second)
	require.Equal(t, repeat(wire.Declined, 1), codes(g.begin(r.op(), g.runOf(g.chain(2, 1), 0))))
	old.gone()
	g.ranks[0] = r.attach("a", 1, 0, false)
	require.NotNil(t, within(t, declareAsync(g.ranks[0], rigDeclare(g.geo, 0))).acc)
	g.store(g.chain(2, 1), 0)
	require.Equal(t, 2, g.counts()[tier.Draining], "which end with its process")
	old.dead()
	r.quiet()
}
