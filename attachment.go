package kvtier

import (
	"fmt"
	"reflect"
	"time"

	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/tier"
)

// wireRanks is the most ranks of a group: what a mask holds.
const wireRanks = 64

// attachment is one member's connection, as the leader sees it. A member id is
// never used again.
type attachment struct {
	l           *leader
	id          uint32
	rank        int // in the group, -1 = none
	coordinator bool
	group       *group // nil: an observer

	// guarded by l.mu
	isGone   bool
	isDead   bool
	declared bool
	leases   map[uint64]*lease
	probing  map[uint64]uint32  // lease id -> seq of the LEASE that a probe holds up
	charges  []uint32           // by slot: leases and loads of this member that count it
	charged  int                // slots with a charge
	onDisk   int                // chunks leased by number
	leased   int                // chunks in its leases
	served   [wire.Types]uint64 // requests, by type
	copying  func() bool        // whether it may touch a slot that was taken back; nil: it may
}

// accepted is what a member of an accepted group gets. The space lives until the
// leader is closed.
type accepted struct {
	accept *wire.Accept
	space  *tier.Space
}

// attach admits a member. The error is a *RefusedError.
func (l *leader) attach(h *wire.Hello) (*attachment, *wire.Welcome, error) {
	if h.Protocol != wire.Protocol {
		return nil, nil, refused(true, "the member speaks protocol %d and the leader %d: use the same version everywhere", h.Protocol, wire.Protocol)
	}
	l.lock()
	defer l.unlock()
	if l.closed {
		return nil, nil, refused(false, "%v", errLeaderClosed)
	}
	a := &attachment{
		l: l, id: l.lastMember + 1, rank: h.Rank, coordinator: h.Coordinator,
		leases: make(map[uint64]*lease), probing: make(map[uint64]uint32),
	}
	if h.Rank >= 0 || h.Coordinator {
		if err := l.joinGroup(a, h); err != nil {
			return nil, nil, err
		}
	}
	l.lastMember++
	l.members[a.id] = a
	l.count.Members++
	return a, &wire.Welcome{Session: l.session(), Member: a.id, Protocol: wire.Protocol}, nil
}

func refused(final bool, format string, args ...any) error {
	return &RefusedError{Reason: fmt.Sprintf(format, args...), Final: final}
}

func (l *leader) joinGroup(a *attachment, h *wire.Hello) error {
	if h.Ranks < 1 || h.Ranks > wireRanks {
		return refused(true, "a group of %d ranks, must be 1 to %d", h.Ranks, wireRanks)
	}
	if h.Rank < -1 || h.Rank >= h.Ranks {
		return refused(true, "rank %d of a group of %d", h.Rank, h.Ranks)
	}
	g := l.groups[h.Group]
	if g == nil {
		g = newGroup(l, h.Group, h.Ranks)
		l.groups[h.Group] = g
		l.watch()
	}
	if g.ranks != h.Ranks {
		return refused(false, "group %q has %d ranks, this member says %d", h.Group, g.ranks, h.Ranks)
	}
	// Who is gone, though perhaps not dead yet, may be followed: its slots and pins
	// stay with the old attachment.
	if a.coordinator && g.coordinator != nil && !g.coordinator.isGone {
		return refused(false, "group %q has a coordinator already", h.Group)
	}
	if a.rank >= 0 && g.members[a.rank] != nil && !g.members[a.rank].isGone {
		return refused(false, "rank %d of group %q is attached already", a.rank, h.Group)
	}
	if a.coordinator {
		g.coordinator = a
	}
	if a.rank >= 0 {
		g.members[a.rank] = a
	}
	a.group = g
	g.attached++
	return nil
}

// serve handles one request. It never blocks. reply is called exactly once, by
// this call or later by any goroutine, never under the leader's lock; it must not
// block. req and what it points to are only read, and not after serve returned.
// serve must not be called after gone.
func (a *attachment) serve(req *wire.Request, reply func(*wire.Reply)) {
	if r := a.handle(req, reply); r != nil {
		reply(r)
	}
}

