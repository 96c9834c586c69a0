package tier

import (
	"path/filepath"
	"slices"
	"strconv"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/sys"
)

const (
	scanners = 8
	// scanList as a unit of work is the namespace's directory itself, which tells
	// what subdirectories there are; the others are the number of a subdirectory.
	scanList = 256
	// scanKnown is the chunks that are known: see recount.
	scanKnown = 257
)

// scan works through the directories until every one is known.
func (s *Store) scan() {
	for {
		s.mu.Lock()
		n, unit, ok := s.nextUnit()
		for !ok && !s.budget.known && !s.ending {
			s.changed.Wait()
			n, unit, ok = s.nextUnit()
		}
		done := !ok || s.ending
		s.mu.Unlock()
		if done {
			return
		}
		s.endUnit(n, unit, s.scanUnit(n, unit))
		s.judge(n)
	}
}

// startScan starts what works through the directories.
func (s *Store) startScan() {
	for range scanners {
		s.spawn("disk scan", s.scan)
	}
}

// nextUnit prefers namespaces in use. Needs mu.
func (s *Store) nextUnit() (*namespaceDir, int, bool) {
	if s.breaker.isAway() {
		return nil, 0, false
	}
	var pick *namespaceDir
	for _, n := range s.dirs {
		if len(n.todo) > 0 && (pick == nil || pick.disk == nil && n.disk != nil) {
			pick = n
		}
	}
	if pick == nil {
		s.checkKnown()
		return nil, 0, false
	}
	unit := pick.todo[len(pick.todo)-1]
	pick.todo = pick.todo[:len(pick.todo)-1]
	return pick, unit, true
}

func (s *Store) endUnit(n *namespaceDir, unit int, g gap) {
	s.mu.Lock()
	first := len(n.gaps) == 0 && n.retryIn == 0
	n.left--
	s.setGap(n, unit, g)
	s.checkKnown()
	s.changed.Broadcast()
	s.mu.Unlock()
	if g.cause != nil {
		s.count.inc(s.count.errors, errnoName(g.cause))
		// One sick directory is not a sick disk, however many names it has and however
		// often it is tried: reads and writes will tell. That this user may not see it
		// says nothing of the disk at all.
		if first && !denied(g.cause) {
			s.towardBreaker("scan "+n.name, g.cause)
		}
	}
}

// checkKnown opens the way for writes once every byte is counted, or estimated where
// it cannot be. Needs mu.
func (s *Store) checkKnown() {
	if slices.ContainsFunc(s.dirs, func(n *namespaceDir) bool { return n.left > 0 }) {
		return
	}
	s.chargeGaps()
	if s.placeAhead() || s.budget.known {
		return
	}
	s.budget.known = true
	s.lanes.open()
	s.changed.Broadcast()
}

// scanUnit goes on after what it cannot read, and gives that as a gap.
func (s *Store) scanUnit(n *namespaceDir, unit int) (g gap) {
	s.mu.Lock()
	again := n.gaps[unit] != nil // what is not ours has been counted
	s.mu.Unlock()
	reject := func(why string) {
		if !again {
			s.count.inc(s.count.rejected, why)
		}
	}
	switch unit {
	case scanList:
		return s.scanTop(n, reject)
	case scanKnown:
		return s.recount(n)
	}
	sub := subName(unit)
	dir := filepath.Join(n.path, sub)
	names, err := s.fs.ReadNames(dir)
	if absent(err) || foreign(err) {
		return g
	}
	if err != nil {
		return gap{whole: true, cause: err}
	}
	if err := s.countDir(n, unit); err != nil && !absent(err) {
		g.skip(err)
	}
	if len(names) == 0 && s.own() {
		n.stripes[unit].Lock()
		s.dropEmptyDir(n, unit)
		n.stripes[unit].Unlock()
	}
	for _, name := range names {
		if k, ok := chunk.ParseFileName(name); ok {
			if chunk.SubDir(k) != sub {
				reject("path")
			} else if err := s.adopt(n, k); err != nil && !absent(err) {
				g.skip(err)
			}
			continue
		}
		if k, session, number, ok := chunk.ParseTempName(name); !ok {
			reject("name")
		} else if chunk.SubDir(k) != sub {
			reject("path")
		} else if session != s.session || number <= s.deadTemps.Load() {
			if err := s.sweep(filepath.Join(dir, name)); foreign(err) {
				reject("type")
			} else if err != nil {
				g.skip(err)
			}
		}
	}
	return g
}

