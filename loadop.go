package kvtier

import (
	"time"

	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/tier"
)

// loadOp is one load of a group: a run of chunks that all its ranks copy out of
// the arena, window by window, so that a run longer than the arena streams through
// it. Verdicts are decided in order, once, for all ranks: verdicts[:decided] never
// change. It exists until all ranks have ended it. Guarded by the leader's lock.
type loadOp struct {
	g     *group
	sp    *space
	op    uint64
	owner *attachment // whose caps the pins count against
	crew  *crew
	count *counters // the leader's; a self-test has its own
	first uint32    // ordinal of keys[0]
	keys  []chunkKey

	verdicts []wire.Verdict
	decided  int
	from, to int       // the open window
	busy     []uint64  // by chunk of the window: ranks that may still read the slot
	until    time.Time // the window's reads, once they are in its copies, are late

	lease       *lease // taken over from the coordinator; nil: none, or nothing is left of it
	leaseOffset int    // index in the lease of keys[0]
	unreadable  int    // the lowest index whose read failed
	starved     bool   // it waits for a slot
	ended       uint64 // ranks that have ended the operation
	waits       []loadWait
}

// loadWait is a LOAD_WAIT that is not answered.
type loadWait struct {
	rank  int
	first int
	deferral
}

// loadBegin takes the lease over and opens the first window. The reply has READY
// for the leading resident keys of that window, LATER for what is still to be
// decided, FAILED from the first key on that is gone.
func (a *attachment) loadBegin(req *wire.Request) *wire.Reply {
	l, g, run := a.l, a.group, req.Run
	l.count.Loads.Begun++
	if !a.coordinator {
		return refusal(req, wire.StatusRefused)
	}
	if _, unsent := g.unsent[req.Op]; unsent {
		a.endLease(run.Lease)
		return refusal(req, wire.StatusAborted)
	}
	sp := a.ready()
	if sp == nil || g.knows(req.Op) || len(run.Keys) == 0 {
		a.endLease(run.Lease)
		return refusal(req, wire.StatusRefused)
	}
	le := a.leases[run.Lease]
	if run.Lease != 0 && le == nil {
		l.count.Loads.LeaseLost++
		return refusal(req, wire.StatusStale)
	}
	o := &loadOp{
		g: g, sp: sp, op: req.Op, owner: a, crew: g.crew, count: &l.count, first: run.First,
		keys:       append([]chunkKey(nil), run.Keys...),
		verdicts:   make([]wire.Verdict, len(run.Keys)),
		busy:       make([]uint64, sp.window()),
		unreadable: len(run.Keys),
	}
	for i := range o.verdicts {
		o.verdicts[i].Code = wire.Later
	}
	if le != nil {
		o.takeOver(le)
	}
	g.loads[o.op] = o
	sp.loads[o] = struct{}{}
	l.hurry()
	o.openWindow(0)
	r := answer(req)
	r.Verdicts = append([]wire.Verdict(nil), o.verdicts...)
	return r
}

// takeOver makes the rest of a lease the operation's: it has no TTL any more, and
// ends window by window. What it holds outside of the load ends now.
func (o *loadOp) takeOver(le *lease) {
	le.detach()
	offset := int(int64(o.first) - int64(le.first))
	if offset < 0 || offset >= len(le.keys) || le.keys[offset] != o.keys[0] {
		le.drop(0, len(le.keys)) // another run: the load stands on its own
		return
	}
	le.drop(0, offset)
	le.drop(offset+len(o.keys), len(le.keys))
	o.lease, o.leaseOffset = le, offset
}

// openWindow begins the window at this index: all its reads start at once.
func (o *loadOp) openWindow(from int) {
	o.from, o.to = from, min(from+len(o.busy), len(o.keys))
	clear(o.busy)
	o.until = o.sp.l.now().Add(o.sp.l.opts.windowTimeout)
	o.count.Loads.Windows++
	o.progress()
}

// progress decides what can be decided, in order, and starts the window's reads.
func (o *loadOp) progress() {
	o.starved = false
	before := o.decided
	for o.decided < o.to && o.decide(o.decided) {
	}
	if o.decided < o.to {
		o.startReads()
		if o.starved {
			o.sp.l.starve(o)
		}
	}
	if o.decided == before {
		return
	}
	if o.decided == len(o.keys) {
		o.dropLease(o.from, len(o.keys))
	}
	if o.decided >= o.to {
		// From here on the ranks are waited for.
		o.until = o.sp.l.now().Add(o.sp.l.opts.windowTimeout)
		o.readAhead()
	}
	o.answerWaits()
}

// decide gives the verdict over one key, or false while it is being read.
func (o *loadOp) decide(i int) bool {
	k := o.keys[i]
	p := o.sp.Look(k)
	switch {
	case p.State == tier.Ready && o.sp.Pin(p.Ref) == nil:
		o.sp.charge(o.owner, p.Ref.Slot)
		o.sp.Touch(k, o.first+uint32(i))
		o.busy[i-o.from] = lowBits(o.g.ranks) &^ o.ended
		o.verdicts[i] = wire.Verdict{Code: wire.Ready, Slot: p.Ref.Slot, Generation: p.Ref.Generation}
		o.decided++
		o.dropLease(i, i+1)
		o.count.Loads.Ready++
		return true
	case i >= o.unreadable:
	case p.State == tier.Filling, p.State == tier.Free && p.OnDisk:
		return false
	}
	o.count.Loads.ChunksFailed++
	o.failFrom(i)
	return true
}

