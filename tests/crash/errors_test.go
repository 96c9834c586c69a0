package crash

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/disktest"
	"github.com/kvtier/kvtier/tier"
)

// TestErrorAtEachCall lets the n-th call of a piece of work fail, for every n and
// every kind of error: no wrong byte, no partial file, right books, and what failed
// can be done again.
func TestErrorAtEachCall(t *testing.T) {
	for _, errno := range []syscall.Errno{
		syscall.EIO, syscall.ENOSPC, syscall.EDQUOT, syscall.EMFILE, syscall.EACCES, syscall.ENOMEM, syscall.EROFS,
	} {
		t.Run(errno.Error(), func(t *testing.T) {
			t.Parallel()
			for n := 1; ; n++ {
				if !errorAt(t, n, errno) {
					require.Greater(t, n, 60)
					break
				}
			}
		})
	}
}

// errorAt reports whether there were n calls.
func errorAt(t *testing.T, n int, errno syscall.Errno) bool {
	dir := filepath.Join(t.TempDir(), "root")
	disk, clock := newMemDisk(dir), &clock{}
	o := tier.StoreOptions{FS: disk, Now: clock.now, Durable: n%2 == 0, Tick: 2 * time.Millisecond}
	b := open(t, dir, o).scanned()
	require.NoError(t, b.put(0))
	require.NoError(t, b.put(5)) // in the same directory
	b.close()

	where := failNth(disk, n, errno)
	b, err := tryOpen(t, dir, o)
	if err != nil {
		require.ErrorIs(t, err, errno, where())
		b = open(t, dir, o) // whoever could not open tries again
	}
	b.wait("scan after "+where(), func() bool {
		clock.jump(11 * time.Second)
		return b.disk.Scanned() && b.store.Stats().Known
	})
	for i := range 4 { // one old chunk and three new ones
		b.putInTheEnd(i, clock, where)
	}
	for i := range 4 {
		if i == 0 && (errno == syscall.ENOSPC || errno == syscall.EDQUOT) {
			continue // it may have made room
		}
		if err := b.get(i); err != nil {
			require.ErrorIs(t, err, tier.ErrIO, where())
			require.NoError(t, b.get(i), where())
		}
	}
	b.disk.Remove(key(2))
	b.disk.Touch(key(3), 1)
	b.idle()
	require.False(t, b.disk.Has(key(2)), where())
	b.booksOf(disk, clock, math.MaxInt64, where)
	st := b.store.Stats()
	require.NotEqual(t, "off", st.State, where())
	require.Empty(t, st.Corrupt, where())
	b.close()

	disk.set(nil)
	b = open(t, dir, o).scanned()
	b.idle()
	require.False(t, b.disk.Has(key(2)), where())
	for _, i := range []int{1, 3} {
		require.NoError(t, b.get(i), where())
	}
	require.Empty(t, disk.files(".tmp"), where())
	b.wait("books of the next run after "+where(), func() bool { return b.store.Stats().UsedBytes == disk.used() })
	b.close()
	return where() != "no call"
}

// failNth makes the n-th call from now on fail. where tells which one that was, "no call"
// as long as there were not so many.
func failNth(disk *memDisk, n int, errno syscall.Errno) (where func() string) {
	calls, failed := 0, "no call"
	disk.set(func(call, path string) error {
		if calls++; calls == n {
			failed = fmt.Sprintf("%d: %s %s", n, call, filepath.Base(path))
			return &os.PathError{Op: call, Path: path, Err: errno}
		}
		return nil
	})
	return func() string {
		disk.mu.Lock()
		defer disk.mu.Unlock()
		return failed
	}
}

// putInTheEnd puts a chunk, again and again if a fault is in the way.
func (b *box) putInTheEnd(n int, clock *clock, where func() string) {
	b.t.Helper()
	err := b.put(n)
	for tries := 0; err != nil && tries < 200; tries++ {
		require.NotErrorIs(b.t, err, tier.ErrOff, where())
		clock.jump(2 * time.Second) // full file systems are left alone for a moment
		err = b.put(n)
	}
	require.NoError(b.t, err, where())
}

