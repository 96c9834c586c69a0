package tier

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/disktest"
	"github.com/kvtier/kvtier/internal/sys"
)

// lockChild is the argument that makes the test binary lead a root and wait, forkChild
// the one that makes it fork besides.
const (
	lockChild = "-lead-root="
	forkChild = "-lead-root-and-fork="
)

func TestMain(m *testing.M) {
	for _, arg := range os.Args[1:] {
		if path, ok := cutPrefix(arg, lockChild); ok {
			leadRoot(path)
			return
		}
		if path, ok := cutPrefix(arg, forkChild); ok {
			leadRootAndFork(path)
			return
		}
	}
	os.Exit(m.Run())
}

func cutPrefix(s, prefix string) (string, bool) {
	if len(s) < len(prefix) || s[:len(prefix)] != prefix {
		return "", false
	}
	return s[len(prefix):], true
}

// leadRoot says on stdout whether it leads, and ends when stdin does.
func leadRoot(path string) {
	r, err := OpenRoot(path, RootOptions{})
	if err != nil {
		fmt.Println("error", err)
		return
	}
	ok, holder, err := r.TryLock()
	fmt.Println(ok, holder, err)
	bufio.NewReader(os.Stdin).ReadByte()
}

type leader struct {
	cmd  *exec.Cmd
	says string
}

func startLeader(t *testing.T, path string) *leader {
	t.Helper()
	return startChild(t, lockChild+path)
}

func startChild(t *testing.T, argument string) *leader {
	t.Helper()
	cmd := exec.Command(os.Args[0], argument)
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		stdin.Close()
		cmd.Process.Kill()
		cmd.Wait()
	})
	line, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err)
	return &leader{cmd: cmd, says: line}
}

func TestRootHasOneLeaderOverProcesses(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "root")
	child := startLeader(t, dir)
	require.Equal(t, "true  <nil>\n", child.says)
	r, err := OpenRoot(dir, RootOptions{})
	require.NoError(t, err)
	defer r.Close()
	ok, holder, err := r.TryLock()
	require.NoError(t, err)
	require.False(t, ok)
	require.Equal(t, fmt.Sprintf("process %d", child.cmd.Process.Pid), holder)
	require.Zero(t, r.Session())
	_, err = OpenStore(r, StoreOptions{CapBytes: 1 << 20})
	require.ErrorIs(t, err, ErrNotLocked)

	// SIGKILL is enough, at once.
	require.NoError(t, child.cmd.Process.Kill())
	child.cmd.Wait()
	ok, _, err = r.TryLock()
	require.NoError(t, err)
	require.True(t, ok)
	require.NotZero(t, r.Session())
	var h lockHolder
	require.NoError(t, json.Unmarshal([]byte(r.lock.file.ReadText()), &h))
	require.Equal(t, lockHolder{PID: os.Getpid(), Start: sys.ProcessStart(os.Getpid()), Boot: sys.BootID()}, h)
	require.NotZero(t, h.Start)
	require.NotEmpty(t, h.Boot)

	// Opening and closing the root again in this process must not lose the lock.
	for range 3 {
		again, err := OpenRoot(dir, RootOptions{})
		require.NoError(t, err)
		ok, holder, err := again.TryLock()
		require.NoError(t, err)
		require.False(t, ok)
		require.Equal(t, "this process", holder)
		require.NoError(t, again.Close())
	}
	require.Contains(t, startLeader(t, dir).says, fmt.Sprintf("false process %d", os.Getpid()))
	require.NoError(t, r.Close())
	require.NoError(t, r.Close())
	require.Equal(t, "true  <nil>\n", startLeader(t, dir).says)
	require.Empty(t, processLocks.open)
}

func TestRootHasOneLeaderInTheProcess(t *testing.T) {
	dir := t.TempDir()
	link := filepath.Join(t.TempDir(), "alias")
	require.NoError(t, os.Symlink(dir, link))
	a, err := OpenRoot(dir, RootOptions{})
	require.NoError(t, err)
	b, err := OpenRoot(link, RootOptions{})
	require.NoError(t, err)
	for range 2 {
		ok, _, err := a.TryLock()
		require.NoError(t, err)
		require.True(t, ok)
	}
	ok, _, err := b.TryLock()
	require.NoError(t, err)
	require.False(t, ok)
	session := a.Session()
	require.NoError(t, a.Close())
	require.Zero(t, a.Session())
	_, _, err = a.TryLock()
	require.ErrorIs(t, err, ErrClosed)
	ok, _, err = b.TryLock()
	require.NoError(t, err)
	require.True(t, ok)
	require.NotEqual(t, session, b.Session())
	require.NoError(t, b.Close())
}

func TestRootReplacedUnderItsLeader(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "root")
	h := openShelf(t, dir, "m", StoreOptions{}).scanned()
	require.NoError(t, h.put(1))
	require.True(t, h.root.StillLocked())
	require.NoError(t, os.RemoveAll(dir))
	h.wait("the tier to notice", func() bool { return h.store.Stats().State == "dead" })
	require.ErrorIs(t, h.get(1), ErrOff)
	require.Equal(t, "true  <nil>\n", startLeader(t, dir).says)
}

