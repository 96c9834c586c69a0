package kvtier

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/sys"
	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/tier"
)

// sidecarFS lets opening layout.json, or what becomes it, fail or wait.
type sidecarFS struct {
	tier.Filesystem
	errno atomic.Int32 // 0: none
	gate  atomic.Pointer[chan struct{}]
	tries atomic.Int32 // that failed or waited
}

func withSidecarFS(f *sidecarFS) rigOption {
	return func(o *leaderOptions) { f.Filesystem, o.disk.FS = o.disk.FS, f }
}

func (f *sidecarFS) Open(path string, flags sys.OpenFlag) (tier.OpenFile, error) {
	if strings.HasPrefix(filepath.Base(path), "layout.json") {
		if gate := f.gate.Load(); gate != nil {
			f.tries.Add(1)
			<-*gate
		}
		if errno := f.errno.Load(); errno != 0 {
			f.tries.Add(1)
			return nil, &os.PathError{Op: "open", Path: path, Err: syscall.Errno(errno)}
		}
	}
	return f.Filesystem.Open(path, flags)
}

// hasDisk says whether the namespace of the group has its disk.
func (g *rigGroup) hasDisk() bool {
	g.r.l.mu.Lock()
	defer g.r.l.mu.Unlock()
	return g.r.l.spaces[g.fingerprint()].disk != nil
}

// A directory that cannot be opened when the first group comes: the namespace is in
// memory until it can, while groups come and go, and then it is on disk with all that
// both hold, and without what was removed in between.
func TestNamespaceComesToItsDiskLater(t *testing.T) {
	for _, errno := range []syscall.Errno{syscall.EIO, syscall.EMFILE, syscall.ENOSPC} {
		t.Run(errno.Error(), func(t *testing.T) {
			fs := &sidecarFS{}
			r := newLeaderRig(t, withSidecarFS(fs))
			g := r.join("g", 1, 1)
			old := g.chain(1, 4)
			g.store(old, 0)
			g.onDisk(old)
			r.stop()

			fs.errno.Store(int32(errno))
			r.start()
			g = r.join("g", 1, 1)
			require.False(t, g.acc.accept.DiskEnabled)
			require.False(t, g.state(old[0]))
			young, held := g.chain(2, 5), g.chain(3, 2)
			g.store(young, 0)
			g.store(held, 0)
			require.Equal(t, uint32(2), g.lease(1, g.runOf(held, 0)).Leased)
			r.l.lock()
			g.acc.space.Remove(old[2])
			r.l.unlock()
			for range 3 { // it does not get better
				tries := fs.tries.Load()
				r.advance(reopenAfter)
				require.Eventually(t, func() bool { return fs.tries.Load() > tries }, patience, time.Millisecond, "nobody tries again")
				require.False(t, g.hasDisk())
			}
			leave(r.join("another", 1, 1))

			fs.errno.Store(0)
			require.Eventually(t, func() bool { r.advance(reopenAfter); return g.hasDisk() }, patience, time.Millisecond)
			g.onDisk(young)
			g.onDisk(held)
			g.release(1)
			require.Equal(t, repeat(wire.Ready, 2), g.loadAll(0, g.runOf(old[:2], 0)), "what an earlier run has stored")
			r.quiet()
			require.False(t, g.look(old[2]).OnDisk)
			require.True(t, r.join("new", 1, 1).acc.accept.DiskEnabled)
			r.stop()

			r.start()
			g = r.join("g", 1, 1)
			require.Eventually(t, r.l.spaces[g.fingerprint()].disk.Scanned, patience, time.Millisecond)
			require.Equal(t, repeat(wire.Ready, 5), g.loadAll(0, g.runOf(young, 0)))
			require.Equal(t, repeat(wire.Ready, 2), g.loadAll(0, g.runOf(old[:2], 0)))
			require.False(t, g.state(old[2]), "it was removed")
			r.quiet()
		})
	}
}

// Chunks that a lease holds before the disk comes are held on disk as long as the lease
// is there, and no longer.
func TestHoldsGoOverToALateDisk(t *testing.T) {
	const files = 14
	fs := &sidecarFS{}
	fs.errno.Store(int32(syscall.EIO))
	r := newLeaderRig(t, withSidecarFS(fs), withDiskCap(files*(rigSlot+chunk.FooterBytes+4096)), withSlots(256))
	g := r.join("g", 1, 1)
	held := g.chain(1, 2)
	g.store(held, 0)
	lease := g.runOf(held, 0)
	lease.Lease = 1 // without a pin: one copy stays, wherever
	require.Equal(t, uint32(2), r.call(g.coord, &wire.Request{Type: wire.Lease, Run: lease}).Hits.Leased)
	fs.errno.Store(0)
	r.advance(reopenAfter)
	require.Eventually(t, g.hasDisk, patience, time.Millisecond)
	g.onDisk(held)
	next := uint32(10)
	push := func() {
		for range 3 * files {
			g.store(g.chain(next, 1), 0)
			g.onDisk(g.chain(next, 1))
			next++
		}
	}
	push()
	for _, k := range held {
		require.True(t, g.look(k).OnDisk, "evicted although it is leased")
	}
	g.release(1)
	push()
	require.False(t, g.look(held[0]).OnDisk, "held for ever")
}

// One chunk larger than the cap will not fit later.
func TestNamespaceTooBigForItsDiskIsNotTriedAgain(t *testing.T) {
	r := newLeaderRig(t, withDiskCap(rigSlot))
	g := r.join("g", 1, 1)
	require.False(t, g.hasDisk())
	require.Nil(t, r.l.spaces[g.fingerprint()].reopening)
}

// A try that hangs in the disk holds nobody up: neither lookups nor the end.
func TestCloseWhileADirectoryIsBeingOpened(t *testing.T) {
	fs := &sidecarFS{}
	fs.errno.Store(int32(syscall.EIO))
	r := newLeaderRig(t, withSidecarFS(fs))
	g := r.join("g", 1, 1)
	keys := g.chain(1, 2)
	g.store(keys, 0)
	gate := make(chan struct{})
	open := sync.OnceFunc(func() { close(gate) })
	t.Cleanup(open)
	tries := fs.tries.Load()
	fs.gate.Store(&gate)
	r.advance(reopenAfter)
	require.Eventually(t, func() bool { return fs.tries.Load() > tries }, patience, time.Millisecond)
	require.Equal(t, repeat(wire.Ready, 2), g.loadAll(0, g.runOf(keys, 0)))
	r.advance(10 * reopenAfter)
	require.Equal(t, tries+1, fs.tries.Load(), "one at a time")
	r.l.mu.Lock()
	sp := r.l.spaces[g.fingerprint()]
	running := sp.reopening.running
	r.l.mu.Unlock()
	require.NoError(t, r.l.close(2*time.Second))
	fs.errno.Store(0)
	fs.gate.Store(nil)
	open() // it ends, well, in a store that is closed
	<-running
	require.Nil(t, sp.disk)
	require.NoError(t, r.root.Close())
	r.start()
	require.True(t, r.join("g", 1, 1).hasDisk())
}
