package kvtier

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/tier"
)

// The driver plays coordinators and ranks that may do anything a real one may do, at
// any moment: abort, cancel before and after the metadata travelled, end early, die
// and come back, while the disk damages chunks and time passes. It checks every byte
// that a rank reads, that all ranks see the same verdicts, and that nothing is left
// when everybody has ended, without the help of any TTL.

type driver struct {
	r      *leaderRig
	groups []*driverGroup
}

type driverGroup struct {
	*rigGroup
	chains [][]chunk.Key
	stores map[uint64]*driverStore
	loads  map[uint64]*driverLoad
	alive  []bool // by rank
	// zombies are gone and not dead.
	zombies []*attachment
}

type driverStore struct {
	rn       *wire.Run
	vs       []wire.Verdict
	sent     bool
	answered []bool
}

type driverLoad struct {
	rn    *wire.Run
	known []wire.Verdict // what any rank has seen; Later: nothing yet
	sent  bool
	ranks []driverRank
}

type driverRank struct {
	at      int
	verdict []wire.Verdict
	wait    <-chan *wire.Reply
	ended   bool
}

func TestRandomOperations(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		options := []rigOption{withSlots(rapid.Int64Range(8, 64).Draw(rt, "slots"))}
		if rapid.Bool().Draw(rt, "memory only") {
			options = append(options, withoutDisk)
		}
		d := &driver{r: newLeaderRig(t, options...)}
		d.r.t = rt
		shapes := [][2]int{{1, 1}, {2, 2}, {4, 8}, {3, 1}}
		for _, id := range []string{"a", "b"}[:rapid.IntRange(1, 2).Draw(rt, "groups")] {
			s := rapid.SampledFrom(shapes).Draw(rt, "shape")
			g := &driverGroup{rigGroup: d.r.join(id, s[0], s[1]), stores: map[uint64]*driverStore{}, loads: map[uint64]*driverLoad{}}
			for seed := range uint32(3) {
				g.chains = append(g.chains, g.chain(seed, 24))
			}
			for range g.ranks {
				g.alive = append(g.alive, true)
			}
			d.groups = append(d.groups, g)
		}
		act := func(f func(*rapid.T, *driverGroup)) func(*rapid.T) {
			return func(rt *rapid.T) { f(rt, d.groups[rapid.IntRange(0, len(d.groups)-1).Draw(rt, "group")]) }
		}
		rt.Repeat(map[string]func(*rapid.T){
			"store":        act(d.store),
			"part":         act(d.part),
			"part ":        act(d.part),
			"cancel store": act(d.cancelStore),
			"lease":        act(d.lease),
			"release":      act(d.release),
			"load":         act(d.load),
			"copy":         act(d.copy),
			"copy ":        act(d.copy),
			"copy  ":       act(d.copy),
			"end load":     act(d.endLoad),
			"cancel load":  act(d.cancelLoad),
			"remove":       act(d.remove),
			"die":          act(d.die),
			"return":       act(d.comeBack),
			"spoil":        act(d.spoil),
			"pass time": func(rt *rapid.T) {
				d.r.advance(time.Duration(rapid.SampledFrom([]int{1, 6, 31, 61, 121}).Draw(rt, "s")) * time.Second)
			},
			"breathe": func(*rapid.T) { time.Sleep(time.Millisecond) },
		})
		for _, g := range d.groups {
			d.endAll(g)
		}
		d.r.quiet()
		d.r.stop()
	})
}

func (g *driverGroup) draw(rt *rapid.T) *wire.Run {
	keys := g.chains[rapid.IntRange(0, len(g.chains)-1).Draw(rt, "chain")]
	from := rapid.IntRange(0, len(keys)-1).Draw(rt, "from")
	if rapid.Bool().Draw(rt, "from the start") {
		from = 0
	}
	return g.runOf(keys[:rapid.IntRange(from+1, len(keys)).Draw(rt, "to")], from)
}

func pick[T any](rt *rapid.T, m map[uint64]T) (op uint64, ok bool) {
	if len(m) == 0 {
		return 0, false
	}
	least := ^uint64(0)
	for k := range m { // any order, one choice
		least = min(least, k)
	}
	op = least
	if n := rapid.IntRange(0, 3).Draw(rt, "which"); n > 0 {
		for k := range m {
			if k > op && k <= least+uint64(n) {
				op = k
			}
		}
	}
	return op, true
}

func (d *driver) store(rt *rapid.T, g *driverGroup) {
	op, rn := d.r.op(), g.draw(rt)
	if rapid.IntRange(0, 9).Draw(rt, "cancel first") == 0 {
		g.cancelUnsent(op)
	}
	vs := g.begin(op, rn)
	hole := false
	for _, v := range vs {
		require.False(rt, hole && v.Code == wire.Granted, "granted behind a hole: %v", codes(vs))
		hole = v.Code == wire.Declined
		if v.Code == wire.Granted {
			g.stores[op] = &driverStore{rn: rn, vs: vs, answered: make([]bool, len(g.ranks))}
		}
	}
}

