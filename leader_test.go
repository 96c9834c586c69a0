package kvtier

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/tier"
)

func codes(vs []wire.Verdict) []wire.Code {
	out := make([]wire.Code, len(vs))
	for i, v := range vs {
		out[i] = v.Code
	}
	return out
}

func repeat(c wire.Code, n int) []wire.Code {
	out := make([]wire.Code, n)
	for i := range out {
		out[i] = c
	}
	return out
}

func TestStoreLeaseLoad(t *testing.T) {
	for _, c := range []struct {
		name string
		d, i int
	}{{"one rank", 1, 1}, {"two ranks", 2, 2}, {"chunk on half of the ranks", 4, 8}, {"interleave does not divide", 3, 3}} {
		t.Run(c.name, func(t *testing.T) {
			r := newLeaderRig(t)
			g := r.join("g", c.d, c.i)
			keys := g.chain(7, 6)
			g.store(keys, 0)

			rep := r.call(g.coord, &wire.Request{Type: wire.Lookup, Run: g.runOf(keys, 0)})
			require.EqualValues(t, 6, rep.Hits.Held)
			require.Zero(t, rep.Hits.Leased)
			longer := g.chain(7, 9)
			require.Equal(t, wire.Hits{Held: 6, Resident: 6, Leased: 6}, g.lease(1, g.runOf(longer, 0)))
			require.Equal(t, repeat(wire.Ready, 6), g.loadAll(1, g.runOf(keys, 0)))
			r.quiet()

			// A load may begin inside the lease and end before its end.
			g.lease(2, g.runOf(keys, 0))
			require.Equal(t, repeat(wire.Ready, 3), g.loadAll(2, run(keys[1], 2, keys[2:5])))
			r.quiet()
			require.EqualValues(t, 6, r.l.count.Published)
		})
	}
}

func TestStoreVerdicts(t *testing.T) {
	r := newLeaderRig(t)
	g := r.join("g", 2, 2)
	keys := g.chain(1, 8)

	// Behind a hole.
	require.Equal(t, repeat(wire.Declined, 2), codes(g.begin(r.op(), g.runOf(keys[:4], 2))))
	// A parent that is being assembled is good enough, in the batch and before it.
	first, rn := r.op(), g.runOf(keys[:2], 0)
	vs := g.begin(first, rn)
	require.Equal(t, repeat(wire.Granted, 2), codes(vs))
	second, rn2 := r.op(), g.runOf(keys[:4], 1)
	vs2 := g.begin(second, rn2)
	require.Equal(t, []wire.Code{wire.Pending, wire.Granted, wire.Granted}, codes(vs2))
	// One number, one operation.
	require.Equal(t, repeat(wire.Declined, 1), codes(g.begin(first, g.runOf(keys[:5], 4))))

	for rank := range 2 {
		g.write(first, rank, rn, vs)
		g.write(second, rank, rn2, vs2)
	}
	require.Eventually(t, func() bool { return g.look(keys[3]).State == tier.Ready }, patience, time.Millisecond)
	require.Equal(t, repeat(wire.Have, 4), codes(g.begin(r.op(), g.runOf(keys[:4], 0))))
	g.onDisk(keys[:4])
	r.quiet()

	// Only the coordinator begins.
	rep := r.call(g.ranks[0], &wire.Request{Type: wire.StoreBegin, Op: r.op(), Run: g.runOf(keys, 4)})
	require.Equal(t, wire.StatusRefused, rep.Status)
	require.Equal(t, repeat(wire.Declined, 4), codes(rep.Verdicts))
}

func TestStoreOfAFullArenaIsPrefixClosed(t *testing.T) {
	r := newLeaderRig(t, withoutDisk, withSlots(16))
	g := r.join("g", 1, 1)
	keys := g.chain(1, 40)
	var all []wire.Code
	require.Eventually(t, func() bool { // the arena grows in the background
		op := r.op()
		all = codes(g.begin(op, g.runOf(keys, 0)))
		granted := 0
		for _, c := range all {
			if c == wire.Granted {
				granted++
			}
		}
		g.cancelUnsent(op)
		return granted == 16
	}, patience, time.Millisecond)
	require.Equal(t, append(repeat(wire.Granted, 16), repeat(wire.Declined, 24)...), all)
	r.quiet()
}

