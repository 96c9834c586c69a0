package tier

import (
	"maps"
	"sync"
)

// StoreStats is what the disk tier has done since it was opened, and its state.
type StoreStats struct {
	State         string `json:"state"` // scanning, on, trial, off, dead
	BreakerTrips  uint64 `json:"breaker_trips"`
	CapBytes      int64  `json:"cap_bytes"`
	FloorBytes    int64  `json:"floor_bytes"`
	UsedBytes     int64  `json:"used_bytes"` // allocated, of all that is ours below the root
	ReservedBytes int64  `json:"reserved_bytes"`
	UnreadBytes   int64  `json:"unread_bytes"` // of UsedBytes, an estimate: what lies there and cannot be read now
	DirtyBytes    int64  `json:"dirty_bytes"`  // payload waiting to be written
	Known         bool   `json:"known"`        // UsedBytes is complete
	Direct        bool   `json:"direct"`       // direct I/O in use
	QueuedReads   int    `json:"queued_reads"`
	QueuedWrites  int    `json:"queued_writes"`
	QueuedUnlinks int    `json:"queued_unlinks"`

	Reads      uint64 `json:"reads"` // that gave a chunk
	ReadBytes  uint64 `json:"read_bytes"`
	Writes     uint64 `json:"writes"`
	WriteBytes uint64 `json:"write_bytes"`
	Present    uint64 `json:"present"` // puts of a chunk that was there or on its way
	Touched    uint64 `json:"touched"` // mtimes written
	Adopted    uint64 `json:"adopted"` // files of earlier sessions
	Swept      uint64 `json:"swept"`   // temp files of dead sessions removed
	Sidecars   uint64 `json:"sidecars_written"`
	Vanished   uint64 `json:"vanished"` // files that somebody else has removed
	Removed    uint64 `json:"removed"`
	Reread     uint64 `json:"reread"` // reads that were right only the second time

	EvictedSelf  uint64 `json:"evicted_self"`  // of the namespace that was written
	EvictedOther uint64 `json:"evicted_other"` // of another one

	Misses   map[string]uint64 `json:"misses"`   // reads without a chunk: absent, corrupt, newer, off, closed, io
	Rejected map[string]uint64 `json:"rejected"` // not adopted: name, path, type, links, size, newer
	Corrupt  map[string]uint64 `json:"corrupt"`  // proved: size, footer, magic, field, key, fingerprint, lengths, groups, payload
	Dropped  map[string]uint64 `json:"dropped"`  // chunks that will not be written: io, removed, newer, size, closed
	// Attempts that came too early: the chunk was not taken, or its write found no room
	// or a tier that went off: dirty (the queue is full), room, off, removed. The chunk
	// stays in DRAM and is offered again, so one chunk may count often; what is evicted
	// before its turn counts in the arena, as evicted_dirty.
	Postponed map[string]uint64 `json:"postponed"`
	Errors    map[string]uint64 `json:"errors"` // by errno

	Namespaces []NamespaceStats `json:"namespaces"`
}

// NamespaceStats is one directory below the root.
type NamespaceStats struct {
	Name    string `json:"name"`
	Files   int    `json:"files"`
	Bytes   int64  `json:"bytes"`
	InUse   bool   `json:"in_use"`
	Scanned bool   `json:"scanned"`
}

// diskCounters only grow. Their lock is held for one addition and comes after every
// other one.
type diskCounters struct {
	mu                                                    sync.Mutex
	reads, readBytes, writes, writeBytes                  uint64
	present, touched, adopted, swept, sidecars            uint64
	vanished, removed, reread, evictedSelf, evictedOther  uint64
	misses, rejected, corrupt, dropped, postponed, errors map[string]uint64
}

func newDiskCounters() *diskCounters {
	return &diskCounters{
		misses: map[string]uint64{}, rejected: map[string]uint64{}, corrupt: map[string]uint64{},
		dropped: map[string]uint64{}, postponed: map[string]uint64{}, errors: map[string]uint64{},
	}
}

func (c *diskCounters) add(field *uint64, n uint64) {
	c.mu.Lock()
	*field += n
	c.mu.Unlock()
}

func (c *diskCounters) inc(m map[string]uint64, why string) {
	c.mu.Lock()
	m[why]++
	c.mu.Unlock()
}

// Stats gives a copy.
func (s *Store) Stats() StoreStats {
	state, trips := s.breaker.state()
	c := s.count
	c.mu.Lock()
	st := StoreStats{
		BreakerTrips: trips, Direct: s.direct.Load(),
		Reads: c.reads, ReadBytes: c.readBytes, Writes: c.writes, WriteBytes: c.writeBytes,
		Present: c.present, Touched: c.touched, Adopted: c.adopted, Swept: c.swept, Sidecars: c.sidecars,
		Vanished: c.vanished, Removed: c.removed, Reread: c.reread,
		EvictedSelf: c.evictedSelf, EvictedOther: c.evictedOther,
		Misses: maps.Clone(c.misses), Rejected: maps.Clone(c.rejected), Corrupt: maps.Clone(c.corrupt),
		Dropped: maps.Clone(c.dropped), Postponed: maps.Clone(c.postponed), Errors: maps.Clone(c.errors),
	}
	c.mu.Unlock()
	st.QueuedReads, st.QueuedWrites = s.lanes.depth()
	s.mu.Lock()
	defer s.mu.Unlock()
	b := &s.budget
	st.CapBytes, st.FloorBytes, st.UsedBytes, st.ReservedBytes, st.Known = b.limit, b.floor, b.used, b.reserved, b.known
	st.DirtyBytes = s.dirty
	st.QueuedUnlinks = len(s.removals) + len(s.failed)
	if s.unlinking {
		st.QueuedUnlinks++
	}
	if st.State = state; state == "on" && !b.known {
		st.State = "scanning"
	}
	for _, n := range s.dirs {
		for _, g := range n.gaps {
			st.UnreadBytes += g.bytes
		}
		st.Namespaces = append(st.Namespaces, NamespaceStats{
			Name: n.name, Files: len(n.index.byKey), Bytes: n.index.bytes, InUse: n.disk != nil, Scanned: n.scanned(),
		})
	}
	return st
}