func TestRootRefusals(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	for _, path := range []string{file, filepath.Join(file, "below"), ""} {
		_, err := OpenRoot(path, RootOptions{})
		require.ErrorIs(t, err, ErrNotDirectory, path)
		require.ErrorContains(t, err, "name a directory")
	}
	if os.Geteuid() == 0 {
		other := filepath.Join(dir, "other")
		require.NoError(t, os.Mkdir(other, 0o777))
		require.NoError(t, os.Chown(other, 12345, 12345))
		_, err := OpenRoot(other, RootOptions{})
		require.ErrorIs(t, err, ErrOwner)
		require.ErrorContains(t, err, "uid 12345")
	}
	_, err := OpenRoot("/proc/self/kvtier", RootOptions{})
	require.Error(t, err)

	newer := filepath.Join(dir, "newer")
	require.NoError(t, os.Mkdir(newer, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(newer, rootFileName), []byte(`{"format":2,"anything":[]}`), 0o600))
	_, err = OpenRoot(newer, RootOptions{})
	require.ErrorIs(t, err, ErrNewerRoot)
	damaged := filepath.Join(dir, "damaged")
	require.NoError(t, os.Mkdir(damaged, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(damaged, rootFileName), nil, 0o600))
	_, err = OpenRoot(damaged, RootOptions{})
	require.ErrorIs(t, err, ErrDamagedRoot)
}

func TestRootOnAReadOnlyMount(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", syscall.MS_RDONLY, ""); err != nil {
		t.Skip("cannot mount: ", err)
	}
	defer syscall.Unmount(dir, 0)
	for _, path := range []string{dir, filepath.Join(dir, "new")} {
		_, err := OpenRoot(path, RootOptions{})
		require.ErrorIs(t, err, ErrUnwritable)
	}
}

func TestRootNetworkFileSystems(t *testing.T) {
	for magic, name := range map[int64]string{0x6969: "nfs", 0xff534d42: "cifs", 0xfe534d42: "smb", 0x65735546: "fuse", 0x01021997: "9p", 0xc36400: "ceph"} {
		require.Equal(t, name, sys.NetworkName(magic))
	}
	for _, magic := range []int64{0xef53, 0x58465342, 0x01021994, 0x9123683e, 0x2fc12fc1, 0x794c7630} {
		require.Empty(t, sys.NetworkName(magic))
	}
}

func TestRootIsMadeOnceByMany(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	ids := make([]string, 8)
	var all sync.WaitGroup
	for i := range ids {
		all.Go(func() {
			if r, err := OpenRoot(dir, RootOptions{}); err == nil {
				ids[i] = r.file.Root
				r.Close()
			}
		})
	}
	all.Wait()
	for _, id := range ids {
		require.Len(t, id, 32)
		require.Equal(t, ids[0], id)
	}
	require.Empty(t, disktest.Files(t, dir, rootTempTail))
	st, err := sys.Lstat(dir)
	require.NoError(t, err)
	require.Equal(t, uint32(0o700), st.Mode&0o777)
	st, err = sys.Lstat(filepath.Join(dir, runDirName))
	require.NoError(t, err)
	require.Equal(t, uint32(0o700), st.Mode&0o777)
}

func TestRuntimeRoot(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	a, err := OpenRuntimeRootIn(dir, "my cache/1")
	require.NoError(t, err)
	defer a.Close()
	b, err := OpenRuntimeRootIn(dir, "my cache/2")
	require.NoError(t, err)
	defer b.Close()
	require.NotEqual(t, a.Path(), b.Path())
	require.Equal(t, dir, filepath.Dir(a.Path()))
	for _, r := range []*Root{a, b} {
		ok, _, err := r.TryLock()
		require.NoError(t, err)
		require.True(t, ok)
		st, err := os.Stat(fmt.Sprintf("/proc/self/fd/%d", r.RunDir().Fd()))
		require.NoError(t, err)
		require.True(t, st.IsDir())
	}
	_, err = OpenStore(a, StoreOptions{CapBytes: 1 << 20})
	require.Error(t, err)
	require.NoError(t, os.Chmod(dir, 0o755))
	_, err = OpenRuntimeRootIn(dir, "x")
	require.ErrorIs(t, err, ErrOwner)
	_, err = OpenRuntimeRootIn(dir, "")
	require.Error(t, err)
}

func TestRootDefaults(t *testing.T) {
	r, err := OpenRoot(t.TempDir(), RootOptions{})
	require.NoError(t, err)
	defer r.Close()
	fs, err := sys.Statfs(r.Path())
	require.NoError(t, err)
	limit, floor, err := r.DiskDefaults()
	require.NoError(t, err)
	require.Equal(t, min(200<<30, fs.TotalBytes/2), limit)
	require.LessOrEqual(t, floor, r.file.FreeBytes/2)
	require.Positive(t, floor)
}
