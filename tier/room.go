package tier

import (
	"errors"
	"syscall"
	"time"
)

const (
	// roomWait bounds how long a write waits for eviction to make room.
	roomWait = 5 * time.Second
	// fullPause is how long nothing is written after the file system was full and
	// eviction did not help; doubling up to maxFullPause, for each try costs a chunk
	// that is evicted in vain.
	fullPause    = time.Second
	maxFullPause = time.Minute
)

// room says whether a write is worth a try after one has found no room. The zero
// value: it is. Guarded by Store.mu.
type room struct {
	lacking bool      // the last write found none: one at a time is tried
	full    bool      // it was the file system that had none, and the log says so
	until   time.Time // nothing is tried before
	pause   time.Duration
	enough  int64 // free on the file system, at which the pause ends early; 0: unknown
}

// refuses says whether a write is not to be tried now; dirty: what is being written.
func (r *room) refuses(now time.Time, dirty int64) bool {
	return r.lacking && (now.Before(r.until) || dirty > 0)
}

// pausing reports that the file system was full a moment ago.
func (s *Store) pausing() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now().Before(s.room.until)
}

// noRoom notes that a write has found no room within the cap and above the floor.
func (s *Store) noRoom(err error) {
	if errors.Is(err, ErrNoRoom) {
		s.mu.Lock()
		s.room.lacking = true
		s.mu.Unlock()
	}
}

// full notes that the file system has no room of that many bytes, and says so once
// until a write succeeds.
func (s *Store) full(need int64, err error) {
	fs, ferr := s.fs.Statfs(s.root.path)
	s.mu.Lock()
	r := &s.room
	said := r.full
	r.lacking, r.full = true, true
	r.pause = min(max(2*r.pause, fullPause), maxFullPause)
	r.until = s.now().Add(r.pause)
	if r.enough = 0; ferr == nil && !errors.Is(err, syscall.EDQUOT) { // of a quota it tells nothing
		r.enough = fs.AvailBytes + need
	}
	s.mu.Unlock()
	if !said {
		s.log.Warn("file system of the disk tier is full, chunks wait in DRAM and are lost when they are evicted there", "root", s.root.path, "cause", err)
	}
}

// lookForRoom ends the pause of a full file system when somebody has freed something.
func (s *Store) lookForRoom() {
	s.mu.Lock()
	enough := s.room.enough
	waits := s.room.full && enough > 0 && s.now().Before(s.room.until)
	s.mu.Unlock()
	if !waits {
		return
	}
	fs, err := s.fs.Statfs(s.root.path)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil && fs.AvailBytes >= enough {
		s.room.until = time.Time{}
	}
}

// reserve takes bytes of the budget, waiting for eviction if it must.
func (s *Store) reserve(n *namespaceDir, bytes int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.writing = n
	s.budget.wanted += bytes
	s.starved = false
	s.changed.Broadcast()
	got := false
	s.waitLocked(roomWait, func() bool {
		got = s.budget.reserve(bytes)
		return got || s.starved || s.ending || !s.ok()
	})
	s.budget.wanted -= bytes
	s.changed.Broadcast()
	switch {
	case got:
		return nil
	case !s.ok():
		return ErrOff
	case s.ending:
		return ErrClosed
	}
	return ErrNoRoom
}

// makeRoom has eviction free bytes because the file system is full, whatever the
// budget says.
func (s *Store) makeRoom(bytes int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.budget.owed += bytes
	s.starved = false
	s.changed.Broadcast()
	s.waitLocked(roomWait, func() bool {
		return s.budget.owed <= 0 || s.starved || s.ending || !s.ok()
	})
}

// waitLocked waits for cond, at most for d. Needs mu.
func (s *Store) waitLocked(d time.Duration, cond func() bool) {
	deadline := time.Now().Add(d)
	alarm := time.AfterFunc(d, func() {
		s.mu.Lock()
		s.changed.Broadcast()
		s.mu.Unlock()
	})
	defer alarm.Stop()
	for !cond() && time.Now().Before(deadline) {
		s.changed.Wait()
	}
}
