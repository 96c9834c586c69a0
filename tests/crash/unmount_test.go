package crash

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/disktest"
	"github.com/kvtier/kvtier/internal/sys"
	"github.com/kvtier/kvtier/tier"
)

// device is what the file system at dir is mounted from.
func device(t *testing.T, dir string) string {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	require.NoError(t, err)
	for line := range strings.Lines(string(b)) {
		mount, source, _ := strings.Cut(line, " - ")
		if f := strings.Fields(mount); len(f) > 4 && f[4] == dir {
			return strings.Fields(source)[1]
		}
	}
	t.Fatal("not a mount point: " + dir)
	return ""
}

// mountAgain mounts a device once more.
func mountAgain(t *testing.T, kind, device, dir string) {
	t.Helper()
	require.NoError(t, syscall.Mount(device, dir, kind, 0, ""))
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
}

// path is the file of a chunk in a root at another place.
func (b *box) path(root string, n int) string {
	ns := disktest.Namespace("crash/model")
	fp, err := ns.Fingerprint()
	require.NoError(b.t, err)
	return filepath.Join(root, chunk.DirName(ns.Model, fp), chunk.SubDir(key(n)), chunk.FileName(key(n)))
}

func (b *box) state(states ...string) {
	b.t.Helper()
	b.wait(strings.Join(states, " or "), func() bool {
		for _, s := range states {
			if b.store.Stats().State == s {
				return true
			}
		}
		return false
	})
}

// booksMatch waits until what is accounted is what lies there. On xfs a directory gives
// its block back when names go, which is seen when the next file comes.
func (b *box) booksMatch(root, kind string) {
	b.t.Helper()
	b.idle()
	b.wait("the books", func() bool {
		slack := int64(0)
		if kind == "xfs" {
			for _, st := range disktest.Stats(b.t, root) {
				if st.Directory() {
					slack += 4096
				}
			}
		}
		more := b.store.Stats().UsedBytes - disktest.Allocated(b.t, root)
		return more >= 0 && more <= slack
	})
}

// A disk that is unmounted while it is in use, changed meanwhile, and mounted again:
// the tier is off while it is away, and afterwards serves what is there.
func TestUnmountedAndMountedAgain(t *testing.T) {
	for _, kind := range []struct {
		name string
		mkfs []string
	}{{"ext4", []string{"-q", "-F"}}, {"xfs", []string{"-q", "-f"}}} {
		t.Run(kind.name, func(t *testing.T) { unmountedAndMountedAgain(t, kind.name, kind.mkfs) })
	}
}

func unmountedAndMountedAgain(t *testing.T, kind string, mkfs []string) {
	dir, _ := loopDisk(t, kind, mkfs...)
	root, from := filepath.Join(dir, "root"), device(t, dir)
	b := open(t, root, tier.StoreOptions{}).scanned()
	for n := range 11 {
		require.NoError(t, b.put(n))
	}
	stranger, err := os.ReadFile(b.path(root, 10))
	require.NoError(t, err)
	b.disk.Remove(key(10))
	b.idle()
	require.ErrorIs(t, syscall.Unmount(dir, 0), syscall.EBUSY, "what holds the lock keeps it mounted")

	require.NoError(t, syscall.Unmount(dir, syscall.MNT_DETACH))
	b.state("off")
	for n := range 5 {
		require.False(t, b.disk.Has(key(n)))
		require.ErrorIs(t, b.get(n), tier.ErrOff)
		require.ErrorIs(t, b.put(100+n), errDropped)
	}
	b.disk.Remove(key(5))
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, entries, "somebody has written below the mount point")

	// Somebody else has it, and has his way with it.
	other := t.TempDir()
	mountAgain(t, kind, from, other)
	elsewhere := filepath.Join(other, "root")
	require.NoError(t, os.Remove(b.path(elsewhere, 1)))
	require.NoError(t, os.Rename(b.path(elsewhere, 3), b.path(elsewhere, 2)))
	require.NoError(t, os.Truncate(b.path(elsewhere, 4), 5000))
	require.NoError(t, os.WriteFile(b.path(elsewhere, 10), stranger, 0o600))
	for n := 6; n < 9; n++ { // what is allocated changes, and nothing else
		f, err := os.OpenFile(b.path(elsewhere, n), os.O_WRONLY, 0)
		require.NoError(t, err)
		require.NoError(t, f.Truncate(0))
		require.NoError(t, f.Truncate(disktest.FileBytes))
		require.NoError(t, f.Close())
	}
	require.Equal(t, "off", b.store.Stats().State, "it is not at its path")
	require.NoError(t, syscall.Unmount(other, 0))

	mountAgain(t, kind, from, dir)
	b.state("on")
	b.scanned()
	b.idle()
	require.False(t, b.disk.Has(key(1)))
	require.NoError(t, b.get(0))
	require.ErrorIs(t, b.get(1), tier.ErrAbsent)
	require.ErrorIs(t, b.get(2), tier.ErrCorrupt, "it is another chunk's file")
	require.ErrorIs(t, b.get(3), tier.ErrAbsent)
	require.Error(t, b.get(4))
	require.ErrorIs(t, b.get(5), tier.ErrAbsent, "removed while it was away")
	require.NoFileExists(t, b.path(root, 5))
	for n := 6; n < 9; n++ {
		require.ErrorIs(t, b.get(n), tier.ErrCorrupt)
	}
	require.NoError(t, b.get(9))
	require.NoError(t, b.get(10), "it came while nobody looked")
	require.NoError(t, b.put(1))
	require.NoError(t, b.get(1))
	b.booksMatch(root, kind)

	// And once more, with nothing changed: nothing is lost.
	held := b.disk.Count()
	require.NoError(t, syscall.Unmount(dir, syscall.MNT_DETACH))
	b.state("off")
	mountAgain(t, kind, from, dir)
	b.state("on")
	b.scanned()
	require.Equal(t, held, b.disk.Count())
	require.NoError(t, b.get(1))
	b.booksMatch(root, kind)
	b.close()
	require.NoError(t, syscall.Unmount(dir, 0), "nothing is open any more")
}

