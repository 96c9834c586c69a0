package kvtier

import (
	"errors"
	"time"

	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/tier"
)

// lease is the promise that a leading run of chunks stays retrievable. It belongs
// to one member, under an id of that member's choice, until a load takes it over.
// keys[i] is kept by holds[i]. Guarded by the leader's lock.
type lease struct {
	id    uint64
	a     *attachment
	sp    *space
	first uint32 // ordinal of keys[0]
	flags uint32 // PREFETCH, PIN
	keys  []chunkKey
	holds []hold
	until time.Time
	held  int // leading chunks of the run that were held when it was last looked at
	ended bool

	pending int  // disk reads it waits for
	wanting int  // and reads within the caps that wait for the arena to grow
	queued  bool // in the leader's list of such leases
	bad     chunkKey
	hasBad  bool // bad could not be read: not held, as far as this lease goes
	waits   []deferral
}

// hold says how one chunk of a lease is kept, and what that counts against.
type hold struct {
	ref   tier.Ref // of pinned and filling; the charged slot of onlyDRAM
	kind  holdKind
	ready bool // verified in DRAM when the lease last looked
}

type holdKind uint8

const (
	unheld   holdKind = iota
	pinned            // a pin on its slot; charged
	filling           // a disk read, with PIN pinned when it ends well; charged
	onlyDRAM          // the only copy, held without a pin; charged
	byNumber          // held wherever it is; counts by number
)

// find answers LOOKUP, PREFETCH and LEASE: where a run is, and with LEASE that it
// stays. While the disk tier still scans its directory, names that are not known
// yet are looked up on a goroutine of their own first, and the reply comes then.
func (a *attachment) find(req *wire.Request, reply func(*wire.Reply)) *wire.Reply {
	if req.Type == wire.Lease && req.Run.Flags&wire.LeaseRenew != 0 {
		return a.renew(req)
	}
	l, run := a.l, req.Run
	sp := a.ready()
	if sp == nil {
		return refusal(req, wire.StatusRefused)
	}
	if l.probe(a, sp, req, reply) {
		return nil
	}
	return a.found(sp, req, run.Keys, reply)
}

// found is find after the probe.
func (a *attachment) found(sp *space, req *wire.Request, keys []chunkKey, reply func(*wire.Reply)) *wire.Reply {
	r := answer(req)
	switch req.Type {
	case wire.Lookup:
		r.Hits = sp.lookup(keys)
		a.l.countLookup(sp, r.Hits, len(keys), r.Hits.Held)
		return r
	case wire.Prefetch:
		r.Hits = a.prefetch(sp, req.Run.First, keys)
		return r
	}
	if full := len(a.leases) >= maxLeases || a.l.leases >= leasesOfAll*maxLeases; full && a.leases[req.Run.Lease] == nil {
		r.Status = wire.StatusBusy
		return r
	}
	le := a.lease(sp, req.Run, keys)
	if le == nil {
		r.Status = wire.StatusStale // n = 0 and an id that is not known
		return r
	}
	if le.pending+le.wanting > 0 && req.Timeout > 0 {
		le.waits = append(le.waits, deferral{reply, r, a.l.now().Add(min(req.Timeout, longestDeferral))})
		a.l.hurry()
		return nil
	}
	r.Hits = le.hits()
	return r
}

