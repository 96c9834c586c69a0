package kvtier

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/tier"
)

// charged is how many slots count against the caps: of a member, of all.
func (g *rigGroup) charged() (member, all int) {
	g.r.l.mu.Lock()
	defer g.r.l.mu.Unlock()
	return g.coord.charged, g.r.l.spaces[g.fingerprint()].charged
}

func (g *rigGroup) fingerprint() chunk.Fingerprint {
	fp, _ := chunk.ParseFingerprint(g.acc.accept.Fingerprint)
	return fp
}

func TestLeaseIsIdempotent(t *testing.T) {
	r := newLeaderRig(t, withoutDisk)
	g := r.join("g", 1, 1)
	keys, other := g.chain(1, 10), g.chain(2, 3)
	g.grow()
	g.store(keys, 0)
	g.store(other, 0)
	check := func(rn *wire.Run, want, charged int) {
		t.Helper()
		h := g.lease(1, rn)
		n := uint32(want)
		require.Equal(t, wire.Hits{Held: n, Resident: n, Leased: n}, h)
		member, all := g.charged()
		require.Equal(t, charged, member)
		require.Equal(t, charged, all)
		require.Len(t, g.coord.leases, 1)
	}
	for range 3 {
		check(g.runOf(keys, 0), 10, 10)
	}
	check(g.runOf(keys[:4], 0), 4, 4)      // shorter
	check(g.runOf(keys[:8], 0), 8, 8)      // longer
	check(g.runOf(keys[:8], 2), 6, 6)      // begins later
	check(g.runOf(other, 0), 3, 3)         // another prefix
	check(g.runOf(g.chain(3, 2), 0), 0, 0) // nothing is held
	check(g.runOf(keys, 0), 10, 10)
	g.release(1)
	r.quiet()
	g.release(1) // unknown by now
	r.quiet()
}

// What the old lease pins and the new run still names is not lost in between, though
// the arena is under pressure from the new lease's own reads.
func TestLeaseKeepsCommonPins(t *testing.T) {
	r := newLeaderRig(t, withSlots(16))
	g := r.join("g", 1, 1)
	keys := g.chain(1, 40)
	g.store(keys, 0)
	g.onDisk(keys)
	h := g.lease(1, g.runOf(keys, 0))
	require.EqualValues(t, 4, h.Resident, "a quarter of 16 slots")
	require.EqualValues(t, 40, h.Leased)
	pins := func() (out []tier.Ref) {
		for _, o := range g.coord.leases[1].holds {
			if o.kind == pinned {
				out = append(out, o.ref)
			}
		}
		return out
	}
	before := pins()
	require.Len(t, before, 4)
	// The same run from its second chunk on: three pins stay, one is new.
	h = g.lease(1, g.runOf(keys, 1))
	require.EqualValues(t, 4, h.Resident)
	require.Equal(t, before[1:], pins()[:3])
	g.release(1)
	r.quiet()
}

