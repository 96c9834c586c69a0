package tier

import (
	"slices"
	"time"

	"github.com/kvtier/kvtier/internal/chunk"
)

const (
	// ordinalStep is what a chunk is older than the one before it in the prefix.
	ordinalStep = int64(time.Microsecond)
	// longestPrefill bounds how old a new chunk may look because of its parent.
	longestPrefill = int64(10 * time.Minute)
)

// stampAt is the recency of the chunk with that ordinal, used at now.
func stampAt(now time.Time, ordinal uint32) int64 {
	return now.UnixNano() - int64(ordinal)*ordinalStep
}

// publishStamp is the recency of a new chunk. The chunks of one prefill come one
// after the other, and by the clock alone each would be newer than the one before:
// eviction would take the beginning of a prefix first and leave the rest useless.
// So a chunk is never newer than its parent. Needs mu.
func (s *Store) publishStamp(n *namespaceDir, parent chunk.Key, ordinal uint32) int64 {
	stamp := stampAt(s.useTime(), ordinal)
	if ordinal == 0 {
		return stamp
	}
	if p := n.index.find(parent); p != nil && !p.has(entryUnlinking) {
		stamp = max(min(stamp, p.stamp-ordinalStep), stamp-longestPrefill)
	}
	return stamp
}

// Touch notes that a chunk was used. Its mtime follows in the background, at most
// once in the touch interval, and for all chunks at close.
func (d *Disk) Touch(k chunk.Key, ordinal uint32) {
	s := d.s
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.useTime()
	if e := d.dir.index.find(k); d.good(e) {
		s.touchEntry(d.dir, e, s.uses.at(now, ordinal), ordinal)
	}
}

// useRun gives the chunks of a prefix that are touched one after the other the
// same time: each call is later than the one before it by more than ordinalStep,
// and by its own time each chunk would be newer than its parent.
type useRun struct {
	time, last time.Time
	ordinal    uint32
}

// runGap ends a run.
const runGap = 10 * time.Millisecond

func (r *useRun) at(now time.Time, ordinal uint32) time.Time {
	if ordinal <= r.ordinal || now.Sub(r.last) > runGap {
		r.time = now
	}
	r.ordinal, r.last = ordinal, now
	return r.time
}

// useTime is the clock of recency: that of the machine, but it never goes back. A
// chunk that is used after the clock was set back is newer than all before it. Needs
// mu.
func (s *Store) useTime() time.Time {
	now := s.now()
	if ns := now.UnixNano(); ns >= s.lastUse {
		s.lastUse = ns
		return now
	}
	s.lastUse += ordinalStep
	return time.Unix(0, s.lastUse)
}

// lateTouch is a hit on a chunk whose mtime was written not long ago.
type lateTouch struct {
	removal
	since int64 // Unix ns
}

// touchEntry notes a use. What is not due to be written becomes so without another
// use: a kill must not cost more than the hits of one touch interval. Needs mu.
func (s *Store) touchEntry(n *namespaceDir, e *diskEntry, used time.Time, ordinal uint32) {
	n.index.touch(e, stampAt(used, ordinal))
	e.flags |= entryTouched
	if e.has(entryInQueue) {
		return
	}
	e.flags |= entryInQueue
	now, r := s.now(), removal{n, e.key}
	if s.touchDue(now, time.Unix(int64(e.touched), 0)) {
		s.touches = append(s.touches, r)
	} else {
		s.late = append(s.late, lateTouch{r, now.UnixNano()})
	}
}

// touchDue is also for a clock that was set back.
func (s *Store) touchDue(now, since time.Time) bool {
	d := now.Sub(since)
	return d >= s.o.Touch || d < 0
}