// lease makes or replaces the lease of this id; without keys it only renews it, nil
// when there is none.
//
// A run that begins like the old one keeps the holds of the common part as they
// are. Of any other the new holds are taken before the old ones end, but with the
// old charges given back first, so that a lease does not compete with itself.
func (a *attachment) lease(sp *space, run *wire.Run, keys []chunkKey) *lease {
	l := a.l
	old := a.leases[run.Lease]
	if len(keys) == 0 {
		if old != nil {
			old.touch()
		}
		return old
	}
	le := old
	switch {
	case old == nil:
		le = a.newLease(sp, run)
	case old.first == run.First && old.flags == run.Flags && (len(old.keys) == 0 || old.keys[0] == keys[0]):
		common := 0
		for common < len(old.keys) && common < len(keys) && old.keys[common] == keys[common] {
			common++
		}
		old.truncate(common)
	default:
		le = a.newLease(sp, run)
		le.bad, le.hasBad = old.bad, old.hasBad
		le.waits, old.waits = old.waits, nil
		old.discharge(-1)
	}
	le.extend(keys)
	if old != nil && old != le {
		old.discharge(+1)
		old.end(wire.StatusOK)
	}
	le.touch()
	if old == nil {
		l.count.Leases++
		h := le.hits()
		l.countLookup(sp, h, len(keys), h.Leased)
	}
	if a.leases[run.Lease] != le {
		a.leases[run.Lease] = le // also without any key: a load with it is merely a miss
		l.leases++
	}
	l.watch()
	le.answerWaits()
	return le
}

func (a *attachment) newLease(sp *space, run *wire.Run) *lease {
	return &lease{id: run.Lease, a: a, sp: sp, first: run.First, flags: run.Flags}
}

func (le *lease) touch() { le.until = le.a.l.now().Add(le.a.l.opts.leaseTTL) }

// extend looks at the run again, key by key: what is kept in the best way stays, and
// the rest is kept as well as the caps allow. It stops at the first key that is not
// held; what only a cap keeps out of the lease is still counted as held.
func (le *lease) extend(keys []chunkKey) {
	pin := le.flags&wire.LeasePin != 0
	fetch := le.flags&wire.LeasePrefetch != 0
	open := true // the lease still grows
	hungry := false
	le.wanting = 0
	i := 0
	for ; i < len(keys); i++ {
		if i < len(le.keys) && le.settled(i, pin, fetch) {
			continue
		}
		k := keys[i]
		p := le.sp.LookInDRAM(k)
		ready, coming := p.State == tier.Ready, p.State == tier.Filling
		if !ready && (!coming && (p.State != tier.Free || !le.sp.OnDisk(k)) || le.hasBad && k == le.bad) {
			break
		}
		if open && i >= len(le.keys) && !le.mayGrow() {
			le.a.l.count.Misses.OverCap++
			open = false
		}
		if !open {
			continue
		}
		h := hold{kind: byNumber, ready: ready}
		switch {
		case ready && pin && le.sp.mayCharge(le.a, p.Ref.Slot) && le.sp.Pin(p.Ref) == nil:
			// Not touched here: what is used is, by the load or by the store that finds
			// it held, and thousands of touches would take milliseconds.
			h.kind, h.ref = pinned, p.Ref
		case ready && !le.sp.OnDisk(k):
			if !le.sp.mayCharge(le.a, p.Ref.Slot) {
				le.a.l.count.Misses.OverCap++
				open = false // DRAM only, and over the cap: the lease ends here
			}
			h.kind, h.ref = onlyDRAM, p.Ref
		case coming && le.sp.fills[p.Ref.Slot] != nil && le.sp.mayCharge(le.a, p.Ref.Slot):
			h.kind, h.ref = filling, p.Ref
		case !ready && !coming && fetch && le.sp.mayChargeNew(le.a):
			if !hungry {
				ref, err := le.sp.read(k, le.first+uint32(i))
				switch {
				case err == nil:
					h.kind, h.ref = filling, ref
				case errors.Is(err, tier.ErrNoSlot) && le.sp.growing():
					hungry = true
				default:
					fetch = false // no slot for this one, so none for the next
				}
			}
			if hungry && le.a.charged+le.wanting < le.sp.memberCap() && le.sp.charged+le.wanting < le.sp.allCap() {
				le.wanting++
			}
		}
		if h.kind == byNumber && le.a.onDisk >= maxLeasedOnDisk && i >= len(le.keys) {
			le.a.l.count.Misses.OverCap++
			open = false
		}
		switch {
		case !open:
			le.truncate(i)
			continue
		case i >= len(le.keys):
			le.keys = append(le.keys, k)
			le.holds = append(le.holds, hold{})
			le.count(1)
		case h.kind != pinned && h.kind == le.holds[i].kind && h.ref == le.holds[i].ref:
			le.holds[i].ready = ready // kept as it was
			continue
		default:
			le.release(i)
		}
		le.take(i, h)
	}
	le.held = i
	le.truncate(i)
	if le.wanting > 0 && !le.queued {
		le.queued = true
		le.a.l.hungry = append(le.a.l.hungry, le)
		le.a.l.hurry()
	}
}