func TestPartsThatDoNotBelong(t *testing.T) {
	r := newLeaderRig(t)
	g := r.join("g", 2, 2)
	other := r.join("other", 2, 2)
	keys := g.chain(1, 1)
	op, rn := r.op(), g.runOf(keys, 0)
	v := g.begin(op, rn)[0]
	done := func(a *attachment, op uint64, d wire.Done) {
		t.Helper()
		before := r.l.count.Stores.Ignored
		r.call(a, &wire.Request{Type: wire.StoreDone, Op: op, Done: []wire.Done{d}})
		require.Equal(t, before+1, r.l.count.Stores.Ignored)
		require.Equal(t, tier.Assembling, g.look(keys[0]).State)
	}
	right := wire.Done{Slot: v.Slot, Generation: v.Generation, Part: 0}
	wrong := right
	wrong.Generation++
	done(g.ranks[0], op, wrong)
	wrong = right
	wrong.Part = 1
	done(g.ranks[0], op, wrong)
	wrong = right
	wrong.Slot = 1 << 31
	done(g.ranks[0], op, wrong)
	done(g.ranks[0], op+1000, right)
	done(other.ranks[0], op, right)
	// The same rank twice is not two ranks.
	r.call(g.ranks[0], &wire.Request{Type: wire.StoreDone, Op: op, Done: []wire.Done{right, right}})
	require.Equal(t, tier.Assembling, g.look(keys[0]).State)
	g.write(op, 0, rn, []wire.Verdict{v})
	g.write(op, 1, rn, []wire.Verdict{v})
	require.Eventually(t, func() bool { return g.look(keys[0]).State == tier.Ready }, patience, time.Millisecond)
	r.quiet()
}

// With D*I > C a chunk is complete when the ranks that have rows of it are done.
func TestOnlyRanksWithRowsAreExpected(t *testing.T) {
	r := newLeaderRig(t)
	g := r.join("g", 4, 8)
	keys := g.chain(1, 2)
	op, rn := r.op(), g.runOf(keys, 0)
	vs := g.begin(op, rn)
	g.write(op, 0, rn, vs)
	g.write(op, 1, rn, vs)
	require.Eventually(t, func() bool { return g.look(keys[0]).State == tier.Ready }, patience, time.Millisecond)
	require.Equal(t, tier.Assembling, g.look(keys[1]).State)
	g.write(op, 2, rn, vs)
	g.write(op, 3, rn, vs)
	require.Eventually(t, func() bool { return g.look(keys[1]).State == tier.Ready }, patience, time.Millisecond)
	r.quiet()
}

func TestAbortedPartFreesTheChunk(t *testing.T) {
	r := newLeaderRig(t)
	g := r.join("g", 2, 2)
	keys := g.chain(1, 2)
	op := r.op()
	vs := g.begin(op, g.runOf(keys, 0))
	d := func(rank int, v wire.Verdict, s wire.Status) {
		r.call(g.ranks[rank], &wire.Request{Type: wire.StoreDone, Op: op,
			Done: []wire.Done{{Slot: v.Slot, Generation: v.Generation, Part: uint32(rank), Status: s}}})
	}
	d(0, vs[0], wire.StatusAborted)
	require.Equal(t, tier.Free, g.look(keys[0]).State, "unindexed at once")
	require.Equal(t, 1, g.counts()[tier.Draining], "rank 1 may still write")
	// The key can be brought again meanwhile, into another slot.
	again := r.op()
	vs2 := g.begin(again, g.runOf(keys[:1], 0))
	require.Equal(t, wire.Granted, vs2[0].Code)
	require.NotEqual(t, vs[0].Slot, vs2[0].Slot)
	d(1, vs[0], wire.StatusOK)
	require.Zero(t, g.counts()[tier.Draining])
	d(0, vs[1], wire.StatusOK)
	d(1, vs[1], wire.StatusAborted)
	require.Zero(t, g.counts()[tier.Draining])
	g.write(again, 0, g.runOf(keys[:1], 0), vs2)
	g.write(again, 1, g.runOf(keys[:1], 0), vs2)
	require.Eventually(t, func() bool { return g.look(keys[0]).State == tier.Ready }, patience, time.Millisecond)
	r.quiet()
}

