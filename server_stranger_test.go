package kvtier

import (
	"encoding/binary"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/wire"
)

// A process of another user that comes as far as the socket gets a refusal with its
// reason; the log has one line and the statistics a number.
func TestProcessOfAnotherUserIsRefused(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("not run: needs root to become another user")
	}
	path, err := os.MkdirTemp("", "kvtier") // reachable for everybody, other than t.TempDir
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(path) })
	c := openTest(t, path, RoleLeader)
	requireState(t, c, StateLeader)
	run := filepath.Join(path, "run")
	for dir := range map[string]bool{path: true, run: true} {
		require.NoError(t, os.Chmod(dir, 0o755))
	}
	socket := filepath.Join(run, socketName)
	require.NoError(t, os.Chmod(socket, 0o666))

	for range 3 {
		refuse := helloAs(t, 65534, socket)
		require.True(t, refuse.Final)
		require.Equal(t, "the leader runs as user 0 and this process as user 65534: one cache is for processes of one user", refuse.Reason)
	}
	text, err := c.leaderStats()
	require.NoError(t, err)
	var s struct {
		Strangers int `json:"members_refused_user"`
		Members   int `json:"members_admitted"`
	}
	require.NoError(t, json.Unmarshal(text, &s))
	require.Equal(t, 3, s.Strangers)
	require.Zero(t, s.Members)
	lines := 0
	for _, r := range c.Records(1 << 20) {
		if strings.Contains(r.Text, "a process of another user is refused") {
			require.Contains(t, r.Text, "uid=65534")
			lines++
		}
	}
	require.Equal(t, 1, lines)
	newBlob(t, c) // for the own user all is as before
}

// helloAs connects as another user and gives what the leader answers.
func helloAs(t *testing.T, uid uintptr, socket string) *wire.Refuse {
	t.Helper()
	var frame []byte
	ended := make(chan error, 1)
	go func() {
		// The credentials of a connection are those of the calling thread, which ends
		// with this goroutine.
		runtime.LockOSThread()
		_, _, e := syscall.RawSyscall(syscall.SYS_SETRESUID, uid, uid, uid)
		_, _, _ = syscall.RawSyscall(syscall.SYS_PRCTL, syscall.PR_SET_DUMPABLE, 1, 0)
		if e != 0 {
			ended <- e
			return
		}
		fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
		if err != nil {
			ended <- err
			return
		}
		f := os.NewFile(uintptr(fd), "socket")
		defer f.Close()
		if err = syscall.Connect(fd, &syscall.SockaddrUnix{Name: socket}); err == nil {
			var length [4]byte
			if _, err = io.ReadFull(f, length[:]); err == nil {
				frame = make([]byte, min(binary.LittleEndian.Uint32(length[:]), 1<<16))
				_, err = io.ReadFull(f, frame)
			}
		}
		ended <- err
	}()
	require.NoError(t, <-ended)
	v, err := wire.ParseFrame(frame)
	require.NoError(t, err)
	require.IsType(t, &wire.Refuse{}, v)
	return v.(*wire.Refuse)
}
