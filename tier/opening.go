package tier

import (
	"bytes"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/kvtier/kvtier/internal/chunk"
)

// Namespace opens the directory of a namespace, making it if there is none, and
// adopts what lies there. The same namespace gives the same Disk. It blocks on the
// disk for a few small files, and if these have to be made, for some seconds until there
// is room for them within the cap: ErrNoRoom if there is none, or if the scan has not
// shown yet how much there is.
func (s *Store) Namespace(ns *chunk.Namespace) (*Disk, error) {
	canonical, err := ns.Canonical()
	if err != nil {
		return nil, err
	}
	fp, err := ns.Fingerprint()
	if err != nil {
		return nil, err
	}
	layout, err := ns.Layout()
	if err != nil {
		return nil, err
	}
	s.opening.Lock()
	defer s.opening.Unlock()
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil, fmt.Errorf("disk tier of %s: %w", s.root.path, ErrClosed)
	}
	if need := layout.FileBytes + directorySlack; need > s.budget.limit-s.budget.limit/4 {
		s.mu.Unlock()
		return nil, fmt.Errorf("%d bytes in a cap of %d: %w", need, s.budget.limit, ErrTooBig)
	}
	n := s.findDir(chunk.DirName(ns.Model, fp), fp.String()[:32])
	s.mu.Unlock()
	if n != nil && n.disk != nil {
		return n.disk, nil // set under opening only
	}
	if !s.own() {
		return nil, fmt.Errorf("namespace %s: %w", chunk.DirName(ns.Model, fp), ErrOff)
	}
	listed := n != nil
	if !listed {
		n = newNamespaceDir(s.root.path, chunk.DirName(ns.Model, fp), fp.String()[:32])
	}
	need, err := s.reserveSidecar(n, canonical)
	if err != nil {
		return nil, fmt.Errorf("namespace %s: %w", n.name, err)
	}
	defer s.unreserve(need)
	made, rebuilt := false, false
	if !listed {
		err = s.makingRoom(need, func() (err error) {
			made, err = s.makeDir(n)
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("namespace %s: %w", n.name, err)
		}
	}
	err = s.makingRoom(need, func() (err error) {
		rebuilt, err = checkSidecar(s.fs, n.path, canonical)
		return err
	})
	if err == nil && s.o.Durable {
		// What was made by a run that was not durable, or in which a sync failed: later
		// chunks there have to be.
		err = errors.Join(syncDir(s.fs, n.path), syncDir(s.fs, s.root.path))
	}
	if err := errors.Join(err, s.countDir(n, scanList)); err != nil {
		return nil, fmt.Errorf("namespace %s: %w", n.name, err)
	}
	if rebuilt {
		s.count.add(&s.count.sidecars, 1)
	}
	if rebuilt && !made {
		s.log.Warn("layout.json was missing or damaged, it is written anew and the chunks are used", "path", n.path)
	}
	d := &Disk{s: s, dir: n, layout: layout, fingerprint: fp, canonical: canonical, pending: map[chunk.Key]*writeJob{}}
	s.bind(n, d)
	return d, nil
}

// makingRoom does something once more, after eviction has freed what it needs, if the file
// system was full.
func (s *Store) makingRoom(need int64, do func() error) error {
	err := do()
	if !noSpace(err) {
		return err
	}
	s.makeRoom(need)
	if err = do(); noSpace(err) {
		s.full(need, err)
	}
	return err
}

// makeDir makes the directory of a namespace that list has not found, and has it
// counted whatever follows.
func (s *Store) makeDir(n *namespaceDir) (made bool, err error) {
	err = s.fs.Mkdir(n.path)
	if err != nil && !exists(err) {
		return false, err
	}
	if err != nil {
		if st, err := s.fs.Lstat(n.path); err != nil || !st.Directory() {
			return false, errors.Join(err, ErrNotDirectory)
		}
		n.todo, n.left = []int{scanList}, 1 // came into being since the root was listed
		s.addDir(n)
		return false, nil
	}
	s.addDir(n)
	return true, nil
}

// reserveSidecar takes what a directory and its sidecar need, nothing if they are there;
// to be given back with unreserve once they are counted.
func (s *Store) reserveSidecar(n *namespaceDir, canonical []byte) (need int64, err error) {
	have, err := readSmall(s.fs, filepath.Join(n.path, sidecarName), maxSidecar)
	switch {
	case err == nil && bytes.Equal(have, canonical):
		return 0, nil
	case err != nil && !absent(err) && !foreign(err):
		return 0, err
	case s.pausing(): // each try on a full file system costs others a chunk
		return 0, ErrNoRoom
	}
	need = sidecarRoom(canonical)
	if err = s.reserve(n, need); err == nil {
		return need, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.budget.known && errors.Is(err, ErrNoRoom) {
		err = fmt.Errorf("the files that lie there are still being counted: %w", err)
	}
	return 0, err
}

func (s *Store) unreserve(need int64) {
	s.mu.Lock()
	s.budget.settle(need, 0)
	s.changed.Broadcast()
	s.mu.Unlock()
}

// sidecarRoom is what the directory of a namespace takes with its sidecar, which for a
// moment is there twice.
func sidecarRoom(canonical []byte) int64 {
	const block = 4096
	return 2*((int64(len(canonical))+block-1)/block*block) + directorySlack
}

// findDir looks for a directory of the fingerprint: its exact name first, else
// one that somebody has renamed, for the part before the @ is for people only.
func (s *Store) findDir(name, prefix string) (found *namespaceDir) {
	for _, n := range s.dirs {
		if n.name == name {
			return n
		}
		if n.prefix == prefix {
			found = n
		}
	}
	return found
}
