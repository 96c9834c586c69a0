package tier

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/spawn"
	"github.com/kvtier/kvtier/internal/sys"
)

// SpaceOptions are what a Space is made of.
type SpaceOptions struct {
	Namespace *chunk.Namespace
	Layout    *chunk.Layout
	Pool      *Pool
	Disk      *Disk // nil: memory only
	DiskLater bool  // SetDisk may still be called

	// Mu is the leader's one lock. The Space's own goroutines and the callbacks it
	// gives to the disk tier take it for moments.
	Mu sync.Locker

	// Settled is called with Mu held, and may call the Space. See SettledEvent.
	Settled func(SettledEvent)

	Workers int // goroutines that hash, at least 1
	Log     *slog.Logger
}

// SettledEvent says how SEALING or FILLING ended. There is exactly one for each
// successful Seal and each successful Fill. Where the caller itself ends it (Remove,
// GiveUpFill), it comes before that call returns.
type SettledEvent struct {
	Key   chunk.Key
	Ref   Ref
	Ready bool  // the chunk is READY as Ref
	Err   error // why it is not
}

// Presence is where a chunk is.
type Presence struct {
	State  State // Free: it has no slot
	Ref    Ref   // of its slot
	OnDisk bool
}

// Space is the arena of one namespace: slots of its chunks' size in one sealed
// memfd, the table of their states, the index of keys, eviction, and the traffic
// with the disk tier.
//
// Methods are called with Mu held, unless they say otherwise; none of those waits.
type Space struct {
	name      string
	layout    *chunk.Layout
	slotBytes int64
	pool      *Pool
	disk      *Disk
	settled   func(SettledEvent)
	log       *slog.Logger
	now       func() time.Time
	opened    time.Time

	arena        *sys.Segment
	tableSegment *sys.Segment
	attached     atomic.Bool
	backedBytes  atomic.Int64
	stopped      atomic.Bool // the workers' cancel flag
	unmapped     atomic.Bool
	stop         chan struct{}
	sealWake     chan struct{} // room for one
	growWake     chan struct{} // room for one
	closing      sync.Once
	closeErr     error

	mu           sync.Locker // guards all below
	off          error
	diskLater    bool                   // the disk is to come
	removedEarly map[chunk.Key]struct{} // before it has come
	table        *Table
	slots        []slot
	index        arenaIndex
	queues       [queueKinds]evictionQueue
	counts       [stateCount]int
	freeHead     uint32
	freeCount    int
	fresh        uint32   // slots from here on never had memory
	growing      int      // slots whose memory is being allocated right now
	holes        []uint32 // slots before it that have none
	stalledUntil time.Time
	sealing      []Ref // waiting for a worker
	waiting      bool  // the backlog will be offered again after a while
	noRoom       bool  // the last write found none: nothing is offered before
	backlog      []Ref // READY, dirty and postponed by the disk tier; oldest first, some may be gone
	dirty        int
	writing      int
	stats        SpaceStats
	inflight     int           // goroutines and I/O that touch the arena
	quiet        chan struct{} // closed when inflight is 0 after closing has begun
}

// NewSpace makes the arena of a namespace, with its first few slots. It may wait for
// other namespaces to give memory back: Mu must not be held. The group that it is
// made for counts as attached (see SetAttached).
//
// Errors: ErrSlotTooBig, ErrPoolFull, ErrMemoryLimit, or what the kernel says.
func NewSpace(o SpaceOptions) (*Space, error) {
	fp, err := o.Namespace.Fingerprint()
	if err != nil {
		return nil, fmt.Errorf("opening an arena: %w", err)
	}
	s := &Space{
		name:      chunk.DirName(o.Namespace.Model, fp),
		layout:    o.Layout,
		slotBytes: o.Layout.PaddedBytes,
		pool:      o.Pool,
		disk:      o.Disk,
		diskLater: o.DiskLater,
		settled:   o.Settled,
		log:       o.Log,
		now:       time.Now,
		opened:    time.Now(),
		stop:      make(chan struct{}),
		sealWake:  make(chan struct{}, 1),
		growWake:  make(chan struct{}, 1),
		mu:        o.Mu,
		index:     newArenaIndex(),
		freeHead:  none,
		quiet:     make(chan struct{}),
	}
	if err := s.open(); err != nil {
		return nil, fmt.Errorf("opening the arena of %s: %w", s.name, err)
	}
	for range max(1, o.Workers) {
		s.spawn("a hash worker", s.hashLoop)
	}
	s.spawn("the arena's growth", s.growLoop)
	return s, nil
}

