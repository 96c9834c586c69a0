package soak

import (
	"errors"
	"io/fs"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/disktest"
	"github.com/kvtier/kvtier/internal/sys"
)

// allocated gives bytes that certainly lie below a root in use at one moment: a walk
// takes a while, and what is evicted and written meanwhile must not count both. So
// only what a second look finds unchanged is taken, for that was there at the moment
// between.
func allocated(t *testing.T, root string) (bytes int64) {
	t.Helper()
	for path, before := range disktest.Stats(t, root) {
		after, err := sys.Lstat(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		require.NoError(t, err)
		if after.SameFile(&before) {
			bytes += min(before.Allocated, after.Allocated)
		}
	}
	return bytes
}

// sampler watches the cap from outside.
type sampler struct {
	t       *testing.T
	root    string
	quit    chan struct{}
	ended   sync.WaitGroup
	samples int
	highest int64
}

func startSampler(t *testing.T, root string, every time.Duration) *sampler {
	s := &sampler{t: t, root: root, quit: make(chan struct{})}
	s.ended.Go(func() {
		for !t.Failed() {
			s.highest = max(s.highest, allocated(t, root))
			s.samples++
			select {
			case <-s.quit:
				return
			case <-time.After(every):
			}
		}
	})
	return s
}

// stop gives what was seen: how often it was looked, and the most there was.
func (s *sampler) stop() (samples int, highest int64) {
	close(s.quit)
	s.ended.Wait()
	return s.samples, s.highest
}
