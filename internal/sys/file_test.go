package sys

import (
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFileGatherAndTimes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	f, err := Open(path, OpenReadWrite|OpenCreate|OpenExclusive, 0o600)
	require.NoError(t, err)
	n, err := f.WriteV([][]byte{[]byte("abc"), []byte("defg")}, 2)
	require.NoError(t, err)
	require.Equal(t, 7, n)
	a, b := make([]byte, 4), make([]byte, 9)
	n, err = f.ReadV([][]byte{a, b}, 0)
	require.NoError(t, err)
	require.Equal(t, 9, n)
	require.Equal(t, "\x00\x00abcdefg\x00\x00\x00\x00", string(a)+string(b))
	n, err = f.ReadV([][]byte{a}, 9)
	require.NoError(t, err)
	require.Zero(t, n)

	before, err := os.Stat(path)
	require.NoError(t, err)
	const ns = 1_234_567_890_123_456_789
	require.NoError(t, f.SetModified(ns))
	st, err := f.Stat()
	require.NoError(t, err)
	require.Equal(t, int64(ns), st.ModifiedNS)
	require.Equal(t, int64(9), st.Size)
	require.True(t, st.Regular())
	require.False(t, st.Directory())
	require.Equal(t, uint64(1), st.Links)
	require.NoError(t, SetModified(path, ns+1))
	after, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, int64(ns+1), after.ModTime().UnixNano())
	require.Equal(t, before.Sys().(*syscall.Stat_t).Atim, after.Sys().(*syscall.Stat_t).Atim)

	require.NoError(t, f.Sync())
	require.NoError(t, f.DropCache())
	require.NoError(t, f.Close())
	require.Error(t, f.Close())
	_, err = Open(path, OpenWrite|OpenCreate|OpenExclusive, 0o600)
	require.ErrorIs(t, err, syscall.EEXIST)
}

func TestFileAllocatedIsWhatItReallyTakes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	f, err := Open(path, OpenReadWrite|OpenCreate, 0o600)
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, f.Truncate(1<<20))
	st, err := f.Stat()
	require.NoError(t, err)
	require.Equal(t, int64(1<<20), st.Size)
	require.Less(t, st.Allocated, int64(1<<20), "a hole takes nothing")
}

func TestFileLinksAreNotFollowed(t *testing.T) {
	dir := t.TempDir()
	target, link := filepath.Join(dir, "target"), filepath.Join(dir, "link")
	require.NoError(t, os.Mkdir(target, 0o700))
	require.NoError(t, os.Symlink(target, link))
	_, err := Open(link, OpenRead, 0)
	require.ErrorIs(t, err, syscall.ELOOP)
	_, err = ReadNames(link)
	require.Error(t, err)
	st, err := Lstat(link)
	require.NoError(t, err)
	require.False(t, st.Directory())
	require.NoError(t, syscall.Mkfifo(filepath.Join(dir, "fifo"), 0o600))
	f, err := Open(filepath.Join(dir, "fifo"), OpenRead|OpenNonblock, 0)
	require.NoError(t, err, "a fifo must not block")
	require.NoError(t, f.Close())
	names, err := ReadNames(dir)
	require.NoError(t, err)
	require.ElementsMatch(t, []string{"target", "link", "fifo"}, names)
}

func TestFileNames(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	require.NoError(t, Mkdir(a))
	require.ErrorIs(t, Mkdir(a), syscall.EEXIST)
	require.NoError(t, Writable(a))
	require.NoError(t, os.WriteFile(filepath.Join(a, "x"), nil, 0o600))
	require.ErrorIs(t, Rmdir(a), syscall.ENOTEMPTY)
	require.NoError(t, Rename(filepath.Join(a, "x"), b))
	require.NoError(t, Link(b, filepath.Join(a, "y")))
	require.ErrorIs(t, Link(b, filepath.Join(a, "y")), syscall.EEXIST)
	require.NoError(t, Unlink(filepath.Join(a, "y")))
	require.ErrorIs(t, Unlink(filepath.Join(a, "y")), syscall.ENOENT)
	require.NoError(t, Rmdir(a))
	require.Error(t, Writable(a))
	page, err := NewPages(4096)
	require.NoError(t, err)
	page[4095] = 1
	require.NoError(t, FreePages(page))
	fs, err := Statfs(dir)
	require.NoError(t, err)
	require.Positive(t, fs.TotalBytes)
	require.LessOrEqual(t, fs.AvailBytes, fs.TotalBytes)
}

func TestLockTellsItsHolder(t *testing.T) {
	path := filepath.Join(t.TempDir(), "LOCK")
	l, err := OpenLock(path)
	require.NoError(t, err)
	defer l.Close()
	ok, err := l.TryLock()
	require.NoError(t, err)
	require.True(t, ok)
	require.Zero(t, l.Holder(), "nobody else")
	require.NoError(t, l.WriteText("a long text"))
	require.NoError(t, l.WriteText("short"))
	require.Equal(t, "short", l.ReadText())
	require.NoError(t, l.Unlock())
	require.NotEmpty(t, BootID())
	start := ProcessStart(os.Getpid())
	require.NotZero(t, start)
	require.Zero(t, ProcessStart(-1))
	child := exec.Command("sleep", "60")
	require.NoError(t, child.Start())
	defer child.Wait()
	defer child.Process.Kill()
	require.GreaterOrEqual(t, ProcessStart(child.Process.Pid), start)
}
