package sys

import (
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

var (
	// ErrProcessGone is returned when the process ended before it could be
	// watched.
	ErrProcessGone = errors.New("process has ended already")
	// ErrNoPidFD is returned where a process cannot be watched: the kernel is
	// older than 5.3, or its pid is not visible from here.
	ErrNoPidFD = errors.New("process cannot be watched (needs pidfd: Linux 5.3, for a peer in another pid namespace 6.5)")
)

// Process watches one process. It refers to this very process, not to whoever
// gets the number next.
type Process struct {
	file *os.File
	raw  syscall.RawConn
}

// OpenProcess watches the process with that pid.
func OpenProcess(pid int) (*Process, error) {
	if pid <= 0 {
		return nil, fmt.Errorf("pid %d: %w", pid, ErrNoPidFD)
	}
	fd, err := unix.PidfdOpen(pid, 0)
	switch {
	case errors.Is(err, unix.ESRCH):
		return nil, fmt.Errorf("pid %d: %w", pid, ErrProcessGone)
	case err != nil:
		return nil, fmt.Errorf("pid %d: %w: %w", pid, ErrNoPidFD, err)
	}
	return newProcess(fd)
}

// PeerProcess watches the process at the other end of a unix socket: the one
// that connected, or that listened. A fork of it that merely holds the socket
// does not count.
func PeerProcess(c *net.UnixConn) (*Process, error) {
	fd, err := socketOption(c, func(fd int) (int, error) {
		return unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PEERPIDFD)
	})
	switch {
	case err == nil:
		unix.CloseOnExec(fd)
		return newProcess(fd)
	case errors.Is(err, unix.ENOPROTOOPT): // before 6.5
		cred, err := PeerCred(c)
		if err != nil {
			return nil, err
		}
		return OpenProcess(cred.PID)
	case errors.Is(err, unix.ESRCH), errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENODATA):
		// Kernels up to 6.15 have no pidfd for a process that is reaped.
		return nil, fmt.Errorf("peer: %w", ErrProcessGone)
	}
	return nil, fmt.Errorf("SO_PEERPIDFD: %w", err)
}

func newProcess(fd int) (*Process, error) {
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("setting pidfd non-blocking: %w", err)
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	raw, err := f.SyscallConn()
	if err == nil {
		err = f.SetDeadline(time.Time{}) // fails when the poller refused the descriptor
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("pidfd and poller: %w", err)
	}
	return &Process{file: f, raw: raw}, nil
}

// Wait returns nil when the process is gone: its memory is unmapped, so nothing
// of it can write into shared memory any more. After Close it returns
// os.ErrClosed. The goroutine waits in Go's poller.
func (p *Process) Wait() error {
	var failed error
	err := p.raw.Read(func(fd uintptr) bool {
		var gone bool
		gone, failed = readable(int(fd))
		return gone || failed != nil
	})
	if err != nil {
		return fmt.Errorf("waiting for a process: %w", pollError(err))
	}
	if failed != nil {
		return fmt.Errorf("waiting for a process: %w", failed)
	}
	return nil
}

// Gone says whether the process has ended, without waiting.
func (p *Process) Gone() bool {
	var gone bool
	_ = p.raw.Control(func(fd uintptr) { gone, _ = readable(int(fd)) })
	return gone
}

// Close ends a Wait with os.ErrClosed.
func (p *Process) Close() error { return p.file.Close() }

func readable(fd int) (bool, error) {
	set := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n := 0
	err := ignoreEINTR(func() (err error) {
		n, err = unix.Poll(set, 0)
		return err
	})
	return n > 0, err
}
