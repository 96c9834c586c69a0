package shm

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
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/sys"
)

// noStranger is for sockets that no other user reaches.
func noStranger(t testing.TB) func(uint32) any {
	return func(uid uint32) any {
		t.Errorf("a process of user %d", uid)
		return nil
	}
}

func newConnPair(t testing.TB) (server, client *Conn) {
	t.Helper()
	dir, err := os.Open(t.TempDir())
	require.NoError(t, err)
	defer dir.Close()
	l, err := Listen(dir, "sock", noStranger(t))
	require.NoError(t, err)
	defer l.Close()
	client, err = Dial(dir, "sock", patience)
	require.NoError(t, err)
	server, err = l.Accept()
	require.NoError(t, err)
	t.Cleanup(func() {
		for _, c := range []*Conn{server, client} {
			c.Close()
			c.Forget()
		}
	})
	return server, client
}

func frame(length uint32, body string) []byte {
	return append(binary.LittleEndian.AppendUint32(nil, length), body...)
}

func TestFrames(t *testing.T) {
	server, client := newConnPair(t)
	require.NoError(t, client.Send(map[string]string{"a": "<&>"}))
	raw, files, err := server.Recv(patience)
	require.NoError(t, err)
	require.Empty(t, files)
	require.Equal(t, `{"a":"<&>"}`, strings.TrimSpace(string(raw)), "no escapes")

	large := json.RawMessage(`"` + strings.Repeat("x", MaxFrame-2) + `"`)
	sent := make(chan error, 1)
	go func() { sent <- client.Send(large) }()
	raw, _, err = server.Recv(patience)
	require.NoError(t, err)
	require.Equal(t, len(large), len(raw))
	require.NoError(t, <-sent)

	require.ErrorIs(t, client.Send(json.RawMessage(string(large)+" ")), ErrFrame)
	require.ErrorIs(t, client.Send(json.RawMessage{}), ErrFrame)
	require.ErrorIs(t, client.Send(make(chan int)), ErrFrame)
	require.ErrorIs(t, client.Send(1, make([]*os.File, sys.MaxFiles+1)...), ErrFrame)
	require.NoError(t, client.Send(1), "such a frame does no harm to the connection")
}

func TestFrameWithFiles(t *testing.T) {
	server, client := newConnPair(t)
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, client.Send(1, f, f))
	require.NoError(t, client.Send(2, f))
	require.NoError(t, client.Send(3))
	for want := range 3 {
		raw, files, err := server.Recv(patience)
		require.NoError(t, err)
		require.Equal(t, want+1, int(raw[0]-'0'))
		require.NoError(t, WantFiles(files, 2-want))
		for _, got := range files {
			require.NoError(t, got.Close())
		}
	}
	require.NoError(t, client.Send(1, f, f))
	_, files, err := server.Recv(patience)
	require.NoError(t, err)
	require.ErrorIs(t, WantFiles(files, 3), ErrPeerBroken)
	require.ErrorIs(t, files[0].Close(), os.ErrClosed)
}

func TestBrokenFrames(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	require.NoError(t, err)
	defer f.Close()
	for name, send := range map[string]func(c *Conn) error{
		"empty":    func(c *Conn) error { return sys.SendFiles(c.socket, frame(0, ""), nil) },
		"too long": func(c *Conn) error { return sys.SendFiles(c.socket, frame(MaxFrame+1, "{"), nil) },
		"huge":     func(c *Conn) error { return sys.SendFiles(c.socket, frame(1<<32-1, "{"), nil) },
		"no JSON":  func(c *Conn) error { return sys.SendFiles(c.socket, frame(2, "{]"), nil) },
		"cut": func(c *Conn) error {
			_ = sys.SendFiles(c.socket, frame(10, "{"), []*os.File{f})
			return c.Close()
		},
		"cut length": func(c *Conn) error {
			_ = sys.SendFiles(c.socket, []byte{1}, nil)
			return c.Close()
		},
		"files inside": func(c *Conn) error {
			_ = sys.SendFiles(c.socket, frame(2, "{"), nil)
			return sys.SendFiles(c.socket, []byte("}"), []*os.File{f})
		},
	} {
		server, client := newConnPair(t)
		require.NoError(t, send(client), name)
		_, _, err := server.Recv(patience)
		require.ErrorIs(t, err, ErrPeerBroken, name)
		_, _, again := server.Recv(patience)
		require.Equal(t, err, again, name)
	}
}

func TestRecvGoesOnAfterATimeout(t *testing.T) {
	server, client := newConnPair(t)
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	require.NoError(t, err)
	defer f.Close()
	whole := frame(7, `"abcde"`)
	for i := range whole {
		_, _, err := server.Recv(time.Millisecond)
		require.ErrorIs(t, err, ErrTimeout)
		var files []*os.File
		if i == 0 {
			files = append(files, f)
		}
		require.NoError(t, sys.SendFiles(client.socket, whole[i:i+1], files))
	}
	raw, files, err := server.Recv(patience)
	require.NoError(t, err)
	require.Equal(t, `"abcde"`, string(raw))
	require.NoError(t, WantFiles(files, 1))
	files[0].Close()
}

