package tier

import (
	"cmp"
	"slices"

	"github.com/kvtier/kvtier/internal/chunk"
)

// SetDisk gives its Disk to a Space that was made with DiskLater, once. What is held is
// held there too, what was removed meanwhile is removed there, and chunks that are in
// DRAM only are offered, beginnings of prefixes first: recency on disk goes by parents.
// Mu is held.
func (s *Space) SetDisk(d *Disk) {
	if s.disk != nil || s.off != nil {
		return
	}
	for k, n := range s.index.held {
		for range n {
			d.Hold(k)
		}
	}
	for k := range s.removedEarly {
		d.Remove(k)
	}
	s.disk, s.diskLater, s.removedEarly = d, false, nil
	for i := range s.slots[:s.fresh] {
		if r := (Ref{uint32(i), s.slots[i].generation}); s.unwritten(r) {
			s.backlog = append(s.backlog, r)
		}
	}
	slices.SortFunc(s.backlog, func(a, b Ref) int {
		x, y := &s.slots[a.Slot], &s.slots[b.Slot]
		return cmp.Or(cmp.Compare(x.ordinal, y.ordinal), cmp.Compare(x.recency, y.recency))
	})
	s.offerBacklog()
}

// removeEarly notes a removal for a Disk that is to come.
func (s *Space) removeEarly(k chunk.Key) {
	if s.removedEarly == nil {
		s.removedEarly = make(map[chunk.Key]struct{})
	}
	s.removedEarly[k] = struct{}{}
}
