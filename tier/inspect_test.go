package tier

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/disktest"
)

// inspected is a closed root with n chunks, seen by a tool through a file system in
// which calls can fail.
func inspected(t *testing.T, n int) (*shelf, *InspectedNamespace, *faultFS) {
	t.Helper()
	dir := t.TempDir()
	h := newShelf(t, dir, "m", StoreOptions{})
	for i := range n {
		require.NoError(t, h.put(i))
	}
	h.close()
	i, err := Inspect(dir)
	require.NoError(t, err)
	fs := &faultFS{}
	i.fs = fs
	all, err := i.Namespaces()
	require.NoError(t, err)
	require.Len(t, all, 1)
	return h, all[0], fs
}

func verifier(t *testing.T, n *InspectedNamespace) *Verifier {
	t.Helper()
	v, err := n.Verifier()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, v.Close()) })
	return v
}

// A file descriptor of the lock file that is closed again drops the lock of the whole
// process: looking who leads must not do that to a leader in the same process.
func TestLookingWhoLeadsKeepsTheLock(t *testing.T) {
	dir := t.TempDir()
	h := openShelf(t, dir, "m", StoreOptions{})
	i, err := Inspect(dir)
	require.NoError(t, err)
	for range 2 {
		who, err := i.Leader()
		require.NoError(t, err)
		require.True(t, who.Held)
		require.Equal(t, os.Getpid(), who.PID)
		require.WithinDuration(t, time.Now(), who.Since, time.Minute)
	}
	require.Contains(t, startLeader(t, dir).says, "false process")
	_, err = i.Hold()
	require.ErrorIs(t, err, ErrInUse)
	require.True(t, h.root.StillLocked())
	h.close()
	who, err := i.Leader()
	require.NoError(t, err)
	require.Equal(t, Leadership{}, who)
}

func TestLeaderInAnotherProcessIsSeen(t *testing.T) {
	dir := t.TempDir()
	child := startLeader(t, dir)
	i, err := Inspect(dir)
	require.NoError(t, err)
	who, err := i.Leader()
	require.NoError(t, err)
	require.True(t, who.Held)
	require.Equal(t, child.cmd.Process.Pid, who.PID)
	_, err = i.Hold()
	require.ErrorIs(t, err, ErrInUse)
	require.NoError(t, child.cmd.Process.Kill())
	require.Eventually(t, func() bool {
		who, err := i.Leader()
		return err == nil && !who.Held
	}, shelfPatience, time.Millisecond)
}

// A tool that clears a root keeps leaders out, and no longer than it needs.
func TestHoldKeepsLeadersOut(t *testing.T) {
	dir := t.TempDir()
	newShelf(t, dir, "m", StoreOptions{}).close()
	i, err := Inspect(dir)
	require.NoError(t, err)
	release, err := i.Hold()
	require.NoError(t, err)
	require.Contains(t, startLeader(t, dir).says, "false process")
	require.NoError(t, release())
	require.Contains(t, startLeader(t, dir).says, "true")
}

func TestInspectMakesNothing(t *testing.T) {
	dir := t.TempDir()
	_, err := Inspect(dir)
	require.ErrorIs(t, err, ErrNoRoot)
	_, err = Inspect(filepath.Join(dir, "absent"))
	require.ErrorIs(t, err, os.ErrNotExist)
	require.NoError(t, os.Mkdir(filepath.Join(dir, "m@0123456789abcdef0123456789abcdef"), 0o700))
	i, err := Inspect(dir)
	require.NoError(t, err)
	who, err := i.Leader()
	require.NoError(t, err)
	require.False(t, who.Held)
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 1)
}

