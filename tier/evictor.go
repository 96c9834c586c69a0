package tier

import (
	"path/filepath"

	"github.com/kvtier/kvtier/internal/chunk"
)

// evict unlinks what was removed and, ahead of need, what is oldest.
func (s *Store) evict() {
	for {
		s.mu.Lock()
		s.unlinking = false
		victim, evicted, ok := s.nextVictim()
		for !ok && !s.ending {
			s.changed.Wait()
			victim, evicted, ok = s.nextVictim()
		}
		s.unlinking = ok
		s.mu.Unlock()
		if !ok {
			return
		}
		s.unlinkEntry(victim, evicted)
	}
}

// nextVictim chooses the file to be unlinked next and makes its entry unknown.
// evicted tells an eviction from a removal. Needs mu.
func (s *Store) nextVictim() (v removal, evicted, ok bool) {
	if !s.ok() && !s.lastTry() {
		return removal{}, false, false
	}
	if len(s.removals) > 0 { // also at the end: what was removed must not come back
		v = s.removals[0]
		s.removals = s.removals[1:]
		return v, false, true
	}
	if s.ending {
		return removal{}, false, false
	}
	if s.budget.excess() <= 0 {
		s.starved = false
		return removal{}, false, false
	}
	n, e := s.oldest()
	if e == nil {
		if !s.starved {
			s.starved = true
			s.budget.owed = 0
			s.changed.Broadcast() // those who wait for room wait in vain
		}
		return removal{}, false, false
	}
	e.flags |= entryUnlinking
	n.index.settle(e)
	return removal{n, e.key}, true, true
}

// oldest is over all namespaces, but for those that others may not shrink. Needs mu.
func (s *Store) oldest() (dir *namespaceDir, oldest *diskEntry) {
	for _, n := range s.dirs {
		if n != s.writing && n.floor > 0 && n.index.bytes <= n.floor {
			continue
		}
		if e := n.index.oldest(); e != nil && (oldest == nil || e.stamp < oldest.stamp) {
			dir, oldest = n, e
		}
	}
	return dir, oldest
}

// unlinkEntry removes the file of an entry that is marked so. A write that has
// published the key anew in the meantime has taken the mark away, and its file
// stays.
func (s *Store) unlinkEntry(v removal, evicted bool) {
	stripe := &v.dir.stripes[v.key[0]]
	stripe.Lock()
	defer stripe.Unlock()
	s.mu.Lock()
	e := v.dir.index.find(v.key)
	current := e != nil && e.has(entryUnlinking) && !s.abandoned
	s.mu.Unlock()
	if !current {
		return
	}
	if !s.own() {
		s.keepEntry(v, evicted)
		return
	}
	err := s.fs.Unlink(v.dir.filePath(v.key))
	gone := absent(err) || foreign(err)
	if gone && !s.own() {
		s.keepEntry(v, evicted)
		return
	}
	if err != nil && !gone {
		s.keepEntry(v, evicted)
		s.diskError("unlink "+chunk.FileName(v.key), err)
		return
	}
	s.forget(v.dir, v.key)
	s.dropEmptyDir(v.dir, int(v.key[0]))
	switch {
	case !evicted:
		s.count.add(&s.count.removed, 1)
	case gone:
		s.count.add(&s.count.vanished, 1)
	case v.dir == s.lastWritten():
		s.count.add(&s.count.evictedSelf, 1)
	default:
		s.count.add(&s.count.evictedOther, 1)
	}
}

// dropEmptyDir gives back the block of a subdirectory in which nothing is left: with
// a small cap the directories of former models would fill it. Needs the stripe.
func (s *Store) dropEmptyDir(n *namespaceDir, unit int) {
	n.counting.Lock()
	defer n.counting.Unlock()
	if s.fs.Rmdir(filepath.Join(n.path, subName(unit))) != nil {
		return // not empty, as most of the time
	}
	s.mu.Lock()
	s.budget.add(-n.dirBytes[unit])
	n.dirBytes[unit] = 0
	s.changed.Broadcast()
	s.mu.Unlock()
}

// keepEntry is for a file that could not be unlinked. An evicted one is there as
// before, but the last to be tried again; a removed one stays unknown.
func (s *Store) keepEntry(v removal, evicted bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !evicted {
		s.failed = append(s.failed, v)
		return
	}
	if e := v.dir.index.find(v.key); e != nil {
		e.flags &^= entryUnlinking
		v.dir.index.touch(e, s.useTime().UnixNano())
		v.dir.index.settle(e)
	}
}

func (s *Store) lastWritten() *namespaceDir {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.writing
}
