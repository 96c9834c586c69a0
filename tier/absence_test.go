package tier

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/disktest"
)

// logLines is a log and what was said in it.
type logLines struct {
	mu  sync.Mutex
	log bytes.Buffer
}

func (l *logLines) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(&lockedWriter{&l.mu, &l.log}, nil))
}

func (l *logLines) lines() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Split(strings.TrimSpace(l.log.String()), "\n")
}

// bindOver mounts a directory over another one, until the returned function is called.
func bindOver(t *testing.T, what, dir string) (off func()) {
	t.Helper()
	if err := syscall.Mount(what, dir, "", syscall.MS_BIND, ""); err != nil {
		t.Skipf("not run: nothing can be mounted over a directory here: %v", err)
	}
	off = sync.OnceFunc(func() { require.NoError(t, syscall.Unmount(dir, syscall.MNT_DETACH)) })
	t.Cleanup(off)
	return off
}

// The log has one line when the root goes, whatever is asked meanwhile, and one when it
// is back. Another process that leads at the path in between is left alone.
func TestRootAwayIsSaidOnce(t *testing.T) {
	disk, mounted := ownDisk(t, "8m")
	if !mounted {
		t.Skip("not run: no file system of its own can be mounted here")
	}
	dir, empty, log := filepath.Join(disk, "root"), t.TempDir(), &logLines{}
	h := openShelf(t, dir, "m", StoreOptions{Log: log.logger()}).scanned()
	for n := range 4 {
		require.NoError(t, h.put(n))
	}
	require.Equal(t, InPlace, h.root.Place())
	off := bindOver(t, empty, disk)
	require.Equal(t, Away, h.root.Place())
	h.wait("off", func() bool { return h.store.Stats().State == "off" })
	other := startLeader(t, dir)
	require.Equal(t, "true  <nil>\n", other.says, "the path is free for others")
	for i := range 200 {
		require.Error(t, h.get(i%4))
		require.Error(t, h.put(100+i))
		h.disk.Touch(shelfKey(0), 0)
		h.disk.Remove(shelfKey(500 + i))
	}
	require.Equal(t, Away, h.root.Place())
	require.Len(t, disktest.Files(t, empty, ""), 2, "its root file and its lock")
	require.Len(t, log.lines(), 1)
	require.Contains(t, log.lines()[0], "level=WARN")
	require.Contains(t, log.lines()[0], "mount the same file system there again")
	require.Contains(t, log.lines()[0], "root="+dir)
	require.Contains(t, log.lines()[0], `found="no directory"`)

	off()
	h.wait("return", func() bool { return h.store.Stats().State == "on" })
	h.scanned()
	for n := range 4 {
		require.NoError(t, h.get(n))
	}
	require.NoError(t, h.put(4))
	h.close()
	require.Len(t, log.lines(), 2)
	require.Contains(t, log.lines()[1], "on again")
	require.Len(t, disktest.Files(t, empty, ""), 2)
}

// The lock was lost while the root was away, and another process has it: that one leads.
func TestRootLockedByAnotherWhileAway(t *testing.T) {
	disk, mounted := ownDisk(t, "8m")
	if !mounted {
		t.Skip("not run: no file system of its own can be mounted here")
	}
	aside, log := t.TempDir(), &logLines{}
	bindOver(t, disk, aside)
	dir := filepath.Join(disk, "root")
	h := openShelf(t, dir, "m", StoreOptions{Log: log.logger()}).scanned()
	require.NoError(t, h.put(0))
	off := bindOver(t, t.TempDir(), disk)
	h.wait("off", func() bool { return h.store.Stats().State == "off" })
	// Closing any descriptor of it drops the lock of the process.
	f, err := os.Open(filepath.Join(aside, "root", lockFileName))
	require.NoError(t, err)
	require.NoError(t, f.Close())
	require.Equal(t, "true  <nil>\n", startLeader(t, filepath.Join(aside, "root")).says)
	off()
	h.wait("the end", func() bool { return h.store.Stats().State == "dead" })
	require.Error(t, h.put(1))
	require.ErrorIs(t, h.get(0), ErrOff)
	h.close()
	require.Len(t, disktest.Files(t, disk, ".kvc"), 1)
	require.Len(t, log.lines(), 2)
	require.Contains(t, log.lines()[1], "another process has locked the root")
}

