package tier

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/sys"
)

const (
	// minSlots is what a namespace needs to get on at all: two for a window of a
	// load, and two to store beside it.
	minSlots = 4
	maxSlots = 1 << 31

	// firstSlots are allocated before the Space opens, if they are small: who puts some
	// chunks at once finds them in DRAM afterwards, and not the first ones evicted for
	// the last because growing has not begun.
	firstSlots = 16

	// aheadSlots and aheadBytes say how much is kept allocated and free: what one
	// step of an engine stores at once (16,384 tokens in chunks of 256), since a
	// grant cannot wait for the allocation and what is declined in a prompt's only
	// step is lost. Of small slots it may be more, up to an eighth of the arena.
	aheadSlots = 64
	aheadBytes = 64 << 20

	// growStep is what is allocated between two looks at the memory that is left;
	// one slot if slots are larger.
	growStep = 4 << 20

	// stall is how long growing rests after it was refused.
	stall = time.Second

	// shrinkBatch is how many slots leave the arena per turn of the lock.
	shrinkBatch = 16
)

// slotCount is how many slots of this size the budget can become.
func slotCount(p *Pool, slotBytes int64) (int, error) {
	bytes := p.bytes
	if limit := p.fileLimit(); limit < bytes {
		p.log.Warn("the arena is smaller than its budget: RLIMIT_FSIZE is lower, raise it with ulimit -f",
			"rlimit_fsize", limit, "budget", bytes)
		bytes = limit
	}
	n := min(bytes/slotBytes, maxSlots)
	if n < minSlots {
		return 0, fmt.Errorf("%d bytes hold %d chunks of %d bytes, at least %d are needed: %w", bytes, n, slotBytes, minSlots, ErrSlotTooBig)
	}
	return int(n), nil
}

// ahead is how many free slots growing keeps in stock.
func (s *Space) ahead() int {
	return min(len(s.slots), max(aheadSlots, min(len(s.slots)/8, int(aheadBytes/s.slotBytes))))
}

// pushFree and popFree keep the backed FREE slots, last in first out: what was used
// last is warm.
func (s *Space) pushFree(i uint32) {
	s.slots[i].next = s.freeHead
	s.freeHead = i
	s.freeCount++
}

func (s *Space) popFree() (uint32, bool) {
	i := s.freeHead
	if i == none {
		return 0, false
	}
	s.freeHead = s.slots[i].next
	s.freeCount--
	return i, true
}

// unbacked is how many slots have no memory yet.
func (s *Space) unbacked() int { return len(s.slots) - int(s.fresh) + len(s.holes) }

// canGrow says whether waiting a moment is likely to bring more slots.
func (s *Space) canGrow() bool {
	if s.growing > 0 {
		return true // they are being allocated
	}
	return s.unbacked() > 0 && !s.now().Before(s.stalledUntil) && s.pool.room(s) >= s.slotBytes
}

// allocate takes a FREE slot, evicting one if there is none. While the arena is
// still growing, a chunk that exists nowhere else is not evicted for it.
func (s *Space) allocate() (uint32, error) {
	if s.freeCount == 0 {
		s.evict(!s.canGrow())
	}
	i, ok := s.popFree()
	if s.freeCount < s.ahead() && s.unbacked() > 0 {
		wake(s.growWake)
	}
	if !ok {
		s.stats.Declined++
		return 0, fmt.Errorf("%d slots, %d to come: %w", len(s.slots), s.unbacked(), ErrNoSlot)
	}
	return i, nil
}

// wake leaves a note for a goroutine that sleeps on c, which has room for one.
func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// growLoop allocates slots ahead of need until the Space is closed.
func (s *Space) growLoop() {
	for {
		for s.grow() {
		}
		select {
		case <-s.stop:
			return
		case <-s.growWake:
		}
	}
}

// grow backs the next few slots and reports whether to go on.
func (s *Space) grow() bool {
	first, n := s.planGrowth()
	if n == 0 {
		return false
	}
	return s.growBy(first, n) == nil
}

// planGrowth takes the next unbacked slots: neighbours, so that one call allocates
// them.
func (s *Space) planGrowth() (first uint32, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	want := s.ahead() - s.freeCount
	if s.off != nil || want <= 0 || s.now().Before(s.stalledUntil) {
		return 0, 0
	}
	if last := len(s.holes) - 1; last >= 0 {
		first = s.holes[last]
		s.holes = s.holes[:last]
		s.growing++
		return first, 1
	}
	first = s.fresh
	room := max(1, s.pool.room(s)/s.slotBytes) // one is asked for in any case: the answer names the limit
	n = min(want, max(1, int(growStep/s.slotBytes)), len(s.slots)-int(first), int(min(room, maxSlots)))
	s.fresh += uint32(n)
	s.growing += n
	return first, n
}