func TestLeaseCaps(t *testing.T) {
	r := newLeaderRig(t, withoutDisk) // 64 slots: 16 a member, 32 for all
	g := []*rigGroup{r.join("a", 1, 1), r.join("b", 1, 1), r.join("c", 1, 1)}
	g[0].grow()
	keys := [][]chunk.Key{g[0].chain(1, 20), g[0].chain(2, 20), g[0].chain(3, 20)}
	for i := range keys {
		g[i].store(keys[i], 0)
	}
	require.Equal(t, wire.Hits{Held: 20, Resident: 16, Leased: 16}, g[0].lease(1, g[0].runOf(keys[0], 0)))
	// Over its cap: shorter, never a wait. What it has pinned already costs nothing.
	require.Equal(t, wire.Hits{Held: 20}, g[0].lease(2, g[0].runOf(keys[1], 0)))
	require.Equal(t, wire.Hits{Held: 20, Resident: 16, Leased: 16}, g[0].lease(3, g[0].runOf(keys[0], 0)))
	// Without PIN what is only in DRAM counts as well.
	rep := r.call(g[0].coord, &wire.Request{Type: wire.Lease, Run: &wire.Run{Lease: 4, Keys: keys[2], Parent: g[0].root}})
	require.Equal(t, wire.Hits{Held: 20}, rep.Hits)

	require.Equal(t, wire.Hits{Held: 20, Resident: 16, Leased: 16}, g[1].lease(1, g[1].runOf(keys[1], 0)))
	require.Equal(t, wire.Hits{Held: 20}, g[2].lease(1, g[2].runOf(keys[2], 0)), "all members together")
	require.Equal(t, wire.Hits{Held: 20, Resident: 16, Leased: 16}, g[2].lease(1, g[2].runOf(keys[0], 0)), "others' slots cost nothing more")

	for _, id := range []uint64{1, 2, 3, 4} {
		g[0].release(id)
	}
	g[2].lease(1, g[2].runOf(keys[0][:1], 0))
	require.Equal(t, wire.Hits{Held: 20, Resident: 15, Leased: 15}, g[2].lease(2, g[2].runOf(keys[2], 0)))
	g[1].release(1)
	g[2].release(1)
	g[2].release(2)
	r.quiet()
}

func TestLeaseOfDiskChunksGoesByNumber(t *testing.T) {
	r := newLeaderRig(t)
	g := r.join("g", 1, 1)
	keys := g.chain(1, 40)
	g.store(keys, 0)
	g.onDisk(keys)
	h := g.lease(1, g.runOf(keys, 0))
	require.Equal(t, uint32(40), h.Leased)
	require.Equal(t, uint32(16), h.Resident)
	require.Equal(t, 24, g.coord.onDisk)
	g.coord.onDisk += maxLeasedOnDisk - 24 - 10
	require.Equal(t, uint32(26), g.lease(2, g.runOf(keys, 0)).Leased, "16 pinned, 10 by number")
	g.coord.onDisk -= maxLeasedOnDisk - 24 - 10
	g.release(1)
	g.release(2)
	r.quiet()
}

// Without PIN the only copy still stays.
func TestLeaseKeepsTheOnlyCopy(t *testing.T) {
	r := newLeaderRig(t, withoutDisk, withSlots(16))
	g := r.join("g", 1, 1)
	keys := g.chain(1, 4)
	g.grow()
	g.store(keys, 0)
	rep := r.call(g.coord, &wire.Request{Type: wire.Lease, Run: &wire.Run{Lease: 1, Keys: keys, Parent: g.root}})
	require.Equal(t, wire.Hits{Held: 4, Resident: 4, Leased: 4}, rep.Hits)
	for seed := range uint32(10) {
		g.store(g.chain(100+seed, 5), 0)
	}
	for _, k := range keys {
		require.Equal(t, tier.Ready, g.look(k).State)
	}
	g.release(1)
	for seed := range uint32(10) {
		g.store(g.chain(200+seed, 5), 0)
	}
	require.Equal(t, tier.Free, g.look(keys[0]).State, "now it may go")
	r.quiet()
}

func TestLeaseTTL(t *testing.T) {
	r := newLeaderRig(t, withoutDisk)
	g := r.join("g", 1, 1)
	keys := g.chain(1, 3)
	g.store(keys, 0)
	for id := uint64(1); id <= 4; id++ {
		g.lease(id, g.runOf(keys, 0))
	}
	r.advance(40 * time.Second)
	// Three ways to touch.
	require.Equal(t, wire.Hits{Held: 3, Resident: 3, Leased: 3}, g.leaseReply(1, &wire.Run{}, 0).Hits)
	g.lease(2, g.runOf(keys, 0))
	r.call(g.coord, &wire.Request{Type: wire.Lease, Run: &wire.Run{Flags: wire.LeaseRenew}, Renew: []uint64{3, 77}})
	r.advance(40 * time.Second)
	require.Len(t, g.coord.leases, 3)
	require.Equal(t, wire.StatusStale, g.leaseReply(4, &wire.Run{}, 0).Status)

	// Lost: the load does not happen, and nothing of it is left.
	op := r.op()
	rep := g.loadBegin(op, 4, g.runOf(keys, 0))
	require.Equal(t, wire.StatusStale, rep.Status)
	require.Equal(t, repeat(wire.Failed, 3), codes(rep.Verdicts))
	g.loadEnd(op, 0)

	// Expiry harms no load that has begun.
	load := r.op()
	rep = g.loadBegin(load, 1, g.runOf(keys, 0))
	r.advance(61 * time.Second)
	require.Empty(t, g.coord.leases)
	require.Equal(t, repeat(wire.Ready, 3), g.loadRanks(load, g.runOf(keys, 0), rep.Verdicts))
	r.quiet()
}

