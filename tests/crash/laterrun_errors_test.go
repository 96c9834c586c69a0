package crash

import (
	"errors"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/disktest"
	"github.com/kvtier/kvtier/internal/sys"
	"github.com/kvtier/kvtier/tier"
)

// usedMemDisk holds what usedRoot makes.
func usedMemDisk(t *testing.T, dir string) *memDisk {
	t.Helper()
	disk, clock := newMemDisk(dir), &clock{}
	clock.jump(-time.Hour)
	b := open(t, dir, tier.StoreOptions{FS: disk, Now: clock.now}).scanned()
	for n := range earlier {
		require.NoError(t, b.put(n))
		clock.jump(time.Minute)
	}
	require.NoError(t, b.put(wrong))
	require.NoError(t, b.put(damaged))
	b.close()
	sidecar, temps := namesOf(t, dir)
	require.True(t, disk.edit(b.path(dir, wrong), func([]byte) []byte { return wrongSize }))
	require.True(t, disk.edit(b.path(dir, damaged), func(data []byte) []byte { data[100] ^= 1; return data }))
	require.True(t, disk.edit(sidecar, func(data []byte) []byte { return data[:50] }))
	for _, temp := range temps {
		f, err := disk.Open(temp, sys.OpenWrite|sys.OpenCreate)
		require.NoError(t, err)
		_, err = f.WriteV([][]byte{deadTemp}, 0)
		require.NoError(t, err)
		require.NoError(t, f.Close())
	}
	return disk
}

// TestLaterRunWithAnErrorAtEachCall lets the n-th call fail of a process that takes over
// what an earlier one has left, for every n.
func TestLaterRunWithAnErrorAtEachCall(t *testing.T) {
	for _, errno := range []syscall.Errno{syscall.EIO, syscall.ENOSPC, syscall.EACCES} {
		t.Run(errno.Error(), func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(t.TempDir(), "root")
			used := usedMemDisk(t, dir)
			n := 1
			for laterErrorAt(t, dir, used, n, errno) {
				n++
			}
			t.Logf("%d calls", n-1)
			require.Greater(t, n, 100)
		})
	}
}

// laterErrorAt reports whether there were n calls.
func laterErrorAt(t *testing.T, dir string, used *memDisk, n int, errno syscall.Errno) bool {
	disk, clock := used.killed(), &clock{}
	require.Greater(t, disk.used(), int64(laterCap))
	disk.limit = laterCap // nothing grows before it has shrunk
	o := tier.StoreOptions{FS: disk, Now: clock.now, CapBytes: laterCap, Tick: 2 * time.Millisecond}
	where := failNth(disk, n, errno)
	b, err := tryOpen(t, dir, o)
	for end := time.Now().Add(patience); err != nil; b, err = tryOpen(t, dir, o) { // whoever could not open tries again
		require.True(t, errors.Is(err, errno) || errors.Is(err, tier.ErrNoRoom), "%s: %v", where(), err)
		require.True(t, time.Now().Before(end), "%s: %v", where(), err)
	}
	b.wait("scan and shrinking after "+where(), func() bool {
		clock.jump(11 * time.Second)
		st := b.store.Stats()
		return b.disk.Scanned() && st.Known && st.UsedBytes <= laterCap
	})
	for i := range newOnes {
		b.putInTheEnd(newChunk(i), clock, where)
	}
	if err := b.get(earlier - 1); err != nil {
		require.ErrorIs(t, err, tier.ErrIO, where())
	}
	for tries := 0; ; tries++ {
		if err = b.get(damaged); errors.Is(err, tier.ErrAbsent) {
			break
		}
		require.Error(t, err, where())
		require.True(t, errors.Is(err, tier.ErrIO) || errors.Is(err, tier.ErrCorrupt), "%s: %v", where(), err)
		require.Less(t, tries, 3, where())
	}
	b.disk.Remove(key(removed))
	b.disk.Touch(key(earlier-1), 0)
	b.idle()
	b.booksOf(disk, clock, laterCap, where)
	require.NotEqual(t, "off", b.store.Stats().State, where())
	require.LessOrEqual(t, b.store.Stats().Corrupt["hash"], uint64(3), where())
	b.close()

	disk.set(nil)
	o.Tick = 0
	b = openLater(t, dir, o).scanned()
	b.wait("judgement", func() bool {
		return !disk.edit(b.path(dir, wrong), func(data []byte) []byte { return data })
	})
	b.idle()
	require.Empty(t, disk.files(".tmp"), where())
	sidecar, _ := namesOf(t, dir)
	want, err := disktest.Namespace("crash/model").Canonical()
	require.NoError(t, err)
	var have []byte
	require.True(t, disk.edit(sidecar, func(data []byte) []byte { have = data; return data }))
	require.Equal(t, want, have, where())
	require.False(t, b.disk.Has(key(removed)), where())
	for i := range newOnes {
		require.NoError(t, b.get(newChunk(i)), where())
	}
	require.NoError(t, b.get(earlier-1), where())
	require.ErrorIs(t, b.get(damaged), tier.ErrAbsent, where())
	require.Empty(t, b.store.Stats().Corrupt, where())
	b.booksOf(disk, clock, laterCap, where)
	b.close()
	disk.mu.Lock()
	worst := disk.worst
	disk.mu.Unlock()
	require.Empty(t, worst, where())
	return where() != "no call"
}
