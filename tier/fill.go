package tier

import (
	"fmt"

	"github.com/kvtier/kvtier/internal/chunk"
)

// Fill begins to bring a chunk from disk: its slot is FILLING until Settled is
// called for it. The key must not be in the arena (ErrKnown). Mu is held.
func (s *Space) Fill(k chunk.Key, ordinal uint32) (Ref, error) {
	if s.off != nil {
		return Ref{}, s.off
	}
	if s.disk == nil {
		return Ref{}, ErrMemoryOnly
	}
	if _, ok := s.index.find(k); ok {
		return Ref{}, fmt.Errorf("filling %s: %w", k, ErrKnown)
	}
	i, err := s.allocate()
	if err != nil {
		return Ref{}, err
	}
	r := s.begin(i, k, chunk.Key{}, ordinal, false, fetched)
	s.stats.Fills++
	s.inflight++
	s.disk.Read(k, s.bytes(i), func(res ReadResult) { s.filled(r, res) })
	return r, nil
}

// GiveUpFill ends the wait for a disk read: Settled is called with ErrGivenUp before
// this returns, and the slot drains until the read comes back. Nothing happens when
// the read has ended already. Mu is held.
func (s *Space) GiveUpFill(r Ref) {
	if s.note(s.change(r, givenUp)) {
		s.settle(r, ErrGivenUp)
	}
}

// filled is called once on a lane of the disk tier when a read has ended. Until the
// lock is taken the slot's bytes are still the read's own.
func (s *Space) filled(r Ref, res ReadResult) {
	defer s.guard("the end of a disk read")
	if res.Err != nil {
		s.scrub(r.Slot)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended()
	sl := &s.slots[r.Slot]
	if sl.state == Draining {
		s.leave(r.Slot, reader)
		return
	}
	if res.Err != nil {
		s.stats.FillErrors++
		s.must(s.change(r, unread))
		s.settle(r, res.Err)
		return
	}
	sl.hash, sl.ordinal, sl.parent = res.Hash, res.Ordinal, res.Parent
	sl.durability = clean
	s.must(s.change(r, verified))
	s.settle(r, nil)
}
