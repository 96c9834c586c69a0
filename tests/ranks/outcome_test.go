package ranks

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier"
)

// requests are how often the members of a group asked the leader, by type.
type requests struct {
	Ranks       []map[string]int `json:"rank_requests"`
	Coordinator map[string]int   `json:"coordinator_requests"`
}

func (g *group) requests(c *kvtier.Cache) requests {
	g.t.Helper()
	s, _, _ := statsOf(g.t, c)
	mine, ok := s.of(g.name)
	require.True(g.t, ok, "no such group")
	return mine.requests
}

// since gives what was asked after before; types with nothing are left out.
func (r requests) since(before requests) requests {
	sub := func(a, b map[string]int) map[string]int {
		out := map[string]int{}
		for k, n := range a {
			if n > b[k] {
				out[k] = n - b[k]
			}
		}
		return out
	}
	out := requests{Coordinator: sub(r.Coordinator, before.Coordinator)}
	for i := range r.Ranks {
		out.Ranks = append(out.Ranks, sub(r.Ranks[i], before.Ranks[i]))
	}
	return out
}

// requireRanks waits until every rank has asked exactly this, since before: what ends
// things is not waited for by those who send it.
func (g *group) requireRanks(c *kvtier.Cache, before requests, want map[string]int) {
	g.t.Helper()
	for end := time.Now().Add(wait); ; time.Sleep(time.Millisecond) {
		got := g.requests(c).since(before)
		same := true
		for _, r := range got.Ranks {
			same = same && equal(r, want)
		}
		if same {
			return
		}
		require.True(g.t, time.Now().Before(end), "%v instead of %v on each rank", got.Ranks, want)
	}
}

func equal(a, b map[string]int) bool {
	if len(a) != len(b) {
		return false
	}
	for k := range a {
		if a[k] != b[k] {
			return false
		}
	}
	return true
}

// loadAll begins a load everywhere and gives the events, which are the same.
func (g *group) loadAll(op kvtier.LoadOp) kvtier.Event {
	g.t.Helper()
	for _, r := range g.ranks {
		r.call(request{Cmd: "wipe"})
		r.call(request{Cmd: "load", Load: &op})
	}
	var first kvtier.Event
	for i, r := range g.ranks {
		e := r.event(op.Op)
		e.Rank = 0
		if i == 0 {
			first = e
		}
		require.Equal(g.t, first, e, "rank %d", i)
	}
	return first
}

// Refusals are the same on all ranks, and cost each of them the same few requests.
func TestVerdictsAreTheSameOnAllRanks(t *testing.T) {
	verdictsAreTheSame(t, four)
}

func TestVerdictsAreTheSameOnAllReplicas(t *testing.T) {
	verdictsAreTheSame(t, shape{
		D: 2, TP: 4, I: 2, B: 8, C: 24, Blocks: 64, Widths: []int{48, 17, 9}, Kinds: []kind{replicated, replicated, allRows},
	})
}