// booksOf waits until what is accounted is what lies there, and within the limit.
func (b *box) booksOf(disk *memDisk, clock *clock, limit int64, where func() string) {
	b.t.Helper()
	b.wait("books after "+where(), func() bool {
		clock.jump(11 * time.Second)
		b.idle()
		used := b.store.Stats().UsedBytes
		return used == disk.used() && used <= limit
	})
}

// A file that has lost its name while it is read still takes its room.
func TestCapWithUnlinkedFilesStillRead(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "root")
	disk := newMemDisk(dir)
	disk.limit = 12 * disktest.CostBytes
	b := open(t, dir, tier.StoreOptions{FS: disk, CapBytes: disk.limit, ReadLanes: 4}).scanned()
	for n := range 4 {
		require.NoError(t, b.put(n))
	}
	open := disk.holdReads()
	answers := make(chan error, 4)
	for n := range 4 {
		b.disk.Read(key(n), disktest.Aligned(disktest.PaddedBytes), func(r tier.ReadResult) { answers <- r.Err })
	}
	b.wait("reads", func() bool { return disk.waiting.Load() == 4 })
	for n := range 4 {
		b.disk.Remove(key(n))
	}
	b.wait("removals", func() bool { return b.store.Stats().Removed == 4 })
	for n := 10; n < 40; n++ {
		require.NoError(t, b.put(n))
	}
	require.Empty(t, disk.worst)
	require.Equal(t, disk.used(), b.store.Stats().UsedBytes)
	open()
	for range 4 {
		require.NoError(t, <-answers, "whoever has it open reads it to the end")
	}
	b.wait("books", func() bool { b.idle(); return disk.used() == b.store.Stats().UsedBytes })
	b.close()
}

// Recency is what it was, also when the process was killed: but for the last ten
// seconds.
func TestRecencyAfterAKill(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "root")
	disk, clock := newMemDisk(dir), &clock{}
	o := tier.StoreOptions{FS: disk, Now: clock.now, Tick: 2 * time.Millisecond}
	b := open(t, dir, o).scanned()
	for n := range 6 {
		require.NoError(t, b.put(n))
		clock.jump(time.Second)
	}
	b.disk.Touch(key(0), 0) // a hit that is not due at once ...
	clock.jump(time.Second)
	b.disk.Touch(key(1), 0)
	clock.jump(11 * time.Second) // ... is on disk ten seconds later, without another hit
	b.wait("mtimes", func() bool { return b.store.Stats().Touched >= 2 })
	disk2 := disk.killed()
	_ = b.store.Close(patience)
	require.NoError(t, b.root.Close())

	// With a smaller cap the oldest go first: 2, 3 and so on.
	o.FS, o.CapBytes = disk2, 8*disktest.CostBytes
	b = open(t, dir, o).scanned()
	for n := 100; n < 103; n++ {
		require.NoError(t, b.put(n))
	}
	b.idle()
	var left []int
	for n := range 6 {
		if b.disk.Has(key(n)) {
			left = append(left, n)
		}
	}
	require.Less(t, len(left), 6)
	require.Subset(t, []int{4, 5, 0, 1}, left)
	require.Contains(t, left, 1)
	b.close()
}

// A clock that was set back does not make what is new the next victim.
func TestRecencyWithAClockSetBack(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "root")
	disk, clock := newMemDisk(dir), &clock{}
	b := open(t, dir, tier.StoreOptions{FS: disk, Now: clock.now, CapBytes: 12 * disktest.CostBytes}).scanned()
	for n := range 20 {
		require.NoError(t, b.put(n))
	}
	clock.jump(-time.Hour)
	for n := 20; n < 40; n++ {
		require.NoError(t, b.put(n))
		require.NoError(t, b.get(n))
	}
	b.idle()
	for n := 38; n < 40; n++ {
		require.True(t, b.disk.Has(key(n)), n)
	}
	require.False(t, b.disk.Has(key(19)))
	b.close()
}