// restarted gives a leader that has these chunks only on disk.
func restarted(t *testing.T, n int, options ...rigOption) (*leaderRig, *rigGroup, []chunk.Key) {
	r := newLeaderRig(t, options...)
	g := r.join("g", 1, 1)
	keys := g.chain(1, n)
	g.store(keys, 0)
	r.stop()
	r.start()
	g = r.join("g", 2, 2)
	require.Eventually(t, r.l.spaces[g.fingerprint()].disk.Scanned, patience, time.Millisecond)
	return r, g, keys
}

func TestLeaseReplyWaitsForReads(t *testing.T) {
	r, g, keys := restarted(t, 3)
	r.fs.closeReads()
	rep := g.leaseReply(1, g.runOf(keys, 0), 0)
	require.Equal(t, wire.Hits{Held: 3, Leased: 3, Pending: 3, Bytes: 3 * (rigSlot + 4096)}, rep.Hits, "without a timeout: at once")

	x := g.runOf(keys, 0)
	x.Lease, x.Flags = 1, wire.LeasePin|wire.LeasePrefetch
	waits := r.ask(g.coord, &wire.Request{Type: wire.Lease, Run: x, Timeout: time.Second})
	late := r.ask(g.coord, &wire.Request{Type: wire.Lease, Run: x, Timeout: time.Minute})
	r.advance(2 * time.Second)
	require.Equal(t, rep.Hits, r.wait(waits).Hits, "the time is over")
	require.Empty(t, late)
	r.fs.open()
	require.Equal(t, wire.Hits{Held: 3, Resident: 3, Leased: 3}, r.wait(late).Hits)
	require.EqualValues(t, 3, r.l.count.Fills, "asked three times, read once")

	// A released lease answers who waits for it.
	g.release(1)
	r.quiet()
}

func TestReleaseAnswersWhoWaits(t *testing.T) {
	r, g, keys := restarted(t, 3)
	r.fs.closeReads()
	x := g.runOf(keys, 0)
	x.Lease, x.Flags = 1, wire.LeasePin|wire.LeasePrefetch
	wait := r.ask(g.coord, &wire.Request{Type: wire.Lease, Run: x, Timeout: time.Minute})
	require.Empty(t, wait)
	g.release(1)
	require.Equal(t, wire.StatusAborted, r.wait(wait).Status)
	wait = r.ask(g.coord, &wire.Request{Type: wire.Lease, Run: x, Timeout: time.Minute})
	g.coord.gone()
	require.Equal(t, wire.StatusAborted, r.wait(wait).Status)
	r.fs.open()
	r.quiet()
}

