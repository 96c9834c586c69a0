package kvtier

import (
	"fmt"
	"math/bits"
	"time"

	"github.com/kvtier/kvtier/internal/spawn"
	"github.com/kvtier/kvtier/internal/wire"
)

// group is the ranks of one engine and their coordinator. It is guarded by the
// leader's lock. It is
//
//	forming   until every rank has declared,
//	deciding  while the declarations are compared and the space is opened,
//	accepted  from then on (whole while no rank is missing),
//	refused   for good.
//
// It is forgotten when its last member is dead.
type group struct {
	l           *leader
	id          string
	ranks       int
	members     []*attachment // by rank: who holds it now, or did last
	coordinator *attachment
	attached    int // attachments that are not dead

	declared  []*wire.Declare // by rank
	missing   uint64          // ranks that are not here, or have not declared
	deciding  bool
	agreement *agreement // accepted
	space     *space     // accepted
	refused   *wire.Refuse
	waiting   []groupWait
	created   time.Time
	named     bool // its being incomplete was logged
	crew      *crew

	stores      map[uint64]*storeOp
	loads       map[uint64]*loadOp
	loadChunks  int                 // of which its loads keep a verdict
	pinned      int                 // pins of its loads
	capped      int                 // loads that wait for room within the caps
	fullAt      uint64              // the round of feeding in which there was none
	unsent      map[uint64]struct{} // operations cancelled before any rank knew them
	unsentOrder []uint64

	test, lastTest *selfTest // the present run, and the last one that got slots; may be nil
}

// crew is the attachments, by rank, that a group had while an operation began. An
// operation waits for exactly these, not for who may take their places.
type crew struct {
	members []*attachment
}

type groupWait struct {
	a    *attachment
	done func(*accepted, *wire.Refuse)
}

func newGroup(l *leader, id string, ranks int) *group {
	return &group{
		l: l, id: id, ranks: ranks,
		members:  make([]*attachment, ranks),
		declared: make([]*wire.Declare, ranks),
		missing:  lowBits(ranks),
		created:  l.now(),
		stores:   make(map[uint64]*storeOp),
		loads:    make(map[uint64]*loadOp),
		unsent:   make(map[uint64]struct{}),
	}
}

func lowBits(n int) uint64 { return ^uint64(0) >> (wireRanks - n) }

// whole says whether the group works: accepted and no rank missing.
func (g *group) whole() bool { return g.space != nil && g.missing == 0 }

// await is a coordinator's wait for the outcome.
func (g *group) await(a *attachment, done func(*accepted, *wire.Refuse)) {
	if g.space != nil {
		g.l.tell(done, g.acceptance(a), nil)
		return
	}
	g.waiting = append(g.waiting, groupWait{a, done})
}

// declare takes the declaration of a rank, which may be one that comes back.
func (g *group) declare(a *attachment, d *wire.Declare, done func(*accepted, *wire.Refuse)) {
	bit := uint64(1) << a.rank
	if g.space != nil {
		if !sameDeclaration(g.declared[a.rank], d) {
			g.l.tell(done, nil, &wire.Refuse{Final: true, Reason: fmt.Sprintf(
				"rank %d came back to group %q with another declaration: end all ranks of the group first", a.rank, g.id)})
			return
		}
		a.declared = true
		g.missing &^= bit
		g.assemble()
		g.l.tell(done, g.acceptance(a), nil)
		return
	}
	a.declared = true
	g.refused = nil // it was not final
	g.declared[a.rank] = d
	g.missing &^= bit
	g.waiting = append(g.waiting, groupWait{a, done})
	g.beginDecision()
}

// beginDecision takes what all ranks declare now to be decided, once they have.
func (g *group) beginDecision() {
	if g.missing != 0 || g.deciding {
		return
	}
	g.deciding = true
	declared := append([]*wire.Declare(nil), g.declared...)
	spawn.Go("group acceptance", func(err error) { g.settle(declared, nil, nil, err) }, func() { g.decide(declared) })
}

// assemble notes who the members of a whole group are.
func (g *group) assemble() {
	if g.whole() {
		g.crew = &crew{members: append([]*attachment(nil), g.members...)}
	}
}

// decide compares the declarations and opens the space. It runs without the lock:
// it creates directories and memory.
func (g *group) decide(declared []*wire.Declare) {
	ag, err := agree(declared)
	var sp *space
	if err == nil {
		sp, err = g.l.openSpace(ag)
	} else {
		err = finally{err}
	}
	g.settle(declared, ag, sp, err)
}

// finally marks an error that a second try would meet again.
type finally struct{ error }