// growBy allocates slots that planGrowth has taken and makes them usable, or notes
// why not.
func (s *Space) growBy(first uint32, n int) error {
	at, got := int64(first)*s.slotBytes, n
	err := s.pool.back(s, at, int64(got)*s.slotBytes)
	for errors.Is(err, ErrPoolFull) && got > 1 { // some of them may fit
		got /= 2
		err = s.pool.back(s, at, int64(got)*s.slotBytes)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.growing -= n
	if err != nil {
		got = 0
	}
	for i := uint32(got); i < uint32(n); i++ {
		s.holes = append(s.holes, first+i)
	}
	if err != nil {
		s.stalledUntil = s.now().Add(stall)
		// A person wants the reason once, not once a second with other figures.
		if s.stats.Limit == "" {
			s.log.Warn("the arena does not grow any more for now", "namespace", s.name,
				"bytes", s.backedBytes.Load(), "budget", s.pool.bytes, "error", err)
		}
		s.stats.Limit = err.Error()
		return err
	}
	s.stats.Limit = ""
	s.backedBytes.Add(int64(got) * s.slotBytes)
	for i := uint32(got); i > 0; i-- { // the lowest is used first
		slot := first + i - 1
		sl := &s.slots[slot]
		sl.backed = true
		if sl.generation == 0 {
			sl.generation, sl.place = 1, none
			s.table.set(slot, 1, Free)
		}
		s.pushFree(slot)
	}
	return nil
}

// Shrink gives memory back to the pool, at least want bytes if that much can be
// spared, and says how much it was: free slots first, then evicted chunks. Only a
// namespace without attached groups gives anything. Mu must not be held: the kernel
// frees the pages meanwhile.
func (s *Space) Shrink(want int64) (given int64) {
	for given < want && !s.attached.Load() {
		batch := s.takeBacked(min(shrinkBatch, int((want-given+s.slotBytes-1)/s.slotBytes)))
		if len(batch) == 0 {
			break
		}
		given += s.unback(batch)
	}
	return given
}

// takeBacked takes up to n slots out of use.
func (s *Space) takeBacked(n int) []uint32 {
	s.mu.Lock()
	defer s.mu.Unlock()
	var batch []uint32
	for len(batch) < n && s.off == nil {
		if s.freeCount == 0 && !s.evict(true) {
			break
		}
		i, _ := s.popFree()
		s.slots[i].backed = false
		batch = append(batch, i)
	}
	if len(batch) > 0 {
		s.inflight++
	}
	return batch
}

// unback frees the pages of slots that takeBacked took.
func (s *Space) unback(batch []uint32) (given int64) {
	kept := 0 // of the batch, those whose pages could not be freed come first
	for at, i := range batch {
		if err := sys.PunchHole(s.arena.File(), int64(i)*s.slotBytes, s.slotBytes); err != nil {
			s.log.Warn("arena memory could not be given back", "namespace", s.name, "error", err)
			batch[at], batch[kept] = batch[kept], i
			kept++
			continue
		}
		given += s.slotBytes
	}
	s.backedBytes.Add(-given)
	s.pool.give(given)

	s.mu.Lock()
	defer s.mu.Unlock()
	for _, i := range batch[:kept] {
		s.slots[i].backed = true
		s.pushFree(i)
	}
	s.holes = append(s.holes, batch[kept:]...)
	s.ended()
	return given
}

// padding yields the parts of a chunk that no row covers: [off, off+n).
func padding(l *chunk.Layout, yield func(off, n int64)) {
	for i := range l.Groups {
		g := &l.Groups[i]
		if gap := int64(g.RowStride - g.RowBytes); gap > 0 {
			for row := range int64(g.Rows) {
				yield(g.Offset+row*int64(g.RowStride)+int64(g.RowBytes), gap)
			}
		}
	}
	if tail := l.PaddedBytes - l.PayloadBytes; tail > 0 {
		yield(l.PayloadBytes, tail)
	}
}

// scrub makes the padding zero again after a disk read that failed, in whatever way:
// the next chunk of the slot is hashed and written with it. The slot must be the
// caller's alone.
func (s *Space) scrub(i uint32) {
	b := s.bytes(i)
	padding(s.layout, func(off, n int64) { clear(b[off : off+n]) })
}
