package tier

import (
	"cmp"
	"slices"
)

// aheadFile was adopted with an mtime in the future: the clock was set back since its
// last use. It is no newer than what is used from now on, but its place among others of
// its kind is to be kept, and that is known only when all have been seen.
type aheadFile struct {
	removal
	mtime int64 // Unix ns
	stamp int64 // that it has until then
}

// placeBatch is how many are placed under one lock.
const placeBatch = 1024

// placeAhead says whether files wait for their place, and sees to it that they get it.
// Needs mu.
func (s *Store) placeAhead() (waiting bool) {
	if len(s.ahead) > 0 && !s.placing {
		s.placing = true
		s.spawn("disk recency", s.place)
	}
	return s.placing
}

// place gives the files their recency: in the order of their mtimes, next to each other
// just before the opening, after all that was used before the clock went wrong and
// before all that is used since. The new times go to disk too, for at the next start the
// old ones would be ahead of what was used meanwhile; the oldest first, so that the
// order is right on disk at every moment.
func (s *Store) place() {
	s.mu.Lock()
	work := s.ahead
	s.ahead = nil
	s.mu.Unlock()
	slices.SortStableFunc(work, func(a, b aheadFile) int { return cmp.Compare(a.mtime, b.mtime) })
	for first := 0; first < len(work); first += placeBatch {
		s.mu.Lock()
		for i := first; i < min(first+placeBatch, len(work)); i++ {
			w := &work[i]
			e := w.dir.index.find(w.key)
			if e == nil || e.stamp != w.stamp || e.has(entryTouched|entryUnlinking) { // used or replaced meanwhile
				continue
			}
			w.dir.index.restamp(e, s.opened-int64(len(work)-1-i))
			if !e.has(entryLinked) { // else it is somebody else's, too
				e.flags |= entryTouched | entryInQueue
				s.touches = append(s.touches, w.removal)
			}
		}
		ending := s.ending
		s.mu.Unlock()
		if ending {
			break
		}
	}
	s.mu.Lock()
	s.placing = false
	if !s.ending {
		s.checkKnown()
	}
	s.mu.Unlock()
}

// restamp sets the recency of an entry, which may become older by it.
func (x *diskIndex) restamp(e *diskEntry, stamp int64) {
	x.unqueue(e)
	e.stamp = stamp
	x.settle(e)
}
