package ranks

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier"
)

// beside is a group of two ranks: one works as it should, the other is hostile.
type beside struct {
	*besieged
	pair   *group // with the good rank alone; its coordinator is good too
	honest *process
	evil   *process
	spec   attackSpec
	loaded *prefix // of the next load
	drops  int

	stores int // that came to something
}

func newBeside(t *testing.T, seed uint64) *beside {
	b := &beside{besieged: newBesieged(t)}
	b.spec = attackSpec{Kind: "rank", Dir: b.r.dir, Group: "between", Seed: seed}
	b.pair = &group{t: t, name: b.spec.Group, shape: between, conf: b.r.config, ranks: make([]*process, 1)}
	b.honest = start(t, childSpec{Config: b.r.config("member"), Group: "between", Ranks: between.D, Shape: between, Model: model})
	b.pair.ranks[0] = b.honest
	k, err := b.c.Coordinate("between", between.D)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, k.Close()) })
	b.pair.k = k
	b.enter()
	b.pair.ready()
	require.Equal(t, b.g.fp, b.pair.fp)
	b.loaded = b.pair.newPrefix(2, 1, 0)
	b.pair.fill(b.loaded)
	op, _ := b.pair.begin(b.loaded, 0)
	b.honest.call(request{Cmd: "store", Store: &op})
	b.evil.call(request{Cmd: "store", Store: &op})
	b.pair.held(b.loaded, 1)
	return b
}

// enter starts the hostile rank.
func (b *beside) enter() {
	b.evil = start(b.t, childSpec{Attack: &b.spec})
	b.evil.call(request{Cmd: "ready"})
}

// sealed waits until nothing that was complete is still to be hashed.
func (b *beside) sealed() {
	b.t.Helper()
	b.soon(func() bool {
		s, _, ok := statsOf(b.t, b.c)
		return ok && s.Namespaces[0].Slots["sealing"] == 0
	})
}

// soon waits for what mostly is so already.
func (b *beside) soon(so func() bool) {
	b.t.Helper()
	for end := time.Now().Add(wait); !so(); time.Sleep(100 * time.Microsecond) {
		require.True(b.t, time.Now().Before(end))
	}
}

// heard is how often the good rank has said that it is done with a part of a load, and how
// often the leader thought that a rank had no such part.
func (b *beside) heard() (said, ignored int) {
	b.t.Helper()
	s, _, _ := statsOf(b.t, b.c)
	g, ok := s.of(b.pair.name)
	require.True(b.t, ok, "the leader has no such group")
	return g.Ranks[0]["LOAD_DONE"], s.Loads.Ignored
}

// round has some attacks, from this one on, on a store and a load that are under way, and
// then the good rank do its part of both. It gives the next attack.
func (b *beside) round(from, to int) int {
	t := b.t
	t.Helper()
	b.evil.call(request{Cmd: "ready"})
	b.seed++
	p := b.pair.newPrefix(b.seed, 1, 10)
	b.pair.fill(p)
	store, _ := b.pair.begin(p, 0)
	load := b.pair.plan(b.loaded)
	require.Equal(t, kvtier.Ready, load.Verdicts[0].Code)
	l := b.evil.call(request{Cmd: "attack", From: from, To: to, Store: &store, Load: &load})
	b.sealed()
	require.Zero(t, b.g.lookup(p), "attacks %d to %d complete a chunk to which rank 0 has brought nothing", from, l.Sum-1)
	require.Equal(t, 1, b.g.lookup(b.loaded))

	if _, err := b.honest.try(request{Cmd: "store", Store: &store}); err != nil {
		require.ErrorContains(t, err, "that is gone") // the other rank's part was given up
	}
	b.honest.call(request{Cmd: "wipe"})
	said, ignored := b.heard()
	b.honest.call(request{Cmd: "load", Load: &load})
	e := b.honest.event(load.Op)
	require.Equal(t, kvtier.EventOK, e.Status, "attacks %d to %d: what was ready stays so: %+v", from, l.Sum-1, e)
	b.honest.call(request{Cmd: "check", Seed: b.loaded.seed, Table: b.loaded.table, Loaded: int(load.Tokens), To: int(load.Tokens)})
	b.soon(func() bool {
		now, after := b.heard()
		require.Equal(t, ignored, after, "attacks %d to %d: the slot was not rank 0's any more", from, l.Sum-1)
		return now > said
	})
	if l.State == "attached" {
		b.evil.call(request{Cmd: "end", Store: &store, Load: &load})
	} else {
		b.drops++
	}
	b.pair.k.Cancel(load.Op, false)
	b.pair.k.Cancel(store.Op, false)
	if b.g.lookup(p) == 1 { // the hostile rank has said its part: rank 0 has its own again
		b.stores++
		b.loaded = p
	}
	return int(l.Sum)
}

// A rank that breaks the rules spoils what it has a part in, and nothing of another rank:
// a chunk is not complete without that one's part, and it loads the right bytes or none.
func TestHostileRankBesideAnHonestOne(t *testing.T) {
	const (
		inRound  = 12
		inLeader = 40 // drops until the process ends: what it had comes back only then
	)
	s := seed(t)
	b := newBeside(t, s)
	all, rounds, done, since := rankAttacks(), 0, 0, 0
	for from := 0; from < all; {
		to := min(from-from%inRound+inRound, all)
		if (uint64(from/inRound)+s)%thinned != 0 {
			from = to
			continue
		}
		next := b.round(from, to)
		done, from, rounds = done+next-from, next, rounds+1
		if b.drops-since >= inLeader {
			since = b.drops
			b.evil.kill()
			b.works()
			b.enter()
		}
	}
	t.Logf("%d of %d attacks, %d times dropped, in %d rounds %d stores came to something", done, all, b.drops, rounds, b.stores)
	require.Positive(t, b.stores)
	b.evil.kill()
	requireQuiet(t, b.c)
	b.works()
	// A good one takes its place.
	b.pair.ranks = append(b.pair.ranks, nil)
	b.pair.startRank(1)
	b.pair.ready()
	b.seed++
	p := b.pair.newPrefix(b.seed, 3, 10)
	b.pair.store(p)
	b.pair.load(p)
	requireQuiet(t, b.c)
	require.Zero(t, panics(t, b.besieged))
}
