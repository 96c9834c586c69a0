package shm

// A member counts, in a word of its own, the copies between its pages and slots that
// are under way. It counts one before it looks whether the slot is still meant for it;
// the leader takes a slot back first and looks at the count then. So a count of 0 says
// that nobody there touches a slot that was taken back, now or later, although the
// member has not answered.

// BeginCopy counts a copy. Close must not come before its EndCopy.
func (c *RingClient) BeginCopy() { c.copies.Add(1) }

// EndCopy ends one BeginCopy.
func (c *RingClient) EndCopy() { c.copies.Add(^uint32(0)) }

// Copying says whether a copy of the member is under way, as far as is known: true
// once the ring is closed.
func (s *RingServer) Copying() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.shutDown || s.copies.Load() != 0
}