func (s *Space) open() error {
	n, err := slotCount(s.pool, s.slotBytes)
	if err != nil {
		return err
	}
	s.slots = make([]slot, n) // untouched pages of a huge budget cost nothing
	s.counts[Free] = n
	for kind := range s.queues {
		s.queues[kind].kind = queueKind(kind)
	}
	if s.arena, err = sys.NewSegment("kvtier-arena", int64(n)*s.slotBytes); err != nil {
		return err
	}
	if s.tableSegment, err = sys.NewTable("kvtier-slots", TableBytes(n)); err == nil {
		s.table, err = OpenTable(s.tableSegment)
	}
	if err == nil {
		first := max(minSlots, min(n, firstSlots, int(growStep/s.slotBytes)))
		s.fresh, s.growing = uint32(first), first
		s.attached.Store(true)
		s.pool.join(s)
		if err = s.growBy(0, first); err != nil {
			s.pool.leave(s)
		}
	}
	if err != nil {
		return errors.Join(err, s.unmap())
	}
	return nil
}

// spawn starts a goroutine that touches the arena. A panic in it switches the Space
// off.
func (s *Space) spawn(name string, fn func()) {
	s.mu.Lock()
	s.inflight++
	s.mu.Unlock()
	end := func() {
		s.mu.Lock()
		s.ended()
		s.mu.Unlock()
	}
	spawn.Go(name, func(err error) { s.fail(err); end() }, func() { fn(); end() })
}

// ended is the end of what inflight counts.
func (s *Space) ended() {
	s.inflight--
	if s.inflight == 0 && s.stopped.Load() {
		close(s.quiet)
	}
}

// guard is deferred by callbacks that run on other components' goroutines: their
// panics are this Space's failure.
func (s *Space) guard(what string) {
	if v := recover(); v != nil {
		s.fail(fmt.Errorf("%s panicked: %v\n%s", what, v, debug.Stack()))
	}
}

// fail switches the Space off: what waits is told so, nothing is found any more.
func (s *Space) fail(err error) {
	defer func() {
		if v := recover(); v != nil {
			s.log.Error("switching the namespace off failed", "namespace", s.name, "panic", v)
		}
	}()
	s.log.Error("the namespace is switched off", "namespace", s.name, "error", err)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.off != nil {
		return
	}
	s.off = ErrSpaceOff
	s.stats.Off = err.Error()
	for i := range s.slots[:s.fresh] {
		sl := &s.slots[i]
		if sl.state == Sealing || sl.state == Filling {
			r := Ref{uint32(i), sl.generation}
			s.must(s.change(r, removed))
			s.settle(r, ErrSpaceOff)
		}
	}
}

// note counts an event that came for a slot that is something else by now.
func (s *Space) note(err error) bool {
	if err != nil {
		s.stats.Stale++
	}
	return err == nil
}

func (s *Space) settle(r Ref, err error) {
	if s.settled != nil {
		s.settled(SettledEvent{Key: s.slots[r.Slot].key, Ref: r, Ready: err == nil, Err: err})
	}
}

func (s *Space) onDisk(k chunk.Key) bool { return s.disk != nil && s.disk.Has(k) }

// sameTime is the span within which touches count as one: within it the suffix of a
// prefix is older than what comes before.
const sameTime = 10 * time.Millisecond

// stamp is the recency of a chunk that is touched now: a microsecond older for each
// step away from the start of its prefix, as the disk tier does with mtime. It counts
// from the opening by the monotonic clock: a step of the wall clock changes nothing.
func (s *Space) stamp(ordinal uint32) int64 {
	return s.now().Sub(s.opened).Truncate(sameTime).Microseconds() - int64(ordinal)
}

// begin fills in a slot that allocate gave, and lets e happen to it.
func (s *Space) begin(i uint32, k, parent chunk.Key, ordinal uint32, noDisk bool, e event) Ref {
	sl := &s.slots[i]
	sl.key, sl.parent, sl.ordinal, sl.noDisk = k, parent, ordinal, noDisk
	sl.hash, sl.durability, sl.recency = [16]byte{}, dirty, s.stamp(ordinal)
	r := Ref{i, sl.generation}
	s.must(s.change(r, e))
	return r
}

