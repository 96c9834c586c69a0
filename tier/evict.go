package tier

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
