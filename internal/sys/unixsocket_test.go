package sys

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func openDir(t *testing.T, path string) *os.File {
	t.Helper()
	d, err := os.Open(path)
	require.NoError(t, err)
	t.Cleanup(func() { d.Close() })
	return d
}

// socketPair is a connected pair, by way of a listener.
func socketPair(t *testing.T) (server, client *net.UnixConn) {
	t.Helper()
	dir := openDir(t, t.TempDir())
	l, err := ListenUnix(dir, "sock")
	require.NoError(t, err)
	defer l.Close()
	client, err = DialUnix(dir, "sock", time.Second)
	require.NoError(t, err)
	server, err = l.AcceptUnix()
	require.NoError(t, err)
	t.Cleanup(func() { server.Close(); client.Close() })
	return server, client
}

func TestListenInADeepDirectory(t *testing.T) {
	path := filepath.Join(t.TempDir(), strings.Repeat("d", 120), strings.Repeat("e", 120))
	require.NoError(t, os.MkdirAll(path, 0o700))
	dir := openDir(t, path)
	l, err := ListenUnix(dir, "sock")
	require.NoError(t, err)
	info, err := os.Stat(filepath.Join(path, "sock"))
	require.NoError(t, err)
	require.Equal(t, os.ModeSocket|0o600, info.Mode())
	c, err := DialUnix(dir, "sock", time.Second)
	require.NoError(t, err)
	defer c.Close()
	cred, err := PeerCred(c)
	require.NoError(t, err)
	require.Equal(t, Cred{UID: uint32(os.Geteuid()), PID: os.Getpid()}, cred)
	require.NoError(t, l.Close())
	require.NoError(t, l.Close())
	names, err := os.ReadDir(path)
	require.NoError(t, err)
	require.Empty(t, names)
}

func TestStaleSocketIsReplaced(t *testing.T) {
	path := t.TempDir()
	dir := openDir(t, path)
	_, err := DialUnix(dir, "sock", time.Second)
	require.ErrorIs(t, err, os.ErrNotExist)
	dead, err := ListenUnix(dir, "sock")
	require.NoError(t, err)
	require.NoError(t, dead.UnixListener.Close()) // as a killed process leaves it: the name stays
	_, err = DialUnix(dir, "sock", time.Second)
	require.ErrorIs(t, err, unix.ECONNREFUSED)
	require.True(t, PeerWentAway(err))

	l, err := ListenUnix(dir, "sock")
	require.NoError(t, err)
	c, err := DialUnix(dir, "sock", time.Second)
	require.NoError(t, err)
	c.Close()
	_ = dead.Close()
	_, err = os.Stat(filepath.Join(path, "sock"))
	require.NoError(t, err, "the old listener does not remove the new one's name")
	require.NoError(t, l.Close())
}

func TestSocketsOfTheKilledAreRemoved(t *testing.T) {
	path := t.TempDir()
	dir := openDir(t, path)
	// As left by a kill before the name was there, and what is none of ours.
	for _, name := range []string{"sock.0123456789ab", "sock.other", "sack.0123456789ab"} {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: throughDir(dir, name)})
		require.NoError(t, err)
		l.SetUnlinkOnClose(false)
		require.NoError(t, l.Close())
	}
	require.NoError(t, os.WriteFile(filepath.Join(path, "sock.abcdef"), nil, 0o600))
	l, err := ListenUnix(dir, "sock")
	require.NoError(t, err)
	defer l.Close()
	entries, err := os.ReadDir(path)
	require.NoError(t, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	require.Equal(t, []string{"sack.0123456789ab", "sock", "sock.abcdef", "sock.other"}, names)
}

func TestListenFails(t *testing.T) {
	path := t.TempDir()
	dir := openDir(t, path)
	_, err := ListenUnix(dir, "no/such/dir")
	require.ErrorIs(t, err, os.ErrNotExist)
	require.NoError(t, os.Mkdir(filepath.Join(path, "sock"), 0o700))
	_, err = ListenUnix(dir, "sock")
	require.Error(t, err)
	names, err := os.ReadDir(path)
	require.NoError(t, err)
	require.Len(t, names, 1, "the temporary name is removed")
}

func TestFilesTravel(t *testing.T) {
	server, client := socketPair(t)
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	defer w.Close()
	require.NoError(t, SendFiles(client, []byte("hello"), []*os.File{w}))
	require.NoError(t, SendFiles(client, []byte("world"), nil))
	b := make([]byte, 64)
	n, files, err := RecvFiles(server, b[:2])
	require.NoError(t, err)
	require.Equal(t, "he", string(b[:n]))
	require.Len(t, files, 1, "with the first byte")
	var rest []byte
	for len(rest) < len("lloworld") {
		n, none, err := RecvFiles(server, b)
		require.NoError(t, err)
		require.Empty(t, none)
		rest = append(rest, b[:n]...)
	}
	require.Equal(t, "lloworld", string(rest))
	raw, err := files[0].SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(fd uintptr) {
		flags, err := unix.FcntlInt(fd, unix.F_GETFD, 0)
		require.NoError(t, err)
		require.NotZero(t, flags&unix.FD_CLOEXEC)
	}))
	require.NoError(t, w.Close())
	_, err = files[0].WriteString("x")
	require.NoError(t, err)
	CloseFiles(files)
	all, err := io.ReadAll(r)
	require.NoError(t, err)
	require.Equal(t, "x", string(all))

	client.Close()
	n, files, err = RecvFiles(server, b)
	require.NoError(t, err)
	require.Zero(t, n)
	require.Empty(t, files)
}

// countFDs is the number of open descriptors of this process.
func countFDs(t *testing.T) int {
	t.Helper()
	names, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(names)
}

func TestSurplusFilesAreClosed(t *testing.T) {
	server, client := socketPair(t)
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	defer w.Close()
	files := []*os.File{r, w, r, w, r}
	require.ErrorIs(t, SendFiles(client, []byte("x"), files), ErrTooManyFiles)
	raw, err := client.SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(fd uintptr) {
		var fds []int
		for range 40 {
			fds = append(fds, int(fd))
		}
		_, err := unix.SendmsgN(int(fd), []byte("x"), unix.UnixRights(fds...), nil, 0)
		require.NoError(t, err)
	}))
	before := countFDs(t)
	_, got, err := RecvFiles(server, make([]byte, 8))
	require.ErrorIs(t, err, ErrTooManyFiles)
	require.Empty(t, got)
	require.Equal(t, before, countFDs(t))
}

func TestSendEnds(t *testing.T) {
	server, client := socketPair(t)
	require.NoError(t, client.SetWriteDeadline(time.Now().Add(10*time.Millisecond)))
	require.ErrorIs(t, SendFiles(client, make([]byte, 8<<20), nil), os.ErrDeadlineExceeded, "nobody reads")
	server.Close()
	require.NoError(t, client.SetWriteDeadline(time.Now().Add(time.Second)))
	err := SendFiles(client, []byte("x"), nil)
	require.True(t, PeerWentAway(err), err)
	require.False(t, errors.Is(err, os.ErrDeadlineExceeded))
	require.NoError(t, client.SetReadDeadline(time.Now()))
	_, _, err = RecvFiles(client, make([]byte, 1))
	require.Error(t, err)
}

func TestPeerProcess(t *testing.T) {
	server, client := socketPair(t)
	for _, c := range []*net.UnixConn{server, client} {
		p, err := PeerProcess(c)
		require.NoError(t, err)
		require.False(t, p.Gone())
		require.NoError(t, p.Close())
	}
}
