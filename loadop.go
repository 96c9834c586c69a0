package kvtier

import (
	"slices"
	"time"

	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/tier"
)

// loadOp is one load of a group: a run of chunks that all its ranks copy out of
// the arena, window by window, so that a run longer than the arena streams through
// it. Verdicts are decided in order, once, for all ranks: verdicts[:decided] never
// change. It exists until all ranks have ended it. Guarded by the leader's lock.
//
// What it remembers is bounded: keys are kept while any is undecided, and of verdicts
// that are all FAILED only where they begin. How many loads there may be, and of how
// many chunks, bounds mayLoad.
type loadOp struct {
	g     *group
	sp    *space
	op    uint64
	owner *attachment // whose caps the pins count against
	crew  *crew
	count *counters  // the leader's; a self-test has its own
	first uint32     // ordinal of the first chunk
	total int        // chunks
	keys  []chunkKey // of all chunks, or nil when all are decided

	verdicts []wire.Verdict // of the leading chunks; behind them all are FAILED
	decided  int
	from, to int       // the open window
	busy     []uint64  // by chunk of the window: ranks that may still read the slot
	reading  []*fill   // by chunk of the window: the read that tells this load of its end
	until    time.Time // the window's reads, once they are in its copies, are late

	lease       *lease // taken over from the coordinator; nil: none, or nothing is left of it
	leaseOffset int    // index in the lease of keys[0]
	unreadable  int    // the lowest index whose read failed
	hunger      hunger // what it waits for
	queued      bool   // in the leader's list of loads that wait for something
	ended       uint64 // ranks that have ended the operation
	waits       []loadWait
}

// hunger is what keeps a load from getting on, but for reads and ranks.
type hunger uint8

const (
	fed     hunger = iota
	forSlot        // no slot to read a chunk into
	forRoom        // one more pin would be over the caps
)

// Bounds of the loads that run at once. A group has as many as a rank queues; all of
// them together are of no more chunks than the pages of a very large engine hold, and
// what is over that is answered BUSY, which is a miss. All groups have four times that.
const (
	maxLoadChunks = 1 << 20 // of a group: 48 bytes each
	loadsOfAll    = 4       // times what a group may have
)

// mayLoad says whether one more load of n chunks stays within the bounds.
func (g *group) mayLoad(n int) bool {
	l := g.l
	return len(g.loads) < maxLoads && g.loadChunks+n <= maxLoadChunks &&
		l.loads < loadsOfAll*maxLoads && l.loadChunks+n <= loadsOfAll*maxLoadChunks
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
	if !g.mayLoad(len(run.Keys)) {
		l.count.Loads.Busy++
		return refusal(req, wire.StatusBusy) // the lease stays
	}
	o := g.newLoad(req.Op, a, run.First, append([]chunkKey(nil), run.Keys...))
	o.crew, o.count = g.crew, &l.count
	if le != nil {
		o.takeOver(le)
	}
	o.openWindow(0)
	r := answer(req)
	r.Verdicts = o.verdictsOf(0, o.total)
	return r
}

// newLoad registers a load; the caller fills in crew and count, and opens its window.
func (g *group) newLoad(op uint64, owner *attachment, first uint32, keys []chunkKey) *loadOp {
	sp, n := g.space, len(keys)
	o := &loadOp{
		g: g, sp: sp, op: op, owner: owner, first: first, total: n, keys: keys,
		verdicts: make([]wire.Verdict, n), unreadable: n,
		busy: make([]uint64, sp.window()), reading: make([]*fill, sp.window()),
	}
	for i := range o.verdicts {
		o.verdicts[i].Code = wire.Later
	}
	g.loads[op] = o
	sp.loads[o] = struct{}{}
	g.l.loads++
	o.remember(n)
	g.l.hurry()
	return o
}

// remember counts the chunks that the load keeps a verdict of, or forgets some.
func (o *loadOp) remember(more int) {
	o.g.loadChunks += more
	o.g.l.loadChunks += more
}

// verdictsOf copies the verdicts of a range of chunks.
func (o *loadOp) verdictsOf(from, to int) []wire.Verdict {
	out := make([]wire.Verdict, to-from)
	n := 0
	if from < len(o.verdicts) {
		n = copy(out, o.verdicts[from:])
	}
	for i := n; i < len(out); i++ {
		out[i].Code = wire.Failed
	}
	return out
}

// takeOver makes the rest of a lease the operation's: it has no TTL any more, and
// ends window by window. What it holds outside of the load ends now.
func (o *loadOp) takeOver(le *lease) {
	le.detach()
	offset := int(int64(o.first) - int64(le.first))
	if offset < 0 || offset >= len(le.keys) || le.keys[offset] != o.keys[0] {
		le.truncate(0) // another run: the load stands on its own
		return
	}
	le.drop(0, offset)
	le.drop(offset+len(o.keys), len(le.keys))
	o.lease, o.leaseOffset = le, offset
}

// openWindow begins the window at this index: all its reads start at once.
func (o *loadOp) openWindow(from int) {
	o.from, o.to = from, min(from+len(o.busy), o.total)
	clear(o.busy)
	clear(o.reading)
	o.until = o.sp.l.now().Add(o.sp.l.opts.windowTimeout)
	o.count.Loads.Windows++
	o.progress(false)
}