// Look says where a chunk is. A chunk in a state before READY is not readable yet;
// one in DRAINING is gone.
func (s *Space) Look(k chunk.Key) Presence {
	p := s.LookInDRAM(k)
	p.OnDisk = s.OnDisk(k)
	return p
}

// LookInDRAM is Look without the question whether the chunk is on disk, which costs
// more than the rest of it when thousands of keys are looked up at once.
func (s *Space) LookInDRAM(k chunk.Key) Presence {
	if s.off != nil {
		return Presence{}
	}
	i, ok := s.index.find(k)
	if !ok {
		return Presence{}
	}
	return Presence{State: s.slots[i].state, Ref: Ref{i, s.slots[i].generation}}
}

// OnDisk says whether the disk tier holds the chunk.
func (s *Space) OnDisk(k chunk.Key) bool { return s.off == nil && s.onDisk(k) }

// Grant gives a slot for a chunk that is to be stored; it is ASSEMBLING until Seal or
// Drop. Whether the parent is there is the caller's business. noDisk chunks are never
// written to disk. Errors: ErrKnown, ErrNoSlot, ErrSpaceOff.
func (s *Space) Grant(k, parent chunk.Key, ordinal uint32, noDisk bool) (Ref, error) {
	if s.off != nil {
		return Ref{}, s.off
	}
	if _, ok := s.index.find(k); ok {
		return Ref{}, fmt.Errorf("granting %s: %w", k, ErrKnown)
	}
	i, err := s.allocate()
	if err != nil {
		return Ref{}, err
	}
	s.stats.Grants++
	return s.begin(i, k, parent, ordinal, noDisk, granted), nil
}

// AllowDisk takes back the noDisk of a Grant: the chunk, if it is in the arena, may
// be written from now on.
func (s *Space) AllowDisk(k chunk.Key) {
	if s.off != nil {
		return
	}
	i, ok := s.index.find(k)
	if !ok || !s.slots[i].noDisk {
		return
	}
	sl := &s.slots[i]
	sl.noDisk = false
	if r := (Ref{i, sl.generation}); s.unwritten(r) {
		s.enqueue(r)
	}
}

// Drop ends an assembly that will not be complete. The key is free at once; the slot
// drains until Drained.
func (s *Space) Drop(r Ref) { s.note(s.change(r, dropped)) }

// Drained says that no rank can write the slot of a dropped or removed assembly any
// more. It is owed for each Grant that did not come to Seal.
func (s *Space) Drained(r Ref) {
	if s.is(r, Draining) && s.slots[r.Slot].users&ranks != 0 {
		s.leave(r.Slot, ranks)
	} else {
		s.stats.Stale++
	}
}

func (s *Space) is(r Ref, state State) bool {
	return r.Slot < uint32(len(s.slots)) && s.slots[r.Slot].generation == r.Generation && s.slots[r.Slot].state == state
}

// Pin keeps a READY chunk in its slot until Unpin; pins are counted. Errors: ErrStale,
// ErrSpaceOff.
func (s *Space) Pin(r Ref) error {
	if s.off != nil {
		return s.off
	}
	if !s.is(r, Ready) {
		return fmt.Errorf("pinning slot %d generation %d: %w", r.Slot, r.Generation, ErrStale)
	}
	s.slots[r.Slot].pins++
	s.requeue(r.Slot)
	return nil
}

// Unpin ends one Pin.
func (s *Space) Unpin(r Ref) {
	if !s.is(r, Ready) && !s.is(r, Draining) || s.slots[r.Slot].pins == 0 {
		s.stats.Stale++
		return
	}
	s.slots[r.Slot].pins--
	s.leave(r.Slot, 0)
}

// Hold promises that one copy of a chunk stays, in DRAM or on disk, until Unhold;
// holds are counted, and the chunk may have no slot. It does not bring a chunk back.
func (s *Space) Hold(k chunk.Key) {
	s.index.hold(k)
	if s.disk != nil {
		s.disk.Hold(k)
	}
	i, ok := s.index.find(k)
	if !ok || s.slots[i].state != Ready {
		return
	}
	if s.slots[i].durability == clean && !s.onDisk(k) {
		s.setDurability(i, dirty)
	}
	s.requeue(i)
}

