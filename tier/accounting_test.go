package tier

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/disktest"
	"github.com/kvtier/kvtier/internal/sys"
)

// roundingFS is a file system that gives every chunk file more room than it has
// bytes, as one does that allocates in large units or ahead of need.
type roundingFS struct {
	LocalFilesystem
	more int64
}

func (f roundingFS) stat(st sys.Stat) sys.Stat {
	if st.Regular() && st.Size >= disktest.FileBytes {
		st.Allocated += f.more
	}
	return st
}

func (f roundingFS) Lstat(path string) (sys.Stat, error) {
	st, err := f.LocalFilesystem.Lstat(path)
	return f.stat(st), err
}

func (f roundingFS) Open(path string, flags sys.OpenFlag) (OpenFile, error) {
	file, err := f.LocalFilesystem.Open(path, flags)
	if err != nil {
		return nil, err
	}
	return roundingFile{file, f}, nil
}

type roundingFile struct {
	OpenFile
	fs roundingFS
}

func (f roundingFile) Stat() (sys.Stat, error) {
	st, err := f.OpenFile.Stat()
	return f.fs.stat(st), err
}

// What counts below the cap is what a file takes, not how long it is; for files that
// were written now and for those that were found.
func TestCapIsOnAllocatedBytes(t *testing.T) {
	dir := t.TempDir()
	fs := roundingFS{more: 3 * disktest.FileBytes}
	h := openShelf(t, dir, "m", StoreOptions{FS: fs}).scanned()
	for n := range 8 {
		before := h.store.Stats().UsedBytes
		require.NoError(t, h.put(n))
		require.GreaterOrEqual(t, h.store.Stats().UsedBytes-before, 4*int64(disktest.FileBytes))
	}
	used := h.store.Stats().UsedBytes
	require.Equal(t, disktest.Allocated(t, dir)+8*fs.more, used)
	h.close()

	h = openShelf(t, dir, "m", StoreOptions{FS: fs}).scanned()
	require.Equal(t, used, h.store.Stats().UsedBytes)
	h.close()

	// Half of them fit now.
	limit := used/2 + 4*disktest.FileBytes
	h = openShelf(t, dir, "m", StoreOptions{FS: fs, CapBytes: limit}).scanned()
	h.wait("eviction", func() bool { return h.store.Stats().UsedBytes <= limit })
	h.quiet()
	require.LessOrEqual(t, h.disk.Count(), 4)
	require.Positive(t, h.disk.Count())
}

// A scan that comes by while a chunk is written leaves its temp file alone.
func TestScanLeavesTempsOfItsOwnSession(t *testing.T) {
	fs := &faultFS{}
	h := openShelf(t, t.TempDir(), "m", StoreOptions{FS: fs}).scanned()
	dead := chunk.TempName(shelfKey(1), h.store.session^1, 1)
	scanned := false
	fs.set(func(call, path string) error {
		if call != "rename" || filepath.Ext(path) != ".kvc" || scanned {
			return nil
		}
		scanned = true
		require.NoError(t, os.WriteFile(filepath.Join(filepath.Dir(path), dead), []byte("x"), 0o600))
		require.Len(t, disktest.Files(t, filepath.Dir(path), ".tmp"), 2)
		require.NoError(t, h.store.scanUnit(h.disk.dir, int(shelfKey(1)[0])).cause)
		require.Len(t, disktest.Files(t, filepath.Dir(path), ".tmp"), 1)
		return nil
	})
	require.NoError(t, h.put(1))
	require.True(t, scanned)
	require.NoError(t, h.get(1))
}

// Whoever clears a cache in use takes away temp files and directories too. A chunk is
// lost by that; the disk is not to blame.
func TestClearingUnderAWriteIsNoDiskError(t *testing.T) {
	fs := &faultFS{}
	h := openShelf(t, t.TempDir(), "m", StoreOptions{FS: fs}).scanned()
	for n := range 20 { // more than the breaker takes
		fs.set(func(call, path string) error {
			if call == "rename" && filepath.Ext(path) == ".kvc" {
				if n%2 == 0 {
					require.NoError(t, os.RemoveAll(h.disk.dir.path))
				} else {
					require.NoError(t, os.Remove(disktest.Files(t, filepath.Dir(path), ".tmp")[0]))
				}
			}
			return nil
		})
		require.ErrorIs(t, h.put(n), ErrIO)
		require.False(t, h.disk.Has(shelfKey(n)))
	}
	fs.set(nil)
	st := h.store.Stats()
	require.Equal(t, "on", st.State)
	require.Equal(t, map[string]uint64{"io": 20}, st.Dropped)
	require.Equal(t, map[string]uint64{"ENOENT": 20}, st.Errors)
	require.NoError(t, h.put(3))
	require.NoError(t, h.get(3))
}
