package kvtier

import (
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/disktest"
	"github.com/kvtier/kvtier/internal/sys"
	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/tier"
)

// hangingFS lets writes of chunks hang while it has a gate.
type hangingFS struct {
	tier.Filesystem
	gate  atomic.Pointer[chan struct{}]
	hangs atomic.Int32
}

func (f *hangingFS) Open(path string, flags sys.OpenFlag) (tier.OpenFile, error) {
	if gate := f.gate.Load(); gate != nil && filepath.Ext(path) == ".tmp" {
		f.hangs.Add(1)
		<-*gate
	}
	return f.Filesystem.Open(path, flags)
}

// A write that hangs, with more waiting behind it than the queue takes: the leader stops
// in time, and what was used is remembered.
func TestCloseKeepsRecencyBesideABacklogThatHangs(t *testing.T) {
	fs := &hangingFS{}
	r := newLeaderRig(t, func(o *leaderOptions) {
		fs.Filesystem, o.disk.FS = o.disk.FS, fs
		o.disk.Touch, o.disk.DirtyBytes = time.Hour, 1
	})
	g := r.join("g", 1, 1)
	keys := g.chain(1, 3)
	g.store(keys, 0)
	g.onDisk(keys)
	old := time.Now().Add(-2 * time.Hour)
	files := disktest.Files(t, r.dir, ".kvc")
	require.Len(t, files, 3)
	for _, path := range files {
		require.NoError(t, os.Chtimes(path, old, old))
	}
	require.Equal(t, uint32(3), g.lease(1, g.runOf(keys, 0)).Leased)
	require.Equal(t, repeat(wire.Ready, 3), g.loadAll(1, g.runOf(keys, 0)))

	gate := make(chan struct{})
	fs.gate.Store(&gate)
	g.store(g.chain(2, 4), 0)
	require.Eventually(t, func() bool { return fs.hangs.Load() > 0 }, patience, time.Millisecond)
	require.Error(t, r.l.close(4*time.Second), "the write has not ended")
	for _, path := range files {
		st, err := os.Stat(path)
		require.NoError(t, err)
		require.True(t, st.ModTime().After(old.Add(time.Hour)), path)
	}
	close(gate)
	require.Eventually(t, func() bool { return r.l.store.Stats().QueuedWrites == 0 }, patience, time.Millisecond)
	require.NoError(t, r.root.Close())
	r.l = nil
}
