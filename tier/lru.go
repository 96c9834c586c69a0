package tier

// queueKind says in which eviction queue a slot stands.
type queueKind uint8

const (
	unqueued queueKind = iota // not to be evicted: in use, or the only copy of a held chunk
	cleanQueue
	dirtyQueue
	queueKinds
)

// evictionQueue orders the slots that may be evicted, oldest first, by slot number
// only. It is a heap and no list: the chunks of a prefix are touched from its start
// to its end but leave the other way round (a chunk without its predecessors is
// useless), and a slot returns to the place of its last touch when it is unpinned.
// Both mean inserting in the middle, where a list would have to walk.
type evictionQueue struct {
	kind  queueKind
	order []uint32
}

func (q *evictionQueue) add(slots []slot, i uint32) {
	q.order = append(q.order, i)
	slots[i].queue, slots[i].place = q.kind, uint32(len(q.order)-1)
	q.up(slots, len(q.order)-1)
}

func (q *evictionQueue) remove(slots []slot, i uint32) {
	at, last := int(slots[i].place), len(q.order)-1
	q.put(slots, at, q.order[last])
	q.order = q.order[:last]
	slots[i].queue, slots[i].place = unqueued, none
	if at < last {
		q.moved(slots, at)
	}
}

// moved restores the order after the slot at this place got another recency.
func (q *evictionQueue) moved(slots []slot, at int) {
	q.down(slots, q.up(slots, at))
}

func (q *evictionQueue) put(slots []slot, at int, i uint32) {
	q.order[at] = i
	slots[i].place = uint32(at)
}

// older says who goes first. Equal recency: the higher ordinal.
func older(a, b *slot) bool {
	if a.recency != b.recency {
		return a.recency < b.recency
	}
	return a.ordinal > b.ordinal
}

func (q *evictionQueue) up(slots []slot, at int) int {
	for at > 0 {
		parent := (at - 1) / 2
		if !older(&slots[q.order[at]], &slots[q.order[parent]]) {
			break
		}
		q.swap(slots, at, parent)
		at = parent
	}
	return at
}

func (q *evictionQueue) down(slots []slot, at int) {
	for {
		child := 2*at + 1
		if child >= len(q.order) {
			return
		}
		if right := child + 1; right < len(q.order) && older(&slots[q.order[right]], &slots[q.order[child]]) {
			child = right
		}
		if !older(&slots[q.order[child]], &slots[q.order[at]]) {
			return
		}
		q.swap(slots, at, child)
		at = child
	}
}

func (q *evictionQueue) swap(slots []slot, a, b int) {
	i, j := q.order[a], q.order[b]
	q.put(slots, a, j)
	q.put(slots, b, i)
}

// requeue puts a slot where it belongs after anything about it changed.
func (s *Space) requeue(i uint32) {
	sl := &s.slots[i]
	want := unqueued
	if sl.state == Ready && sl.pins == 0 && sl.users == 0 {
		if sl.durability == clean {
			want = cleanQueue
		} else if !s.index.isHeld(sl.key) {
			want = dirtyQueue
		}
	}
	if want == sl.queue {
		if want != unqueued {
			s.queues[want].moved(s.slots, int(sl.place))
		}
		return
	}
	if sl.queue != unqueued {
		s.queues[sl.queue].remove(s.slots, i)
	}
	if want != unqueued {
		s.queues[want].add(s.slots, i)
	}
}

// maxDemotions bounds how many chunks that have lost their file one eviction looks
// at. There are many only when the disk tier has just been switched off.
const maxDemotions = 64

// evict frees one slot: the oldest clean one, and if there is none and a dirty one
// may go too, the oldest of those. It reports whether it freed one.
func (s *Space) evict(alsoDirty bool) bool {
	for range maxDemotions {
		q := &s.queues[cleanQueue]
		if len(q.order) == 0 {
			break
		}
		i := q.order[0]
		if sl := &s.slots[i]; !s.onDisk(sl.key) {
			s.setDurability(i, dirty) // its file has been evicted or lost meanwhile
			continue
		}
		s.evictSlot(i)
		return true
	}
	q := &s.queues[dirtyQueue]
	if !alsoDirty || len(q.order) == 0 {
		return false
	}
	s.evictSlot(q.order[0])
	return true
}

// Evict gives up the slot of a chunk that is on disk as well, so that its next
// reader has it from there. It reports false for one that is in use, or that is
// nowhere else. Mu is held.
func (s *Space) Evict(r Ref) bool {
	if !s.is(r, Ready) {
		return false
	}
	if sl := &s.slots[r.Slot]; sl.pins > 0 || sl.users != 0 || sl.durability != clean || !s.onDisk(sl.key) {
		return false
	}
	s.evictSlot(r.Slot)
	return true
}

func (s *Space) evictSlot(i uint32) {
	sl := &s.slots[i]
	s.stats.Evicted++
	if sl.durability == dirty && !sl.noDisk && s.disk != nil {
		s.stats.EvictedDirty++ // it was meant to reach the disk
	}
	s.must(s.change(Ref{i, sl.generation}, evicted))
}
