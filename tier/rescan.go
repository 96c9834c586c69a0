package tier

import (
	"path/filepath"

	"github.com/kvtier/kvtier/internal/chunk"
)

// list finds the namespaces below the root and counts what lies beside them. Again
// after the root was away: then it finds what has come since.
func (s *Store) list() error {
	names, err := s.fs.ReadNames(s.root.path)
	if err != nil {
		return err
	}
	beside := int64(0)
	for _, name := range append(names, ".") {
		path := filepath.Join(s.root.path, name)
		if isRootTemp(name) {
			// A process that made the root died here, or is at it and tries again.
			_ = s.sweep(path) // nothing is lost by it
			continue
		}
		prefix, isDir := chunk.ParseDirName(name)
		if !isDir && name != "." && name != rootFileName && name != lockFileName && name != runDirName {
			continue
		}
		st, err := s.fs.Lstat(path)
		if absent(err) && name != "." {
			continue
		}
		if err != nil && !isDir {
			return err
		}
		if isDir && (err != nil || st.Directory()) { // the scan will meet the error again
			s.listDir(name, prefix)
			continue
		}
		if !isDir {
			beside += st.Allocated
		}
	}
	s.mu.Lock()
	s.budget.add(beside - s.beside)
	s.beside = beside
	s.mu.Unlock()
	return nil
}

// listDir makes the directory of a namespace known. No sidecar is being written: that
// is done by Namespace, which waits, and by writes, of which none is under way.
func (s *Store) listDir(name, prefix string) {
	_ = s.sweep(filepath.Join(s.root.path, name, sidecarTemp)) // it is counted where it stays
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.dirs {
		if n.name == name {
			return
		}
	}
	n := newNamespaceDir(s.root.path, name, prefix)
	n.todo, n.left = []int{scanList}, 1
	s.dirs = append(s.dirs, n)
}

// rescan has every directory scanned and every known chunk looked at, before anything
// is written. Needs mu.
func (s *Store) rescan() {
	s.budget.known = false
	for _, n := range s.dirs {
		inWork := n.left - len(n.todo)
		n.todo = []int{scanKnown, scanList} // from the end
		n.left = inWork + len(n.todo)
		n.listed = [256]bool{}
		for _, g := range n.gaps {
			s.budget.used -= g.bytes
		}
		clear(n.gaps)
	}
}

// recount looks at every chunk that is known: it may have gone, or another file may
// have its name.
func (s *Store) recount(n *namespaceDir) (g gap) {
	for page := 0; ; page++ {
		var keys []chunk.Key
		s.mu.Lock()
		if page >= len(n.index.pages) || s.ending {
			s.mu.Unlock()
			return g
		}
		for i := range n.index.pages[page] {
			e := &n.index.pages[page][i]
			if at, used := n.index.byKey[e.key]; used && n.index.at(at) == e {
				keys = append(keys, e.key)
			}
		}
		s.mu.Unlock()
		for _, k := range keys {
			if err := s.recountEntry(n, k); err != nil {
				g.cause = err // its bytes stay in the books: nothing is to be charged
			}
		}
	}
}

func (s *Store) recountEntry(n *namespaceDir, k chunk.Key) error {
	stripe := &n.stripes[k[0]]
	stripe.Lock()
	defer stripe.Unlock()
	s.mu.Lock()
	e := n.index.find(k)
	known := e != nil && !e.has(entryUnlinking)
	s.mu.Unlock()
	if !known {
		return nil
	}
	st, err := s.fs.Lstat(n.filePath(k))
	if absent(err) || foreign(err) || err == nil && !st.Regular() {
		if s.own() {
			s.count.add(&s.count.vanished, 1)
			s.forget(n, k)
		}
		return nil
	}
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if e = n.index.find(k); e == nil { // removed: the stripe keeps only evictions away
		return nil
	}
	s.budget.add(n.index.account(e, accounted(&st)))
	e.flags &^= entryLinked
	if st.Links != 1 {
		e.flags |= entryLinked
	}
	if e.size != st.Size {
		e.size = st.Size
		e.flags &^= entryCounted
		if n.disk != nil {
			s.classify(n, e)
		}
	}
	return nil
}