func (d *driver) part(rt *rapid.T, g *driverGroup) {
	op, ok := pick(rt, g.stores)
	if !ok {
		return
	}
	g.stores[op].sent = true
	d.answer(g, op, rapid.IntRange(0, len(g.ranks)-1).Draw(rt, "rank"), rapid.IntRange(0, 9).Draw(rt, "abort") == 0)
}

// answer is one rank's part of a store that it has learned of.
func (d *driver) answer(g *driverGroup, op uint64, rank int, abort bool) {
	s := g.stores[op]
	if s.answered[rank] || !g.alive[rank] {
		return
	}
	s.answered[rank] = true
	if abort {
		req := &wire.Request{Type: wire.StoreDone, Op: op}
		for _, v := range s.vs {
			if v.Code == wire.Granted {
				req.Done = append(req.Done, wire.Done{Slot: v.Slot, Generation: v.Generation, Part: uint32(rank), Status: wire.StatusAborted})
			}
		}
		d.r.call(g.ranks[rank], req)
	} else {
		g.write(op, rank, s.rn, s.vs)
	}
	for r, done := range s.answered {
		if !done && g.alive[r] {
			return
		}
	}
	delete(g.stores, op)
}

func (d *driver) cancelStore(rt *rapid.T, g *driverGroup) {
	if op, ok := pick(rt, g.stores); ok {
		s := g.stores[op]
		if !s.sent {
			g.cancelUnsent(op)
			delete(g.stores, op)
		} else {
			d.r.call(g.coord, &wire.Request{Type: wire.Cancel, Op: op})
		}
	}
}

func (d *driver) lease(rt *rapid.T, g *driverGroup) {
	rn := g.draw(rt)
	rn.Lease = rapid.Uint64Range(1, 5).Draw(rt, "lease")
	rn.Flags = rapid.SampledFrom([]uint32{3, 3, 3, 0, 1, 2}).Draw(rt, "flags")
	rep := d.r.call(g.coord, &wire.Request{Type: wire.Lease, Run: rn})
	h := rep.Hits
	require.LessOrEqual(rt, h.Resident, h.Leased)
	require.LessOrEqual(rt, h.Leased, h.Held)
	require.LessOrEqual(rt, int(h.Held), len(rn.Keys))
	member, _ := g.charged()
	// Loads that run may go beyond the cap, all together by one window.
	sp := d.r.l.spaces[g.fingerprint()]
	require.LessOrEqual(rt, member, sp.memberCap()+sp.window())
}

func (d *driver) release(rt *rapid.T, g *driverGroup) {
	g.release(rapid.Uint64Range(1, 5).Draw(rt, "lease"))
}

func (d *driver) load(rt *rapid.T, g *driverGroup) {
	if len(g.loads) > 2 {
		return
	}
	op, rn := d.r.op(), g.draw(rt)
	rep := g.loadBegin(op, rapid.Uint64Range(0, 5).Draw(rt, "lease"), rn)
	if rep.Status != wire.StatusOK {
		return
	}
	l := &driverLoad{rn: rn, known: append([]wire.Verdict(nil), rep.Verdicts...), ranks: make([]driverRank, len(g.ranks))}
	for i := range l.ranks {
		l.ranks[i].verdict = append([]wire.Verdict(nil), rep.Verdicts...)
		l.ranks[i].ended = !g.alive[i]
	}
	g.loads[op] = l
}

// copy lets one rank of a load get on by one chunk, if it can.
func (d *driver) copy(rt *rapid.T, g *driverGroup) {
	op, ok := pick(rt, g.loads)
	if !ok {
		return
	}
	l := g.loads[op]
	l.sent = true
	rank := rapid.IntRange(0, len(g.ranks)-1).Draw(rt, "rank")
	k := &l.ranks[rank]
	if k.ended || !g.alive[rank] {
		return
	}
	if k.wait != nil {
		select {
		case rep := <-k.wait:
			k.wait = nil
			require.Equal(rt, wire.StatusOK, rep.Status)
			require.EqualValues(rt, k.at, rep.First)
			require.NotEmpty(rt, rep.Verdicts)
			for i, v := range rep.Verdicts {
				at := k.at + i
				require.NotEqual(rt, wire.Later, v.Code)
				if l.known[at].Code != wire.Later {
					require.Equal(rt, l.known[at], v, "op %d index %d: another rank was told something else", op, at)
				}
				l.known[at], k.verdict[at] = v, v
			}
		default:
			return
		}
	}
	switch v := k.verdict[k.at]; v.Code {
	case wire.Later:
		k.wait = d.r.ask(g.ranks[rank], &wire.Request{Type: wire.LoadWait, Op: op, First: uint32(k.at)})
	case wire.Failed:
		d.finish(g, op, rank)
	case wire.Ready:
		slot := g.acc.space.Bytes(tier.Ref{Slot: v.Slot, Generation: v.Generation})
		for _, row := range g.rows(l.rn.First+uint32(k.at), rank) {
			require.Equal(rt, content(l.rn.Keys[k.at], row), slot[row*rigRow:][:rigRow], "wrong bytes")
		}
		d.r.call(g.ranks[rank], &wire.Request{Type: wire.LoadDone, Op: op,
			Done: []wire.Done{{Slot: v.Slot, Generation: v.Generation, Part: uint32(rank)}}})
		if k.at++; k.at == len(l.rn.Keys) {
			d.finish(g, op, rank)
		}
	}
}

