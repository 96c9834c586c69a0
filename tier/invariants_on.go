//go:build invariants

package tier

import (
	"fmt"

	"github.com/kvtier/kvtier/internal/chunk"
)

// invariants says that every change of a slot is checked against the rules below;
// it is for tests.
const invariants = true

// fullCheckSlots is the size of arena up to which every change checks every slot.
const fullCheckSlots = 256

// mustHold panics when the slot that has just changed, or the whole, breaks a rule.
func (s *Space) mustHold(changed uint32) {
	sum := 0
	for _, n := range s.counts {
		sum += n
	}
	assert(sum == len(s.slots), "states add up to %d of %d slots", sum, len(s.slots))
	s.slotMustHold(changed)
	if len(s.slots) > fullCheckSlots {
		return
	}
	var counts [stateCount]int
	indexed, queued, unsaved := 0, 0, 0
	for i := range s.slots {
		s.slotMustHold(uint32(i))
		sl := &s.slots[i]
		counts[sl.state]++
		if j, ok := s.index.find(sl.key); ok && j == uint32(i) && sl.state != Free {
			indexed++
		}
		if sl.queue != unqueued {
			queued++
		}
		if sl.state == Ready && sl.durability != clean {
			unsaved++
		}
	}
	assert(counts == s.counts, "states %v are counted as %v", counts, s.counts)
	assert(indexed == len(s.index.slots), "%d slots of %d keys", indexed, len(s.index.slots))
	assert(queued == len(s.queues[cleanQueue].order)+len(s.queues[dirtyQueue].order), "queues hold what is not theirs")
	assert(unsaved == s.dirty, "%d dirty chunks are counted as %d", unsaved, s.dirty)
	free, last := 0, none
	for i := s.freeHead; i != none; i = s.slots[i].next {
		assert(s.slots[i].state == Free && s.slots[i].backed && i != last, "slot %d is in the free list", i)
		free, last = free+1, i
		assert(free <= len(s.slots), "the free list has a loop")
	}
	assert(free == s.freeCount, "%d free slots are counted as %d", free, s.freeCount)
}

func (s *Space) slotMustHold(i uint32) {
	sl := &s.slots[i]
	owner, indexed := s.index.find(sl.key)
	indexed = indexed && owner == i
	switch sl.state {
	case Free:
		assert(sl.pins == 0 && sl.users == 0, "free slot %d has %d pins, users %b", i, sl.pins, sl.users)
		assert(!indexed || sl.generation == 0, "free slot %d is indexed", i)
	case Assembling:
		assert(sl.pins == 0 && sl.users == ranks && indexed, "assembling slot %d has %d pins, users %b, indexed %t", i, sl.pins, sl.users, indexed)
	case Filling:
		assert(sl.pins == 0 && sl.users == reader && indexed, "filling slot %d has %d pins, users %b, indexed %t", i, sl.pins, sl.users, indexed)
	case Sealing:
		assert(sl.pins == 0 && sl.users == hasher && indexed, "sealing slot %d has %d pins, users %b, indexed %t", i, sl.pins, sl.users, indexed)
	case Ready:
		assert(sl.users&^writer == 0 && indexed, "ready slot %d has users %b, indexed %t", i, sl.users, indexed)
	case Draining:
		assert(!indexed, "draining slot %d is indexed", i)
	}
	assert(sl.backed || sl.state == Free, "slot %d is %s and has no memory", i, sl.state)
	if sl.queue != unqueued {
		assert(sl.state == Ready && sl.pins == 0 && sl.users == 0, "slot %d may be evicted as it is %s with %d pins", i, sl.state, sl.pins)
		assert(s.queues[sl.queue].order[sl.place] == i, "slot %d is lost in its queue", i)
		assert(sl.queue == cleanQueue || !s.index.isHeld(sl.key), "held slot %d may be evicted", i)
	}
	if i < uint32(len(s.table.words)) {
		assert(s.table.Check(Ref{i, sl.generation}, sl.state), "the table has another state than slot %d", i)
	}
}

// mustBePadded panics when something was written between or after the rows.
func mustBePadded(l *chunk.Layout, b []byte) {
	padding(l, func(off, n int64) {
		for at, v := range b[off : off+n] {
			assert(v == 0, "padding at %d is written", off+int64(at))
		}
	})
}

func assert(ok bool, format string, args ...any) {
	if !ok {
		panic("invariant: " + fmt.Sprintf(format, args...))
	}
}