// mountOver mounts a directory over another one, until the returned function is called.
func mountOver(t *testing.T, what, dir string) (off func()) {
	t.Helper()
	if err := syscall.Mount(what, dir, "", syscall.MS_BIND, ""); err != nil {
		notRun(t, "mount over a directory", err)
	}
	gone := false
	off = func() {
		if !gone {
			gone = true
			require.NoError(t, syscall.Unmount(dir, syscall.MNT_DETACH))
		}
	}
	t.Cleanup(off)
	return off
}

// copyTree copies a root with its times, as a backup does.
func copyTree(t *testing.T, from, to string) {
	t.Helper()
	out, err := exec.Command("cp", "-a", from, to).CombinedOutput()
	require.NoError(t, err, string(out))
}

// Something else stands at the path: nothing in it changes, and when it goes the tier
// is there again.
func TestSomethingElseMountedOverTheRoot(t *testing.T) {
	for _, other := range []struct {
		name string
		make func(t *testing.T, root, at string) // at is to be mounted over the parent of the root
	}{
		{"an empty mount point", func(*testing.T, string, string) {}},
		{"a directory", func(t *testing.T, _, at string) { require.NoError(t, os.Mkdir(filepath.Join(at, "root"), 0o700)) }},
		{"a file", func(t *testing.T, _, at string) {
			require.NoError(t, os.WriteFile(filepath.Join(at, "root"), []byte("mine"), 0o600))
		}},
		{"a copy of the root", func(t *testing.T, root, at string) { copyTree(t, root, filepath.Join(at, "root")) }},
		{"a root in use", func(t *testing.T, _, at string) {
			b := open(t, filepath.Join(at, "root"), tier.StoreOptions{}).scanned()
			t.Cleanup(b.close)
			require.NoError(t, b.put(0))
			b.idle()
		}},
	} {
		t.Run(other.name, func(t *testing.T) {
			dir, at := ownTmpfs(t, "size=64m"), ownTmpfs(t, "size=64m")
			root := filepath.Join(dir, "root")
			b := open(t, root, tier.StoreOptions{Touch: time.Millisecond}).scanned()
			for n := range 8 {
				require.NoError(t, b.put(n))
			}
			other.make(t, root, at)
			before := disktest.Stats(t, at)
			off := mountOver(t, at, dir)
			b.state("off")
			for n := range 8 {
				require.Error(t, b.get(n))
				require.Error(t, b.put(100+n))
				b.disk.Touch(key(n), 0)
			}
			b.disk.Remove(key(1))
			_, err := b.store.Namespace(disktest.Namespace("another"))
			require.ErrorIs(t, err, tier.ErrOff)
			require.Equal(t, before, disktest.Stats(t, at))

			off()
			b.state("on")
			b.scanned()
			for n := range 8 {
				if n == 1 {
					require.ErrorIs(t, b.get(n), tier.ErrAbsent)
				} else {
					require.NoError(t, b.get(n))
				}
			}
			require.NoError(t, b.put(100))
			require.NoError(t, b.get(100))
			b.booksMatch(root, "tmpfs")
			b.close()
			require.Equal(t, before, disktest.Stats(t, at))
		})
	}
}