// Odd things in the tier's places harm nobody: not adopted, not followed, not
// removed, and the tier goes on.
func TestForeignThingsInOurPlaces(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "root")
	b := open(t, dir, tier.StoreOptions{}).scanned()
	require.NoError(t, b.put(0))
	require.NoError(t, b.put(1))
	b.close()
	fp, err := disktest.Namespace("crash/model").Fingerprint()
	require.NoError(t, err)
	ns := filepath.Join(dir, chunk.DirName("crash/model", fp))
	path := func(n int) string { return filepath.Join(ns, chunk.SubDir(key(n)), chunk.FileName(key(n))) }
	outside := t.TempDir()
	// A directory by the name of a chunk, one by the name of a temp file of a dead
	// session, a symlink to a directory in place of a subdirectory, a file in place
	// of another, a pipe, and names that no parser likes.
	require.NoError(t, os.MkdirAll(filepath.Join(path(5), "full"), 0o700))
	temp := filepath.Join(filepath.Dir(path(0)), chunk.TempName(key(0), 7, 1))
	require.NoError(t, os.Mkdir(temp, 0o700))
	require.NoError(t, os.Symlink(outside, filepath.Dir(path(2))))
	require.NoError(t, os.WriteFile(filepath.Dir(path(3)), []byte("a file"), 0o600))
	require.NoError(t, syscall.Mkfifo(path(10), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(outside, chunk.FileName(key(2))), make([]byte, disktest.FileBytes), 0o600))
	k := chunk.FileName(key(15))
	for _, name := range []string{
		"\xff\xfe", "a\nb", " ", "..kvc", strings.ToUpper(k), k + " ", k[1:], "0" + k, strings.TrimSuffix(k, ".kvc"),
		k[:64] + ".KVC", k[:64] + ".0000000000000007.01.tmp", k[:64] + ".7.1.tmp", strings.Repeat("n", 255),
	} {
		require.NoError(t, os.WriteFile(filepath.Join(filepath.Dir(path(0)), name), []byte("x"), 0o600), "%q", name)
	}
	require.NoError(t, os.WriteFile(filepath.Join(ns, "AB"), nil, 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "no@namespace"), nil, 0o600))

	b = open(t, dir, tier.StoreOptions{}).scanned()
	b.wait("adoption", func() bool { return b.store.Stats().Adopted == 2 })
	require.Equal(t, map[string]uint64{"type": 5, "name": 14}, b.store.Stats().Rejected)
	require.Equal(t, 2, b.disk.Count())
	for range 10 { // more often than the breaker bears
		require.ErrorIs(t, b.get(2), tier.ErrAbsent, "%+v", b.store.Stats())
		require.Zero(t, b.disk.Probe([]chunk.Key{key(2)}, time.Second))
		require.Error(t, b.put(2), "outside of the root")
		require.Error(t, b.put(3))
		require.Error(t, b.put(5))
		require.ErrorIs(t, b.get(5), tier.ErrAbsent, "%+v", b.store.Stats())
	}
	require.NoError(t, b.put(10), "a pipe gives way")
	require.NoError(t, b.get(10))
	// One that was there and is replaced under a running tier.
	require.NoError(t, os.Remove(path(1)))
	require.NoError(t, os.Symlink(filepath.Join(outside, chunk.FileName(key(2))), path(1)))
	require.NoError(t, os.Remove(path(10)))
	require.NoError(t, os.Mkdir(path(10), 0o700))
	for range 10 {
		require.ErrorIs(t, b.get(1), tier.ErrAbsent)
		require.ErrorIs(t, b.get(10), tier.ErrAbsent)
	}
	require.NoError(t, b.put(1))
	require.NoError(t, b.get(1))
	require.Equal(t, "on", b.store.Stats().State)
	require.NoError(t, b.get(0))
	entries, err := os.ReadDir(outside)
	require.NoError(t, err)
	require.Len(t, entries, 1)
	require.DirExists(t, temp)
	require.Empty(t, b.store.Stats().Corrupt)
	b.close()
}

// A hung write that comes back after the tier was closed leaves nothing in a
// directory that somebody else may lead by then.
func TestLateWriteAfterCloseLeavesNothing(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "root")
	disk := newMemDisk(dir)
	b := open(t, dir, tier.StoreOptions{FS: disk}).scanned()
	open := disk.holdWrites()
	done := make(chan error, 1)
	require.True(t, b.start(1, func(err error) { done <- err }))
	b.wait("write", func() bool { return disk.waiting.Load() == 1 })
	require.ErrorIs(t, b.store.Close(100*time.Millisecond), tier.ErrIO)
	open()
	require.ErrorIs(t, <-done, tier.ErrClosed)
	require.Empty(t, disk.files(".kvc"))
	require.NoError(t, b.root.Close())
}