func TestVerifierProvesByTwoReadsOfOneFile(t *testing.T) {
	h, n, _ := inspected(t, 3)
	k, path := shelfKey(0), h.file(0)
	n.i.fs = corrupting(1)
	v := verifier(t, n)
	c := v.Check(k)
	require.Equal(t, Check{State: CheckUnsteady, Reason: "payload"}, c)
	require.Error(t, v.Remove(k, c))
	require.Equal(t, CheckGood, v.Check(k).State)

	// Another file has the name by the second read, and that read fails too.
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	republish := func() {
		require.NoError(t, os.WriteFile(path+".new", b, 0o600))
		require.NoError(t, os.Rename(path+".new", path))
	}
	replaced := corrupting(1)
	replaced.then = func() {
		republish()
		replaced.then = nil
		replaced.times.Store(1)
	}
	n.i.fs = replaced
	v = verifier(t, n)
	c = v.Check(k)
	require.Equal(t, CheckUnsteady, c.State)
	require.Error(t, v.Remove(k, c))
	require.FileExists(t, path)

	// Proved, but then published anew: the new file stays.
	n.i.fs = corrupting(2)
	v = verifier(t, n)
	c = v.Check(k)
	require.Equal(t, CheckDamaged, c.State)
	republish()
	require.NoError(t, v.Remove(k, c))
	require.FileExists(t, path)
	require.Equal(t, CheckGood, v.Check(k).State)

	n.i.fs = corrupting(2)
	v = verifier(t, n)
	require.NoError(t, v.Remove(k, v.Check(k)))
	require.NoFileExists(t, path)
	require.Equal(t, Check{State: CheckVanished}, v.Check(k))
}

func TestSystemErrorsProveNothing(t *testing.T) {
	_, n, fs := inspected(t, 1)
	v := verifier(t, n)
	for errno, name := range map[syscall.Errno]string{
		syscall.EIO: "EIO", syscall.EMFILE: "EMFILE", syscall.EACCES: "EACCES", syscall.ENOMEM: "ENOMEM",
	} {
		for _, call := range []string{"open", "read"} {
			fs.set(failing(call, errno))
			c := v.Check(shelfKey(0))
			require.Equal(t, CheckUnreadable, c.State)
			require.Equal(t, name, c.Reason)
			require.ErrorIs(t, c.Err, errno)
			require.Error(t, v.Remove(shelfKey(0), c))
		}
	}
	fs.set(nil)
	require.Equal(t, CheckGood, v.Check(shelfKey(0)).State)
}

func TestVerifierWithoutDirectIO(t *testing.T) {
	h, n, fs := inspected(t, 2)
	fs.set(failing("open direct", syscall.EINVAL))
	v := verifier(t, n)
	require.Equal(t, CheckGood, v.Check(shelfKey(0)).State)
	require.NoError(t, os.Truncate(h.file(1), 100))
	require.Equal(t, "size", v.Check(shelfKey(1)).Reason)
}

// A name that cannot be removed is told, and keeps its directory and its sidecar.
func TestClearTellsWhatStays(t *testing.T) {
	h, n, fs := inspected(t, 3)
	keep := h.file(1)
	fs.set(func(call, path string) error {
		if call == "unlink" && path == keep {
			return &os.PathError{Op: call, Path: path, Err: syscall.EACCES}
		}
		return nil
	})
	var kept []string
	n.Clear(Clearing{
		Chunks: func(Entry) bool { return true }, Temps: true, Directories: true, AnySidecar: true,
		Each: func(e Entry, err error) {
			if err != nil {
				kept = append(kept, e.Path)
			}
		},
	})
	require.Equal(t, []string{keep}, kept)
	require.FileExists(t, keep)
	require.FileExists(t, filepath.Join(n.path, sidecarName))
	require.NoFileExists(t, h.file(0))
	require.NoDirExists(t, filepath.Join(n.path, chunk.SubDir(shelfKey(0))))
}

// Chunks may be deleted under a leader: misses, and its books are right again.
func TestClearUnderALeader(t *testing.T) {
	dir := t.TempDir()
	h := openShelf(t, dir, "m", StoreOptions{}).scanned()
	for i := range 4 {
		require.NoError(t, h.put(i))
	}
	i, err := Inspect(dir)
	require.NoError(t, err)
	all, err := i.Namespaces()
	require.NoError(t, err)
	all[0].Clear(Clearing{Chunks: func(e Entry) bool { return e.Key != shelfKey(2) }})
	for n := range 4 {
		if n == 2 {
			require.NoError(t, h.get(n))
		} else {
			require.ErrorIs(t, h.get(n), ErrAbsent)
		}
	}
	require.EqualValues(t, 3, h.store.Stats().Vanished)
	require.Zero(t, h.store.Stats().BreakerTrips)
	require.Equal(t, h.store.Stats().UsedBytes, disktest.Allocated(t, dir))
	require.NoError(t, h.put(0))
	require.NoError(t, h.get(0))
}
