package kvtier

import (
	"math/bits"
	"time"

	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/tier"
)

// storeOp is one operation of a group that brings chunks. It exists until the last
// of its slots is handed over to be hashed, or is free again. Guarded by the
// leader's lock.
type storeOp struct {
	g     *group
	sp    *space
	op    uint64
	crew  *crew
	count *counters // the leader's; a self-test has its own
	parts []storePart
	open  int  // parts that are not ended
	hint  int  // where the last part was found: DONE names them in the order of the grants
	stuck bool // a rank copied on when a part's time was over, and was named in the log
}

// storePart is one granted slot.
type storePart struct {
	ref      tier.Ref
	parent   chunkKey
	ordinal  uint32
	expected uint64 // ranks that write
	done     uint64 // ranks that have ended writing, well or not
	until    time.Time
	first    bool // no part is done yet
	dropped  bool // DRAINING until done == expected
	ended    bool // the slot is no longer this operation's
}

// storeBegin decides over each key of a run. It is prefix-closed: behind a chunk
// that is declined everything is, since a chunk behind a hole cannot be found.
func (a *attachment) storeBegin(req *wire.Request) *wire.Reply {
	l, g, run := a.l, a.group, req.Run
	l.count.Stores.Begun++
	if !a.coordinator {
		return refusal(req, wire.StatusRefused)
	}
	if _, unsent := g.unsent[req.Op]; unsent {
		return refusal(req, wire.StatusAborted)
	}
	sp := a.ready()
	if sp == nil || g.knows(req.Op) {
		l.count.Stores.Declined += uint64(len(run.Keys))
		return refusal(req, wire.StatusRefused)
	}
	o := &storeOp{g: g, sp: sp, op: req.Op, crew: g.crew, count: &l.count}
	r := answer(req)
	r.Verdicts = make([]wire.Verdict, len(run.Keys))
	noDisk := run.Flags&wire.StoreNoDisk != 0
	if !noDisk {
		defer func() { sp.allowDisk(run.Keys, r.Verdicts) }()
	}
	parent := run.Parent
	fits := run.First == 0 || sp.holds(parent)
	stuck := g.stuck()
	for i, k := range run.Keys {
		v := &r.Verdicts[i]
		ordinal := run.First + uint32(i)
		switch p := sp.Look(k); {
		case p.State == tier.Ready, p.OnDisk && p.State == tier.Free:
			v.Code = wire.Have
			sp.Touch(k, ordinal)
			l.count.Stores.Have++
			fits = true
		case p.State != tier.Free:
			v.Code = wire.Pending
			l.count.Stores.Pending++
			fits = true
		case !fits, stuck:
			v.Code = wire.Declined
			l.count.Stores.Declined++
			if stuck {
				l.count.Stores.Stuck++
			}
			fits = false
		default:
			ref, err := sp.Grant(k, parent, ordinal, noDisk)
			if err != nil {
				v.Code = wire.Declined
				l.count.Stores.Declined++
				l.count.Stores.NoSlot++
				fits = false
				break
			}
			*v = wire.Verdict{Code: wire.Granted, Slot: ref.Slot, Generation: ref.Generation}
			o.parts = append(o.parts, storePart{
				ref: ref, parent: parent, ordinal: ordinal, first: true,
				expected: g.agreement.expected(ordinal), until: l.now().Add(l.opts.partTimeout),
			})
			l.count.Stores.Granted++
		}
		parent = k
	}
	if o.open = len(o.parts); o.open > 0 {
		g.stores[req.Op] = o
		l.watch()
	}
	return r
}

// allowDisk lets chunks go to disk that somebody stored for memory only and somebody
// else, who has no such wish, offers too.
func (sp *space) allowDisk(keys []chunkKey, verdicts []wire.Verdict) {
	for i, v := range verdicts {
		if v.Code == wire.Have || v.Code == wire.Pending {
			sp.AllowDisk(keys[i])
		}
	}
}

// knows says whether an operation of this number exists: a number is used once.
func (g *group) knows(op uint64) bool {
	return g.stores[op] != nil || g.loads[op] != nil
}

