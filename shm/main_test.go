package shm

import (
	"encoding/binary"
	"flag"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/sys"
)

// The test binary starts itself again as the other processes of a test.
var helper = flag.String("helper", "", "act as this other process instead of testing")

func TestMain(m *testing.M) {
	flag.Parse()
	switch *helper {
	case "":
		os.Exit(m.Run())
	case "member":
		helpMember(flag.Args())
	case "holder":
		helpHolder()
	default:
		panic("no helper " + *helper)
	}
}

// patience bounds the waits of tests that a working ring ends at once.
const patience = 20 * time.Second

// message is one of size bytes with recognisable contents.
func message(typ uint16, seq uint32, size int) []byte {
	m := make([]byte, size)
	for i := range min(size, 224) { // not a power of two: places differ
		m[i] = byte(i*7) ^ byte(seq) ^ byte(seq>>8)
	}
	for n := 224; n < size; n *= 2 {
		copy(m[n:], m[:n])
	}
	binary.LittleEndian.PutUint32(m[lengthOffset:], uint32(size))
	binary.LittleEndian.PutUint16(m[typeOffset:], typ)
	binary.LittleEndian.PutUint32(m[seqOffset:], seq)
	return m
}

// replyRoom lets a test request say in its u32 at 8 what its reply needs.
func replyRoom(m []byte) (int, error) { return int(binary.LittleEndian.Uint32(m[8:])), nil }

func request(seq uint32, size, reply int) []byte {
	m := message(1, seq, size)
	binary.LittleEndian.PutUint32(m[8:], uint32(reply))
	return m
}

func newServer(t testing.TB) *RingServer {
	t.Helper()
	s, err := NewRingServer(0xABCDEF0123456789, 7, replyRoom)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

// files are the server's, duplicated as if they had been received.
func files(t testing.TB, s *RingServer) (segment, request, reply *os.File) {
	t.Helper()
	a, b, c := s.Files()
	got := make([]*os.File, 3)
	for i, f := range []*os.File{a, b, c} {
		var err error
		got[i], err = sys.DupFile(f)
		require.NoError(t, err)
	}
	return got[0], got[1], got[2]
}

// newPair is a server and the client of it, in one process but over two mappings.
func newPair(t testing.TB) (*RingServer, *RingClient) {
	t.Helper()
	s := newServer(t)
	c := newClient(t, s)
	return s, c
}

func newClient(t testing.TB, s *RingServer) *RingClient {
	t.Helper()
	c, err := OpenRing(files(t, s))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

// startAt lets all cursors of a fresh pair begin at pos.
func startAt(s *RingServer, c *RingClient, pos uint32) {
	for _, e := range []*endpoint{&s.endpoint, &c.endpoint} {
		e.in.pos, e.out.pos = pos, pos
		e.in.head.Store(pos)
		e.out.tail.Store(pos)
	}
}

// within fails the test when f does not return in time.
func within(t testing.TB, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatal("no end of: " + what)
	}
}