func TestConnEnds(t *testing.T) {
	server, client := newConnPair(t)
	got := make(chan error, 1)
	go func() { _, _, err := server.Recv(0); got <- err }()
	require.NoError(t, server.Close())
	require.ErrorIs(t, <-got, ErrClosed)
	require.ErrorIs(t, server.Send(1), ErrClosed)
	_, _, err := client.Recv(patience)
	require.ErrorIs(t, err, ErrPeerClosed)
	require.ErrorIs(t, client.Send(1), ErrPeerClosed)
	_, err = client.WatchDeath()
	require.NoError(t, err)
}

// A peer that does not read holds up nobody for good.
func TestSendToADeafPeerEnds(t *testing.T) {
	_, client := newConnPair(t)
	sent := make(chan error, 1)
	go func() {
		for {
			if err := client.Send(json.RawMessage(`"` + strings.Repeat("x", 1<<20) + `"`)); err != nil {
				sent <- err
				return
			}
		}
	}()
	require.Never(t, func() bool { return len(sent) > 0 }, 20*time.Millisecond, 5*time.Millisecond)
	require.NoError(t, client.Close())
	within(t, "Send", func() { require.ErrorIs(t, <-sent, ErrClosed) })
}

func TestListener(t *testing.T) {
	dir, err := os.Open(t.TempDir())
	require.NoError(t, err)
	defer dir.Close()
	_, err = Dial(dir, "sock", patience)
	require.ErrorIs(t, err, ErrPeerClosed)
	l, err := Listen(dir, "sock", noStranger(t))
	require.NoError(t, err)
	accepted := make(chan error, 1)
	go func() { _, err := l.Accept(); accepted <- err }()
	require.NoError(t, l.Close())
	require.ErrorIs(t, <-accepted, ErrClosed)
}

// A process of another user that reaches the socket all the same is not admitted, and
// is told why.
func TestOtherUserIsRefused(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to become another user")
	}
	path, err := os.MkdirTemp("", "kvtier") // reachable for everybody, other than t.TempDir
	require.NoError(t, err)
	defer os.RemoveAll(path)
	dir, err := os.Open(path)
	require.NoError(t, err)
	defer dir.Close()
	l, err := Listen(dir, "sock", func(uid uint32) any { return map[string]uint32{"not for": uid} })
	require.NoError(t, err)
	defer l.Close()
	accepted := make(chan *Conn, 1)
	go func() {
		c, _ := l.Accept()
		accepted <- c
	}()
	socket := filepath.Join(path, "sock")
	told := ""
	connect := func() error {
		connected := make(chan error, 1)
		go func() {
			// The credentials of a connection are those of the calling thread, which
			// ends with this goroutine.
			runtime.LockOSThread()
			_, _, e := syscall.RawSyscall(syscall.SYS_SETRESUID, 65534, 65534, 65534)
			_, _, _ = syscall.RawSyscall(syscall.SYS_PRCTL, syscall.PR_SET_DUMPABLE, 1, 0)
			if e != 0 {
				connected <- e
				return
			}
			fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
			if err == nil {
				defer syscall.Close(fd)
				err = syscall.Connect(fd, &syscall.SockaddrUnix{Name: socket})
			}
			if err == nil {
				b := make([]byte, 4096)
				var n int
				n, err = syscall.Read(fd, b)
				told = string(b[min(n, 4):n])
			}
			connected <- err
		}()
		return <-connected
	}
	require.ErrorIs(t, connect(), os.ErrPermission, "by the mode of the directory")
	require.NoError(t, os.Chmod(path, 0o755))
	require.ErrorIs(t, connect(), os.ErrPermission, "by the mode of the socket")
	require.NoError(t, os.Chmod(socket, 0o666))
	require.NoError(t, connect())
	require.JSONEq(t, `{"not for": 65534}`, told)
	require.Empty(t, accepted)
	own, err := Dial(dir, "sock", patience)
	require.NoError(t, err)
	defer own.Close()
	c := <-accepted
	require.EqualValues(t, 0, c.PeerUID())
	require.NoError(t, c.Close())
}

// Descriptors that are refused never belong to this process.
func TestRefusedFilesAreNeverTaken(t *testing.T) {
	for n := 1; n <= sys.MaxFiles; n++ {
		server, client := newConnPair(t)
		server.RefuseFiles()
		require.NoError(t, client.Send(1))
		_, files, err := server.Recv(patience)
		require.NoError(t, err)
		require.Empty(t, files)
		read, write, err := os.Pipe()
		require.NoError(t, err)
		defer read.Close()
		attached := make([]*os.File, n)
		for i := range attached {
			attached[i] = write
		}
		require.NoError(t, client.Send(2, attached...))
		require.NoError(t, write.Close())
		_, _, err = server.Recv(patience)
		require.ErrorIs(t, err, ErrPeerBroken)
		_, err = read.Read(make([]byte, 1))
		require.ErrorIs(t, err, io.EOF, "nobody has it")
	}
}