func TestCancelUnsent(t *testing.T) {
	r := newLeaderRig(t)
	g := r.join("g", 2, 2)
	keys := g.chain(1, 3)
	after := r.op()
	require.Equal(t, repeat(wire.Granted, 3), codes(g.begin(after, g.runOf(keys, 0))))
	g.cancelUnsent(after)
	r.quiet()
	require.Equal(t, tier.Free, g.look(keys[0]).State)

	before := r.op()
	g.cancelUnsent(before)
	rep := r.call(g.coord, &wire.Request{Type: wire.StoreBegin, Op: before, Run: g.runOf(keys, 0)})
	require.Equal(t, wire.StatusAborted, rep.Status)
	require.Equal(t, repeat(wire.Declined, 3), codes(rep.Verdicts))
	r.quiet()

	// Without UNSENT ranks may know it: the slots drain until they answer.
	sent, rn := r.op(), g.runOf(keys, 0)
	vs := g.begin(sent, rn)
	r.call(g.coord, &wire.Request{Type: wire.Cancel, Op: sent})
	require.Equal(t, 3, g.counts()[tier.Draining])
	g.write(sent, 0, rn, vs)
	require.Equal(t, 3, g.counts()[tier.Draining])
	g.write(sent, 1, rn, vs)
	r.quiet()

	g.store(keys, 0)
	g.lease(1, g.runOf(keys, 0))
	load := r.op()
	require.Equal(t, repeat(wire.Ready, 3), codes(g.loadBegin(load, 1, g.runOf(keys, 0)).Verdicts))
	g.cancelUnsent(load)
	r.quiet()

	g.lease(2, g.runOf(keys, 0))
	load = r.op()
	g.cancelUnsent(load)
	require.Equal(t, wire.StatusAborted, g.loadBegin(load, 2, g.runOf(keys, 0)).Status)
	r.quiet()
}

func TestTwoGroupsOnOneKey(t *testing.T) {
	r := newLeaderRig(t)
	a, b := r.join("a", 1, 1), r.join("b", 2, 2)
	require.Equal(t, a.acc.accept.Fingerprint, b.acc.accept.Fingerprint)
	require.Same(t, a.acc.space, b.acc.space)
	keys := a.chain(1, 2)
	opA, rn := r.op(), a.runOf(keys, 0)
	vs := a.begin(opA, rn)
	require.Equal(t, repeat(wire.Pending, 2), codes(b.begin(opA, b.runOf(keys, 0))), "the number belongs to the group")
	a.write(opA, 0, rn, vs)
	require.Eventually(t, func() bool { return a.look(keys[1]).State == tier.Ready }, patience, time.Millisecond)
	require.Equal(t, repeat(wire.Have, 2), codes(b.begin(r.op(), b.runOf(keys, 0))))
	// What one rank stored, two load.
	b.lease(1, b.runOf(keys, 0))
	require.Equal(t, repeat(wire.Ready, 2), b.loadAll(1, b.runOf(keys, 0)))
	r.quiet()
}

func TestNoDiskStaysInMemory(t *testing.T) {
	r := newLeaderRig(t)
	g := r.join("g", 1, 1)
	keys := g.chain(1, 2)
	op, rn := r.op(), g.runOf(keys[:1], 0)
	rn.Flags = wire.StoreNoDisk
	g.write(op, 0, rn, g.begin(op, rn))
	require.Eventually(t, func() bool { return g.state(keys[0]) }, patience, time.Millisecond)
	g.store(keys, 1)
	g.onDisk(keys[1:])
	require.False(t, g.look(keys[0]).OnDisk)
	// Somebody else with the same wish changes nothing, somebody without it does.
	rn = g.runOf(keys[:1], 0)
	rn.Flags = wire.StoreNoDisk
	require.Equal(t, repeat(wire.Have, 1), codes(g.begin(r.op(), rn)))
	require.False(t, g.look(keys[0]).OnDisk)
	require.Equal(t, repeat(wire.Have, 1), codes(g.begin(r.op(), g.runOf(keys[:1], 0))))
	g.onDisk(keys)
	r.quiet()
}

