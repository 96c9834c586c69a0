package kvtier

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/tier"
)

// A prefix several times as long as the arena streams through it, for several loads
// at once.
func TestLoadLongerThanTheArena(t *testing.T) {
	r := newLeaderRig(t, withSlots(16))
	g := r.join("g", 2, 2)
	keys := g.chain(1, 70)
	g.store(keys, 0)
	g.onDisk(keys)
	h := g.lease(1, g.runOf(keys, 0))
	require.EqualValues(t, 70, h.Leased)
	require.EqualValues(t, 4, h.Resident)
	op := r.op()
	rn := g.runOf(keys, 0)
	rep := g.loadBegin(op, 1, rn)
	require.Len(t, rep.Verdicts, 70)
	require.Equal(t, []wire.Code{wire.Ready, wire.Ready, wire.Later}, codes(rep.Verdicts[:3]), "a window of 2")

	g.lease(2, g.runOf(keys, 0))
	op2 := r.op()
	rep2 := g.loadBegin(op2, 2, rn)
	done := make(chan []wire.Code)
	go func() { done <- g.loadRanks(op2, rn, rep2.Verdicts) }()
	require.Equal(t, repeat(wire.Ready, 70), g.loadRanks(op, rn, rep.Verdicts))
	require.Equal(t, repeat(wire.Ready, 70), <-done)
	require.Positive(t, r.l.count.Loads.Windows)
	r.quiet()
}

// A chunk that cannot be read fails for all ranks alike, with all that follow.
func TestLoadFailsAlikeForAllRanks(t *testing.T) {
	for _, bad := range []int{0, 1, 5, 8, 11} {
		r, g, keys := restarted(t, 12)
		r.spoil(keys[bad])
		rn := g.runOf(keys, 0)
		op := r.op()
		rep := g.loadBegin(op, 0, rn) // without a lease nobody has tried before
		seen := g.loadRanks(op, rn, rep.Verdicts)
		require.Equal(t, append(repeat(wire.Ready, bad), wire.Failed), seen)
		r.quiet()
		r.stop()
	}
}

func TestLoadOfWhatIsGone(t *testing.T) {
	r := newLeaderRig(t, withoutDisk)
	g := r.join("g", 2, 2)
	keys := g.chain(1, 6)
	g.store(keys[:4], 0)
	op := r.op()
	rep := g.loadBegin(op, 0, g.runOf(keys, 0))
	require.Equal(t, append(repeat(wire.Ready, 4), wire.Failed, wire.Failed), codes(rep.Verdicts))
	wait := r.call(g.ranks[1], &wire.Request{Type: wire.LoadWait, Op: op, First: 4})
	require.Equal(t, repeat(wire.Failed, 2), codes(wait.Verdicts))
	require.EqualValues(t, 4, wait.First)
	g.loadEnd(op, 0)
	g.loadEnd(op, 1)
	r.quiet()
	// The operation is over.
	require.Equal(t, wire.StatusStale, r.call(g.ranks[0], &wire.Request{Type: wire.LoadWait, Op: op}).Status)
	require.Equal(t, wire.StatusOK, r.call(g.ranks[0], &wire.Request{Type: wire.LoadDone, Op: op, Flags: wire.LoadDoneEnd}).Status)
}

func TestPinsEndRankByRank(t *testing.T) {
	r := newLeaderRig(t, withoutDisk)
	g := r.join("g", 2, 2)
	keys := g.chain(1, 3)
	g.store(keys, 0)
	op := r.op()
	rn := g.runOf(keys, 0)
	vs := g.loadBegin(op, 0, rn).Verdicts
	done := func(rank, i int) {
		r.call(g.ranks[rank], &wire.Request{Type: wire.LoadDone, Op: op,
			Done: []wire.Done{{Slot: vs[i].Slot, Generation: vs[i].Generation, Part: uint32(rank)}}})
	}
	charged := func() int { _, all := g.charged(); return all }
	require.Equal(t, 3, charged())
	done(0, 0)
	done(0, 0) // twice is once
	require.Equal(t, 3, charged())
	require.EqualValues(t, 1, r.l.count.Loads.Ignored)
	done(1, 0)
	require.Equal(t, 2, charged())
	g.loadEnd(op, 0)
	require.Equal(t, 2, charged())
	done(1, 1) // rank 0 has named none of these
	require.Equal(t, 1, charged())
	g.loadEnd(op, 1)
	require.Zero(t, charged())
	r.quiet()
}