// Unhold ends one Hold.
func (s *Space) Unhold(k chunk.Key) {
	if !s.index.unhold(k) {
		s.stats.Stale++
		return
	}
	if s.disk != nil {
		s.disk.Unhold(k)
	}
	if i, ok := s.index.find(k); ok {
		s.requeue(i)
	}
}

// OnlyInDRAM says that the chunk is READY and not on disk.
func (s *Space) OnlyInDRAM(k chunk.Key) bool {
	i, ok := s.index.find(k)
	return ok && s.slots[i].state == Ready && !s.onDisk(k)
}

// Touch makes a chunk recent, in DRAM and on disk.
func (s *Space) Touch(k chunk.Key, ordinal uint32) {
	if s.disk != nil {
		s.disk.Touch(k, ordinal)
	}
	if i, ok := s.index.find(k); ok {
		s.slots[i].recency = s.stamp(ordinal)
		s.requeue(i)
	}
}

// Remove forgets a chunk, in DRAM and on disk. What is being copied out of its slot
// ends well; an assembly is dropped, and Drained is still owed for it.
func (s *Space) Remove(k chunk.Key) {
	if s.disk != nil {
		s.disk.Remove(k)
	} else if s.diskLater {
		s.removeEarly(k)
	}
	i, ok := s.index.find(k)
	if !ok {
		return
	}
	sl := &s.slots[i]
	from, r := sl.state, Ref{i, sl.generation}
	s.must(s.change(r, removed))
	if from == Ready {
		s.free(i)
	} else if from != Assembling {
		s.settle(r, ErrRemoved)
	}
}

// SetAttached says whether any group is attached. While none is, other namespaces may
// take this one's memory.
func (s *Space) SetAttached(attached bool) { s.attached.Store(attached) }

// Slots is the number of slots that the arena has when it is fully grown. Any time.
func (s *Space) Slots() int { return len(s.slots) }

// SlotBytes is the size of a slot. Any time.
func (s *Space) SlotBytes() int64 { return s.slotBytes }

// Bytes is the memory of a slot, P bytes, for whoever was told its Ref and is counted
// as its user (a rank of the assembly, or a pin): else it may change under him. Nil
// after Close and for a slot that does not exist. Any time.
func (s *Space) Bytes(r Ref) []byte {
	if r.Slot >= uint32(len(s.slots)) || s.unmapped.Load() {
		return nil
	}
	return s.bytes(r.Slot)
}

func (s *Space) bytes(i uint32) []byte {
	at := int64(i) * s.slotBytes
	return s.arena.Bytes()[at : at+s.slotBytes : at+s.slotBytes]
}

// ArenaFile is the memfd of the slots, to be passed to ranks. Any time before Close.
func (s *Space) ArenaFile() *os.File { return s.arena.File() }

// TableFile is the memfd of the slot table, to be passed to ranks. Any time before
// Close.
func (s *Space) TableFile() *os.File { return s.tableSegment.File() }

// Close switches the Space off, waits for what touches its arena, and unmaps it. The
// disk tier should have drained its writes before. Whoever copies to or from Bytes
// must have stopped. When the time does not suffice the memory stays mapped, since a
// late read would crash the process, and ErrSpaceBusy is returned. Mu must not be
// held. Idempotent.
func (s *Space) Close(timeout time.Duration) error {
	s.closing.Do(func() { s.closeErr = s.close(timeout) })
	return s.closeErr
}

func (s *Space) close(timeout time.Duration) error {
	s.mu.Lock()
	if s.off == nil {
		s.off = ErrSpaceOff
	}
	s.stopped.Store(true)
	close(s.stop)
	if s.inflight == 0 {
		close(s.quiet)
	}
	s.mu.Unlock()

	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-s.quiet:
	case <-timer.C:
		return fmt.Errorf("closing the arena of %s: %w", s.name, ErrSpaceBusy)
	}
	s.mu.Lock()
	s.table.words = nil // late events change nothing that anybody reads
	s.unmapped.Store(true)
	s.mu.Unlock()
	s.pool.leave(s)
	return s.unmap()
}

func (s *Space) unmap() error {
	var errs []error
	for _, segment := range []*sys.Segment{s.arena, s.tableSegment} {
		if segment != nil {
			errs = append(errs, segment.Close())
		}
	}
	return errors.Join(errs...)
}