// mayGrow says whether the lease may name one chunk more. How a chunk is held costs
// what the caps count, its name costs memory.
func (le *lease) mayGrow() bool {
	return le.a.leased < maxLeasedChunks && le.a.l.leased < leasesOfAll*maxLeasedChunks
}

// count notes how many chunks more the lease names.
func (le *lease) count(more int) {
	le.a.leased += more
	le.a.l.leased += more
}

// refill tries the reads again that had to wait for slots.
func (le *lease) refill() {
	le.queued = false
	if le.ended || le.wanting == 0 {
		return
	}
	n, held := len(le.keys), le.held
	le.extend(le.keys)
	if le.held == n {
		le.held = held // beyond the lease nothing was looked at
	}
	le.answerWaits()
}

// settled says that a hold cannot become a better one. A chunk that is held without
// a pin is not looked at again while the caps leave no room to pin it: the hold keeps
// it, and what may have happened to its file only reading it can tell.
func (le *lease) settled(i int, pin, fetch bool) bool {
	switch le.holds[i].kind {
	case pinned, filling:
		return true
	case byNumber:
		return !(pin || fetch) || !le.sp.mayChargeNew(le.a)
	}
	return false
}

// take begins a hold.
func (le *lease) take(i int, h hold) {
	le.holds[i] = h
	switch h.kind {
	case pinned:
		le.sp.charge(le.a, h.ref.Slot)
	case filling:
		le.sp.charge(le.a, h.ref.Slot)
		le.pending++
		le.sp.fills[h.ref.Slot].addWait(fillWait{le, i})
	case onlyDRAM:
		le.sp.charge(le.a, h.ref.Slot)
		le.sp.Hold(le.keys[i])
	case byNumber:
		le.a.onDisk++
		le.sp.Hold(le.keys[i])
	}
}

// release ends a hold.
func (le *lease) release(i int) {
	h := le.holds[i]
	le.holds[i] = hold{}
	switch h.kind {
	case pinned:
		le.sp.unpin(h.ref)
		le.sp.uncharge(le.a, h.ref.Slot)
	case filling:
		le.sp.uncharge(le.a, h.ref.Slot)
		le.pending--
		if f := le.sp.fills[h.ref.Slot]; f != nil && f.ref == h.ref {
			delete(f.waits, fillWait{le, i})
		}
	case onlyDRAM:
		le.sp.uncharge(le.a, h.ref.Slot)
		le.sp.Unhold(le.keys[i])
		le.a.l.freed = true
	case byNumber:
		le.a.onDisk--
		le.sp.Unhold(le.keys[i])
	}
}

// drop ends the holds of a range; the lease goes on with the others.
func (le *lease) drop(from, to int) {
	for i := max(from, 0); i < min(to, len(le.holds)); i++ {
		le.release(i)
	}
}

// truncate ends the lease's holds from index n on.
func (le *lease) truncate(n int) {
	if n < len(le.keys) {
		le.drop(n, len(le.keys))
		le.count(n - len(le.keys))
		le.keys, le.holds = le.keys[:n], le.holds[:n]
		if cap(le.keys) > 4*n { // what it does not name takes no memory
			le.keys, le.holds = append([]chunkKey(nil), le.keys...), append([]hold(nil), le.holds...)
		}
	}
}