func (d *driver) finish(g *driverGroup, op uint64, rank int) {
	l := g.loads[op]
	if !l.ranks[rank].ended && g.alive[rank] {
		g.loadEnd(op, rank)
	}
	l.ranks[rank].ended = true
	for _, k := range l.ranks {
		if !k.ended {
			return
		}
	}
	delete(g.loads, op)
}

func (d *driver) endLoad(rt *rapid.T, g *driverGroup) {
	if op, ok := pick(rt, g.loads); ok {
		d.finish(g, op, rapid.IntRange(0, len(g.ranks)-1).Draw(rt, "rank"))
	}
}

func (d *driver) cancelLoad(rt *rapid.T, g *driverGroup) {
	if op, ok := pick(rt, g.loads); ok {
		req := &wire.Request{Type: wire.Cancel, Op: op}
		if !g.loads[op].sent {
			req.Flags = wire.CancelUnsent
			delete(g.loads, op)
		}
		d.r.call(g.coord, req)
	}
}

func (d *driver) remove(rt *rapid.T, g *driverGroup) {
	if rapid.IntRange(0, 3).Draw(rt, "seldom") == 0 {
		g.coord.remove(g.draw(rt).Keys[:1])
	}
}

func (d *driver) spoil(rt *rapid.T, g *driverGroup) {
	k := g.draw(rt).Keys[0]
	if d.r.opts.disk != nil && g.look(k).OnDisk && rapid.IntRange(0, 3).Draw(rt, "seldom") == 0 {
		d.r.damage(k)
	}
}

// die ends a rank: its connection, and its process now or later.
func (d *driver) die(rt *rapid.T, g *driverGroup) {
	if rapid.IntRange(0, 3).Draw(rt, "seldom") > 0 {
		return
	}
	rank := rapid.IntRange(0, len(g.ranks)-1).Draw(rt, "rank")
	if !g.alive[rank] {
		return
	}
	g.alive[rank] = false
	a := g.ranks[rank]
	a.gone()
	if rapid.Bool().Draw(rt, "dead at once") {
		a.dead()
	} else {
		g.zombies = append(g.zombies, a)
	}
	for op, s := range g.stores {
		s.answered[rank] = true
		d.drop(g, op)
	}
	for op := range g.loads {
		d.finish(g, op, rank)
	}
}

// drop forgets a store that every rank has answered or will not answer.
func (d *driver) drop(g *driverGroup, op uint64) {
	for _, done := range g.stores[op].answered {
		if !done {
			return
		}
	}
	delete(g.stores, op)
}

func (d *driver) comeBack(rt *rapid.T, g *driverGroup) {
	for rank, alive := range g.alive {
		if alive {
			continue
		}
		a := d.r.attach(g.id, len(g.ranks), rank, false)
		out := make(chan *wire.Refuse, 1)
		a.declare(rigDeclare(g.geo, rank), func(_ *accepted, no *wire.Refuse) { out <- no })
		require.Nil(rt, <-out)
		g.ranks[rank], g.alive[rank] = a, true
		// Of what began before it knows nothing.
		for op, s := range g.stores {
			s.answered[rank] = true
			d.drop(g, op)
		}
	}
}

// endAll is the orderly end of everything a group has begun.
func (d *driver) endAll(g *driverGroup) {
	for op, s := range g.stores {
		if !s.sent {
			g.cancelUnsent(op)
			continue
		}
		for rank := range g.ranks {
			if g.stores[op] != nil {
				d.answer(g, op, rank, false)
			}
		}
	}
	for op := range g.loads {
		for rank := range g.ranks {
			if g.loads[op] != nil {
				d.finish(g, op, rank)
			}
		}
	}
	for id := range uint64(6) {
		g.release(id)
	}
	for _, a := range g.zombies {
		a.dead()
	}
}
