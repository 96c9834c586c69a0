package kvtier

import (
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/wire"
)

// pinnedSlots is how many slots loads and leases of all groups keep.
func (r *leaderRig) pinnedSlots(g *rigGroup) int { _, all := g.charged(); return all }

// A rank that is stopped keeps what it reads, and no more than the caps: other engines
// go on, and the loads that found no room are misses in time.
func TestLoadsOfAStoppedRankStayWithinTheCaps(t *testing.T) {
	r := newLeaderRig(t, withSlots(32)) // windows of 4; 8 slots a member, 16 in all
	g := []*rigGroup{r.join("a", 1, 1), r.join("b", 1, 1), r.join("c", 1, 1)}
	g[0].grow()
	keys := g[0].chain(1, 28)
	g[0].store(keys, 0)
	g[0].onDisk(keys)
	begin := func(g *rigGroup) (ops []uint64) {
		for i := 0; i < 28; i += 4 {
			ops = append(ops, r.op())
			rep := g.loadBegin(ops[len(ops)-1], 0, g.runOf(keys[:i+4], i))
			require.Equal(t, wire.StatusOK, rep.Status)
			for _, v := range rep.Verdicts {
				require.NotEqual(t, wire.Failed, v.Code)
			}
		}
		return ops
	}
	ops := begin(g[0])
	require.Equal(t, 8, r.pinnedSlots(g[0]))
	waits := make([]<-chan *wire.Reply, len(ops))
	for i, op := range ops {
		waits[i] = r.ask(g[0].ranks[0], &wire.Request{Type: wire.LoadWait, Op: op})
	}
	for i, w := range waits {
		if i < 2 {
			require.Equal(t, wire.Ready, r.wait(w).Verdicts[0].Code, "load %d", i)
		} else {
			require.Empty(t, w, "load %d", i)
		}
	}
	// The others, whose coordinators have caps of their own, fill up what all may have;
	// yet the window of a group is always its own.
	more := begin(g[1])
	require.Equal(t, 8, r.pinnedSlots(g[0]), "the same chunks cost nothing more")
	require.Equal(t, repeat(wire.Ready, 4), g[1].loadRanks(more[0], g[1].runOf(keys[:4], 0), repeatVerdict(wire.Later, 4)))

	// An engine beside them stores and loads.
	fresh := g[2].chain(5, 12)
	g[2].store(fresh, 0)
	require.Equal(t, repeat(wire.Ready, 12), g[2].loadAll(0, g[2].runOf(fresh, 0)))

	// In time the loads that wait are failed; what the ranks may still read stays.
	r.advance(11 * time.Second)
	for i, w := range waits[2:] {
		require.Equal(t, wire.Failed, r.wait(w).Verdicts[0].Code, "load %d", i+2)
	}
	require.Positive(t, r.l.count.Misses.OverCap)
	require.Equal(t, 12, r.pinnedSlots(g[0]), "8 of the first engine, and of the second what it got since")
	r.advance(time.Hour)
	require.Equal(t, 12, r.pinnedSlots(g[0]))
	for _, op := range ops {
		g[0].loadEnd(op, 0)
	}
	for _, op := range more[1:] {
		g[1].loadEnd(op, 0)
	}
	r.quiet()
}

func repeatVerdict(c wire.Code, n int) []wire.Verdict {
	out := make([]wire.Verdict, n)
	for i := range out {
		out[i].Code = c
	}
	return out
}

// Leases that use up the caps do not keep loads from getting on: one window of a group
// may always be pinned, and who waits for it longest is first.
func TestLoadsGetOnWhenLeasesHoldTheCaps(t *testing.T) {
	r := newLeaderRig(t, withoutDisk) // 64 slots: windows of 8; 16 slots a member, 32 in all
	g, other := r.join("a", 1, 1), r.join("b", 1, 1)
	g.grow()
	keys := [][]chunk.Key{g.chain(1, 32), g.chain(2, 16), g.chain(3, 16)}
	for _, k := range keys {
		g.store(k, 0)
	}
	require.EqualValues(t, 16, g.lease(1, g.runOf(keys[1], 0)).Resident)
	require.EqualValues(t, 16, other.lease(1, other.runOf(keys[2], 0)).Resident)
	require.Equal(t, 32, r.pinnedSlots(g), "all that may be")

	// Two loads of two windows each, of chunks that nobody has leased.
	ops := [2]uint64{r.op(), r.op()}
	rn := [2]*wire.Run{g.runOf(keys[0][:16], 0), g.runOf(keys[0], 16)}
	first := g.loadBegin(ops[0], 0, rn[0]).Verdicts
	require.Equal(t, append(repeat(wire.Ready, 8), repeat(wire.Later, 8)...), codes(first))
	require.Equal(t, repeat(wire.Later, 16), codes(g.loadBegin(ops[1], 0, rn[1]).Verdicts))
	require.Equal(t, 40, r.pinnedSlots(g))
	wait := func(i, at int) <-chan *wire.Reply {
		return r.ask(g.ranks[0], &wire.Request{Type: wire.LoadWait, Op: ops[i], First: uint32(at)})
	}
	second := wait(1, 0)
	require.Empty(t, second)
	done := func(i int, vs []wire.Verdict) {
		for _, v := range vs {
			r.call(g.ranks[0], &wire.Request{Type: wire.LoadDone, Op: ops[i], Done: []wire.Done{{Slot: v.Slot, Generation: v.Generation}}})
		}
	}
	// What one has copied is the other's turn, chunk by chunk.
	done(0, first[:3])
	rep := r.wait(second)
	require.Equal(t, wire.Ready, rep.Verdicts[0].Code)
	done(0, first[3:8])
	require.Equal(t, 40, r.pinnedSlots(g))
	next := wait(0, 8)
	require.Empty(t, next, "the next window of the first stands back")
	rep = r.call(g.ranks[0], &wire.Request{Type: wire.LoadWait, Op: ops[1]})
	require.Equal(t, repeat(wire.Ready, 8), codes(rep.Verdicts))
	done(1, rep.Verdicts)
	require.Equal(t, wire.Ready, r.wait(next).Verdicts[0].Code)
	require.Equal(t, 40, r.pinnedSlots(g))
	g.loadEnd(ops[0], 0)
	rep = r.call(g.ranks[0], &wire.Request{Type: wire.LoadWait, Op: ops[1], First: 8})
	require.Equal(t, repeat(wire.Ready, 8), codes(rep.Verdicts))
	g.loadEnd(ops[1], 0)
	require.Equal(t, 32, r.pinnedSlots(g))
	g.release(1)
	other.release(1)
	r.quiet()
}

