package kvtier

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/spawn"
	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/tier"
)

type chunkKey = chunk.Key

// space is a namespace with what the leader's operations know about its slots. All
// groups with the same fingerprint share it. Guarded by the leader's lock.
type space struct {
	*tier.Space
	l      *leader
	disk   *tier.Disk // nil: memory only, for good if reopening is nil too
	layout *chunk.Layout
	groups int // that use it now

	fingerprint chunk.Fingerprint
	model       string
	reopening   *reopening

	// charges counts, by slot, the leases and loads that count it against the caps:
	// chunks that exist only in DRAM, slots that are pinned or are about to be.
	charges []uint32
	charged int // slots with a charge

	fills     map[uint32]*fill // by slot: disk reads that have not ended
	fillOrder []*fill          // by deadline; those that ended are skipped
	dryAt     uint64           // the round of feeding in which no slot was free
	loads     map[*loadOp]struct{}
	tests     map[chunkKey]*selfTest // by the chunks of running self-tests
}

// fill is a disk read under way, and who waits for it.
type fill struct {
	ref   tier.Ref
	key   chunk.Key
	until time.Time
	ended bool
	waits map[fillWait]struct{} // exactly those that wait still
	loads map[*loadOp]int       // by load that waits, the chunk's index in it
}

// fillWait is one key of a lease.
type fillWait struct {
	lease *lease
	index int
}

func (f *fill) addWait(w fillWait) {
	if f.waits == nil {
		f.waits = make(map[fillWait]struct{})
	}
	f.waits[w] = struct{}{}
}

func (f *fill) addLoad(o *loadOp, i int) {
	if f.loads == nil {
		f.loads = make(map[*loadOp]int)
	}
	if _, has := f.loads[o]; !has { // the lowest, should a run name a key twice
		f.loads[o] = i
	}
}

// openSpace gives the space of a namespace, opening it if no group uses it yet. It
// does I/O and runs without the lock.
func (l *leader) openSpace(ag *agreement) (*space, error) {
	l.opening.Lock()
	defer l.opening.Unlock()
	l.lock()
	sp, closed := l.spaces[ag.fingerprint], l.closed
	if sp != nil {
		sp.SetAttached(true) // its memory stays, from here on
	}
	l.unlock()
	if closed {
		return nil, errLeaderClosed
	}
	if sp != nil {
		return sp, nil
	}
	l.awaitRetired() // perhaps the namespace itself, whose memory is needed again
	if p := ag.layout.PaddedBytes; p > l.opts.dramBytes {
		return nil, finally{fmt.Errorf("one chunk of %d tokens takes %d bytes and the DRAM budget is %d: raise dram_gib or lower the tokens of a chunk",
			ag.geometry.C, p, l.opts.dramBytes)}
	}
	sp = &space{
		l: l, layout: ag.layout, fingerprint: ag.fingerprint, model: ag.namespace.Model,
		fills: make(map[uint32]*fill), loads: make(map[*loadOp]struct{}),
		tests: make(map[chunkKey]*selfTest),
	}
	if l.store != nil && !ag.memoryOnly {
		d, err := l.store.Namespace(ag.namespace)
		if err != nil {
			said := "namespace is kept in memory only"
			if !errors.Is(err, tier.ErrTooBig) {
				said += " until its directory can be opened, which is tried again and again"
				sp.reopening = &reopening{namespace: ag.namespace, at: l.now().Add(reopenAfter)}
			}
			l.log.Warn(said, "namespace", ag.fingerprint.String()[:32], "error", err)
		} else {
			sp.disk = d
		}
	}
	t, err := tier.NewSpace(tier.SpaceOptions{
		Namespace: ag.namespace, Layout: ag.layout, Pool: l.pool, Disk: sp.disk, DiskLater: sp.reopening != nil,
		Mu: &l.mu, Settled: sp.settled, Workers: l.opts.workers, Log: l.log,
	})
	if errors.Is(err, tier.ErrSlotTooBig) {
		return nil, finally{err}
	}
	if err != nil {
		return nil, err
	}
	sp.Space = t
	sp.charges = make([]uint32, t.Slots())
	l.lock()
	closed = l.closed
	if !closed {
		l.spaces[ag.fingerprint] = sp
		if sp.reopening != nil {
			l.watch()
		}
	}
	l.unlock()
	if closed {
		_ = t.Close(0) // nothing was put into it
		return nil, errLeaderClosed
	}
	return sp, nil
}

// enter and leave count the groups that use the space. Without any its memory may go
// to other namespaces.
func (sp *space) enter() {
	sp.groups++
	sp.SetAttached(true)
}

func (sp *space) leave() {
	if sp.groups--; sp.groups == 0 {
		sp.SetAttached(false)
		sp.l.watch() // it may be vacant, now or when its slots have drained
	}
}

// retireVacant closes the namespaces that no group uses and that hold nothing, so that
// a leader that lives long does not keep an arena for each it has ever seen. What holds
// chunks stays: an engine that comes back finds them in DRAM. The caller holds mu.
func (l *leader) retireVacant() {
	for fp, sp := range l.spaces {
		if sp.groups > 0 || len(sp.loads)+len(sp.fills)+len(sp.tests)+sp.charged > 0 || !sp.Vacant() {
			continue
		}
		delete(l.spaces, fp)
		done := make(chan struct{})
		l.retiring[sp] = done
		spawn.Go("end of a namespace", l.fail, func() {
			defer close(done)
			defer l.retired(sp)
			if err := sp.Close(retireTimeout); err != nil {
				l.log.Warn("the arena of a namespace stays", "namespace", sp.fingerprint.String()[:32], "error", err)
			}
		})
	}
}