// Removed under a pin: whoever copies goes on, the slot is free afterwards.
func TestRemoveUnderALoad(t *testing.T) {
	r := newLeaderRig(t)
	g := r.join("g", 1, 1)
	keys := g.chain(1, 3)
	g.store(keys, 0)
	g.onDisk(keys)
	rn := g.runOf(keys, 0)
	op := r.op()
	rep := g.loadBegin(op, 0, rn)
	require.Equal(t, 2, g.coord.remove(keys[1:]))
	require.Equal(t, 2, g.counts()[tier.Draining])
	require.Equal(t, repeat(wire.Ready, 3), g.loadRanks(op, rn, rep.Verdicts))
	require.Equal(t, uint32(1), g.lease(1, rn).Held)
	g.release(1)
	r.quiet()
}

func TestLoadDeadlines(t *testing.T) {
	r, g, keys := restarted(t, 20)
	r.fs.closeReads()
	rn := g.runOf(keys, 0)
	op := r.op()
	rep := g.loadBegin(op, 0, rn)
	require.Equal(t, repeat(wire.Later, 20), codes(rep.Verdicts))
	short := r.ask(g.ranks[0], &wire.Request{Type: wire.LoadWait, Op: op, Timeout: time.Second})
	long := r.ask(g.ranks[1], &wire.Request{Type: wire.LoadWait, Op: op})
	r.advance(2 * time.Second)
	require.Equal(t, wire.StatusTimeout, r.wait(short).Status)
	r.advance(7 * time.Second)
	require.Empty(t, long)
	r.advance(2 * time.Second)
	verdicts := r.wait(long).Verdicts
	require.Equal(t, repeat(wire.Failed, len(verdicts)), codes(verdicts))
	require.NotEmpty(t, verdicts)
	g.loadEnd(op, 0)
	g.loadEnd(op, 1)
	// The reads go on until they are given up; then the keys are free.
	require.Equal(t, tier.Filling, g.look(keys[0]).State)
	h := g.leaseReply(1, rn, 0).Hits
	require.Positive(t, h.Pending)
	r.advance(30 * time.Second)
	require.NotEqual(t, tier.Filling, g.look(keys[0]).State)
	require.Positive(t, g.counts()[tier.Draining])
	require.Zero(t, g.leaseReply(1, rn, 0).Hits.Held, "the lease does not try again what it could not read")
	g.release(1)
	r.fs.open()
	r.quiet()
}

// The copies of a window are waited for as long as its reads, then the rest fails.
func TestSlowRankEndsALongLoad(t *testing.T) {
	r := newLeaderRig(t)
	g := r.join("g", 2, 2)
	keys := g.chain(1, 20)
	g.store(keys, 0)
	g.onDisk(keys)
	rn := g.runOf(keys, 0)
	g.lease(1, rn)
	op := r.op()
	vs := g.loadBegin(op, 1, rn).Verdicts
	window := r.l.spaces[g.fingerprint()].window()
	require.Equal(t, append(repeat(wire.Ready, window), wire.Later), codes(vs[:window+1]))
	wait := r.ask(g.ranks[0], &wire.Request{Type: wire.LoadWait, Op: op, First: uint32(window)})
	r.advance(9 * time.Second)
	require.Empty(t, wait)
	r.advance(2 * time.Second)
	require.Equal(t, wire.Failed, r.wait(wait).Verdicts[0].Code)
	_, all := g.charged()
	require.Equal(t, window, all, "the slow rank may still read its window")
	require.Equal(t, repeat(wire.Ready, window), g.load(op, 1, rn, vs)[:window])
	g.loadEnd(op, 0)
	r.quiet()
}

func TestPartDeadlines(t *testing.T) {
	r := newLeaderRig(t)
	g := r.join("g", 2, 2)
	keys := g.chain(1, 2)
	// 120 s from the grant.
	op, rn := r.op(), g.runOf(keys, 0)
	vs := g.begin(op, rn)
	r.advance(119 * time.Second)
	require.Equal(t, tier.Assembling, g.look(keys[0]).State)
	r.advance(2 * time.Second)
	require.Equal(t, tier.Free, g.look(keys[0]).State)
	require.Equal(t, 2, g.counts()[tier.Draining])
	g.write(op, 0, rn, vs) // late, and no use any more
	require.Equal(t, 2, g.counts()[tier.Draining])
	g.write(op, 1, rn, vs)
	r.quiet()
	// 10 s from the first part.
	op = r.op()
	vs = g.begin(op, rn)
	r.advance(60 * time.Second)
	g.write(op, 1, rn, vs)
	r.advance(9 * time.Second)
	require.Equal(t, tier.Assembling, g.look(keys[0]).State)
	r.advance(2 * time.Second)
	require.Equal(t, 2, g.counts()[tier.Draining])
	g.write(op, 0, rn, vs)
	r.quiet()
	require.EqualValues(t, 4, r.l.count.Stores.Expired)
	require.Zero(t, r.l.count.Published)
}