// startReads begins the disk reads of the open window.
func (o *loadOp) startReads() {
	for i := o.decided; i < min(o.to, o.unreadable); i++ {
		p := o.sp.Look(o.keys[i])
		if p.State != tier.Free || !p.OnDisk {
			continue
		}
		if _, err := o.sp.read(o.keys[i], o.first+uint32(i)); err != nil {
			o.starved = true
			return
		}
	}
}

// readAhead starts the reads of the next window while the ranks copy this one, if
// the arena has room to spare: nothing keeps what they bring until it opens.
func (o *loadOp) readAhead() {
	if o.decided == len(o.keys) || o.sp.Available() < 4*len(o.busy) {
		return
	}
	for i := o.to; i < min(o.to+len(o.busy), len(o.keys)); i++ {
		p := o.sp.Look(o.keys[i])
		if p.State != tier.Free {
			continue
		}
		if !p.OnDisk {
			return
		}
		if _, err := o.sp.read(o.keys[i], o.first+uint32(i)); err != nil {
			return
		}
	}
}

// starve queues a load for the next slot that becomes free.
func (l *leader) starve(o *loadOp) {
	for _, s := range l.starved {
		if s == o {
			return
		}
	}
	l.starved = append(l.starved, o)
}

// feed gives those who wait for a slot another try: loads first, oldest first.
func (l *leader) feed() {
	loads, leases := l.starved, l.hungry
	l.starved, l.hungry = nil, nil
	for _, o := range loads {
		if o.starved {
			o.progress()
		}
	}
	for _, le := range leases {
		le.refill()
	}
	l.freed = false // whatever the tries themselves gave up they had before
}

// fillEnded is told how a disk read ended that may be of this window.
func (o *loadOp) fillEnded(f *fill, ok bool) {
	if o.decided >= o.to {
		return
	}
	for i := o.decided; i < o.to; i++ {
		if o.keys[i] != f.key {
			continue
		}
		if !ok {
			o.unreadable = min(o.unreadable, i)
		}
		if i == o.decided {
			o.progress()
		}
		return
	}
}

// failFrom makes every verdict FAILED that is not decided, from i on. What is
// decided stays, so that all ranks see the same.
func (o *loadOp) failFrom(i int) {
	if o.decided == len(o.keys) {
		return
	}
	for i = max(i, o.decided); i < len(o.keys); i++ {
		o.verdicts[i] = wire.Verdict{Code: wire.Failed}
	}
	o.count.Loads.Failed++
	o.decided = len(o.keys)
	o.starved = false
	o.dropLease(0, len(o.keys))
	o.answerWaits()
}

// dropLease ends the lease's part of a range of the load.
func (o *loadOp) dropLease(from, to int) {
	if o.lease != nil {
		o.lease.drop(o.leaseOffset+from, min(o.leaseOffset+to, len(o.lease.keys)))
	}
}

// loadWait is answered when the verdict over the index it names is decided.
func (a *attachment) loadWait(req *wire.Request, reply func(*wire.Reply)) *wire.Reply {
	g := a.group
	if g == nil || a.rank < 0 {
		return refusal(req, wire.StatusRefused)
	}
	o := g.loads[req.Op]
	if o == nil || o.crew.members[a.rank] != a {
		return refusal(req, wire.StatusStale)
	}
	if int64(req.First) >= int64(len(o.keys)) || o.ended>>a.rank&1 != 0 {
		return refusal(req, wire.StatusRefused)
	}
	r := answer(req)
	w := loadWait{rank: a.rank, first: int(req.First), deferral: deferral{reply: reply, message: r}}
	if o.fillIn(&w) {
		return r
	}
	if req.Timeout > 0 {
		w.until = a.l.now().Add(min(req.Timeout, longestDeferral))
	}
	o.waits = append(o.waits, w)
	a.l.hurry()
	return nil
}

// fillIn puts the verdicts that are decided into the reply.
func (o *loadOp) fillIn(w *loadWait) bool {
	if w.first >= o.decided {
		return false
	}
	to := min(o.decided, w.first+len(o.busy))
	w.message.Verdicts = append([]wire.Verdict(nil), o.verdicts[w.first:to]...)
	return true
}

func (o *loadOp) answerWaits() {
	kept := o.waits[:0]
	for _, w := range o.waits {
		if o.fillIn(&w) {
			o.sp.l.send(w.reply, w.message)
		} else {
			kept = append(kept, w)
		}
	}
	clear(o.waits[len(kept):])
	o.waits = kept
}