// verdictsAreTheSame takes a shape of four ranks, each of which has a part of each chunk.
func verdictsAreTheSame(t *testing.T, s shape) {
	const slots, window = 24, 24 / 8
	r := root{dir: t.TempDir(), slots: slots, extra: shortParts}
	lead := func() *process {
		p := start(t, childSpec{Config: r.config("leader"), Rank: -1})
		require.Equal(t, kvtier.StateLeader, p.call(request{Cmd: "state"}).State)
		return p
	}
	leader := lead()
	c := open(t, r.config("member"))
	g := newGroup(t, c, "four", s, r.config)
	base := g.newPrefix(1, 10, 0)
	g.store(base)
	require.NoError(t, c.Flush(wait))

	t.Run("arena full", func(t *testing.T) {
		g.t = t
		before := g.requests(c)
		var open []uint64
		declined := 0
		for seed := uint32(50); declined < 20; seed++ {
			p := g.newPrefix(seed, 4, 20)
			op := opNumbers.Add(1)
			a := g.k.StoreBegin([]kvtier.StoreBegin{{Op: op, Parent: p.root, Keys: p.keys}}, wait)[0]
			require.NoError(t, a.Err)
			open = append(open, op)
			if a.Verdicts[3].Code == kvtier.Declined {
				declined++
				time.Sleep(time.Millisecond) // it may be growing
			}
		}
		require.Equal(t, map[string]int{"STORE_BEGIN": len(open)}, g.requests(c).since(before).Coordinator)
		// No rank has heard or said anything.
		g.requireRanks(c, before, map[string]int{})
		for _, op := range open {
			g.k.Cancel(op, true)
		}
		requireQuiet(t, c)
	})

	t.Run("one rank refuses a store", func(t *testing.T) {
		g.t = t
		p := g.newPrefix(2, 3, 0)
		g.fill(p)
		op, _ := g.begin(p, 0)
		before := g.requests(c)
		for i, r := range g.ranks {
			mine := op
			if i == 2 {
				mine.Blocks = []uint32{1 << 20, 0, 0}
			}
			_, err := r.try(request{Cmd: "store", Store: &mine})
			if i < 3 { // the last one finds the slots taken back
				require.Equal(t, i == 2, err != nil, "rank %d: %v", i, err)
			}
		}
		g.requireRanks(c, before, map[string]int{"STORE_DONE": 1})
		requireQuiet(t, c)
		require.Zero(t, g.lookup(p))
	})

	t.Run("one rank refuses a load", func(t *testing.T) {
		g.t = t
		op := g.plan(base)
		before := g.requests(c)
		for i, r := range g.ranks {
			mine := op
			if i == 1 {
				mine.Session++ // it is attached to another leader, as far as it knows
			}
			r.call(request{Cmd: "load", Load: &mine})
		}
		for i, r := range g.ranks {
			if e := r.event(op.Op); i == 1 {
				require.Equal(t, kvtier.EventStale, e.Status)
			} else {
				require.NotEqual(t, kvtier.EventOK, e.Status, "rank %d cannot have got what rank 1 did not", i)
			}
		}
		g.k.Cancel(op.Op, true)
		requireQuiet(t, c)
		// How many pieces a window comes in depends on the disk; it has three chunks, and
		// there was no second one.
		for i, r := range g.requests(c).since(before).Ranks {
			if i != 1 {
				require.Len(t, r, 2)
				require.LessOrEqual(t, r["LOAD_WAIT"], window+1)
				require.LessOrEqual(t, r["LOAD_DONE"], window+1)
			}
		}
	})

	// A chunk that is damaged on disk, and nothing is in DRAM.
	leader.kill()
	victim := filepath.Join(r.dir, "*", "*", base.keys[6].String()+".kvc")
	found, err := filepath.Glob(victim)
	require.NoError(t, err)
	require.Len(t, found, 1, victim)
	f, err := os.OpenFile(found[0], os.O_RDWR, 0)
	require.NoError(t, err)
	_, err = f.WriteAt([]byte("damaged"), 100)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	lead()
	g.ready()
	t.Run("disk read failed", func(t *testing.T) {
		g.t = t
		g.held(base, 10)
		before := g.requests(c)
		op := g.plan(base)
		e := g.loadAll(op)
		require.Equal(t, kvtier.Event{Kind: kvtier.EventLoad, Op: op.Op, Status: kvtier.EventMiss, FirstFailed: 6, Tokens: uint32(6 * s.C)}, e)
		for _, r := range g.ranks {
			r.call(request{Cmd: "check", Seed: base.seed, Table: base.table, Loaded: int(e.Tokens), To: len(base.keys) * s.C})
		}
		got := g.requests(c).since(before)
		for _, r := range got.Ranks {
			require.LessOrEqual(t, r["LOAD_WAIT"], len(base.keys), "one for each chunk, at most")
			require.LessOrEqual(t, r["LOAD_DONE"], len(base.keys))
			require.Len(t, r, 2)
		}
		requireQuiet(t, c)
		require.Equal(t, 6, g.lookup(base), "and it is a miss from now on")
	})
}
