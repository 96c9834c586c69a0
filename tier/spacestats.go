package tier

// SpaceStats are the figures of one namespace's arena; counters since it was opened.
type SpaceStats struct {
	Slots     int           `json:"slots"`           // the arena's final number of slots
	SlotBytes int64         `json:"slot_bytes"`      // P
	Backed    int64         `json:"allocated_bytes"` // of memory
	States    map[State]int `json:"-"`               // slots; Free includes those that have no memory yet
	Available int           `json:"available"`       // see Space.Available
	Dirty     int           `json:"dirty"`           // READY chunks that are nowhere else
	Writing   int           `json:"writing"`         // of these, how many the disk tier is to write
	Limit     string        `json:"limit"`           // what keeps the arena from growing; empty: nothing
	Off       string        `json:"off"`             // why the namespace is switched off; empty: it is not

	Grants          uint64 `json:"grants"`   // slots given to stores
	Fills           uint64 `json:"fills"`    // and to reads
	Declined        uint64 `json:"declined"` // not given for want of one
	Sealed          uint64 `json:"sealed"`
	FillErrors      uint64 `json:"fill_errors"`
	Evicted         uint64 `json:"evicted"`
	EvictedDirty    uint64 `json:"evicted_dirty"`    // of these: lost although meant for disk
	Backlog         int    `json:"backlog"`          // chunks that wait for room in the queue to disk
	WritesPostponed uint64 `json:"writes_postponed"` // not taken at once by the disk tier
	WriteErrors     uint64 `json:"write_errors"`
	Stale           uint64 `json:"stale"` // events for a slot that was something else by then
}

// Available is how many slots could be given: free, evictable, and still to come
// within the budget.
func (s *Space) Available() int {
	n := s.freeCount + s.growing + len(s.queues[cleanQueue].order) + len(s.queues[dirtyQueue].order)
	if more := s.unbacked(); more > 0 && !s.now().Before(s.stalledUntil) {
		n += int(min(int64(more), max(0, s.pool.room(s)/s.slotBytes)))
	}
	return n
}

// Vacant says whether no group is attached and nothing is here that anybody could find,
// holds, or still touches.
func (s *Space) Vacant() bool {
	return !s.attached.Load() && len(s.index.slots) == 0 && len(s.index.held) == 0 && s.counts[Free] == len(s.slots)
}

// Counts is how many slots are in each state.
func (s *Space) Counts() map[State]int {
	counts := make(map[State]int, stateCount)
	for state, n := range s.counts {
		counts[State(state)] = n
	}
	return counts
}

// Stats is a copy of the present figures.
func (s *Space) Stats() SpaceStats {
	st := s.stats
	st.Slots, st.SlotBytes, st.Backed = len(s.slots), s.slotBytes, s.backedBytes.Load()
	st.States, st.Available = s.Counts(), s.Available()
	st.Dirty, st.Writing, st.Backlog = s.dirty, s.writing, len(s.backlog)
	return st
}
