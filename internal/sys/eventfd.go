package sys

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ErrNotEventFD is returned for a received descriptor that is no eventfd.
var ErrNotEventFD = errors.New("descriptor is not an eventfd")

// Event is an eventfd registered with Go's poller: a waiting goroutine holds no
// thread.
//
// The non-blocking flag belongs to the open file description, so a peer that
// holds a duplicate can clear it at any time. Reads therefore ask for NOWAIT
// each time, and writes look for room first; a peer that means harm can delay a
// Signal by exact timing, never a Wait or a Close.
type Event struct {
	file *os.File
	raw  syscall.RawConn
}

// NewEvent creates an eventfd with count 0.
func NewEvent() (*Event, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	return newEvent(os.NewFile(uintptr(fd), "eventfd"))
}

// OpenEvent wraps a received descriptor after checking that it is an eventfd. It
// takes ownership of f and closes it in any case: a file decides about the
// poller when it is made of its descriptor, so a duplicate is used.
func OpenEvent(f *os.File) (*Event, error) {
	defer f.Close()
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("opening eventfd: %w", err)
	}
	fd := -1
	var failed error
	err = raw.Control(func(old uintptr) {
		name, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", old))
		if err != nil || name != "anon_inode:[eventfd]" {
			failed = errors.Join(fmt.Errorf("%w: %.64s", ErrNotEventFD, name), err)
			return
		}
		if fd, failed = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 0); failed == nil {
			failed = unix.SetNonblock(fd, true)
		}
	})
	if err = errors.Join(err, failed); err != nil {
		if fd >= 0 {
			unix.Close(fd)
		}
		return nil, fmt.Errorf("opening eventfd: %w", err)
	}
	return newEvent(os.NewFile(uintptr(fd), "eventfd"))
}

func newEvent(f *os.File) (*Event, error) {
	raw, err := f.SyscallConn()
	if err == nil {
		err = f.SetDeadline(time.Time{}) // fails when the poller refused the descriptor
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("eventfd and poller: %w", err)
	}
	return &Event{file: f, raw: raw}, nil
}

// Signal wakes who waits, or lets the next Wait return at once. It does not wait
// and may be called from any goroutine. Errors but os.ErrClosed do not occur in
// a healthy process.
func (e *Event) Signal() error {
	var failed error
	err := e.raw.Control(func(fd uintptr) {
		ready := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		if n, err := unix.Poll(ready, 0); err == nil && n == 0 {
			return // the count is at its maximum: the reader has been signalled
		}
		one := [8]byte{1} // in this machine's byte order, which is little endian
		failed = ignoreEINTR(func() error {
			_, err := unix.Write(int(fd), one[:])
			return err
		})
	})
	if errors.Is(failed, unix.EAGAIN) {
		failed = nil
	}
	if err != nil {
		return fmt.Errorf("signalling: %w", pollError(err))
	}
	if failed != nil {
		return fmt.Errorf("signalling: %w", failed)
	}
	return nil
}

// Wait returns nil once signalled, which takes all signals so far; with
// os.ErrDeadlineExceeded at the deadline, with os.ErrClosed after Close. One
// goroutine waits at a time.
func (e *Event) Wait() error {
	var count [8]byte
	var failed error
	buffers := [][]byte{count[:]}
	err := e.raw.Read(func(fd uintptr) bool {
		failed = ignoreEINTR(func() error {
			_, err := unix.Preadv2(int(fd), buffers, -1, unix.RWF_NOWAIT)
			return err
		})
		if errors.Is(failed, unix.EOPNOTSUPP) { // before 5.12
			failed = ignoreEINTR(func() error {
				_, err := unix.Read(int(fd), count[:])
				return err
			})
		}
		return !errors.Is(failed, unix.EAGAIN)
	})
	if err != nil {
		return fmt.Errorf("waiting for a signal: %w", pollError(err))
	}
	if failed != nil {
		return fmt.Errorf("waiting for a signal: %w", failed)
	}
	return nil
}

// pollError names the errors of the poller: a file's raw connection, other than
// the file itself, reports the end of the file by an error of a private package.
func pollError(err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return err
	}
	return fmt.Errorf("%w: %w", os.ErrClosed, err)
}

// SetDeadline ends a Wait, also a running one, at t; the zero time means never.
// It may be called from any goroutine.
func (e *Event) SetDeadline(t time.Time) { _ = e.file.SetReadDeadline(t) }

// File is the descriptor, to be passed to a peer; the Event keeps owning it. Its
// Fd method must not be called, it could make the descriptor blocking: see FD.
func (e *Event) File() *os.File { return e.file }

// FD is the number of the descriptor, valid until Close.
func (e *Event) FD() int {
	n := -1
	_ = e.raw.Control(func(fd uintptr) { n = int(fd) })
	return n
}

// Close ends waits with os.ErrClosed.
func (e *Event) Close() error { return e.file.Close() }