// Death at each step. gone alone keeps what may still be touched; dead frees it.
func TestDeathOfARank(t *testing.T) {
	steps := []struct {
		name string
		do   func(r *leaderRig, g *rigGroup) (touched tier.State)
	}{
		{"store granted", func(r *leaderRig, g *rigGroup) tier.State {
			g.begin(r.op(), g.runOf(g.chain(5, 3), 0))
			return tier.Draining
		}},
		{"store half done by others", func(r *leaderRig, g *rigGroup) tier.State {
			op, rn := r.op(), g.runOf(g.chain(5, 3), 0)
			g.write(op, 0, rn, g.begin(op, rn))
			return tier.Draining
		}},
		{"store aborted by others", func(r *leaderRig, g *rigGroup) tier.State {
			op, rn := r.op(), g.runOf(g.chain(5, 1), 0)
			v := g.begin(op, rn)[0]
			r.call(g.ranks[0], &wire.Request{Type: wire.StoreDone, Op: op,
				Done: []wire.Done{{Slot: v.Slot, Generation: v.Generation, Status: wire.StatusAborted}}})
			return tier.Draining
		}},
		{"load begun", func(r *leaderRig, g *rigGroup) tier.State {
			g.loadBegin(r.op(), 0, g.runOf(g.chain(1, 3), 0))
			return tier.Ready
		}},
		{"load half done", func(r *leaderRig, g *rigGroup) tier.State {
			op := r.op()
			v := g.loadBegin(op, 0, g.runOf(g.chain(1, 3), 0)).Verdicts[0]
			r.call(g.ranks[1], &wire.Request{Type: wire.LoadDone, Op: op, Done: []wire.Done{{Slot: v.Slot, Generation: v.Generation, Part: 1}}})
			return tier.Ready
		}},
		{"others have ended", func(r *leaderRig, g *rigGroup) tier.State {
			op := r.op()
			g.loadBegin(op, 0, g.runOf(g.chain(1, 3), 0))
			g.loadEnd(op, 0)
			return tier.Ready
		}},
	}
	for _, s := range steps {
		t.Run(s.name, func(t *testing.T) {
			r := newLeaderRig(t, withoutDisk)
			g := r.join("g", 2, 2)
			g.store(g.chain(1, 3), 0)
			touched := s.do(r, g)
			g.ranks[1].gone()
			if touched == tier.Draining {
				require.Positive(t, g.counts()[tier.Draining])
				require.Zero(t, g.counts()[tier.Assembling])
			} else {
				_, all := g.charged()
				require.Equal(t, 3, all)
			}
			require.Equal(t, repeat(wire.Declined, 1), codes(g.begin(r.op(), g.runOf(g.chain(8, 1), 0))), "no more grants")
			g.ranks[1].dead()
			g.ranks[1].dead()
			g.ranks[0].gone()
			g.ranks[0].dead()
			r.quiet()
			g.coord.dead()
			require.Empty(t, r.l.groups)
		})
	}
}

func TestDeathOfTheCoordinator(t *testing.T) {
	r := newLeaderRig(t)
	g := r.join("g", 2, 2)
	keys := g.chain(1, 6)
	g.store(keys, 0)
	g.lease(1, g.runOf(keys, 0))
	g.lease(2, g.runOf(keys, 0))
	op := r.op()
	rep := g.loadBegin(op, 1, g.runOf(keys, 0))
	store, rn := r.op(), g.runOf(g.chain(2, 2), 0)
	vs := g.begin(store, rn)
	g.coord.gone()
	g.coord.dead()
	require.Empty(t, g.coord.leases)
	// What the ranks know of goes on.
	require.Equal(t, repeat(wire.Ready, 6), g.loadRanks(op, g.runOf(keys, 0), rep.Verdicts))
	g.write(store, 0, rn, vs)
	g.write(store, 1, rn, vs)
	require.Eventually(t, func() bool { return g.look(rn.Keys[1]).State == tier.Ready }, patience, time.Millisecond)
	r.quiet()
}

