package tier

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// leadRootAndFork leads a root, forks two children, which live on, and says their
// pids.
func leadRootAndFork(path string) {
	r, err := OpenRoot(path, RootOptions{})
	if err != nil {
		fmt.Println("error", err)
		return
	}
	ok, _, err := r.TryLock()
	keeps, closes := fork(false), fork(true)
	fmt.Println(ok, err, keeps, closes)
	bufio.NewReader(os.Stdin).ReadByte()
}

// fork makes a child as C programs and Python do, with all that this process has
// open. The runtime of Go does not work in it: it only makes bare system calls.
//
//go:norace
func fork(closeAll bool) (pid int) {
	child, _, errno := syscall.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 {
		panic(errno)
	}
	if child != 0 {
		return int(child)
	}
	if closeAll {
		syscall.RawSyscall(unix.SYS_CLOSE_RANGE, 0, 1<<31, 0)
	}
	for {
		syscall.RawSyscall6(unix.SYS_PPOLL, 0, 0, 0, 0, 0, 0)
	}
}

// A process that forks hands its files down. A child that lives longer than the
// leader must not keep others from leading, and one that closes all its files must
// not end its parent's lead.
func TestForkedChildHasNoPartInTheLock(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "root")
	parent := startChild(t, forkChild+dir)
	var keeps, closes int
	_, err := fmt.Sscanf(parent.says, "true <nil> %d %d", &keeps, &closes)
	require.NoError(t, err, parent.says)
	for _, pid := range []int{keeps, closes} {
		t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
	}
	require.Eventually(t, func() bool { // it has closed its files
		open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", closes))
		return err == nil && len(open) == 0
	}, shelfPatience, time.Millisecond)

	r, err := OpenRoot(dir, RootOptions{})
	require.NoError(t, err)
	defer r.Close()
	ok, holder, err := r.TryLock()
	require.NoError(t, err)
	require.False(t, ok, "the lead was lost with a file that a child has closed")
	require.Equal(t, fmt.Sprintf("process %d", parent.cmd.Process.Pid), holder)

	require.NoError(t, parent.cmd.Process.Kill())
	parent.cmd.Wait()
	open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", keeps))
	require.NoError(t, err)
	require.NotEmpty(t, open, "the child lives and has the lock file open")
	ok, holder, err = r.TryLock()
	require.NoError(t, err)
	require.True(t, ok, holder)
}
