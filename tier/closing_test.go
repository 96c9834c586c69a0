package tier

import (
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/sys"
)

// touched puts a chunk of long ago and uses it now; its mtime is not due for long.
func (h *shelf) touched(n int) (used time.Time) {
	h.t.Helper()
	require.NoError(h.t, h.put(n))
	old := time.Now().Add(-time.Hour)
	require.NoError(h.t, sys.SetModified(h.file(n), old.UnixNano()))
	h.disk.Touch(shelfKey(n), 0)
	require.Less(h.t, h.modified(n), old.Add(time.Minute).UnixNano(), "not written yet")
	return old.Add(time.Minute)
}

func (h *shelf) modified(n int) int64 {
	h.t.Helper()
	st, err := sys.Lstat(h.file(n))
	require.NoError(h.t, err)
	return st.ModifiedNS
}

// abandon closes and gives the error.
func (h *shelf) abandon(timeout time.Duration) error {
	h.t.Helper()
	err := h.store.Close(timeout)
	require.NoError(h.t, h.root.Close())
	h.store = nil
	return err
}

// Writes that may not run, because the scan has not ended, do not cost the clean stop.
func TestCloseDoesNotWaitForTheScan(t *testing.T) {
	h := openShelf(t, t.TempDir(), "m", StoreOptions{Touch: time.Hour}).scanned()
	used := h.touched(1)
	h.store.lanes.shut()
	done := make(chan error, 1)
	require.True(t, h.disk.Write(shelfJob(shelfKey(2), 0, chunk.Key{}, func(err error) { done <- err })))
	require.NoError(t, h.abandon(shelfPatience))
	require.ErrorIs(t, h.answer(done), ErrClosed)
	require.Greater(t, h.modified(1), used.UnixNano())
}

// Queued writes are waited for, those that may not run only up to a time of their own.
func TestDrainWaitsForTheGate(t *testing.T) {
	l := newLanes(1, 1, 100, 100)
	job := &fakeLaneJob{60}
	require.True(t, l.push(&l.writes, job))
	far := time.Now().Add(shelfPatience)
	l.drain(far, time.Now())
	require.Len(t, l.writes.jobs, 1, "it may not run")
	drained := make(chan struct{})
	drain := func(gate time.Time) {
		go func() {
			l.drain(far, gate)
			drained <- struct{}{}
		}()
	}
	drain(far)
	l.open()
	require.Same(t, job, l.next(&l.writes, 0))
	l.shut()
	drain(time.Now()) // a write under way is waited for all the same
	select {
	case <-drained:
		t.Fatal("not drained")
	case <-time.After(10 * time.Millisecond):
	}
	l.finish(&l.writes, 0, job)
	<-drained
	<-drained
}

// One write that hangs does not cost the others their recency.
func TestCloseKeepsRecencyBesideAWriteThatHangs(t *testing.T) {
	fs := &faultFS{}
	h := openShelf(t, t.TempDir(), "m", StoreOptions{FS: fs, Touch: time.Hour}).scanned()
	used := h.touched(1)
	gate := make(chan struct{})
	fs.set(func(call, path string) error {
		if call == "write direct" {
			<-gate
		}
		return nil
	})
	done := make(chan error, 1)
	require.True(t, h.disk.Write(shelfJob(shelfKey(2), 0, chunk.Key{}, func(err error) { done <- err })))
	require.Error(t, h.abandon(3*time.Second), "the write has not ended")
	require.Greater(t, h.modified(1), used.UnixNano())
	close(gate)
	require.ErrorIs(t, h.answer(done), ErrClosed)
}

// What was used is written at the end also when the disk was switched off.
func TestCloseKeepsRecencyThoughTheDiskIsOff(t *testing.T) {
	fs := &faultFS{}
	h := openShelf(t, t.TempDir(), "m", StoreOptions{FS: fs, Touch: time.Hour, Breaker: BreakerOptions{Errors: 1, Off: time.Hour}}).scanned()
	used := h.touched(1)
	fs.set(failing("read", syscall.EIO))
	require.ErrorIs(t, h.get(1), ErrIO)
	require.Equal(t, "off", h.store.Stats().State)
	fs.set(nil)
	require.NoError(t, h.abandon(shelfPatience))
	require.Greater(t, h.modified(1), used.UnixNano())
}

// A chunk that is removed while the disk is off does not come back after a clean stop.
func TestRemovedWhileTheDiskIsOff(t *testing.T) {
	dir, fs := t.TempDir(), &faultFS{}
	open := func() *shelf {
		return openShelf(t, dir, "m", StoreOptions{FS: fs, Breaker: BreakerOptions{Errors: 1, Off: time.Hour}}).scanned()
	}
	remove := func(h *shelf, n int) {
		require.NoError(t, h.put(n))
		fs.set(failing("read", syscall.EIO))
		require.ErrorIs(t, h.get(n), ErrIO)
		require.Equal(t, "off", h.store.Stats().State)
		h.disk.Remove(shelfKey(n))
		require.FileExists(t, h.file(n))
	}
	h := open()
	remove(h, 1)
	fs.set(nil)
	require.NoError(t, h.abandon(shelfPatience))
	h = open()
	require.False(t, h.disk.Has(shelfKey(1)))
	require.NoFileExists(t, h.file(1))

	// If that fails, it is said.
	remove(h, 2)
	remaining := h.file(2)
	fs.set(failing("unlink", syscall.EIO))
	err := h.abandon(shelfPatience)
	require.ErrorIs(t, err, ErrIO)
	require.ErrorContains(t, err, "found at the next start: 1")
	require.FileExists(t, remaining)
	fs.set(nil)
}

// A file that could not be unlinked is tried once more at the end.
func TestRemovalThatFailedIsTriedAgainAtTheEnd(t *testing.T) {
	fs := &faultFS{}
	h := openShelf(t, t.TempDir(), "m", StoreOptions{FS: fs, Tick: time.Hour}).scanned() // no other occasion
	require.NoError(t, h.put(1))
	removed := h.file(1)
	fs.set(failing("unlink", syscall.EIO))
	h.disk.Remove(shelfKey(1))
	h.wait("the first try", func() bool { return h.store.Stats().Errors["EIO"] == 1 })
	require.FileExists(t, removed)
	require.Equal(t, 1, h.store.Stats().QueuedUnlinks)
	fs.set(nil)
	require.NoError(t, h.abandon(shelfPatience))
	require.NoFileExists(t, removed)
}

// Nor when the unlinks hang: the stop is bounded, and says what stays.
func TestRemovalThatHangsAtTheEnd(t *testing.T) {
	fs := &faultFS{}
	h := openShelf(t, t.TempDir(), "m", StoreOptions{FS: fs}).scanned()
	gate, hanging := make(chan struct{}), make(chan struct{})
	var once sync.Once
	for n := range 3 {
		require.NoError(t, h.put(n))
	}
	fs.set(func(call, path string) error {
		if call == "unlink" {
			once.Do(func() { close(hanging) })
			<-gate
		}
		return nil
	})
	for n := range 3 {
		h.disk.Remove(shelfKey(n))
	}
	<-hanging
	err := h.abandon(100 * time.Millisecond)
	require.ErrorContains(t, err, "have not ended")
	require.ErrorContains(t, err, "found at the next start: 3")
	close(gate)
}
