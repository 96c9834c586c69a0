package tier

import "time"

const (
	// What could not be read is tried again after scanRetry, then after twice that, and
	// so on up to maxScanRetry.
	scanRetry    = 10 * time.Second
	maxScanRetry = 10 * time.Minute

	// guessShare of the cap is taken for directories of which nothing is known.
	guessShare = 4
)

// gap is what a scan could not read of one unit: the whole directory, or some names in
// it. One file or directory that cannot be read must neither stop all writes nor be
// forgotten below the cap, so bytes are charged for it, until it can be read or is gone.
type gap struct {
	whole   bool // the directory could not be listed
	names   int  // that could not be looked at
	cause   error
	bytes   int64 // charged and not covered by files that were found since
	charged bool
}

func (g *gap) skip(err error) {
	g.names++
	if g.cause == nil {
		g.cause = err
	}
}

// setGap notes what the last try has left unread. Needs mu.
func (s *Store) setGap(n *namespaceDir, unit int, g gap) {
	old := n.gaps[unit]
	if old != nil && old.whole == g.whole && g.cause != nil {
		g.bytes, g.charged = old.bytes, old.charged
	} else if old != nil {
		s.budget.used -= old.bytes
	}
	if g.cause != nil {
		n.gaps[unit] = &g
	} else if old != nil {
		delete(n.gaps, unit)
		if len(n.gaps) == 0 {
			s.log.Info("all of a cache directory can be read again", "path", n.path)
		}
	}
}

// cover takes the bytes of a file that was found in a gap off what was charged for it.
// Needs mu.
func (s *Store) cover(n *namespaceDir, unit int, bytes int64) {
	if g := n.gaps[unit]; g != nil {
		bytes = min(bytes, g.bytes)
		g.bytes -= bytes
		s.budget.used -= bytes
	}
}

// chargeGaps enters for what could not be read what it probably takes. Needs mu.
func (s *Store) chargeGaps() {
	all := 0
	for _, n := range s.dirs {
		all += len(n.gaps)
	}
	guess := s.budget.limit / guessShare / int64(max(all, scanList))
	for _, n := range s.dirs {
		if !n.uncharged() {
			continue
		}
		said, files, dirs := int64(0), 0, 0
		var cause error
		file, dir := n.typicalBytes()
		if n.disk != nil {
			file = n.disk.layout.FileBytes
		}
		if file == 0 {
			file = guess
		}
		if dir == 0 {
			dir = guess
		}
		for unit, g := range n.gaps {
			if g.charged {
				continue
			}
			g.charged = true
			switch {
			case unit == scanList: // what lies below it has gaps of its own
				g.bytes = int64(g.names) * directorySlack
			case g.whole:
				g.bytes = max(dir, file)
			default:
				g.bytes = int64(g.names) * file
			}
			// It lies there already: what is free on the file system is less by it.
			s.budget.used += g.bytes
			said, files, cause = said+g.bytes, files+g.names, g.cause
			if g.whole {
				dirs++
			}
		}
		if n.retryIn == 0 {
			s.log.Warn("part of a cache directory cannot be read, it is left out and tried again",
				"path", n.path, "directories", dirs, "names", files, "bytes_charged", said, "cause", cause)
			n.retryIn = scanRetry
			n.retryAt = s.now().Add(n.retryIn)
		}
	}
}

func (n *namespaceDir) uncharged() bool {
	for _, g := range n.gaps {
		if !g.charged {
			return true
		}
	}
	return false
}

// typicalBytes gives what the largest file takes that could be read, and the fullest
// subdirectory: keys are hashes, so that all of them hold about as much. 0: none could.
// Needs mu.
func (n *namespaceDir) typicalBytes() (file, dir int64) {
	var sums [256]int64
	for _, page := range n.index.pages {
		for i := range page {
			e := &page[i]
			sums[e.key[0]] += e.bytes()
			file = max(file, e.bytes())
		}
	}
	for unit, sum := range sums {
		if n.gaps[unit] == nil {
			dir = max(dir, sum+n.dirBytes[unit])
		}
	}
	return file, dir
}

// retryScan puts what could not be read back to work. Needs mu.
func (s *Store) retryScan() {
	for _, n := range s.dirs {
		wait := n.retryAt.Sub(s.now())
		if len(n.gaps) == 0 || n.left > 0 || wait > 0 && wait <= n.retryIn { // more: the clock was set back
			continue
		}
		for unit := range n.gaps {
			n.todo = append(n.todo, unit)
			n.left++
		}
		n.retryIn = min(2*n.retryIn, maxScanRetry)
		n.retryAt = s.now().Add(n.retryIn)
		if s.budget.known { // the first ones have ended
			s.spawn("disk scan", s.scan)
		}
		s.changed.Broadcast()
	}
}