// handle returns nil when the reply is deferred.
func (a *attachment) handle(req *wire.Request, reply func(*wire.Reply)) (r *wire.Reply) {
	l := a.l
	l.lock()
	defer l.unlock()
	defer l.contain(req, &r)
	a.served[req.Type]++
	if l.closed || a.isGone {
		return refusal(req, wire.StatusAborted)
	}
	switch req.Type {
	case wire.Lookup, wire.Prefetch, wire.Lease:
		return a.find(req, reply)
	case wire.Release:
		return a.release(req)
	case wire.StoreBegin:
		return a.storeBegin(req)
	case wire.StoreDone:
		return a.storeDone(req)
	case wire.LoadBegin:
		return a.loadBegin(req)
	case wire.LoadWait:
		return a.loadWait(req, reply)
	case wire.LoadDone:
		return a.loadDone(req)
	case wire.Cancel:
		return a.cancel(req)
	case wire.SelfTest:
		return a.selfTest(req, reply)
	}
	return refusal(req, wire.StatusRefused)
}

// contain turns a panic into a leader that answers nothing but misses: mu must not
// stay locked, the engine would hang on it.
func (l *leader) contain(req *wire.Request, r **wire.Reply) {
	v := recover()
	if v == nil {
		return
	}
	l.closed = true
	l.log.Error("the leader stops serving after an internal error", "message", req.Type.String(), "error", fmt.Sprint(v))
	*r = refusal(req, wire.StatusAborted)
}

// answer is the empty reply to req.
func answer(req *wire.Request) *wire.Reply {
	return &wire.Reply{Type: req.Type, Op: req.Op, Seq: req.Seq, First: req.First}
}

// refusal is the reply that makes req a miss.
func refusal(req *wire.Request, status wire.Status) *wire.Reply {
	r := answer(req)
	r.Status = status
	code := wire.Failed
	switch req.Type {
	case wire.StoreBegin:
		code = wire.Declined
	case wire.LoadBegin:
	case wire.LoadWait:
		r.Verdicts = []wire.Verdict{{Code: code}}
		return r
	default:
		return r
	}
	if req.Run != nil {
		r.Verdicts = make([]wire.Verdict, len(req.Run.Keys))
		for i := range r.Verdicts {
			r.Verdicts[i].Code = code
		}
	}
	return r
}

// ready gives the space that this member works in; nil while its group is not
// accepted or a rank is missing, which makes everything a miss. The caller holds mu.
func (a *attachment) ready() *space {
	if a.group == nil || !a.group.whole() {
		a.l.count.Misses.GroupNotReady++
		return nil
	}
	return a.group.space
}

// declare hands in a rank's declaration; a coordinator calls it with nil to wait
// for its group. done is called once, perhaps before declare returns and perhaps
// much later, never under the leader's lock.
func (a *attachment) declare(d *wire.Declare, done func(*accepted, *wire.Refuse)) {
	a.l.lock()
	defer a.l.unlock()
	no := func(final bool, format string, args ...any) {
		a.l.tell(done, nil, &wire.Refuse{Reason: fmt.Sprintf(format, args...), Final: final})
	}
	switch g := a.group; {
	case a.l.closed || a.isGone:
		no(false, "%v", errLeaderClosed)
	case g == nil:
		no(true, "a member without a group has nothing to declare")
	case g.refused != nil && g.refused.Final:
		a.l.tell(done, nil, g.refused)
	case d == nil && !a.coordinator:
		no(true, "rank %d must declare its regions", a.rank)
	case d == nil:
		g.await(a, done)
	case a.rank < 0:
		no(true, "a coordinator that is no rank has no regions to declare")
	case a.declared:
		no(true, "rank %d has declared already", a.rank)
	default:
		g.declare(a, d, done)
	}
}