// A rank that takes a dead one's place answers for nothing of it, and the dead one's
// slots are free only by its death.
func TestRankFollows(t *testing.T) {
	r := newLeaderRig(t)
	g := r.join("g", 2, 2)
	keys := g.chain(1, 3)
	op, rn := r.op(), g.runOf(keys, 0)
	vs := g.begin(op, rn)
	old := g.ranks[1]
	old.gone()
	g.ranks[1] = r.attach("g", 2, 1, false)
	require.NotNil(t, within(t, declareAsync(g.ranks[1], rigDeclare(g.geo, 1))).acc)
	g.write(op, 1, rn, vs)
	g.write(op, 0, rn, vs)
	require.Equal(t, 3, g.counts()[tier.Draining])
	g.store(keys, 0)
	g.lease(1, g.runOf(keys, 0))
	require.Equal(t, repeat(wire.Ready, 3), g.loadAll(1, g.runOf(keys, 0)))
	require.Equal(t, 3, g.counts()[tier.Draining])
	old.dead()
	r.quiet()
}

// A rank that ends early has failed: the others need not wait for a deadline.
func TestEarlyEndFailsTheRest(t *testing.T) {
	r := newLeaderRig(t)
	g := r.join("g", 2, 2)
	keys := g.chain(1, 20)
	g.store(keys, 0)
	g.onDisk(keys)
	rn := g.runOf(keys, 0)
	g.lease(1, rn)
	op := r.op()
	vs := g.loadBegin(op, 1, rn).Verdicts
	wait := r.ask(g.ranks[1], &wire.Request{Type: wire.LoadWait, Op: op, First: 19})
	require.Empty(t, wait)
	g.loadEnd(op, 0)
	require.Equal(t, wire.Failed, r.wait(wait).Verdicts[0].Code)
	require.Contains(t, g.load(op, 1, rn, vs), wire.Failed)
	r.quiet()
}

// The load takes the lease over: what exists only in DRAM stays for its later windows.
func TestLaterWindowsStayPinned(t *testing.T) {
	r := newLeaderRig(t, withoutDisk, withSlots(16))
	g := r.join("g", 1, 1)
	g.grow()
	keys := g.chain(1, 4)
	g.store(keys, 0)
	rn := g.runOf(keys, 0)
	require.EqualValues(t, 4, g.lease(1, rn).Resident)
	op := r.op()
	vs := g.loadBegin(op, 1, rn).Verdicts
	require.Equal(t, []wire.Code{wire.Ready, wire.Ready, wire.Later, wire.Later}, codes(vs))
	require.Empty(t, g.coord.leases)
	for seed := range uint32(10) {
		g.store(g.chain(100+seed, 5), 0)
	}
	require.Equal(t, repeat(wire.Ready, 4), g.loadRanks(op, rn, vs))
	r.quiet()
}

// What a disk cannot read now is tried once per load, and stays on disk.
func TestReadErrorFailsTheLoadOnce(t *testing.T) {
	r, g, keys := restarted(t, 5)
	r.fs.broken.Store(true)
	op, rn := r.op(), g.runOf(keys, 0)
	rep := g.loadBegin(op, 0, rn)
	require.Equal(t, []wire.Code{wire.Failed}, g.loadRanks(op, rn, rep.Verdicts))
	r.quiet()
	require.LessOrEqual(t, r.l.count.Fills, uint64(5))
	r.fs.broken.Store(false)
	require.Equal(t, repeat(wire.Ready, 5), g.loadAll(0, rn))
	r.quiet()
}

// The next window is read while the ranks still copy this one.
func TestNextWindowIsReadAhead(t *testing.T) {
	r, g, keys := restarted(t, 20)
	g.grow()
	op, rn := r.op(), g.runOf(keys, 0)
	rep := g.loadBegin(op, 0, rn)
	require.Eventually(t, func() bool { return g.look(keys[15]).State == tier.Ready }, patience, time.Millisecond)
	require.Equal(t, tier.Free, g.look(keys[16]).State, "but only the next one")
	require.Equal(t, repeat(wire.Ready, 20), g.loadRanks(op, rn, rep.Verdicts))
	require.EqualValues(t, 20, r.l.count.Fills)
	r.quiet()
}