// holds says whether a key is held or on its way.
func (sp *space) holds(k chunkKey) bool {
	p := sp.Look(k)
	return p.State != tier.Free || p.OnDisk
}

// storeDone takes in what one rank has finished.
func (a *attachment) storeDone(req *wire.Request) *wire.Reply {
	r := answer(req)
	if a.group == nil || a.rank < 0 {
		r.Status = wire.StatusRefused
		return r
	}
	o := a.group.stores[req.Op]
	for _, d := range req.Done {
		var p *storePart
		if o != nil && int64(d.Part) == int64(a.rank) && o.crew.members[a.rank] == a {
			p = o.find(tier.Ref{Slot: d.Slot, Generation: d.Generation})
		}
		if p == nil {
			a.group.counts(req.Op).Stores.Ignored++
			continue
		}
		o.partDone(p, 1<<a.rank, d.Status == wire.StatusOK)
	}
	return r
}

// find gives the part with this slot, nil when it is not the operation's.
func (o *storeOp) find(ref tier.Ref) *storePart {
	for range o.parts {
		p := &o.parts[o.hint]
		o.hint = (o.hint + 1) % len(o.parts)
		if p.ref == ref && !p.ended {
			return p
		}
	}
	return nil
}

// partDone notes that the ranks in who have ended writing a slot. A rank that has
// no rows in the chunk answers too, and changes nothing.
func (o *storeOp) partDone(p *storePart, who uint64, ok bool) {
	who &= p.expected &^ p.done
	if who == 0 {
		return
	}
	p.done |= who
	l := o.g.l
	if !ok && !p.dropped {
		o.count.Stores.Aborted++
		o.drop(p)
		return
	}
	if p.dropped {
		o.drain(p)
		return
	}
	if p.first {
		p.first = false
		if t := l.now().Add(l.opts.straggleTimeout); t.Before(p.until) {
			p.until = t
		}
	}
	if p.done != p.expected {
		return
	}
	if p.ordinal > 0 && !o.sp.holds(p.parent) {
		o.count.Stores.Orphans++
	}
	if err := o.sp.Seal(p.ref); err != nil {
		// Removed meanwhile: the slot drains, and nobody writes it any more.
		p.dropped = true
		o.drain(p)
		return
	}
	o.end(p)
}

// drop unindexes a chunk at once. Its slot is free when nobody can write it.
func (o *storeOp) drop(p *storePart) {
	if p.ended || p.dropped {
		return
	}
	p.dropped = true
	o.count.Stores.Dropped++
	o.sp.Drop(p.ref)
	o.drain(p)
}

// assemblyRemoved: the slot drains already, until its ranks have ended writing.
func (sp *space) assemblyRemoved(ref tier.Ref) {
	l := sp.l
	for _, g := range l.groups {
		for _, o := range g.stores {
			if o.sp != sp {
				continue
			}
			if p := o.find(ref); p != nil {
				p.dropped = true
				o.count.Stores.Dropped++
				o.drain(p)
				return
			}
		}
	}
}

func (o *storeOp) drain(p *storePart) {
	if p.done == p.expected {
		o.sp.Drained(p.ref)
		o.g.l.freed = true
		o.end(p)
	}
}

func (o *storeOp) end(p *storePart) {
	p.ended = true
	if o.open--; o.open == 0 {
		delete(o.g.stores, o.op)
	}
}

// abandon drops what is not complete: the slots drain.
func (o *storeOp) abandon() {
	for i := range o.parts {
		o.drop(&o.parts[i])
	}
}

// withdraw is abandon for an operation that no rank has, as its coordinator says. The
// leader does not rely on it: a rank that copies now may copy this. One that does not
// would find the slots taken back.
func (o *storeOp) withdraw() {
	o.abandon()
	for i := range o.parts {
		o.passOver(&o.parts[i])
	}
}

// finish ends everything: there is nobody left who could write.
func (o *storeOp) finish() {
	for i := range o.parts {
		p := &o.parts[i]
		if p.ended {
			continue
		}
		p.done = p.expected
		if p.dropped {
			o.drain(p)
		} else {
			o.drop(p)
		}
	}
}