// dismiss answers a rank's waits with a status.
func (o *loadOp) dismiss(which func(*loadWait) bool, status wire.Status) {
	kept := o.waits[:0]
	for _, w := range o.waits {
		if which(&w) {
			w.message.Status = status
			o.sp.l.send(w.reply, w.message)
		} else {
			kept = append(kept, w)
		}
	}
	clear(o.waits[len(kept):])
	o.waits = kept
}

// loadDone takes in which chunks a rank has finished with, or that it has ended
// the operation, of which the leader may know nothing.
func (a *attachment) loadDone(req *wire.Request) *wire.Reply {
	r := answer(req)
	if a.group == nil || a.rank < 0 {
		r.Status = wire.StatusRefused
		return r
	}
	o := a.group.loads[req.Op]
	if o == nil || o.crew.members[a.rank] != a {
		return r
	}
	for _, d := range req.Done {
		if int64(d.Part) != int64(a.rank) || !o.chunkDone(tier.Ref{Slot: d.Slot, Generation: d.Generation}, a.rank) {
			a.group.counts(req.Op).Loads.Ignored++
			continue
		}
		if d.Status != wire.StatusOK {
			o.failFrom(o.decided) // this rank fails the load: the others need not go on
		}
	}
	if req.Flags&wire.LoadDoneEnd != 0 {
		o.rankEnded(a)
		return r
	}
	o.advance()
	return r
}

// chunkDone ends a rank's pin on one chunk of the window.
func (o *loadOp) chunkDone(ref tier.Ref, rank int) bool {
	for i := o.from; i < min(o.to, o.decided); i++ {
		v := o.verdicts[i]
		if v.Code == wire.Ready && v.Slot == ref.Slot && v.Generation == ref.Generation && o.busy[i-o.from]>>rank&1 != 0 {
			o.release(i, 1<<rank)
			return true
		}
	}
	return false
}

// release ends the pins of these ranks on one chunk of the window.
func (o *loadOp) release(i int, ranks uint64) {
	b := &o.busy[i-o.from]
	if *b&ranks == 0 {
		return
	}
	if *b &^= ranks; *b == 0 {
		v := o.verdicts[i]
		o.sp.unpin(tier.Ref{Slot: v.Slot, Generation: v.Generation})
		o.sp.uncharge(o.owner, v.Slot)
	}
}

// advance opens the next window when all ranks have finished this one.
func (o *loadOp) advance() {
	if o.decided < o.to || o.to == len(o.keys) || o.decided == len(o.keys) {
		return
	}
	for _, b := range o.busy {
		if b != 0 {
			return
		}
	}
	o.openWindow(o.to)
}

// rankEnded ends all that a rank has in this operation.
func (o *loadOp) rankEnded(a *attachment) {
	if o.crew.members[a.rank] != a {
		return
	}
	bit := uint64(1) << a.rank
	o.ended |= bit
	for i := range o.busy {
		o.release(o.from+i, bit)
	}
	o.dismiss(func(w *loadWait) bool { return w.rank == a.rank }, wire.StatusAborted)
	if o.ended == lowBits(o.g.ranks) {
		o.finish()
		return
	}
	// It ended before the last window: it has failed, and so have the others.
	o.failFrom(o.decided)
	o.advance()
}

// memberGone: a rank asks for nothing any more, though it may still read.
func (o *loadOp) memberGone(a *attachment) {
	if o.crew.members[a.rank] != a {
		return
	}
	o.dismiss(func(w *loadWait) bool { return w.rank == a.rank }, wire.StatusAborted)
	o.failFrom(o.decided)
}

// memberDead: a rank reads nothing any more.
func (o *loadOp) memberDead(a *attachment) {
	o.rankEnded(a)
}

// finish ends the operation and every pin of it.
func (o *loadOp) finish() {
	for i, b := range o.busy {
		o.release(o.from+i, b)
	}
	o.ended = lowBits(o.g.ranks)
	if o.decided < len(o.keys) {
		o.failFrom(o.decided)
	}
	o.dismiss(func(*loadWait) bool { return true }, wire.StatusAborted)
	o.starved = false
	o.lease = nil
	delete(o.sp.loads, o)
	delete(o.g.loads, o.op)
}

// expire fails what is over its deadline: the reads of the window, or its copies
// while further windows wait for them.
func (o *loadOp) expire(now time.Time) {
	if o.decided < len(o.keys) && !now.Before(o.until) {
		o.count.Loads.Expired++
		o.failFrom(o.decided)
	}
	o.dismiss(func(w *loadWait) bool { return !w.until.IsZero() && !now.Before(w.until) }, wire.StatusTimeout)
	if o.owner.isGone && o.decided == len(o.keys) && !now.Before(o.until) {
		o.passOver()
	}
}

// passOver ends the operation for ranks that do not copy, once its coordinator is gone
// and its time is over: they may never hear of it. One that does after all finds that
// the leader does not know it, or that the slots are used for something else.
func (o *loadOp) passOver() {
	for rank, a := range o.crew.members {
		if o.ended>>rank&1 == 0 && a.idle() {
			o.rankEnded(a)
		}
	}
}