// A root whose lock file is deleted, or taken out of it, does not come back.
func TestRootGone(t *testing.T) {
	for name, take := range map[string]func(dir string) error{
		"deleted":      os.RemoveAll,
		"lock file":    func(dir string) error { return os.Remove(filepath.Join(dir, lockFileName)) },
		"lock renamed": func(dir string) error { return os.Rename(filepath.Join(dir, lockFileName), filepath.Join(dir, "x")) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "root")
			h := openShelf(t, dir, "m", StoreOptions{}).scanned()
			require.NoError(t, h.put(1))
			require.NoError(t, take(dir))
			require.Equal(t, Gone, h.root.Place())
			h.wait("the tier to notice", func() bool { return h.store.Stats().State == "dead" })
		})
	}
	t.Run("moved and moved back", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "root")
		h := openShelf(t, dir, "m", StoreOptions{}).scanned()
		require.NoError(t, h.put(1))
		require.NoError(t, os.Rename(dir, dir+".aside"))
		require.Equal(t, Away, h.root.Place())
		h.wait("off", func() bool { return h.store.Stats().State == "off" })
		require.NoError(t, os.Rename(dir+".aside", dir))
		h.wait("return", func() bool { return h.store.Stats().State == "on" })
		require.NoError(t, h.get(1))
	})
}

// The breaker's time does not bring a tier back whose root is away; the root does, also
// one that was off for errors.
func TestBreakerAway(t *testing.T) {
	now := time.Unix(1000, 0)
	b := newBreaker(BreakerOptions{})
	for range 8 {
		b.fail(now, "x")
	}
	require.True(t, b.off.Load())
	require.True(t, b.leave())
	require.False(t, b.leave(), "known already")
	require.False(t, b.tick(now.Add(time.Hour)))
	require.True(t, b.off.Load())
	b.comeBack(now)
	require.False(t, b.off.Load())
	state, _ := b.state()
	require.Equal(t, "on", state)
	b.kill()
	require.False(t, b.leave())
	b.comeBack(now)
	require.True(t, b.off.Load())
}

// What is stored while the disk is away waits in DRAM, and goes to disk when it is back.
func TestChunksStoredWhileTheRootIsAway(t *testing.T) {
	disk, mounted := ownDisk(t, "8m")
	if !mounted {
		t.Skip("not run: no file system of its own can be mounted here")
	}
	root, store := openStoreAt(t, filepath.Join(disk, "root"), StoreOptions{})
	t.Cleanup(func() { require.NoError(t, root.Close()) })
	t.Cleanup(func() { require.NoError(t, store.Close(shelfPatience)) })
	d, err := store.Namespace(rigNamespace("rig"))
	require.NoError(t, err)
	require.Eventually(t, d.Scanned, shelfPatience, time.Millisecond)
	g := newRig(t, rigOptions{slots: 8, disk: d})
	g.grown(8)
	g.store(1, 0, false)
	require.Eventually(t, func() bool { return d.Has(rigKey(1)) }, shelfPatience, time.Millisecond)
	off := bindOver(t, t.TempDir(), disk)
	require.Eventually(t, func() bool { return store.Stats().State == "off" }, shelfPatience, time.Millisecond)
	for n := 2; n < 5; n++ {
		g.store(n, n-1, false)
	}
	g.do(func() { require.Equal(t, 3, g.space.Stats().Backlog) })
	require.False(t, d.Has(rigKey(2)))
	off()
	for n := 1; n < 5; n++ {
		require.Eventually(t, func() bool { return d.Has(rigKey(n)) }, shelfPatience, time.Millisecond)
	}
	require.Eventually(t, func() bool {
		return store.Stats().UsedBytes == disktest.Allocated(t, root.Path())
	}, shelfPatience, time.Millisecond)
}