// memberGone: a rank will report nothing any more, though it may still write.
func (o *storeOp) memberGone(a *attachment) {
	if o.crew.members[a.rank] != a {
		return
	}
	for i := range o.parts {
		if p := &o.parts[i]; !p.ended && (p.expected&^p.done)>>a.rank&1 != 0 {
			o.drop(p)
		}
	}
}

// memberDead: a rank writes nothing any more.
func (o *storeOp) memberDead(a *attachment) {
	if o.crew.members[a.rank] != a {
		return
	}
	for i := range o.parts {
		if p := &o.parts[i]; !p.ended {
			o.partDone(p, 1<<a.rank, false)
		}
	}
}

// expire drops the chunks that are over their deadline.
func (o *storeOp) expire(now time.Time) {
	for i := range o.parts {
		p := &o.parts[i]
		if p.dropped && !p.ended {
			o.passOver(p)
			if late := o.copying(p); late != 0 && !o.stuck && !now.Before(p.until) {
				o.stuck = true
				o.g.l.log.Warn("ranks do not end their copies: their group stores nothing more until they do, or are dead",
					"group", o.g.id, "op", o.op, "ranks", ranksOf(late))
			}
			continue
		}
		if p.ended || now.Before(p.until) {
			continue
		}
		late := p.expected &^ p.done
		o.count.Stores.Expired++
		o.g.l.log.Debug("chunk not complete in time", "group", o.g.id, "op", o.op, "late_ranks", bits.OnesCount64(late))
		o.drop(p)
	}
}

// passOver ends the wait of a slot that drains for ranks that do not copy: they may
// never have heard of the operation, and would find the slot taken back.
func (o *storeOp) passOver(p *storePart) {
	if p.ended {
		return
	}
	for late := p.expected &^ p.done; late != 0; late &= late - 1 {
		if rank := bits.TrailingZeros64(late); o.crew.members[rank].idle() {
			o.partDone(p, 1<<rank, false)
		}
	}
}

// copying gives the ranks that keep a slot draining: they are here, and in a copy.
func (o *storeOp) copying(p *storePart) (ranks uint64) {
	if p.ended || !p.dropped {
		return 0
	}
	for late := p.expected &^ p.done; late != 0; late &= late - 1 {
		rank := bits.TrailingZeros64(late)
		if a := o.crew.members[rank]; !a.isGone && !a.idle() {
			ranks |= 1 << rank
		}
	}
	return ranks
}

// stuck says whether a rank is still in a copy whose time is over. Every slot that such
// a group were granted would drain with it, whichever copy the rank is in.
func (g *group) stuck() bool {
	for _, o := range g.stores {
		if !o.stuck {
			continue // every offer asks, and hardly one store has a late rank
		}
		for i := range o.parts {
			if o.copying(&o.parts[i]) != 0 {
				return true
			}
		}
	}
	return false
}

// cancel ends an operation. From the coordinator with UNSENT: no rank knows it, so
// what it holds is free as soon as no rank copies, also when the BEGIN comes in later.
// From the coordinator without: ranks may know it and still answer. From a rank: its copies
// of a load have stopped.
func (a *attachment) cancel(req *wire.Request) *wire.Reply {
	r, g := answer(req), a.group
	if g == nil {
		r.Status = wire.StatusRefused
		return r
	}
	unsent := req.Flags&wire.CancelUnsent != 0
	if !a.coordinator {
		if unsent {
			r.Status = wire.StatusRefused
		} else if o := g.loads[req.Op]; o != nil {
			o.rankEnded(a)
		}
		return r
	}
	if unsent {
		g.rememberUnsent(req.Op)
	}
	if o := g.stores[req.Op]; o != nil {
		if unsent {
			o.withdraw()
		} else {
			o.abandon()
		}
	}
	if o := g.loads[req.Op]; o != nil {
		if unsent {
			o.finish()
		} else {
			o.failFrom(o.decided)
		}
	}
	return r
}
