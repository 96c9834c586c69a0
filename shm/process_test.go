package shm

import (
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/wire"
)

const memberRequests = 2000

// must ends a helper process, which has nobody to return an error to.
func must(err error) {
	if err != nil {
		panic(err)
	}
}

// helpMember is a member: it attaches through the socket in args[0], sends
// requests over its ring, leaves the socket to a child, and lives on.
func helpMember(args []string) {
	dir, err := os.Open(args[0])
	must(err)
	conn, err := Dial(dir, "sock", patience)
	must(err)
	must(conn.Send(&wire.Hello{Protocol: wire.Protocol, Ranks: 1, PID: os.Getpid()}))
	raw, files, err := conn.Recv(patience)
	must(err)
	must(WantFiles(files, 3))
	v, err := wire.ParseFrame(raw)
	must(err)
	ring, err := OpenRing(files[0], files[1], files[2])
	must(err)
	if v.(*wire.Welcome).Session != ring.Session() {
		panic("another session")
	}
	for seq := range uint32(memberRequests) {
		req := &wire.Request{Type: wire.StoreDone, Seq: seq, Done: make([]wire.Done, seq%50)}
		msg, err := req.Append(nil)
		must(err)
		must(ring.Send(msg, req.ReplyBytes()))
		msg, err = ring.Next(nil)
		must(err)
		rep, err := wire.ParseReply(msg)
		must(err)
		if rep.Seq != seq {
			panic("reply to another request")
		}
	}
	socket, err := conn.socket.File()
	must(err)
	holder := exec.Command(os.Args[0], "-helper=holder")
	holder.Stdin = os.Stdin
	holder.ExtraFiles = []*os.File{socket}
	must(holder.Start())
	must(conn.Send(&wire.Goodbye{})) // a frame that says: ready to be killed
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// helpHolder holds what it has inherited until the test is over.
func helpHolder() { _, _ = io.Copy(io.Discard, os.Stdin) }

// A member in another process attaches, works and is killed while a child of it
// keeps the socket open.
func TestMemberProcess(t *testing.T) {
	path := t.TempDir()
	dir, err := os.Open(path)
	require.NoError(t, err)
	defer dir.Close()
	l, err := Listen(dir, "sock", noStranger(t))
	require.NoError(t, err)
	defer l.Close()

	cmd := exec.Command(os.Args[0], "-helper=member", path)
	cmd.Stderr = os.Stderr
	in, out, err := os.Pipe()
	require.NoError(t, err)
	cmd.Stdin = in
	require.NoError(t, cmd.Start())
	in.Close()
	defer out.Close() // ends the holder
	defer cmd.Process.Kill()

	conn, err := l.Accept()
	require.NoError(t, err)
	defer conn.Close()
	defer conn.Forget()
	require.EqualValues(t, os.Geteuid(), conn.PeerUID())
	raw, none, err := conn.Recv(patience)
	require.NoError(t, err)
	require.NoError(t, WantFiles(none, 0))
	hello, err := wire.ParseFrame(raw)
	require.NoError(t, err)
	require.Equal(t, cmd.Process.Pid, hello.(*wire.Hello).PID)
	gone, err := conn.WatchDeath()
	require.NoError(t, err)

	s, err := NewRingServer(1<<63, 1, wire.RequestReplyBytes)
	require.NoError(t, err)
	defer s.Close()
	segment, requestBell, replyBell := s.Files()
	require.NoError(t, conn.Send(&wire.Welcome{Session: 1 << 63, Member: 1, Protocol: wire.Protocol}, segment, requestBell, replyBell))
	within(t, "requests of the member", func() {
		for seq := range uint32(memberRequests) {
			m, err := s.Next(nil)
			require.NoError(t, err)
			req, err := wire.ParseRequest(m)
			require.NoError(t, err)
			require.Equal(t, seq, req.Seq)
			require.Len(t, req.Done, int(seq%50))
			msg, err := (&wire.Reply{Type: req.Type, Seq: req.Seq}).Append(nil)
			require.NoError(t, err)
			require.NoError(t, s.Reply(msg))
		}
	})
	raw, _, err = conn.Recv(patience)
	require.NoError(t, err)
	require.JSONEq(t, `{"type":"goodbye"}`, string(raw))
	select {
	case <-gone:
		t.Fatal("the member lives")
	default:
	}

	require.NoError(t, cmd.Process.Kill())
	select {
	case <-gone:
	case <-time.After(patience):
		t.Fatal("death was not noticed")
	}
	_, _, err = conn.Recv(20 * time.Millisecond)
	require.ErrorIs(t, err, ErrTimeout, "the holder keeps the socket open: an end of it would not have told")
	require.Error(t, cmd.Wait())

	require.NoError(t, out.Close())
	_, _, err = conn.Recv(patience)
	require.ErrorIs(t, err, ErrPeerClosed, "with the holder the socket ends")
}

// A closed socket is no death, and the watch outlives it.
func TestDeathIsNotTheEndOfTheSocket(t *testing.T) {
	server, client := newConnPair(t)
	gone, err := server.WatchDeath()
	require.NoError(t, err)
	again, err := server.WatchDeath()
	require.NoError(t, err)
	require.Equal(t, gone, again)
	require.NoError(t, client.Close())
	_, _, err = server.Recv(patience)
	require.ErrorIs(t, err, ErrPeerClosed)
	require.NoError(t, server.Close())
	require.False(t, server.process.Gone())
	require.Never(t, func() bool {
		select {
		case <-gone:
			return true
		default:
			return false
		}
	}, 20*time.Millisecond, 5*time.Millisecond)
	server.Forget()
	_, err = client.WatchDeath()
	require.ErrorIs(t, err, ErrClosed)
}

// Nothing is left open when everything is closed.
func TestNothingIsLeftOpen(t *testing.T) {
	fds := func() int {
		names, err := os.ReadDir("/proc/self/fd")
		require.NoError(t, err)
		return len(names)
	}
	mappings := func() (n int) {
		text, err := os.ReadFile("/proc/self/maps")
		require.NoError(t, err)
		for i := 0; i+11 < len(text); i++ {
			if string(text[i:i+11]) == "kvtier-ring" {
				n++
			}
		}
		return n
	}
	t.Run("warm-up", func(t *testing.T) { newPair(t); newConnPair(t) })
	openBefore, mappedBefore := fds(), mappings()
	t.Run("use", func(t *testing.T) {
		for range 10 {
			s, c := newPair(t)
			require.NoError(t, c.Send(request(1, 32, 32), 32))
			_, err := s.Next(make(chan struct{}))
			require.NoError(t, err)
			server, client := newConnPair(t)
			_, err = server.WatchDeath()
			require.NoError(t, err)
			segment, a, b := s.Files()
			require.NoError(t, server.Send(json.RawMessage(strconv.Quote("x")), segment, a, b))
			require.NoError(t, client.Send(json.RawMessage("1"), segment))
			_, got, err := client.Recv(patience)
			require.NoError(t, err)
			require.ErrorIs(t, WantFiles(got, 2), ErrPeerBroken)
		}
	})
	require.Eventually(t, func() bool { return fds() <= openBefore }, patience, time.Millisecond)
	require.Equal(t, mappedBefore, mappings())
}