func TestNoDiskIsTakenBackBeforeTheChunkIsWhole(t *testing.T) {
	r := newLeaderRig(t)
	g := r.join("g", 1, 1)
	keys := g.chain(1, 1)
	op, rn := r.op(), g.runOf(keys, 0)
	rn.Flags = wire.StoreNoDisk
	vs := g.begin(op, rn)
	require.Equal(t, repeat(wire.Pending, 1), codes(g.begin(r.op(), g.runOf(keys, 0))))
	g.write(op, 0, rn, vs)
	g.onDisk(keys)
	r.quiet()
}

func TestChunksOutliveTheLeader(t *testing.T) {
	r := newLeaderRig(t)
	g := r.join("g", 2, 2)
	keys := g.chain(1, 5)
	g.store(keys, 0)
	session := r.l.session()
	r.stop() // what is dirty is written out

	r.start()
	require.NotEqual(t, session, r.l.session())
	g = r.join("g", 1, 1)
	rep := g.leaseReply(1, g.runOf(keys, 0), 5*time.Second)
	require.Equal(t, wire.Hits{Held: 5, Resident: 5, Leased: 5}, rep.Hits)
	require.Equal(t, repeat(wire.Ready, 5), g.loadAll(1, g.runOf(keys, 0)))
	r.quiet()
}

func TestClosedLeaderAnswersMisses(t *testing.T) {
	r := newLeaderRig(t)
	g := r.join("g", 1, 1)
	keys := g.chain(1, 40)
	g.store(keys, 0)
	g.onDisk(keys)
	g.lease(1, g.runOf(keys, 0))
	op := r.op()
	rep := g.loadBegin(op, 1, g.runOf(keys, 0))
	require.Equal(t, wire.Later, rep.Verdicts[39].Code)
	wait := r.ask(g.ranks[0], &wire.Request{Type: wire.LoadWait, Op: op, First: 39})
	l := r.l
	r.stop()
	require.NotEqual(t, wire.Ready, r.wait(wait).Verdicts[:1:1])
	rep = r.call(g.coord, &wire.Request{Type: wire.LoadBegin, Op: r.op(), Run: g.runOf(keys, 0)})
	require.Equal(t, wire.StatusAborted, rep.Status)
	require.Equal(t, repeat(wire.Failed, 40), codes(rep.Verdicts))
	g.ranks[0].gone()
	g.ranks[0].dead()
	g.coord.dead()
	_, _, err := l.attach(&wire.Hello{Protocol: wire.Protocol, Group: "g", Ranks: 1, Rank: 0})
	require.Error(t, err)
}

func TestStats(t *testing.T) {
	r := newLeaderRig(t)
	g := r.join("g", 2, 2)
	keys := g.chain(1, 4)
	g.store(keys, 0)
	g.onDisk(keys)
	g.lease(1, g.runOf(g.chain(1, 5), 0))
	var s map[string]any
	require.NoError(t, json.Unmarshal(r.l.stats(), &s))
	require.EqualValues(t, 3, s["members"])
	require.EqualValues(t, 4, s["published"])
	require.EqualValues(t, 4*rigC, s["hit_tokens_dram"])
	require.EqualValues(t, 1, s["misses"].(map[string]any)["absent"])
	require.EqualValues(t, 4, s["stores"].(map[string]any)["granted"])
	ns := s["namespaces"].([]any)[0].(map[string]any)
	require.EqualValues(t, 4, ns["slots"].(map[string]any)["ready"])
	require.EqualValues(t, 4, ns["chunks_on_disk"])
	require.EqualValues(t, 4, ns["slots_charged"])
	require.NotEmpty(t, s["disk"])
	group := s["groups"].([]any)[0].(map[string]any)
	require.Equal(t, "accepted", group["state"])
	require.EqualValues(t, 1, group["leases"])
	g.release(1)
	r.quiet()
}
