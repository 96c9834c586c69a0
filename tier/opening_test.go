package tier

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/disktest"
)

// manyRegions is a namespace whose description takes some hundred KB.
func manyRegions(model string) *chunk.Namespace {
	ns := &chunk.Namespace{ChunkTokens: 1, Model: model, KVDtype: "bf16", Groups: []chunk.Group{{Kind: chunk.GroupFull, TokensPerRow: 1}}}
	for i := range 3000 {
		ns.Groups[0].Regions = append(ns.Groups[0].Regions, chunk.Region{
			Bytes: 4, Component: "target", Head: -1, Layer: -1, Name: fmt.Sprintf("region %d", i)})
	}
	return ns
}

// full gives a tier whose cap is used up, but for what eviction keeps free, and the most
// that lay below its root at a call of the new sidecar.
func full(t *testing.T) (h *shelf, worst *atomic.Int64) {
	t.Helper()
	dir, fs, worst := t.TempDir(), &faultFS{}, &atomic.Int64{}
	h = openShelf(t, dir, "m", StoreOptions{FS: fs, CapBytes: 1300 << 10}).scanned()
	for n := range 70 {
		require.NoError(t, h.put(n))
	}
	h.quiet()
	fs.set(func(call, path string) error {
		if strings.HasPrefix(filepath.Base(path), sidecarName) {
			worst.Store(max(worst.Load(), disktest.Allocated(t, dir)))
		}
		return nil
	})
	return h, worst
}

// The description of a namespace has its place within the cap before it is written.
func TestCapHoldsWhenANamespaceOpens(t *testing.T) {
	h, worst := full(t)
	d, err := h.store.Namespace(manyRegions("other"))
	require.NoError(t, err)
	st, err := os.Stat(filepath.Join(d.dir.path, sidecarName))
	require.NoError(t, err)
	require.Greater(t, st.Size(), int64(200<<10))
	require.Greater(t, worst.Load(), int64(800<<10))
	require.LessOrEqual(t, worst.Load(), int64(1300<<10))
	require.Positive(t, h.store.Stats().EvictedOther)
	h.quiet()
	require.Zero(t, h.store.Stats().ReservedBytes)
	require.Equal(t, disktest.Allocated(t, h.root.Path()), h.store.Stats().UsedBytes)
}

// So it has when a chunk makes anew what somebody has taken away and the tier has noticed.
func TestCapHoldsWhenADirectoryIsMadeAgain(t *testing.T) {
	h, worst := full(t)
	d, err := h.store.Namespace(manyRegions("other"))
	require.NoError(t, err)
	require.NoError(t, os.RemoveAll(d.dir.path))
	require.Error(t, h.store.countDir(d.dir, scanList), "it is gone")
	for n := 100; h.store.Stats().UsedBytes < 1150<<10; n++ {
		require.NoError(t, h.put(n))
	}
	h.quiet()
	worst.Store(0)
	k := shelfKey(1)
	payload := disktest.Aligned(int(d.layout.PaddedBytes))
	done := make(chan error, 1)
	require.True(t, d.Write(WriteJob{Key: k, Payload: payload, Hash: chunk.HashPayload(payload), Done: func(err error) { done <- err }}))
	require.NoError(t, h.answer(done))
	require.FileExists(t, filepath.Join(d.dir.path, sidecarName))
	require.Positive(t, worst.Load())
	require.LessOrEqual(t, worst.Load(), int64(1300<<10))
}

// Without room it is not opened, and nothing is left of the attempt.
func TestNoRoomForANamespace(t *testing.T) {
	h, _ := full(t)
	for n := range 70 {
		h.disk.Hold(shelfKey(n))
	}
	_, err := h.store.Namespace(manyRegions("other"))
	require.ErrorIs(t, err, ErrNoRoom)
	require.Len(t, h.store.Stats().Namespaces, 1)
	require.Zero(t, h.store.Stats().ReservedBytes)
	for n := range 70 {
		h.disk.Unhold(shelfKey(n))
	}
	_, err = h.store.Namespace(manyRegions("other"))
	require.NoError(t, err)
}

// On a full file system old chunks give way to the description too.
func TestNamespaceOnAFullFileSystem(t *testing.T) {
	fs := &faultFS{}
	h := openShelf(t, t.TempDir(), "m", StoreOptions{FS: fs}).scanned()
	for n := range 10 {
		require.NoError(t, h.put(n))
	}
	fs.set(func(call, path string) error {
		if call == "open" && filepath.Base(path) == sidecarTemp && h.disk.Count() == 10 {
			return syscall.ENOSPC
		}
		return nil
	})
	_, err := h.store.Namespace(disktest.Namespace("other"))
	require.NoError(t, err)
	require.Less(t, h.disk.Count(), 10)
}

// But not one after the other, when that does not help.
func TestNamespaceOnAFileSystemThatStaysFull(t *testing.T) {
	fs := &faultFS{}
	h := openShelf(t, t.TempDir(), "m", StoreOptions{FS: fs, Now: func() time.Time { return clockStart }}).scanned()
	for n := range 10 {
		require.NoError(t, h.put(n))
	}
	fs.set(func(call, path string) error {
		if call == "open" && filepath.Base(path) == sidecarTemp {
			return syscall.ENOSPC
		}
		return nil
	})
	for range 20 {
		_, err := h.store.Namespace(disktest.Namespace("other"))
		require.True(t, errors.Is(err, ErrNoRoom) || errors.Is(err, syscall.ENOSPC), err)
	}
	h.quiet()
	require.GreaterOrEqual(t, h.disk.Count(), 8)
	fs.set(nil)
}

// How much may be written is known only when all that lies there is counted. A namespace
// that has its directory is opened before.
func TestNamespaceWaitsForTheScan(t *testing.T) {
	dir, fs := t.TempDir(), &faultFS{}
	h := openShelf(t, dir, "m", StoreOptions{FS: fs}).scanned()
	require.NoError(t, h.put(1))
	h.close()
	gate := make(chan struct{})
	fs.set(func(call, path string) error {
		if call == "readdir" && path != dir {
			<-gate
		}
		return nil
	})
	h = openShelf(t, dir, "m", StoreOptions{FS: fs})
	opened := make(chan error, 1)
	go func() {
		_, err := h.store.Namespace(disktest.Namespace("other"))
		for errors.Is(err, ErrNoRoom) { // on a slow machine
			_, err = h.store.Namespace(disktest.Namespace("other"))
		}
		opened <- err
	}()
	time.Sleep(50 * time.Millisecond)
	sidecars := disktest.Files(t, dir, sidecarName)
	close(gate)
	require.Equal(t, []string{filepath.Join(h.disk.dir.path, sidecarName)}, sidecars)
	require.NoError(t, h.answer(opened))
	fs.set(nil)
}