func TestUnreadableChunkShortensTheLease(t *testing.T) {
	r, g, keys := restarted(t, 6)
	r.spoil(keys[3])
	h := g.lease(1, g.runOf(keys, 0))
	require.Equal(t, wire.Hits{Held: 3, Resident: 3, Leased: 3}, h)
	// The same lease does not try again.
	fills := r.l.count.Fills
	require.Equal(t, h, g.lease(1, g.runOf(keys, 0)))
	require.Equal(t, fills, r.l.count.Fills)
	// Stored anew it is held again, for the same lease too.
	op, rn := r.op(), run(keys[2], 3, keys[3:4])
	require.Eventually(t, func() bool {
		vs := g.begin(op, rn)
		g.write(op, 0, rn, vs)
		g.write(op, 1, rn, vs)
		op = r.op()
		return g.look(keys[3]).State == tier.Ready
	}, patience, time.Millisecond)
	require.Equal(t, wire.Hits{Held: 6, Resident: 6, Leased: 6}, g.lease(1, g.runOf(keys, 0)))
	g.release(1)
	r.quiet()
}

func TestPrefetchBringsIntoDRAM(t *testing.T) {
	r, g, keys := restarted(t, 5)
	rep := r.call(g.coord, &wire.Request{Type: wire.Prefetch, Run: g.runOf(keys, 0)})
	require.Positive(t, rep.Hits.Pending)
	require.Equal(t, uint32(5), rep.Hits.Held)
	require.Eventually(t, func() bool {
		r.call(g.coord, &wire.Request{Type: wire.Prefetch, Run: g.runOf(keys, 0)})
		return r.call(g.coord, &wire.Request{Type: wire.Lookup, Run: g.runOf(keys, 0)}).Hits.Resident == 5
	}, patience, time.Millisecond)
	r.quiet()
}

// While the directory is still listed, names are looked up one by one.
func TestProbeWhileTheScanRuns(t *testing.T) {
	r := newLeaderRig(t)
	g := r.join("g", 1, 1)
	keys := g.chain(1, 3)
	g.store(keys, 0)
	r.stop()
	r.fs.closeLists()
	r.start()
	g = r.join("g", 1, 1)
	disk := r.l.spaces[g.fingerprint()].disk
	require.False(t, disk.Scanned())
	require.Eventually(t, func() bool { // a probe has its time, and this machine perhaps other work
		return r.call(g.coord, &wire.Request{Type: wire.Lookup, Run: g.runOf(g.chain(1, 5), 0)}).Hits.Held == 3
	}, patience, time.Millisecond)
	require.Equal(t, wire.Hits{Held: 3, Resident: 3, Leased: 3}, g.lease(1, g.runOf(keys, 0)))
	require.False(t, disk.Scanned())
	require.Positive(t, r.l.count.Probes)

	// Released while it is looked up: it does not come to life afterwards.
	x := g.runOf(g.chain(9, 3), 0)
	x.Lease, x.Flags = 2, wire.LeasePin|wire.LeasePrefetch
	wait := r.ask(g.coord, &wire.Request{Type: wire.Lease, Run: x})
	g.release(2)
	r.wait(wait)
	require.NotContains(t, g.coord.leases, uint64(2))
	require.Equal(t, repeat(wire.Ready, 3), g.loadAll(1, g.runOf(keys, 0)))
	r.fs.open()
	require.Eventually(t, disk.Scanned, patience, time.Millisecond)
	r.quiet()
}

// A lease of 4,096 keys of which all, or none but by name, are in DRAM.
func BenchmarkLease4096(b *testing.B) {
	for _, c := range []struct {
		name  string
		slots int64
	}{{"resident", 32768}, {"capped", 4096}} {
		b.Run(c.name, func(b *testing.B) {
			r := newLeaderRig(b, withSlots(c.slots))
			g := r.join("g", 1, 1)
			keys := g.chain(1, 4096)
			g.store(keys, 0)
			g.onDisk(keys)
			rn := g.runOf(keys, 0)
			b.Run("first", func(b *testing.B) {
				b.ReportAllocs()
				for range b.N {
					g.leaseReply(1, rn, 0)
					b.StopTimer()
					g.release(1)
					b.StartTimer()
				}
			})
			b.Run("again", func(b *testing.B) {
				b.ReportAllocs()
				for range b.N {
					g.leaseReply(1, rn, 0)
				}
			})
			g.release(1)
		})
	}
}