func (l *leader) retired(sp *space) {
	l.lock()
	defer l.unlock()
	delete(l.retiring, sp)
}

// awaitRetired waits until what was vacant has given its memory back. It takes
// retireTimeout at most.
func (l *leader) awaitRetired() {
	l.lock()
	retiring := slices.Collect(maps.Values(l.retiring))
	l.unlock()
	for _, done := range retiring {
		<-done
	}
}

// retireTimeout is what an allocation under way is waited for.
const retireTimeout = 10 * time.Second

// Caps, in slots.
func (sp *space) memberCap() int { return max(1, len(sp.charges)/4) }
func (sp *space) allCap() int    { return max(1, len(sp.charges)/2) }

// window is how many chunks of a load are pinned at once.
func (sp *space) window() int { return max(2, min(wire.MaxWindow, len(sp.charges)/8)) }

// mayCharge says whether counting this slot for the member stays within the caps.
func (sp *space) mayCharge(a *attachment, slot uint32) bool {
	if a.counts(slot) {
		return true
	}
	return a.charged < sp.memberCap() && (sp.charges[slot] > 0 || sp.charged < sp.allCap())
}

// room is how many slots that nobody counts the member may still be charged.
func (sp *space) room(a *attachment) int {
	return min(sp.memberCap()-a.charged, sp.allCap()-sp.charged)
}

// counts says whether this slot counts for the member already.
func (a *attachment) counts(slot uint32) bool { return a.charges != nil && a.charges[slot] > 0 }

// mayChargeNew is mayCharge for a slot that nobody has.
func (sp *space) mayChargeNew(a *attachment) bool {
	return a.charged < sp.memberCap() && sp.charged < sp.allCap()
}

func (sp *space) charge(a *attachment, slot uint32) {
	if a.charges == nil {
		a.charges = make([]uint32, len(sp.charges))
	}
	if a.charges[slot]++; a.charges[slot] == 1 {
		a.charged++
	}
	if sp.charges[slot]++; sp.charges[slot] == 1 {
		sp.charged++
	}
}

func (sp *space) uncharge(a *attachment, slot uint32) {
	if a.charges[slot]--; a.charges[slot] == 0 {
		a.charged--
	}
	if sp.charges[slot]--; sp.charges[slot] == 0 {
		sp.charged--
	}
	sp.l.freed = true // room within the caps
}

// unpin gives up a pin; the slot may be free afterwards.
func (sp *space) unpin(r tier.Ref) {
	sp.Unpin(r)
	sp.l.freed = true
}

// growing says whether a slot that cannot be had now is likely to come: memory that
// is being allocated is neither free nor available, but backed in the end.
func (sp *space) growing() bool {
	if sp.Available() > 0 {
		return true
	}
	st := sp.Stats()
	return st.Limit == "" && st.Off == "" && st.Backed < int64(st.Slots)*st.SlotBytes
}

// read starts a disk read of a key that is on disk and not in DRAM.
func (sp *space) read(k chunk.Key, ordinal uint32) (tier.Ref, error) {
	ref, err := sp.Fill(k, ordinal)
	if err != nil {
		return tier.Ref{}, err
	}
	f := &fill{ref: ref, key: k, until: sp.l.now().Add(fillTimeout)}
	sp.fills[ref.Slot] = f
	sp.fillOrder = append(sp.fillOrder, f)
	sp.counts(k).Fills++
	sp.l.watch()
	return ref, nil
}

// counts gives where to count what happens to a chunk: self-tests are apart.
func (sp *space) counts(k chunkKey) *counters {
	if _, test := sp.tests[k]; test {
		return &sp.l.testCount
	}
	return &sp.l.count
}

// settled is told by the space, under the lock, that a hash or a disk read ended.
func (sp *space) settled(e tier.SettledEvent) {
	l := sp.l
	l.freed = true
	t := sp.tests[e.Key]
	if t != nil && e.Err != nil {
		t.readErr = e.Err
	}
	if f := sp.fills[e.Ref.Slot]; f != nil && f.ref == e.Ref {
		sp.fillEnded(f, e.Ready)
	} else if e.Ready {
		sp.counts(e.Key).Published++
	} else {
		sp.counts(e.Key).PublishFailed++
	}
	if t != nil || len(l.outbox) > 0 || len(l.starved) > 0 || len(l.hungry) > 0 {
		l.poke() // this is not the leader's own critical section: the loop sends
	}
}

// fillEnded tells everybody who waits how a read ended.
func (sp *space) fillEnded(f *fill, ok bool) {
	if f.ended {
		return
	}
	f.ended = true
	delete(sp.fills, f.ref.Slot)
	if !ok {
		sp.counts(f.key).FillsFailed++
	}
	for w := range f.waits {
		w.lease.fillEnded(w.index, f, ok)
	}
	for o, i := range f.loads {
		o.fillEnded(i, f, ok)
	}
	f.waits, f.loads = nil, nil
}

// giveUpFills ends the reads that are over their deadline: the keys are unindexed,
// the slots drain until the reads return.
func (sp *space) giveUpFills(now time.Time) {
	for len(sp.fillOrder) > 0 {
		f := sp.fillOrder[0]
		if !f.ended {
			if now.Before(f.until) {
				return
			}
			sp.counts(f.key).FillsGivenUp++
			sp.GiveUpFill(f.ref)
			sp.fillEnded(f, false)
		}
		sp.fillOrder[0] = nil
		sp.fillOrder = sp.fillOrder[1:]
	}
	sp.fillOrder = nil
}
