package sys

import (
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// peerEvent is the other holder of e's eventfd.
func peerEvent(t *testing.T, e *Event) *Event {
	t.Helper()
	fd, err := unix.FcntlInt(uintptr(e.FD()), unix.F_DUPFD_CLOEXEC, 0)
	require.NoError(t, err)
	p, err := OpenEvent(os.NewFile(uintptr(fd), "passed"))
	require.NoError(t, err)
	t.Cleanup(func() { p.Close() })
	return p
}

func newTestEvent(t *testing.T) *Event {
	t.Helper()
	e, err := NewEvent()
	require.NoError(t, err)
	t.Cleanup(func() { e.Close() })
	return e
}

func waiting(e *Event) <-chan error {
	done := make(chan error, 1)
	go func() { done <- e.Wait() }()
	return done
}

func TestEventWakes(t *testing.T) {
	e := newTestEvent(t)
	p := peerEvent(t, e)
	done := waiting(e)
	require.NoError(t, p.Signal())
	require.NoError(t, <-done)

	require.NoError(t, p.Signal())
	require.NoError(t, p.Signal())
	require.NoError(t, e.Wait(), "a signal before the wait counts")
	e.SetDeadline(time.Now())
	require.ErrorIs(t, e.Wait(), os.ErrDeadlineExceeded, "one wait takes all signals")
	e.SetDeadline(time.Time{})
	require.NoError(t, p.Signal())
	require.NoError(t, e.Wait())
}

func TestEventEndsAWait(t *testing.T) {
	e := newTestEvent(t)
	done := waiting(e)
	e.SetDeadline(time.Unix(1, 0))
	require.ErrorIs(t, <-done, os.ErrDeadlineExceeded)
	e.SetDeadline(time.Time{})
	done = waiting(e)
	require.NoError(t, e.Close())
	require.ErrorIs(t, <-done, os.ErrClosed)
	require.ErrorIs(t, e.Signal(), os.ErrClosed)
	require.ErrorIs(t, e.Wait(), os.ErrClosed)
	require.Equal(t, -1, e.FD())
}

// The flag belongs to both holders: a peer that clears it must not make this
// side's calls wait in the kernel, where no deadline and no Close reaches them.
func TestPeerMakesEventBlocking(t *testing.T) {
	e := newTestEvent(t)
	p := peerEvent(t, e)
	require.NoError(t, unix.SetNonblock(p.FD(), false))
	first := waiting(e) // a variable each: Never may look once more after it has returned
	require.Never(t, func() bool { return len(first) > 0 }, 20*time.Millisecond, time.Millisecond)
	require.NoError(t, p.Signal())
	require.NoError(t, <-first)
	second := waiting(e)
	require.Never(t, func() bool { return len(second) > 0 }, 20*time.Millisecond, time.Millisecond)
	closed := make(chan error, 1)
	go func() { closed <- e.Close() }()
	require.Eventually(t, func() bool { return len(second) == 1 && len(closed) == 1 }, 10*time.Second, time.Millisecond)
	require.ErrorIs(t, <-second, os.ErrClosed)
	require.NoError(t, <-closed)
}

func TestSignalOfAFullEvent(t *testing.T) {
	e := newTestEvent(t)
	p := peerEvent(t, e)
	full := [8]byte{0xFE, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF}
	_, err := unix.Write(p.FD(), full[:])
	require.NoError(t, err)
	require.NoError(t, unix.SetNonblock(p.FD(), false))
	require.NoError(t, e.Signal(), "does not wait for room")
	require.NoError(t, e.Wait())
}

func TestOpenEventRefuses(t *testing.T) {
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer w.Close()
	_, err = OpenEvent(r)
	require.ErrorIs(t, err, ErrNotEventFD)
	require.ErrorIs(t, r.Close(), os.ErrClosed)
}
