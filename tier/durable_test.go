package tier

import (
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/disktest"
)

// dirSyncs is the directories that were synced; those in which it fails are chosen.
type dirSyncs struct {
	faultFS
	mu    sync.Mutex
	fails func(dir string) bool
	done  []string
}

func newDirSyncs() *dirSyncs {
	f := &dirSyncs{fails: func(string) bool { return false }}
	f.faultFS.set(func(call, path string) error {
		if call != "fsync" {
			return nil
		}
		f.mu.Lock()
		fails := f.fails
		f.mu.Unlock()
		if fails(path) {
			return syscall.EIO
		}
		f.mu.Lock()
		f.done = append(f.done, path)
		f.mu.Unlock()
		return nil
	})
	return f
}

func (f *dirSyncs) failIn(fails func(dir string) bool) {
	f.mu.Lock()
	f.fails = fails
	f.mu.Unlock()
}

func (f *dirSyncs) take() (dirs []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	dirs, f.done = f.done, nil
	return dirs
}

func nowhere(string) bool { return false }

// No chunk is called stored before all the directories above it are safe, also when the
// first try to make them so has failed.
func TestDirectoriesThatWereNotSynced(t *testing.T) {
	fs := newDirSyncs()
	h := openShelf(t, t.TempDir(), "m", StoreOptions{FS: fs, Durable: true, Breaker: BreakerOptions{Errors: 1 << 30}}).scanned()
	path := h.disk.dir.path
	for _, what := range []string{"a subdirectory", "the namespace's directory"} {
		n := 1
		if what != "a subdirectory" {
			require.NoError(t, h.put(1))
			require.NoError(t, os.RemoveAll(path))
			n = 2
		}
		fs.failIn(func(dir string) bool { return dir == path })
		for range 3 { // the directories are there the second time
			require.ErrorIs(t, h.put(n), ErrIO, what)
			require.False(t, h.disk.Has(shelfKey(n)))
		}
		require.Empty(t, disktest.Files(t, h.root.Path(), ".kvc"))
		require.Empty(t, disktest.Files(t, h.root.Path(), ".tmp"))
		fs.failIn(nowhere)
		fs.take()
		require.NoError(t, h.put(n), what)
		synced := fs.take()
		require.Contains(t, synced, path)
		require.Contains(t, synced, h.root.Path())
		require.Contains(t, synced, filepath.Dir(h.file(n)))
		require.NoError(t, h.put(n+100))
		require.NotContains(t, fs.take(), h.root.Path(), "once is enough")
	}
}

// A chunk whose name cannot be made safe is not stored, and can be stored later.
func TestNameThatCannotBeSynced(t *testing.T) {
	fs := newDirSyncs()
	h := openShelf(t, t.TempDir(), "m", StoreOptions{FS: fs, Durable: true, Breaker: BreakerOptions{Errors: 1 << 30}}).scanned()
	require.NoError(t, h.put(1))
	sub := filepath.Dir(h.file(1))
	require.NoError(t, h.put(2))
	h.disk.Remove(shelfKey(1))
	h.quiet()
	require.NoDirExists(t, sub)
	fs.failIn(func(dir string) bool { return dir == sub })
	require.ErrorIs(t, h.put(1), ErrIO)
	require.False(t, h.disk.Has(shelfKey(1)))
	h.quiet()
	require.NoFileExists(t, h.file(1))
	require.ErrorIs(t, h.get(1), ErrAbsent)
	require.Equal(t, uint64(1), h.store.Stats().Errors["EIO"])
	require.Equal(t, map[string]uint64{"io": 1}, h.store.Stats().Dropped)
	fs.failIn(nowhere)
	require.NoError(t, h.put(1))
	require.NoError(t, h.get(1))
	h.quiet()
	require.Equal(t, disktest.Allocated(t, h.root.Path()), h.store.Stats().UsedBytes)
}

// Nobody who puts the same chunk is told that it is stored while its name may fail yet.
func TestRePutWaitsForTheSync(t *testing.T) {
	fs := newDirSyncs()
	h := openShelf(t, t.TempDir(), "m", StoreOptions{FS: fs, Durable: true}).scanned()
	require.NoError(t, h.put(1))
	h.disk.Remove(shelfKey(1))
	h.quiet()
	sub, gate, hanging := filepath.Dir(h.file(1)), make(chan struct{}), make(chan struct{})
	fs.failIn(func(dir string) bool {
		if dir == sub {
			close(hanging)
			<-gate
		}
		return dir == sub
	})
	answers := make(chan error, 2)
	write := func() bool {
		return h.disk.Write(shelfJob(shelfKey(1), 0, chunk.Key{}, func(err error) { answers <- err }))
	}
	require.True(t, write())
	<-hanging
	require.True(t, h.disk.Has(shelfKey(1)))
	require.True(t, write())
	select {
	case err := <-answers:
		t.Fatal("too early: ", err)
	case <-time.After(10 * time.Millisecond):
	}
	close(gate)
	require.ErrorIs(t, h.answer(answers), ErrIO)
	require.ErrorIs(t, h.answer(answers), ErrIO)
	fs.failIn(nowhere)
}

// What an earlier opening could not sync is synced by the next.
func TestNamespaceThatWasNotSynced(t *testing.T) {
	fs := newDirSyncs()
	r, s := openStoreAt(t, t.TempDir(), StoreOptions{FS: fs, Durable: true})
	t.Cleanup(func() { require.NoError(t, r.Close()) })
	t.Cleanup(func() { require.NoError(t, s.Close(shelfPatience)) })
	fs.failIn(func(dir string) bool { return dir == r.Path() })
	for range 2 {
		_, err := s.Namespace(disktest.Namespace("m"))
		require.ErrorIs(t, err, syscall.EIO)
	}
	fs.failIn(nowhere)
	fs.take()
	_, err := s.Namespace(disktest.Namespace("m"))
	require.NoError(t, err)
	require.Contains(t, fs.take(), r.Path())
}
