package tier

import (
	"os"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/sys"
)

// What stands in the place of one chunk does not decide how all others are read.
func TestPipeInPlaceOfAChunkKeepsDirectIO(t *testing.T) {
	h := openShelf(t, t.TempDir(), "m", StoreOptions{}).scanned()
	for n := range 3 {
		require.NoError(t, h.put(n))
	}
	if !h.store.Stats().Direct {
		t.Skip("not run: the file system takes no direct I/O")
	}
	require.NoError(t, os.Remove(h.file(1)))
	require.NoError(t, syscall.Mkfifo(h.file(1), 0o600))
	require.ErrorIs(t, h.get(1), ErrAbsent)
	require.True(t, h.store.Stats().Direct)
	require.NoError(t, h.get(2))
	require.NoError(t, h.put(1), "it gives way")
	require.NoError(t, h.get(1))
	require.True(t, h.store.Stats().Direct)
}

// A file system that stops taking it, as after a remount, is noticed by a plain file.
func TestDirectIORefusedForAFile(t *testing.T) {
	fs := &faultFS{}
	h := openShelf(t, t.TempDir(), "m", StoreOptions{FS: fs}).scanned()
	require.NoError(t, h.put(1))
	fs.set(failing("open direct", syscall.EINVAL))
	require.NoError(t, h.get(1))
	require.False(t, h.store.Stats().Direct)
}

// What lies wrong in the page cache says nothing of the file: where there is no direct
// I/O the second read comes from the device all the same.
func TestSecondReadIsNotFromThePageCache(t *testing.T) {
	fs := &cachingFS{stale: map[string]bool{}}
	h := openShelf(t, t.TempDir(), "m", StoreOptions{FS: fs}).scanned()
	for n := range 2 {
		require.NoError(t, h.put(n))
	}
	require.False(t, h.store.Stats().Direct)
	fs.spoil(h.file(0))
	require.NoError(t, h.get(0))
	require.NoError(t, h.get(0))
	st := h.store.Stats()
	require.Equal(t, uint64(1), st.Reread)
	require.Empty(t, st.Corrupt)
	require.FileExists(t, h.file(0))

	// What is wrong on the device is wrong the second time too.
	b, err := os.ReadFile(h.file(1))
	require.NoError(t, err)
	b[5] ^= 1
	require.NoError(t, os.WriteFile(h.file(1), b, 0o600))
	require.ErrorIs(t, h.get(1), ErrCorrupt)
	require.NoFileExists(t, h.file(1))
}

// cachingFS takes no direct I/O, and has a page cache that holds a wrong bit of the
// files that were spoiled until it is dropped.
type cachingFS struct {
	LocalFilesystem
	mu    sync.Mutex
	stale map[string]bool
}

func (f *cachingFS) spoil(path string) {
	f.mu.Lock()
	f.stale[path] = true
	f.mu.Unlock()
}

func (f *cachingFS) Open(path string, flags sys.OpenFlag) (OpenFile, error) {
	if flags&sys.OpenDirect != 0 {
		return nil, &os.PathError{Op: "open", Path: path, Err: syscall.EINVAL}
	}
	file, err := f.LocalFilesystem.Open(path, flags)
	if err != nil {
		return nil, err
	}
	return &cachedFile{file, f, path}, nil
}

type cachedFile struct {
	OpenFile
	fs   *cachingFS
	path string
}

func (f *cachedFile) ReadV(bufs [][]byte, off int64) (int, error) {
	n, err := f.OpenFile.ReadV(bufs, off)
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if n > 0 && off == 0 && f.fs.stale[f.path] {
		bufs[0][0] ^= 1
	}
	return n, err
}

func (f *cachedFile) DropCache() error {
	f.fs.mu.Lock()
	delete(f.fs.stale, f.path)
	f.fs.mu.Unlock()
	return f.OpenFile.DropCache()
}
