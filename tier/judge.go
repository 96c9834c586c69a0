package tier

import (
	"errors"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/sys"
)

// judge looks at files of a wrong size. What a newer version wrote stays, even if
// nothing else is known of it; what is proved wrong goes.
func (s *Store) judge(n *namespaceDir) {
	for {
		s.mu.Lock()
		if len(n.suspects) == 0 || s.ending || !s.ok() {
			s.mu.Unlock()
			return
		}
		k := n.suspects[len(n.suspects)-1]
		n.suspects = n.suspects[:len(n.suspects)-1]
		s.mu.Unlock()
		if err := s.judgeSize(n, k); err != nil && !absent(err) && !foreign(err) {
			s.diskError("look at "+chunk.FileName(k), err)
		}
	}
}

func (s *Store) judgeSize(n *namespaceDir, k chunk.Key) error {
	s.mu.Lock()
	n.index.beginRead(k)
	s.mu.Unlock()
	defer s.endRead(n, k)
	f, err := s.fs.Open(n.filePath(k), sys.OpenRead|sys.OpenNonblock)
	if err != nil {
		return err
	}
	st, newer, err := tailIsNewer(f)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	if newer {
		s.count.inc(s.count.rejected, "newer")
		s.markNewer(n, k)
		return nil
	}
	again, err := s.fs.Lstat(n.filePath(k))
	if err != nil {
		return err
	}
	if again.SameFile(&st) && again.Size == st.Size && st.Size != n.disk.layout.FileBytes && s.own() {
		s.count.inc(s.count.rejected, "size")
		return s.unlinkProved(n, k, &st)
	}
	return nil
}

func (s *Store) endRead(n *namespaceDir, k chunk.Key) {
	s.mu.Lock()
	s.budget.freed(n.index.endRead(k))
	s.changed.Broadcast()
	s.mu.Unlock()
}

// tailIsNewer reads the page where a footer would be.
func tailIsNewer(f OpenFile) (sys.Stat, bool, error) {
	st, err := f.Stat()
	if err != nil || st.Size < chunk.FooterBytes {
		return st, false, err
	}
	page := make([]byte, chunk.FooterBytes)
	n, err := f.ReadV([][]byte{page}, st.Size-chunk.FooterBytes)
	if err != nil || n < len(page) {
		return st, false, err
	}
	_, err = chunk.DecodeFooter(page)
	return st, errors.Is(err, chunk.ErrNewerMajor), nil
}

// markNewer keeps a file from being served and from being replaced.
func (s *Store) markNewer(n *namespaceDir, k chunk.Key) {
	s.mu.Lock()
	if e := n.index.find(k); e != nil {
		e.flags |= entryNewer
	}
	s.mu.Unlock()
}

// unlinkProved removes a file that was shown to be wrong, unless another one has
// its name by now.
func (s *Store) unlinkProved(n *namespaceDir, k chunk.Key, seen *sys.Stat) error {
	stripe := &n.stripes[k[0]]
	stripe.Lock()
	defer stripe.Unlock()
	path := n.filePath(k)
	st, err := s.fs.Lstat(path)
	if err == nil && !st.SameFile(seen) || s.left() {
		return nil
	}
	if err == nil {
		err = s.fs.Unlink(path)
	}
	if err != nil && !absent(err) {
		return err
	}
	s.forget(n, k)
	return nil
}

// forget drops the entry of a file that is gone. Needs the stripe.
func (s *Store) forget(n *namespaceDir, k chunk.Key) {
	s.mu.Lock()
	if e := n.index.find(k); e != nil {
		s.budget.freed(n.index.unnamed(k, e.bytes()))
		n.index.remove(e)
		s.changed.Broadcast()
	}
	s.mu.Unlock()
}