// Many loads in an arena that is far too small, of groups that also lease and store: if
// every rank goes on, every load brings all its chunks.
func TestManyLoadsInASmallArena(t *testing.T) {
	for range 6 {
		seed := uint64(time.Now().UnixNano())
		t.Logf("seed %d", seed)
		crowd(t, rand.New(rand.NewPCG(seed, 1)), 0)
	}
}

// The same with ranks that stop for good: every load ends, as loaded or as a miss, and
// when the stopped ones are dead every slot comes back.
func TestManyLoadsWithStoppedRanks(t *testing.T) {
	for range 6 {
		seed := uint64(time.Now().UnixNano())
		t.Logf("seed %d", seed)
		crowd(t, rand.New(rand.NewPCG(seed, 1)), 0.05)
	}
}

// crowd runs loads; a rank that is asked to copy a chunk stops with that probability.
func crowd(t *testing.T, rnd *rand.Rand, stop float64) {
	slots := int64(8 + rnd.IntN(25))
	r := newLeaderRig(t, withSlots(slots), func(o *leaderOptions) { o.windowTimeout = 10 * time.Minute })
	defer r.stop()
	var groups []*rigGroup
	for _, id := range []string{"a", "b", "c"}[:1+rnd.IntN(3)] {
		groups = append(groups, r.join(id, 1+rnd.IntN(2), 1))
	}
	chains := [][]chunk.Key{groups[0].chain(1, 40), groups[0].chain(2, 25), groups[0].chain(3, 5)}
	for _, keys := range chains {
		groups[0].store(keys, 0)
	}
	for _, keys := range chains {
		groups[0].onDisk(keys)
	}
	t.Logf("%d slots, %d groups", slots, len(groups))

	stopped := make([][]bool, len(groups)) // by rank; written by its goroutine only
	var wg sync.WaitGroup
	for gi, g := range groups {
		stopped[gi] = make([]bool, len(g.ranks))
		type load struct {
			op uint64
			rn *wire.Run
			vs []wire.Verdict
		}
		var loads []load
		for i := range 4 + rnd.IntN(20) {
			keys := chains[rnd.IntN(len(chains))]
			from := rnd.IntN(len(keys))
			rn := g.runOf(keys[:from+1+rnd.IntN(len(keys)-from)], from)
			lease := uint64(rnd.IntN(3)) // some have none
			if lease > 0 {
				lease += uint64(10 * i)
				g.leaseReply(lease, rn, 0)
			}
			if lease > 0 && rnd.IntN(3) == 0 {
				continue // it waits in the queue of the engine, and keeps what it leases
			}
			op := r.op()
			rep := g.loadBegin(op, lease, rn)
			require.Equal(t, wire.StatusOK, rep.Status)
			loads = append(loads, load{op, rn, rep.Verdicts})
		}
		for rank := range g.ranks {
			// A rank has one worker, which goes from load to load as verdicts come.
			stopAt := map[uint64]bool{}
			for _, l := range loads {
				if rnd.Float64() < stop*float64(len(l.rn.Keys)) {
					stopAt[l.op] = true
				}
			}
			for _, l := range loads {
				if stopAt[l.op] {
					stopped[gi][rank] = true // of this load it never says anything
					continue
				}
				wg.Go(func() {
					seen := g.load(l.op, rank, l.rn, l.vs)
					if stop == 0 {
						require.Equal(t, repeat(wire.Ready, len(l.rn.Keys)), seen, "op %d, rank %d", l.op, rank)
					}
				})
			}
		}
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	limit := time.After(6 * patience)
	for running := true; running; {
		select {
		case <-done:
			running = false
		case <-limit:
			t.Fatal("the loads do not get on")
		case <-time.After(100 * time.Millisecond):
			if stop > 0 {
				r.advance(time.Minute) // what waits for a stopped rank is over its time at last
			}
		}
	}
	if stop == 0 {
		require.Zero(t, r.l.count.Loads.Expired)
		require.Zero(t, r.l.count.Loads.Failed)
	}
	for gi, g := range groups {
		require.LessOrEqual(t, r.pinnedSlots(g), r.l.spaces[g.fingerprint()].allCap()+len(groups)*r.l.spaces[g.fingerprint()].window())
		for rank, a := range g.ranks {
			if stopped[gi][rank] {
				a.gone()
				a.dead()
			}
		}
		g.coord.gone() // with its leases
	}
	r.quiet()
	r.requireNothingRemembered()
}