// progress decides what can be decided, in order, and starts the window's reads. turn:
// its turn among the loads that wait has come, so it need not stand back behind them.
func (o *loadOp) progress(turn bool) {
	o.wait(fed)
	before := o.decided
	for o.decided < o.to && o.decide(o.decided, turn) {
	}
	if o.decided < o.to && o.hunger == fed {
		o.startReads(turn)
	}
	if o.decided == before {
		return
	}
	if turn {
		o.until = o.sp.l.now().Add(o.sp.l.opts.windowTimeout) // waiting was no fault of its reads
	}
	if o.decided == o.total {
		o.settled()
	}
	if o.decided >= o.to {
		// From here on the ranks are waited for.
		o.until = o.sp.l.now().Add(o.sp.l.opts.windowTimeout)
		o.readAhead()
	}
	o.answerWaits()
}

// wait notes what the load waits for, and puts it behind those that wait already.
func (o *loadOp) wait(h hunger) {
	if o.hunger == forRoom {
		o.g.capped--
	}
	o.hunger = h
	if h == forRoom {
		o.g.capped++
	}
	if h != fed && !o.queued {
		o.queued = true
		o.sp.l.starved = append(o.sp.l.starved, o)
	}
}

// room is how many more slots the load may pin. The caps count what its coordinator's
// leases and all its group's loads pin; yet one window of a group may always be pinned,
// so that its loads get on whatever leases hold. Who waits for room longer goes first.
func (o *loadOp) room(turn bool) int {
	if !turn && o.g.capped > 0 {
		return 0
	}
	return max(o.sp.window()-o.g.pinned, o.sp.room(o.owner))
}

// mayPin says whether this slot may be pinned: room for one that others may count.
func (o *loadOp) mayPin(slot uint32, turn bool) bool {
	return o.owner.counts(slot) ||
		(turn || o.g.capped == 0) && (o.g.pinned < o.sp.window() || o.sp.mayCharge(o.owner, slot))
}

// decide gives the verdict over one key, or false while it is being read, or waits for
// room.
func (o *loadOp) decide(i int, turn bool) bool {
	k := o.keys[i]
	p := o.sp.Look(k)
	switch {
	case p.State == tier.Ready && !o.mayPin(p.Ref.Slot, turn):
		o.wait(forRoom)
		return false
	case p.State == tier.Ready && o.sp.Pin(p.Ref) == nil:
		o.sp.charge(o.owner, p.Ref.Slot)
		o.g.pinned++
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

// lacksSlots says whether a load waits for a slot, which may come from memory that is
// being allocated and tells nobody.
func (l *leader) lacksSlots() bool {
	return slices.ContainsFunc(l.starved, func(o *loadOp) bool { return o.hunger == forSlot })
}

// feed gives those who wait for a slot or for room another try: loads first, in the
// order in which they began to wait.
func (l *leader) feed() {
	l.round++
	loads, leases := l.starved, l.hungry
	l.starved, l.hungry = nil, nil
	for _, o := range loads {
		o.queued = false
		switch {
		case o.hunger == fed:
		case o.hunger == forRoom && o.g.fullAt == l.round: // behind others of its group
			o.wait(forRoom)
		default:
			o.progress(true)
			if o.hunger == forRoom {
				o.g.fullAt = l.round
			}
		}
	}
	for _, le := range leases {
		le.refill()
	}
	l.freed = false // whatever the tries themselves gave up they had before
}

// failFrom makes every verdict FAILED that is not decided, from i on. What is
// decided stays, so that all ranks see the same.
func (o *loadOp) failFrom(i int) {
	if o.decided == o.total {
		return
	}
	i = max(i, o.decided)
	o.remember(i - len(o.verdicts))
	o.verdicts = append([]wire.Verdict(nil), o.verdicts[:i]...)
	o.count.Loads.Failed++
	o.decided = o.total
	o.settled()
	o.answerWaits()
}

// settled: all is decided, so that nothing is looked at or kept any more.
func (o *loadOp) settled() {
	o.wait(fed)
	for i := range o.reading {
		o.stopReading(o.from + i)
	}
	o.keys = nil
	if o.lease != nil {
		o.lease.truncate(0)
		o.lease = nil
	}
}

// dropLease ends the lease's part of a range of the load.
func (o *loadOp) dropLease(from, to int) {
	if o.lease != nil {
		o.lease.drop(o.leaseOffset+from, min(o.leaseOffset+to, len(o.lease.keys)))
	}
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
	for i := o.from; i < min(o.to, o.decided, len(o.verdicts)); i++ {
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
		o.g.pinned--
	}
}

// advance opens the next window when all ranks have finished this one.
func (o *loadOp) advance() {
	if o.decided < o.to || o.to == o.total || o.decided == o.total {
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
	o.failFrom(o.decided)
	o.dismiss(func(*loadWait) bool { return true }, wire.StatusAborted)
	if o.g.loads[o.op] == o {
		o.remember(-len(o.verdicts))
		o.g.l.loads--
		delete(o.sp.loads, o)
		delete(o.g.loads, o.op)
	}
}

// expire fails what is over its deadline: the reads of the window, or its copies
// while further windows wait for them.
func (o *loadOp) expire(now time.Time) {
	if o.decided < o.total && !now.Before(o.until) {
		o.count.Loads.Expired++
		if o.hunger == forRoom {
			o.sp.l.count.Misses.OverCap++
		}
		o.failFrom(o.decided)
	}
	o.dismiss(func(w *loadWait) bool { return !w.until.IsZero() && !now.Before(w.until) }, wire.StatusTimeout)
	if o.owner.isGone && o.decided == o.total && !now.Before(o.until) {
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
