package tier

import (
	"errors"
)

// own says whether the path of the root leads to the directory that this process has
// locked. It is asked before each call that makes, changes or removes something there,
// and before a name that is not found is taken for a file that is gone: when the file
// system was unmounted, the path leads to somebody else's files or to nothing. mu must
// not be held.
func (s *Store) own() bool {
	if s.root.StillLocked() {
		return true
	}
	s.lost()
	return false
}

// lost switches the tier off because the root is not at its path: for good, or until
// it is there again.
func (s *Store) lost() {
	s.presence.Lock()
	defer s.presence.Unlock()
	switch s.root.Place() {
	case InPlace: // by now
		return
	case Gone:
		s.broken(errLostRoot)
		return
	}
	if !s.breaker.leave() {
		return
	}
	s.mu.Lock()
	s.rescan() // from here on: what is removed now may be a file that nobody knows
	s.mu.Unlock()
	s.log.Warn("disk tier is off, its root is not at its path any more: mount the same file system there again and the tier comes back by itself, or restart with another path",
		"root", s.root.path, "found", s.root.found())
	s.refuseQueued(ErrOff)
}

// comeBack switches the tier on again once the root is where it was and still this
// process's own. Anything may have happened to the files: they are counted anew, and
// until that is done nothing is written.
func (s *Store) comeBack() {
	switch s.root.Place() {
	case Away:
		return
	case Gone:
		s.broken(errLostRoot)
		return
	}
	// Writes that were cut off have to end first. What they could not remove is
	// recognized by its number.
	if _, writes := s.lanes.depth(); writes > 0 {
		return
	}
	switch ours, err := s.root.confirmLock(); {
	case err != nil:
		s.count.inc(s.count.errors, errnoName(err))
		return
	case !ours:
		s.broken(errLockTaken)
		return
	}
	s.opening.Lock()
	defer s.opening.Unlock()
	fs, err := s.fs.Statfs(s.root.path)
	if err = errors.Join(err, s.list()); err != nil {
		s.count.inc(s.count.errors, errnoName(err))
		return // again at the next tick
	}
	s.presence.Lock()
	defer s.presence.Unlock()
	if s.root.Place() != InPlace {
		return
	}
	s.deadTemps.Store(s.temps.Load())
	s.lanes.shut()
	s.mu.Lock()
	s.budget.avail = fs.AvailBytes
	s.mu.Unlock()
	s.breaker.comeBack(s.now())
	s.startScan()
	s.mu.Lock()
	s.changed.Broadcast()
	s.mu.Unlock()
	s.log.Info("disk tier is on again, its root is back at its path; the files are counted anew", "root", s.root.path)
}
