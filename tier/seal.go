package tier

import (
	"encoding/binary"
	"errors"
	"runtime"
	"slices"
	"time"

	"github.com/zeebo/xxh3"
)

// hashPiece bounds what is hashed between two chances for the scheduler and the
// stop flag: assembly cannot be preempted.
const hashPiece = 1 << 20

// Seal notes that all parts are in: nobody writes the slot any more. A worker hashes
// it, then it is READY and Settled is called. Mu is held.
func (s *Space) Seal(r Ref) error {
	if s.off != nil {
		return s.off
	}
	if err := s.change(r, complete); err != nil {
		s.note(err)
		return err
	}
	s.sealing = append(s.sealing, r)
	wake(s.sealWake)
	return nil
}

// hashLoop is a worker: it hashes complete chunks until the Space is closed.
func (s *Space) hashLoop() {
	for {
		r, ok := s.nextSeal()
		if ok {
			hash, done := s.hash(r.Slot)
			s.sealed(r, hash, done)
			continue
		}
		select {
		case <-s.stop:
			return
		case <-s.sealWake:
		}
	}
}

// nextSeal takes the longest waiting chunk. Chunks that were removed meanwhile are
// let go unhashed.
func (s *Space) nextSeal() (Ref, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.sealing) > 0 && !s.stopped.Load() {
		r := s.sealing[0]
		s.sealing = s.sealing[1:]
		if s.slots[r.Slot].state != Sealing {
			s.leave(r.Slot, hasher)
			continue
		}
		if len(s.sealing) > 0 {
			wake(s.sealWake) // for the next worker
		}
		return r, true
	}
	return Ref{}, false
}

// hash computes what chunk.HashPayload does, in pieces; not done when the Space is
// being closed. No lock is held: nobody writes a SEALING slot.
func (s *Space) hash(i uint32) (sum [16]byte, done bool) {
	b := s.bytes(i)
	if invariants {
		mustBePadded(s.layout, b)
	}
	h := xxh3.New()
	for len(b) > 0 {
		if s.stopped.Load() {
			return sum, false
		}
		n := min(len(b), hashPiece)
		_, _ = h.Write(b[:n]) // a hash takes everything
		b = b[n:]
		runtime.Gosched()
	}
	u := h.Sum128()
	binary.LittleEndian.PutUint64(sum[:], u.Lo)
	binary.LittleEndian.PutUint64(sum[8:], u.Hi)
	return sum, true
}

// sealed ends SEALING: the chunk is visible, and after those who wait for it were
// told it is offered to the disk tier.
func (s *Space) sealed(r Ref, hash [16]byte, done bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sl := &s.slots[r.Slot]
	if !done && sl.state == Sealing {
		s.must(s.change(r, removed))
		s.settle(r, ErrSpaceOff)
	}
	if sl.state == Draining {
		s.leave(r.Slot, hasher)
		return
	}
	sl.hash, sl.durability = hash, dirty
	s.must(s.change(r, hashed))
	s.stats.Sealed++
	s.settle(r, nil)
	// Settled may have removed it.
	if sl.generation == r.Generation && sl.state == Ready {
		s.enqueue(r)
	}
}

// offer queues a dirty chunk for disk and says whether there is nothing left to do for
// it. The write keeps the slot from being evicted until it has ended.
func (s *Space) offer(i uint32) bool {
	sl := &s.slots[i]
	if s.disk == nil || sl.noDisk || s.off != nil {
		return true
	}
	if s.disk.Has(sl.key) { // left the arena once, and was computed again
		s.setDurability(i, clean)
		return true
	}
	r := Ref{i, sl.generation}
	sl.users |= writer
	s.requeue(i)
	queued := s.disk.Write(WriteJob{
		Key: sl.key, Parent: sl.parent, Ordinal: sl.ordinal, Payload: s.bytes(i), Hash: sl.hash,
		Done: func(err error) { s.written(r, err) },
	})
	if !queued {
		s.leave(i, writer)
		return s.disk.Newer(sl.key) // else those behind it would wait for ever
	}
	s.inflight++
	s.writing++
	return true
}

// enqueue offers a chunk to the disk tier behind those that wait already. Its queue is
// bounded, and a burst of stores is faster than a disk: what is not taken is offered
// again when a write ends, or after a while. Until then it may be evicted like any other
// dirty chunk.
func (s *Space) enqueue(r Ref) {
	if len(s.backlog) >= len(s.slots) {
		s.backlog = slices.DeleteFunc(s.backlog, func(r Ref) bool { return !s.unwritten(r) })
	}
	s.backlog = append(s.backlog, r)
	s.offerBacklog()
	if len(s.backlog) > 0 {
		s.stats.WritesPostponed++
	}
}

// unwritten says whether a waiting chunk still is in DRAM only.
func (s *Space) unwritten(r Ref) bool {
	sl := &s.slots[r.Slot]
	return sl.generation == r.Generation && sl.state == Ready && sl.durability == dirty && sl.users&writer == 0
}

// offerBacklog offers waiting chunks, oldest first, until one is not taken.
func (s *Space) offerBacklog() {
	for len(s.backlog) > 0 {
		if r := s.backlog[0]; s.unwritten(r) && (s.noRoom || !s.offer(r.Slot)) {
			s.offerLater()
			return
		}
		s.backlog = s.backlog[1:]
	}
	s.backlog = nil
}

// offerLater offers the backlog again after a while when no write is under way whose end
// would do it: a disk that was full or switched off tells nobody that it takes chunks.
func (s *Space) offerLater() {
	if s.writing > 0 || s.waiting || s.stopped.Load() {
		return
	}
	s.waiting = true
	time.AfterFunc(offerAgain, func() {
		defer s.guard("a late offer to the disk tier")
		s.mu.Lock()
		defer s.mu.Unlock()
		s.waiting, s.noRoom = false, false
		if !s.stopped.Load() {
			s.offerBacklog()
		}
	})
}

// offerAgain is how long a backlog rests that the disk tier does not take.
const offerAgain = time.Second

// Draining offers what waits for disk and says whether waiting brings more of it there.
// It does not while the disk tier takes nothing, whether switched off or full.
func (s *Space) Draining() bool {
	s.offerBacklog()
	return s.counts[Sealing] > 0 || len(s.backlog) > 0 && s.writing > 0
}

// written is called once on a lane of the disk tier when a write has ended. A chunk that
// found no room, or a tier that was switched off, waits as one does that was not taken.
func (s *Space) written(r Ref, err error) {
	defer s.guard("the end of a disk write")
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended()
	s.writing--
	sl := &s.slots[r.Slot]
	switch {
	case err != nil:
		s.stats.WriteErrors++
	case sl.state == Ready: // else it was removed, and the disk tier told so
		s.setDurability(r.Slot, clean)
	}
	s.leave(r.Slot, writer)
	if s.noRoom = errors.Is(err, ErrNoRoom); postponed(err) && s.unwritten(r) {
		s.backlog = append(s.backlog, r)
	}
	s.offerBacklog()
}

func (s *Space) setDurability(i uint32, d durability) {
	if sl := &s.slots[i]; sl.durability != d {
		sl.durability = d
		if d == dirty {
			s.dirty++
		} else {
			s.dirty--
		}
		s.requeue(i)
	}
}
