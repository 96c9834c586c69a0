package kvtier

import (
	"encoding/json"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/tier"
)

// A coordinator says that no rank has an operation, and is wrong: the slots must not go
// to somebody else while a rank may be writing them.
func TestCancelUnsentWaitsForWhoCopies(t *testing.T) {
	r := newLeaderRig(t)
	g := r.join("g", 2, 2)
	keys := g.chain(1, 3)
	rn := g.runOf(keys, 0)
	g.grow()
	cancel := func(op uint64) {
		r.call(g.coord, &wire.Request{Type: wire.Cancel, Op: op, Flags: wire.CancelUnsent})
	}

	// Both ranks copy. Each answers in its time.
	op := r.op()
	vs := g.begin(op, rn)
	cancel(op)
	require.Equal(t, tier.Free, g.look(keys[0]).State, "nobody finds it any more")
	require.Equal(t, 3, g.counts()[tier.Draining])
	g.write(op, 1, rn, vs)
	require.Equal(t, 3, g.counts()[tier.Draining])
	again := r.op()
	others := g.begin(again, rn)
	require.Equal(t, repeat(wire.Granted, 3), codes(others))
	for _, v := range others {
		for _, old := range vs {
			require.NotEqual(t, old.Slot, v.Slot, "a slot that is being written is granted")
		}
	}
	g.cancelUnsent(again)
	require.Equal(t, 3, g.counts()[tier.Draining], "those of the first operation alone")
	g.write(op, 0, rn, vs)
	r.quiet()

	// A rank that never had it was copying something else: its slots are free when the
	// leader sees that it does not copy.
	op = r.op()
	g.begin(op, rn)
	cancel(op)
	r.advance(time.Second)
	require.Equal(t, 3, g.counts()[tier.Draining])
	r.idle.Store(true)
	r.advance(time.Second)
	r.quiet()

	// A rank whose connection has ended may copy until its process is dead.
	op = r.op()
	g.begin(op, rn)
	g.ranks[1].gone()
	cancel(op)
	require.Equal(t, 3, g.counts()[tier.Draining])
	g.ranks[1].dead()
	r.quiet()
	require.Zero(t, r.l.count.Published)
}

// The same with a real rank in the middle of a copy, over both links.
func TestCancelUnsentUnderARunningCopy(t *testing.T) {
	for _, link := range []string{"direct", "ring"} {
		t.Run(link, func(t *testing.T) {
			dir := t.TempDir()
			c := openTest(t, dir, RoleLeader)
			requireState(t, c, StateLeader)
			if link == "ring" {
				c = openApart(t, dir, RoleMember)
			}
			e := newEngine(t, c, smallEngine)
			p := e.newPrefix(1, 2, 0)
			e.store(p, 0, 1) // the arena has slots
			e.held(p, 1)

			_, _, _, release, err := e.ranks[0].m.use()
			require.NoError(t, err)
			release = sync.OnceFunc(release)
			defer release()
			out := e.k.StoreBegin([]StoreBegin{{Op: 1000, Parent: p.keys[0], First: 1, Keys: p.keys[1:]}}, testWait)
			require.NoError(t, out[0].Err)
			require.Equal(t, Granted, out[0].Verdicts[0].Code)
			e.k.Cancel(1000, true)
			// Answered after it, as the leader takes requests in their order.
			_, err = e.k.Lookup(p.root, 0, p.keys, testWait)
			require.NoError(t, err)
			require.Equal(t, 1, drainingSlots(t, c))
			release()
			require.Eventually(t, func() bool { return drainingSlots(t, c) == 0 }, testWait, time.Millisecond)
			e.requireIdle()
		})
	}
}

func drainingSlots(t *testing.T, c *Cache) int {
	t.Helper()
	text, err := c.leaderStats()
	require.NoError(t, err)
	var s struct {
		Spaces []struct {
			States map[string]int `json:"slots"`
		} `json:"namespaces"`
	}
	require.NoError(t, json.Unmarshal(text, &s))
	require.Len(t, s.Spaces, 1, string(text))
	return s.Spaces[0].States["draining"]
}