// discharge takes the charges of all holds away, or puts them back.
func (le *lease) discharge(sign int) {
	le.count(sign * len(le.keys))
	for _, h := range le.holds {
		switch {
		case h.kind == byNumber:
			le.a.onDisk += sign
		case h.kind == unheld:
		case sign < 0:
			le.sp.uncharge(le.a, h.ref.Slot)
		default:
			le.sp.charge(le.a, h.ref.Slot)
		}
	}
}

// fillEnded: a read that this lease waited for has ended.
func (le *lease) fillEnded(i int, f *fill, ok bool) {
	if i >= len(le.holds) || le.holds[i].kind != filling || le.holds[i].ref != f.ref {
		return
	}
	if pin := le.flags&wire.LeasePin != 0; ok && pin && le.sp.Pin(f.ref) == nil {
		le.holds[i].kind, le.holds[i].ready = pinned, true
		le.pending--
	} else if ok && !pin {
		le.release(i)
		le.take(i, hold{kind: byNumber, ready: true})
	} else if !le.ended {
		// It cannot be read: the lease ends before it.
		le.bad, le.hasBad = f.key, true
		le.truncate(i)
		le.held = min(le.held, i)
		le.a.l.count.Misses.Unreadable++
	} else {
		le.release(i)
	}
	le.answerWaits()
}

// hits is what the lease holds now.
func (le *lease) hits() wire.Hits {
	h := wire.Hits{Held: uint32(le.held), Leased: uint32(len(le.keys)), Pending: uint32(le.pending + le.wanting)}
	leading := true
	pin := le.flags&wire.LeasePin != 0
	for i := range le.holds {
		o := &le.holds[i]
		if !o.ready {
			h.Bytes += uint64(le.sp.layout.FileBytes)
		}
		leading = leading && o.ready && (o.kind == pinned || !pin)
		if leading {
			h.Resident++
		}
	}
	return h
}

// answerWaits answers whoever waits for the reads, when they have ended.
func (le *lease) answerWaits() {
	if le.pending+le.wanting > 0 {
		return
	}
	le.answerNow()
}

func (le *lease) answerNow() {
	for _, w := range le.waits {
		w.message.Hits = le.hits()
		le.a.l.send(w.reply, w.message)
	}
	le.waits = nil
}

// detach takes the lease away from its member: its id is free again.
func (le *lease) detach() {
	if le.a.leases[le.id] == le {
		delete(le.a.leases, le.id)
		le.a.l.leases--
	}
	le.answerNow()
	le.ended = true
	le.wanting = 0
}

// end gives everything up. Who still waits for it gets the status.
func (le *lease) end(status wire.Status) {
	waits := le.waits
	le.waits = nil
	le.detach()
	for _, w := range waits {
		w.message.Status = status
		w.message.Hits = wire.Hits{}
		le.a.l.send(w.reply, w.message)
	}
	le.truncate(0)
}

// endLease ends a lease if there is one of this id.
func (a *attachment) endLease(id uint64) {
	delete(a.probing, id)
	if le := a.leases[id]; le != nil {
		le.end(wire.StatusAborted)
	}
}

func (a *attachment) release(req *wire.Request) *wire.Reply {
	a.endLease(req.Run.Lease)
	return answer(req)
}

// renew gives all leases it names their full time again.
func (a *attachment) renew(req *wire.Request) *wire.Reply {
	for _, id := range req.Renew {
		if le := a.leases[id]; le != nil {
			le.touch()
		} else {
			a.l.count.LeasesUnknown++
		}
	}
	return answer(req)
}

// expire ends the lease when its time is over, and answers waits that are.
func (le *lease) expire(now time.Time) {
	if !now.Before(le.until) {
		le.a.l.count.LeasesExpired++
		le.end(wire.StatusStale)
		return
	}
	kept := le.waits[:0]
	for _, w := range le.waits {
		if now.Before(w.until) {
			kept = append(kept, w)
			continue
		}
		w.message.Hits = le.hits()
		le.a.l.send(w.reply, w.message)
	}
	clear(le.waits[len(kept):])
	le.waits = kept
}