// reset notes that the group's coordinator began a new epoch. Nothing in the
// leader depends on it: new keys differ from the old ones.
func (a *attachment) reset(epoch []byte) {
	a.l.lock()
	defer a.l.unlock()
	a.l.count.Resets++
	if a.group != nil {
		a.l.log.Info("new epoch, chunks of the old one stay in memory only", "group", a.group.id)
	}
}

// remove forgets chunks, on disk too, and says how many were held. Who still has
// them pinned keeps them until the end of its operation.
func (a *attachment) remove(keys []chunkKey) int {
	a.l.lock()
	defer a.l.unlock()
	sp := a.ready()
	if sp == nil || a.l.closed {
		return 0
	}
	n := 0
	for _, k := range keys {
		p := sp.Look(k)
		if p.State == tier.Free && !p.OnDisk {
			continue
		}
		n++
		sp.Remove(k)
		if p.State == tier.Assembling {
			sp.assemblyRemoved(p.Ref)
		}
	}
	a.l.freed = true
	return n
}

// gone says that the member will send nothing any more, though its process may
// live and still touch slots: no more grants and promises, what it may still touch
// drains. Idempotent.
func (a *attachment) gone() {
	a.l.lock()
	defer a.l.unlock()
	a.leave(false)
}

// goodbye is gone for a member that has said so: it was closed in good order.
func (a *attachment) goodbye() {
	a.l.lock()
	defer a.l.unlock()
	a.leave(true)
}

// dead says that nothing of the member can touch a slot any more: its process has
// ended, or it said goodbye after its copies ended. It implies gone. Idempotent.
func (a *attachment) dead() {
	a.l.lock()
	defer a.l.unlock()
	a.leave(false)
	if a.isDead {
		return
	}
	a.isDead = true
	a.l.count.Deaths++
	delete(a.l.members, a.id)
	g := a.group
	if g == nil {
		return
	}
	if a.rank >= 0 {
		for _, o := range g.stores {
			o.memberDead(a)
		}
		for _, o := range g.loads {
			o.memberDead(a)
		}
	}
	if g.attached--; g.attached == 0 {
		g.dissolve()
	}
}

// leave is gone, or goodbye, under mu.
func (a *attachment) leave(goodbye bool) {
	if a.isGone {
		return
	}
	a.isGone = true
	for _, le := range a.leases {
		le.end(wire.StatusAborted)
	}
	clear(a.probing)
	g := a.group
	if g == nil {
		return
	}
	g.forget(a, goodbye)
	if len(g.loads) > 0 {
		a.l.watch() // those of a coordinator end now without it
	}
	if a.rank >= 0 {
		for _, o := range g.stores {
			o.memberGone(a)
		}
		for _, o := range g.loads {
			o.memberGone(a)
		}
	}
}

// requests counts what the member has asked, by the names of the types.
func (a *attachment) requests() map[string]uint64 {
	out := map[string]uint64{}
	for t, n := range a.served {
		if n > 0 {
			out[wire.Type(t).String()] = n
		}
	}
	return out
}

// watchCopies tells how to see whether a copy of the member is under way. It is asked
// under the leader's lock.
func (a *attachment) watchCopies(copying func() bool) {
	a.l.lock()
	defer a.l.unlock()
	a.copying = copying
}

// idle says that no copy of the member is under way, so that it touches no slot that
// was taken back before.
func (a *attachment) idle() bool { return a.copying != nil && !a.isGone && !a.copying() }

// tell queues the outcome of a declaration for after the lock.
func (l *leader) tell(done func(*accepted, *wire.Refuse), yes *accepted, no *wire.Refuse) {
	l.outbox = append(l.outbox, func() { done(yes, no) })
}

// deferral is a reply that waits for an event, at most until its limit.
type deferral struct {
	reply   func(*wire.Reply)
	message *wire.Reply
	until   time.Time // zero: the operation's own deadlines bound it
}

// sameDeclaration compares what a rank that comes back declares with what it
// declared before.
func sameDeclaration(a, b *wire.Declare) bool {
	x, y := *a, *b
	x.Provenance, y.Provenance = nil, nil
	return reflect.DeepEqual(&x, &y)
}