// settle is the outcome for what was declared when the decision began. It holds only
// if that is what the ranks declare now: one of them may have been followed by a rank
// with other pages, for which nothing was compared.
func (g *group) settle(declared []*wire.Declare, ag *agreement, sp *space, err error) {
	g.l.lock()
	defer g.l.unlock()
	g.deciding = false
	if err == nil {
		sp.enter()
	}
	if overtaken := !g.declares(declared); overtaken || g.attached == 0 {
		if err == nil {
			sp.leave()
		}
		if overtaken {
			g.decideAgain()
		}
		return
	}
	if err != nil {
		_, final := err.(finally)
		g.refuse(&wire.Refuse{Reason: err.Error(), Final: final})
		return
	}
	g.agreement, g.space = ag, sp
	g.assemble()
	g.l.log.Info("group accepted", "group", g.id, "ranks", g.ranks, "namespace", ag.fingerprint.String()[:32],
		"slots", sp.Slots(), "slot_bytes", sp.SlotBytes(), "disk", sp.disk != nil)
	waiting := g.waiting
	g.waiting = nil
	for _, w := range waiting {
		if !w.a.isGone {
			g.l.tell(w.done, g.acceptance(w.a), nil)
		}
	}
}

// declares says whether this is what all ranks declare, or declared before they went.
func (g *group) declares(declared []*wire.Declare) bool {
	for rank, d := range declared {
		if !sameDeclaration(d, g.declared[rank]) {
			return false
		}
	}
	return true
}

// decideAgain begins with what is declared now. Of who is gone nothing counts, as in
// any group that forms.
func (g *group) decideAgain() {
	for m := g.missing; m != 0; m &= m - 1 {
		g.declared[bits.TrailingZeros64(m)] = nil
	}
	g.beginDecision()
}

// refuse gives all members the same answer. After one that is not final every rank
// may declare again.
func (g *group) refuse(no *wire.Refuse) {
	g.l.log.Warn("group refused", "group", g.id, "reason", no.Reason)
	g.refused = no
	g.refuseWaiting(no)
	if !no.Final {
		clear(g.declared)
		g.missing = lowBits(g.ranks)
		for _, a := range g.members {
			if a != nil {
				a.declared = false
			}
		}
	}
}

func (g *group) refuseWaiting(no *wire.Refuse) {
	waiting := g.waiting
	g.waiting = nil
	for _, w := range waiting {
		g.l.tell(w.done, nil, no)
	}
}

// acceptance is what a gets: the columns are those of its rank.
func (g *group) acceptance(a *attachment) *accepted {
	ag, sp := g.agreement, g.space
	acc := &wire.Accept{
		Namespace: ag.canonical, Fingerprint: ag.fingerprint.String(),
		SlotBytes: sp.SlotBytes(), Slots: sp.Slots(),
		ChunkTokens: ag.geometry.C, BlockTokens: ag.geometry.B, DCP: ag.geometry.D, Interleave: ag.geometry.I,
		DiskEnabled: sp.disk != nil, DRAMBytes: g.l.opts.dramBytes,
	}
	if sp.disk != nil {
		acc.DiskBytesCap = g.l.opts.disk.CapBytes
	}
	if a.rank >= 0 {
		acc.Columns, acc.DCPRank = ag.columns[a.rank], ag.dcpRanks[a.rank]
	}
	return &accepted{accept: acc, space: sp.Space}
}

// forget is told that a is gone, and whether it took its leave. An engine ends its
// workers before its scheduler, so that is no trouble and not worth a warning.
func (g *group) forget(a *attachment, goodbye bool) {
	kept := g.waiting[:0]
	for _, w := range g.waiting {
		if w.a == a {
			g.l.tell(w.done, nil, &wire.Refuse{Reason: "the member is gone"})
		} else {
			kept = append(kept, w)
		}
	}
	g.waiting = kept
	if a.rank < 0 || g.members[a.rank] != a {
		return
	}
	if g.space == nil && !g.deciding {
		g.declared[a.rank] = nil
	}
	switch {
	case !g.whole() || g.l.closed:
	case goodbye:
		g.l.log.Info("a rank has left, its group is declined everything until it is back", "group", g.id, "rank", a.rank)
	default:
		g.l.log.Warn("group lost a rank and is declined everything until it is back", "group", g.id, "rank", a.rank)
	}
	g.missing |= 1 << a.rank
	g.testMemberGone(a)
}

// dissolve is called when the last member is dead.
func (g *group) dissolve() {
	for _, o := range g.stores {
		o.finish()
	}
	for _, o := range g.loads {
		o.finish()
	}
	if g.space != nil {
		g.space.leave()
	}
	delete(g.l.groups, g.id)
}

// nameMissing says once that the group is incomplete.
func (g *group) nameMissing(now time.Time) {
	if g.named || g.space != nil || g.refused != nil || now.Sub(g.created) < groupTimeout {
		return
	}
	g.named = true
	var ranks []int
	for m := g.missing; m != 0; m &= m - 1 {
		ranks = append(ranks, bits.TrailingZeros64(m))
	}
	g.l.log.Warn("group is incomplete and is declined everything until all ranks have declared", "group", g.id, "missing_ranks", fmt.Sprint(ranks))
}

// rememberUnsent makes a BEGIN of op that still comes in be refused.
func (g *group) rememberUnsent(op uint64) {
	if _, known := g.unsent[op]; known {
		return
	}
	if len(g.unsentOrder) == cancelledPerCrew {
		delete(g.unsent, g.unsentOrder[0])
		g.unsentOrder = g.unsentOrder[1:]
	}
	g.unsent[op] = struct{}{}
	g.unsentOrder = append(g.unsentOrder, op)
}
