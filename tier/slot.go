package tier

import (
	"fmt"

	"github.com/kvtier/kvtier/internal/chunk"
)

// Ref names one use of a slot. The zero Ref names nothing: generations begin at 1.
type Ref struct{ Slot, Generation uint32 }

// State is what a slot is used for. The numbers are those of the slot table.
type State uint32

const (
	Free       State = iota // nobody's; its bytes are whatever its last use left
	Assembling              // ranks copy their parts in
	Filling                 // the disk tier reads into it
	Sealing                 // complete, a worker hashes it; not visible yet
	Ready                   // verified and immutable
	Draining                // unindexed; somebody may still touch its bytes
	stateCount
)

var stateNames = [stateCount]string{"free", "assembling", "filling", "sealing", "ready", "draining"}

func (s State) String() string {
	if s >= stateCount {
		return fmt.Sprintf("state %d", uint32(s))
	}
	return stateNames[s]
}

// event is what makes a slot change its state.
type event uint8

const (
	granted  event = iota // a store begins
	fetched               // a disk read begins
	complete              // the last expected part is in
	dropped               // deadline, abort, member gone
	removed               // its key is to be forgotten
	hashed                // the worker has the hash
	verified              // the disk read ended well
	unread                // the disk read failed
	givenUp               // the disk read is not waited for any longer
	evicted               // its room is needed
	drained               // nobody can touch its bytes any more
	eventCount
)

var eventNames = [eventCount]string{"granted", "fetched", "complete", "dropped", "removed", "hashed", "verified", "unread", "given up", "evicted", "drained"}

func (e event) String() string { return eventNames[e] }

// users are those, besides pins, who may touch a slot's bytes.
type users uint8

const (
	ranks  users = 1 << iota // write their parts
	hasher                   // reads
	reader                   // a disk read, writes
	writer                   // a disk write, reads
)

// step is one line of the state machine: where it leads, who begins to use the
// bytes and who has ended.
type step struct {
	to          State
	enter, exit users
	legal       bool
}

// steps is the state machine of formats.md, section 5.
var steps = [stateCount][eventCount]step{
	Free: {
		granted: {to: Assembling, enter: ranks, legal: true},
		fetched: {to: Filling, enter: reader, legal: true},
	},
	Assembling: {
		complete: {to: Sealing, enter: hasher, exit: ranks, legal: true},
		dropped:  {to: Draining, legal: true},
		removed:  {to: Draining, legal: true},
	},
	Filling: {
		verified: {to: Ready, exit: reader, legal: true},
		unread:   {to: Free, exit: reader, legal: true},
		givenUp:  {to: Draining, legal: true},
		removed:  {to: Draining, legal: true},
	},
	Sealing: {
		hashed:  {to: Ready, exit: hasher, legal: true},
		removed: {to: Draining, legal: true},
	},
	Ready: {
		evicted: {to: Free, legal: true},
		removed: {to: Draining, legal: true},
	},
	Draining: {
		drained: {to: Free, legal: true},
	},
}

// durability says where else a READY chunk is.
type durability uint8

const (
	dirty durability = iota // only here: not written yet, dropped from the write queue, or never to be written
	clean                   // on disk when last looked
)

// slot is what the leader knows of one slot, without pointers: the garbage
// collector does not look into the table of them. Guarded by Space.mu.
type slot struct {
	key, parent chunk.Key
	hash        [16]byte // of a READY slot
	recency     int64    // microseconds; see Space.stamp
	ordinal     uint32
	generation  uint32
	pins        uint32 // (member, operation) and (lease) pins
	next        uint32 // in the list of free slots
	place       uint32 // in its queue
	state       State
	users       users
	durability  durability
	queue       queueKind
	noDisk      bool // must never be written to disk
	backed      bool // its pages are allocated
}

// none ends a list and marks a missing slot.
const none = ^uint32(0)

// change is the only place where a slot changes its state. It checks the reference
// and the transition, keeps index, queues, counts and the shared table in step, and
// leaves the slot as it was when it returns an error. Becoming FREE needs that
// nobody uses the bytes any more.
//
// The caller sets key, parent and ordinal before a transition out of FREE.
func (s *Space) change(r Ref, e event) error {
	if r.Slot >= uint32(len(s.slots)) || s.slots[r.Slot].generation != r.Generation {
		return fmt.Errorf("slot %d generation %d: %s: %w", r.Slot, r.Generation, e, ErrStale)
	}
	sl := &s.slots[r.Slot]
	from, st := sl.state, steps[sl.state][e]
	if !st.legal {
		return fmt.Errorf("slot %d is %s: %s: %w", r.Slot, from, e, ErrTransition)
	}
	left := sl.users&^st.exit | st.enter
	if st.to == Free && (left != 0 || sl.pins != 0) {
		return fmt.Errorf("slot %d is in use: %s: %w", r.Slot, e, ErrTransition)
	}
	sl.users, sl.state = left, st.to
	s.counts[from]--
	s.counts[st.to]++
	if sl.durability == dirty {
		if from == Ready {
			s.dirty--
		} else if st.to == Ready {
			s.dirty++
		}
	}
	switch {
	case st.to == Free:
		if from != Draining {
			s.index.remove(sl.key)
		}
		sl.generation = nextGeneration(sl.generation)
	case st.to == Draining:
		s.index.remove(sl.key)
	case from == Free:
		s.index.add(sl.key, r.Slot)
	}
	s.table.set(r.Slot, sl.generation, sl.state)
	s.requeue(r.Slot)
	if st.to == Free {
		s.pushFree(r.Slot)
	}
	if invariants {
		s.mustHold(r.Slot)
	}
	return nil
}

// nextGeneration skips 0, so that the zero Ref stays invalid.
func nextGeneration(g uint32) uint32 {
	if g++; g == 0 {
		g = 1
	}
	return g
}

// leave notes that u has stopped using the bytes of a slot, and frees it if it was
// the last one a DRAINING slot waited for. In every other state only a disk write
// ends this way.
func (s *Space) leave(i uint32, u users) {
	s.slots[i].users &^= u
	if s.slots[i].state == Draining {
		s.free(i)
	} else {
		s.requeue(i)
	}
}

// free ends DRAINING once nobody uses the bytes.
func (s *Space) free(i uint32) {
	if sl := &s.slots[i]; sl.users == 0 && sl.pins == 0 {
		s.must(s.change(Ref{i, sl.generation}, drained))
	}
}

// must is for transitions that cannot fail: that they do is a bug of this package,
// and whoever runs this goroutine switches the Space off.
func (s *Space) must(err error) {
	if err != nil {
		panic(err)
	}
}