func (s *Store) scanTop(n *namespaceDir, reject func(why string)) (g gap) {
	names, err := s.fs.ReadNames(n.path)
	if absent(err) || foreign(err) { // removed or replaced since the root was listed
		if err := s.recountDirs(n); err != nil {
			g.skip(err)
		}
		return g
	}
	if err != nil {
		// The names of subdirectories are known without a list.
		g = gap{whole: true, cause: err}
		for unit := range scanList {
			names = append(names, subName(unit))
		}
	}
	if err := s.countDir(n, scanList); err != nil && !absent(err) {
		g.skip(err)
	}
	if err := s.recountDirs(n); err != nil {
		g.skip(err)
	}
	var units []int
	for _, name := range names {
		if unit, ok := parseSubName(name); ok {
			st, err := s.fs.Lstat(filepath.Join(n.path, name))
			if err == nil && st.Directory() || err != nil && !absent(err) {
				units = append(units, unit) // whatever the error, it is the unit's
			} else if err == nil {
				reject("type")
			}
			continue
		}
		if name != sidecarName && name != sidecarTemp {
			reject("name")
		}
	}
	s.mu.Lock()
	for _, unit := range units {
		if !n.listed[unit] {
			n.listed[unit] = true
			n.todo = append(n.todo, unit)
			n.left++
		}
	}
	s.mu.Unlock()
	return g
}

// recountDirs looks for subdirectories that were counted and are gone.
func (s *Store) recountDirs(n *namespaceDir) error {
	for unit := range n.dirBytes {
		s.mu.Lock()
		counted := n.dirBytes[unit] != 0
		s.mu.Unlock()
		if counted {
			if err := s.countDir(n, unit); err != nil && !absent(err) {
				return err
			}
		}
	}
	return nil
}

// sweep removes a temp file. Whoever has the lock owns all of them, and no session
// but this one is alive. What is no file stays, with an error that is foreign.
func (s *Store) sweep(path string) error {
	if s.left() || !s.own() {
		return nil
	}
	st, err := s.fs.Lstat(path)
	if err == nil && !st.Regular() {
		return errForeign
	}
	if err == nil {
		err = s.fs.Unlink(path)
	}
	if err == nil {
		s.count.add(&s.count.swept, 1)
	}
	if absent(err) {
		return nil
	}
	return err
}

// countDir accounts what a directory itself takes; with the namespace's own come
// the sidecar's bytes.
func (s *Store) countDir(n *namespaceDir, unit int) error {
	n.counting.Lock()
	defer n.counting.Unlock()
	path := n.path
	if unit != scanList {
		path = filepath.Join(path, subName(unit))
	}
	st, err := s.fs.Lstat(path)
	if err != nil && !absent(err) {
		return err
	}
	gone, bytes := err, st.Allocated // 0 when it is gone
	if unit == scanList && gone == nil {
		for _, name := range []string{sidecarName, sidecarTemp} {
			st, err := s.fs.Lstat(filepath.Join(n.path, name))
			if err != nil && !absent(err) {
				return err
			}
			if err == nil && st.Regular() {
				bytes += st.Allocated
			}
		}
	}
	s.mu.Lock()
	s.budget.add(bytes - n.dirBytes[unit])
	n.dirBytes[unit] = bytes
	s.mu.Unlock()
	return gone
}