// flushTouches writes the mtimes that are due; all: of every chunk whose mtime is
// behind, until the deadline.
func (s *Store) flushTouches(deadline time.Time, all bool) {
	s.mu.Lock()
	work := s.touches
	s.touches = nil
	now, due := s.now(), 0
	for due < len(s.late) && s.touchDue(now, time.Unix(0, s.late[due].since)) {
		work = append(work, s.late[due].removal)
		due++
	}
	s.late = slices.Delete(s.late, 0, due)
	dirs := s.dirs
	s.mu.Unlock()
	for i, w := range work {
		if !time.Now().Before(deadline) || !s.writeTouch(w) {
			s.mu.Lock()
			s.touches = append(work[i:], s.touches...)
			s.mu.Unlock()
			return
		}
	}
	if !all {
		return
	}
	for _, n := range dirs {
		for page := 0; ; page++ {
			var keys []chunk.Key
			s.mu.Lock()
			if page >= len(n.index.pages) {
				s.mu.Unlock()
				break
			}
			for i := range n.index.pages[page] {
				if e := &n.index.pages[page][i]; e.has(entryTouched) && !e.has(entryUnlinking) {
					keys = append(keys, e.key)
				}
			}
			s.mu.Unlock()
			for _, k := range keys {
				if !time.Now().Before(deadline) || !s.writeTouch(removal{n, k}) {
					return
				}
			}
		}
	}
}

// writeTouch sets one mtime; false when the disk is off, or goes off by it.
func (s *Store) writeTouch(w removal) bool {
	if !s.worth() || !s.own() {
		return false
	}
	s.mu.Lock()
	e := w.dir.index.find(w.key)
	if e == nil || e.has(entryUnlinking) || s.abandoned {
		s.mu.Unlock()
		return true
	}
	e.flags &^= entryTouched | entryInQueue
	e.touched = uint32(s.now().Unix())
	stamp := e.stamp
	s.mu.Unlock()
	if err := s.fs.SetModified(w.dir.filePath(w.key), stamp); err != nil {
		if absent(err) { // that it has vanished is for the next read to find
			return true
		}
		s.mu.Lock()
		if e := w.dir.index.find(w.key); e != nil {
			e.flags |= entryTouched // for the next use, or for Close
		}
		s.mu.Unlock()
		s.diskError("touch "+chunk.FileName(w.key), err)
		return s.ok()
	}
	s.count.add(&s.count.touched, 1)
	return true
}

// watch brings the tier back after its off time and notices reads that hang. It
// makes no system call on the disk, so it cannot hang itself.
func (s *Store) watch() {
	tick := time.NewTicker(s.o.Tick)
	defer tick.Stop()
	for {
		select {
		case <-s.stopTick:
			return
		case <-tick.C:
		}
		if s.lanes.stuck(s.breaker.o.Stuck) {
			if why := s.breaker.stuck(s.now()); why != "" {
				s.tripped(why)
			}
		}
		if s.breaker.tick(s.now()) {
			s.log.Info("disk tier is on again", "root", s.root.path)
		}
		s.mu.Lock()
		s.removals = append(s.removals, s.failed...)
		s.failed = nil
		s.starved = false
		if s.ok() {
			s.retryScan()
		}
		s.changed.Broadcast()
		s.mu.Unlock()
	}
}

// keep does what has to touch the disk now and then.
func (s *Store) keep() {
	tick := time.NewTicker(s.o.Tick)
	defer tick.Stop()
	for {
		select {
		case <-s.stopTick:
			return
		case <-tick.C:
		}
		if s.breaker.isAway() {
			s.comeBack()
			continue
		}
		if !s.own() || !s.ok() {
			continue
		}
		s.lookForRoom()
		s.lookAtFree()
		s.dropLeftovers()
		s.flushTouches(time.Now().Add(s.o.Tick), false)
	}
}

// lookAtFree refreshes what is free on the file system.
func (s *Store) lookAtFree() {
	if s.o.FreeFloorBytes <= 0 {
		return
	}
	fs, err := s.fs.Statfs(s.root.path)
	if err != nil {
		s.diskError("statfs", err)
		return
	}
	s.mu.Lock()
	s.budget.avail = fs.AvailBytes
	s.changed.Broadcast()
	s.mu.Unlock()
}
