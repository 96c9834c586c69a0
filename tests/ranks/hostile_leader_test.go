package ranks

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier"
	"github.com/kvtier/kvtier/internal/sys"
	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/shm"
)

// impostor listens where a leader does, and welcomes members with whatever descriptors.
type impostor struct {
	t      *testing.T
	conns  chan attaching // of coordinators
	closed chan struct{}
}

type attaching struct {
	conn  *shm.Conn
	group string
}

const impostorSession = 7

func newImpostor(t *testing.T, path string) *impostor {
	run := filepath.Join(path, "run")
	require.NoError(t, os.MkdirAll(run, 0o700))
	dir, err := os.Open(run)
	require.NoError(t, err)
	l, err := shm.Listen(dir, "sock", func(uint32) any { return nil })
	require.NoError(t, err)
	p := &impostor{t: t, conns: make(chan attaching), closed: make(chan struct{})}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			p.welcome(conn)
		}
	}()
	t.Cleanup(func() {
		close(p.closed)
		l.Close()
		<-ended
		dir.Close()
	})
	return p
}

// welcome attaches one that is no member of a group, and hands others on.
func (p *impostor) welcome(conn *shm.Conn) {
	raw, _, err := conn.Recv(wait)
	if err == nil {
		f, _ := wire.ParseFrame(raw)
		if h, ok := f.(*wire.Hello); ok && (h.Rank >= 0 || h.Coordinator) {
			select {
			case p.conns <- attaching{conn, h.Group}:
			case <-p.closed:
				conn.Close()
			}
			return
		}
		_ = conn.Send(p.frame())
	}
	p.t.Cleanup(func() { conn.Close(); conn.Forget() })
}

func (p *impostor) frame() *wire.Welcome {
	return &wire.Welcome{Session: impostorSession, Member: 1, Protocol: wire.Protocol}
}

// await gives the next connection of a group; earlier ones of others try again in vain.
func (p *impostor) await(group string) *shm.Conn {
	p.t.Helper()
	for {
		select {
		case a := <-p.conns:
			if a.group == group {
				return a.conn
			}
			a.conn.Close()
		case <-time.After(wait):
			require.FailNow(p.t, "nobody attaches")
		}
	}
}

// A member takes a ring only from descriptors that are one: with others it is without a
// leader, keeps none of them, and goes on.
func TestMemberTakesNoDescriptorsThatAreNoRing(t *testing.T) {
	path := t.TempDir()
	p := newImpostor(t, path)
	c := open(t, root{dir: path, slots: 64}.config("member"))
	ring := func(session uint64) (*shm.RingServer, []*os.File) {
		s, err := shm.NewRingServer(session, 1, wire.RequestReplyBytes)
		require.NoError(t, err)
		t.Cleanup(func() { s.Close() })
		segment, requests, replies := s.Files()
		return s, []*os.File{segment, requests, replies}
	}
	good, right := ring(impostorSession)
	_, other := ring(impostorSession + 1)
	own := func(f *os.File, err error) *os.File {
		require.NoError(t, err)
		t.Cleanup(func() { f.Close() })
		return f
	}
	header := make([]byte, 4096) // all that a ring's segment begins with, so that only the rest differs
	_, err := right[0].ReadAt(header, 0)
	require.NoError(t, err)
	sealed := func(bytes int64, header []byte) *os.File {
		s, err := sys.NewSegment("other", bytes)
		require.NoError(t, err)
		t.Cleanup(func() { s.Close() })
		copy(s.Bytes(), header)
		return s.File()
	}
	sized := func(f *os.File) *os.File {
		require.NoError(t, f.Truncate(shm.SegmentBytes))
		_, err := f.WriteAt(header, 0)
		require.NoError(t, err)
		return f
	}
	fd, err := unix.MemfdCreate("unsealed", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	require.NoError(t, err)
	unsealed := sized(own(os.NewFile(uintptr(fd), "unsealed"), nil))
	read, write, err := os.Pipe()
	pipe := own(read, err)
	own(write, nil)
	dir := own(os.Open(path))
	file := sized(own(os.Create(filepath.Join(t.TempDir(), "file"))))

	attempt := func(name string, try func(k *kvtier.Coordinator, conn *shm.Conn)) {
		group := evilGroup()
		k, err := c.Coordinate(group, 1)
		require.NoError(t, err, name)
		conn := p.await(group)
		try(k, conn)
		require.NoError(t, k.Close(), name)
		conn.Close()
		conn.Forget()
	}
	wrong := map[string][]*os.File{
		"none": {}, "the segment alone": right[:1], "two": right[:2], "four": {right[0], right[1], right[2], right[2]},
		"a bell first": {right[1], right[0], right[2]}, "a bell last of all": {right[1], right[2], right[0]},
		"a ring of another session": other, "three segments": {right[0], right[0], right[0]},
		"a segment too small":  {sealed(shm.SegmentBytes-4096, header), right[1], right[2]},
		"a segment too large":  {sealed(shm.SegmentBytes+4096, header), right[1], right[2]},
		"a segment of zeros":   {sealed(shm.SegmentBytes, nil), right[1], right[2]},
		"a segment not sealed": {unsealed, right[1], right[2]},
		"a file as segment":    {file, right[1], right[2]}, "a directory as segment": {dir, right[1], right[2]},
		"a pipe as segment": {pipe, right[1], right[2]}, "a pipe as first bell": {right[0], pipe, right[2]},
		"a pipe as second bell": {right[0], right[1], pipe}, "a directory as bell": {right[0], dir, right[2]},
		"a file as bell": {right[0], right[1], file},
	}
	attempt("before", func(*kvtier.Coordinator, *shm.Conn) {}) // from here on the cache itself is connected
	before := openFiles(t)
	for name, files := range wrong {
		attempt(name, func(k *kvtier.Coordinator, conn *shm.Conn) {
			require.NoError(t, conn.Send(p.frame(), files...))
			_, _, err := conn.Recv(wait)
			require.ErrorIs(t, err, shm.ErrPeerClosed, "%s: the member hangs up", name)
			require.Zero(t, k.Session(), name)
		})
	}
	require.Eventually(t, func() bool { return openFiles(t) <= before }, wait, time.Millisecond, "descriptors are kept")
	attempt("right", func(k *kvtier.Coordinator, conn *shm.Conn) {
		require.NoError(t, conn.Send(p.frame(), right...))
		require.Eventually(t, func() bool { return k.Session() == impostorSession }, wait, time.Millisecond)
		asked := make(chan error, 1)
		go func() {
			_, err := k.Lookup(kvtier.Key{}, 0, make([]kvtier.Key, 1), wait)
			asked <- err
		}()
		raw, err := good.Next(nil)
		require.NoError(t, err)
		req, err := wire.ParseRequest(raw)
		require.NoError(t, err)
		require.Equal(t, wire.Lookup, req.Type)
		reply, err := (&wire.Reply{Type: req.Type, Seq: req.Seq}).Append(nil)
		require.NoError(t, err)
		require.NoError(t, good.Reply(reply))
		require.NoError(t, <-asked)
	})
}

// openFiles is how many descriptors this process has.
func openFiles(t *testing.T) int {
	names, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(names)
}