// adopt makes the file of a key known, if there is one and if it is not known yet.
// Whether it fits the namespace is decided by what the entry says.
func (s *Store) adopt(n *namespaceDir, k chunk.Key) error {
	stripe := &n.stripes[k[0]]
	stripe.Lock()
	defer stripe.Unlock()
	s.mu.Lock()
	known := n.index.find(k) != nil
	s.mu.Unlock()
	if known {
		return nil
	}
	st, err := s.fs.Lstat(n.filePath(k))
	if foreign(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if !st.Regular() {
		s.count.inc(s.count.rejected, "type")
		return nil
	}
	now := s.now().UnixNano()
	s.mu.Lock()
	defer s.mu.Unlock()
	cost := accounted(&st)
	e := n.index.add(k, min(st.ModifiedNS, now), st.Size, cost)
	if st.ModifiedNS > now {
		s.ahead = append(s.ahead, aheadFile{removal{n, k}, st.ModifiedNS, e.stamp})
	}
	s.budget.add(cost)
	s.cover(n, int(k[0]), cost)
	if st.Links != 1 {
		e.flags |= entryLinked
	}
	if n.disk != nil {
		s.classify(n, e)
	}
	return nil
}

// lookUp is adopt for a key that the scan has not come to. What lies behind a link
// in place of a subdirectory is not ours.
func (s *Store) lookUp(n *namespaceDir, k chunk.Key) error {
	err := s.inPlace(n, k)
	if err == nil {
		err = s.adopt(n, k)
	}
	if err == nil || absent(err) || foreign(err) {
		return nil
	}
	s.mu.Lock()
	gap := n.gaps[int(k[0])] != nil
	s.mu.Unlock()
	if gap { // the scan has met it, and tries again
		s.count.inc(s.count.errors, errnoName(err))
		return nil
	}
	return err
}

// inPlace checks that the subdirectory of a chunk is one.
func (s *Store) inPlace(n *namespaceDir, k chunk.Key) error {
	st, err := s.fs.Lstat(n.subPath(k))
	if err == nil && !st.Directory() {
		err = errForeign
	}
	return err
}

// accounted is what a file costs. Some file systems allocate late: what it will
// take in the end counts from the start.
func accounted(st *sys.Stat) int64 { return max(st.Allocated, (st.Size+511)/512*512) }

// classify counts an entry as adopted or rejected, once. Needs mu.
func (s *Store) classify(n *namespaceDir, e *diskEntry) {
	if e.has(entryCounted | entryNewer) {
		return
	}
	e.flags |= entryCounted
	switch {
	case e.has(entryLinked):
		s.count.inc(s.count.rejected, "links")
	case e.size != n.disk.layout.FileBytes:
		n.suspects = append(n.suspects, e.key)
	default:
		s.count.add(&s.count.adopted, 1)
	}
}

// addDir makes a directory known that was not there when the root was listed.
func (s *Store) addDir(n *namespaceDir) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dirs = append(s.dirs, n)
	if n.left > 0 && !s.ending {
		s.budget.known = false
		s.spawn("disk scan", s.scan) // the first ones may have ended
	}
}

// bind gives a directory to the Disk of its namespace, whose sidecar is checked.
func (s *Store) bind(n *namespaceDir, d *Disk) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n.disk, n.floor = d, s.o.NamespaceFloor
	s.budget.setLargest(d.layout.FileBytes)
	s.changed.Broadcast()
	if s.ending { // Close does not wait for what begins now
		return
	}
	s.spawn("disk adoption", func() {
		// What the scan found before it was known what fits. One page at a time, so
		// that nobody waits for the lock.
		for page := 0; ; page++ {
			s.mu.Lock()
			if page >= len(n.index.pages) || s.ending {
				s.mu.Unlock()
				break
			}
			for i := range n.index.pages[page] {
				e := &n.index.pages[page][i]
				if at, used := n.index.byKey[e.key]; used && n.index.at(at) == e {
					s.classify(n, e)
				}
			}
			s.mu.Unlock()
		}
		s.judge(n)
	})
}

func subName(unit int) string {
	const digits = "0123456789abcdef"
	return string([]byte{digits[unit>>4], digits[unit&15]})
}

func parseSubName(name string) (int, bool) {
	n, err := strconv.ParseUint(name, 16, 8)
	if err != nil || subName(int(n)) != name {
		return 0, false
	}
	return int(n), true
}