// The same before anybody has noticed: it is the call itself that looks where it is.
func TestNothingChangesInACopyOfTheRoot(t *testing.T) {
	const known = 8
	for _, c := range []struct {
		name string
		call func(b *box, at string)
	}{
		{"put", func(b *box, _ string) { require.Error(b.t, b.put(100)) }},
		{"put into a new directory", func(b *box, _ string) {
			k := key(100)
			k[0] = 0xee
			done := make(chan error, 1)
			p := disktest.Payload(k)
			require.True(b.t, b.disk.Write(tier.WriteJob{Key: k, Payload: p, Hash: chunk.HashPayload(p), Done: func(err error) { done <- err }}))
			require.ErrorIs(b.t, <-done, tier.ErrOff)
		}},
		{"remove", func(b *box, _ string) {
			b.disk.Remove(key(0))
			b.state("off")
		}},
		{"read of a damaged file", func(b *box, _ string) { require.Error(b.t, b.get(2)) }},
		{"read of a missing file", func(b *box, _ string) { require.Error(b.t, b.get(3)) }},
		{"touch", func(b *box, _ string) { b.disk.Touch(key(4), 0) }},
		{"namespace", func(b *box, _ string) {
			_, err := b.store.Namespace(disktest.Namespace("another"))
			require.ErrorIs(b.t, err, tier.ErrOff)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir, at := ownTmpfs(t, "size=64m"), ownTmpfs(t, "size=64m")
			root := filepath.Join(dir, "root")
			b := open(t, root, tier.StoreOptions{Tick: time.Hour}).scanned() // nobody else looks
			for n := range known {
				require.NoError(t, b.put(n))
			}
			b.idle()
			copyTree(t, root, filepath.Join(at, "root"))
			damaged, err := os.ReadFile(b.path(filepath.Join(at, "root"), 2))
			require.NoError(t, err)
			damaged[100] ^= 1
			require.NoError(t, os.WriteFile(b.path(filepath.Join(at, "root"), 2), damaged, 0o600))
			require.NoError(t, os.Remove(b.path(filepath.Join(at, "root"), 3)))
			before := disktest.Stats(t, at)
			off := mountOver(t, at, dir)
			c.call(b, at)
			if err := b.store.Close(patience); c.name == "remove" {
				require.ErrorContains(t, err, "could not be deleted", "it is still there")
			} else {
				require.NoError(t, err)
			}
			require.NoError(t, b.root.Close())
			require.Equal(t, before, disktest.Stats(t, at))
			off()
			require.Len(t, disktest.Files(t, root, ".kvc"), known, "nor has it changed here")
			require.Empty(t, disktest.Files(t, root, ".tmp"))
		})
	}
}

// A write that is cut off in the middle by the unmount leaves its temp file behind.
func TestWriteCutOffByAnUnmount(t *testing.T) {
	dir := ownTmpfs(t, "size=64m")
	root, empty := filepath.Join(dir, "root"), t.TempDir()
	disk := &cuttingFS{}
	b := open(t, root, tier.StoreOptions{FS: disk}).scanned()
	require.NoError(t, b.put(0))
	off := func() {}
	disk.beforeRename = func() { off = mountOver(t, empty, dir) }
	require.ErrorIs(t, b.put(1), tier.ErrOff, "worth to be offered again")
	b.state("off")
	off()
	b.state("on")
	b.scanned()
	require.Empty(t, disktest.Files(t, root, ".tmp"))
	require.False(t, b.disk.Has(key(1)))
	require.NoError(t, b.put(1))
	require.NoError(t, b.get(1))
	require.NoError(t, b.get(0))
	b.booksMatch(root, "tmpfs")
	b.close()
}

// A write has looked, and then the file system goes: no directories are made for it.
func TestUnmountedBeforeADirectoryIsMade(t *testing.T) {
	dir := ownTmpfs(t, "size=64m")
	root, other := filepath.Join(dir, "root"), t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(other, "root"), 0o700))
	disk := &cuttingFS{}
	b := open(t, root, tier.StoreOptions{FS: disk}).scanned()
	off := func() {}
	disk.beforeLook = func() { off = mountOver(t, other, dir) }
	require.ErrorIs(t, b.put(0), tier.ErrOff)
	b.state("off")
	require.Len(t, disktest.Stats(t, other), 2)
	off()
	b.state("on")
	require.NoError(t, b.put(0))
	b.close()
	require.Len(t, disktest.Stats(t, other), 2)
}

// cuttingFS does something once, before a chunk's file gets its name, or before it is
// looked whether there is a directory for it.
type cuttingFS struct {
	tier.LocalFilesystem
	beforeRename, beforeLook func()
}

func (f *cuttingFS) Rename(from, to string) error {
	if do := f.beforeRename; do != nil && filepath.Ext(to) == ".kvc" {
		f.beforeRename = nil
		do()
	}
	return f.LocalFilesystem.Rename(from, to)
}

func (f *cuttingFS) Lstat(path string) (sys.Stat, error) {
	if do := f.beforeLook; do != nil && len(filepath.Base(path)) == 2 {
		f.beforeLook = nil
		do()
	}
	return f.LocalFilesystem.Lstat(path)
}
