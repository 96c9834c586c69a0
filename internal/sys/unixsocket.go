package sys

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ErrTooManyFiles is returned when a peer attached more descriptors than a
// message may have. They are closed.
var ErrTooManyFiles = errors.New("peer attached too many descriptors")

// MaxFiles is the most descriptors that travel with one message.
const MaxFiles = 4

// throughDir is a path to name in dir that fits into the 108 bytes of a socket
// address, however deep dir lies.
func throughDir(dir *os.File, name string) string {
	return fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), name)
}

// UnixListener is a listening stream socket in a directory.
type UnixListener struct {
	*net.UnixListener
	dir  *os.File
	name string
	ino  uint64
	once sync.Once
	err  error
}

// ListenUnix listens on a socket called name in dir, mode 0600. A socket of that
// name is replaced, in one step and only when the new one accepts connections:
// the caller holds the lock that says nobody else listens there. What a process left
// that was killed between the making of its socket and the naming is removed. dir
// stays the caller's and must remain open until Close.
func ListenUnix(dir *os.File, name string) (*UnixListener, error) {
	var random [6]byte
	if _, err := rand.Read(random[:]); err != nil {
		return nil, fmt.Errorf("naming a socket: %w", err)
	}
	removeUnnamed(dir, name)
	temp := name + "." + hex.EncodeToString(random[:])
	config := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		// The mode of the unbound socket becomes the mode of its name, so there is
		// no moment with a wider one, and no change of the process's umask.
		var failed error
		err := raw.Control(func(fd uintptr) { failed = unix.Fchmod(int(fd), 0o600) })
		return errors.Join(err, failed)
	}}
	l, err := config.Listen(context.Background(), "unix", throughDir(dir, temp))
	if err != nil {
		return nil, fmt.Errorf("listening on %s: %w", name, err)
	}
	u := &UnixListener{UnixListener: l.(*net.UnixListener), dir: dir, name: name}
	u.SetUnlinkOnClose(false) // it knows the temporary name only
	var st unix.Stat_t
	err = unix.Fstatat(int(dir.Fd()), temp, &st, unix.AT_SYMLINK_NOFOLLOW)
	if err == nil {
		u.ino = st.Ino
		err = unix.Renameat(int(dir.Fd()), temp, int(dir.Fd()), name)
	}
	if err != nil {
		_ = unix.Unlinkat(int(dir.Fd()), temp, 0)
		_ = u.UnixListener.Close()
		return nil, fmt.Errorf("publishing socket %s: %w", name, err)
	}
	return u, nil
}

// removeUnnamed removes sockets under the temporary names of name. One that cannot be
// removed is in nobody's way.
func removeUnnamed(dir *os.File, name string) {
	entries, err := os.ReadDir(throughDir(dir, ""))
	if err != nil {
		return
	}
	for _, e := range entries {
		tail, ok := strings.CutPrefix(e.Name(), name+".")
		if _, err := hex.DecodeString(tail); ok && err == nil && e.Type() == os.ModeSocket {
			_ = unix.Unlinkat(int(dir.Fd()), e.Name(), 0)
		}
	}
}

// Close stops listening and removes the name, unless another socket has taken it.
func (u *UnixListener) Close() error {
	u.once.Do(func() {
		var st unix.Stat_t
		if unix.Fstatat(int(u.dir.Fd()), u.name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil && st.Ino == u.ino {
			_ = unix.Unlinkat(int(u.dir.Fd()), u.name, 0)
		}
		u.err = u.UnixListener.Close()
	})
	return u.err
}

// DialUnix connects to the socket called name in dir. unix.ECONNREFUSED and
// os.ErrNotExist in the error mean that nobody listens.
func DialUnix(dir *os.File, name string, timeout time.Duration) (*net.UnixConn, error) {
	dialer := net.Dialer{Timeout: timeout}
	c, err := dialer.Dial("unix", throughDir(dir, name))
	if err != nil {
		return nil, fmt.Errorf("connecting to %s: %w", name, err)
	}
	return c.(*net.UnixConn), nil
}

// PeerWentAway says whether err of a unix socket means that nobody is at the
// other end any more.
func PeerWentAway(err error) bool {
	return errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.ECONNREFUSED)
}

// Cred is who connected, or who listened, as the kernel saw it at that moment.
type Cred struct {
	UID uint32
	PID int // 0 when it is not visible from this pid namespace
}

// PeerCred asks the kernel for the peer's credentials.
func PeerCred(c *net.UnixConn) (Cred, error) {
	ucred, err := socketOption(c, func(fd int) (*unix.Ucred, error) {
		return unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err != nil {
		return Cred{}, fmt.Errorf("SO_PEERCRED: %w", err)
	}
	return Cred{UID: ucred.Uid, PID: int(ucred.Pid)}, nil
}

func socketOption[T any](c *net.UnixConn, get func(fd int) (T, error)) (value T, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return value, err
	}
	var failed error
	err = raw.Control(func(fd uintptr) { value, failed = get(int(fd)) })
	return value, errors.Join(err, failed)
}

// SendFiles writes all of b; files are attached to its first byte and stay the
// caller's. It honours the write deadline of c. After an error it is unknown how
// much of b was sent.
func SendFiles(c *net.UnixConn, b []byte, files []*os.File) error {
	if len(files) > MaxFiles {
		return fmt.Errorf("sending %d descriptors: %w", len(files), ErrTooManyFiles)
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return fmt.Errorf("sending: %w", err)
	}
	var oob []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			conn, err := f.SyscallConn()
			if err != nil {
				return fmt.Errorf("sending descriptor %d: %w", i, err)
			}
			// The number alone is used below; the caller keeps the file open.
			if err := conn.Control(func(fd uintptr) { fds[i] = int(fd) }); err != nil {
				return fmt.Errorf("sending descriptor %d: %w", i, err)
			}
		}
		oob = unix.UnixRights(fds...)
	}
	var failed error
	err = raw.Write(func(fd uintptr) bool {
		for len(b) > 0 {
			n, err := unix.SendmsgN(int(fd), b, oob, nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
			switch {
			case errors.Is(err, unix.EAGAIN):
				return false
			case errors.Is(err, unix.EINTR):
				continue
			case err != nil:
				failed = err
				return true
			}
			b, oob = b[n:], nil
		}
		return true
	})
	runtime.KeepAlive(files)
	if err == nil {
		err = failed
	}
	if err != nil {
		return fmt.Errorf("sending: %w", err)
	}
	return nil
}

// RecvFiles reads at least one byte into b, and the descriptors attached to it,
// which are the caller's and closed on exec. n = 0 without an error is the end
// of the stream. It honours the read deadline of c.
func RecvFiles(c *net.UnixConn, b []byte) (n int, files []*os.File, err error) {
	oob := make([]byte, unix.CmsgSpace(MaxFiles*4))
	n, got, flags, err := recvmsg(c, b, oob)
	if err != nil {
		return 0, nil, err
	}
	if got == 0 && flags&unix.MSG_CTRUNC == 0 {
		return n, nil, nil
	}
	files, err = filesOf(oob[:got])
	if err == nil && flags&unix.MSG_CTRUNC != 0 {
		err = ErrTooManyFiles
	}
	if err != nil {
		CloseFiles(files)
		return 0, nil, fmt.Errorf("receiving: %w", err)
	}
	return n, files, nil
}

// RecvNoFiles is RecvFiles for a peer that has none to send: with any attached the
// error is ErrTooManyFiles, and none of them was ever this process's. To take and
// close them would not do: whoever closes a file loses his POSIX locks on it.
func RecvNoFiles(c *net.UnixConn, b []byte) (n int, err error) {
	n, _, flags, err := recvmsg(c, b, nil)
	if err == nil && flags&unix.MSG_CTRUNC != 0 {
		return 0, fmt.Errorf("receiving: %w", ErrTooManyFiles)
	}
	return n, err
}

// recvmsg reads bytes and control data, and gives how much came of both.
func recvmsg(c *net.UnixConn, b, oob []byte) (n, got, flags int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, 0, 0, fmt.Errorf("receiving: %w", err)
	}
	var failed error
	err = raw.Read(func(fd uintptr) bool {
		failed = ignoreEINTR(func() (err error) {
			n, got, flags, _, err = unix.Recvmsg(int(fd), b, oob, unix.MSG_CMSG_CLOEXEC|unix.MSG_DONTWAIT)
			return err
		})
		return !errors.Is(failed, unix.EAGAIN)
	})
	if err == nil {
		err = failed
	}
	if err != nil {
		return 0, 0, 0, fmt.Errorf("receiving: %w", err)
	}
	return n, got, flags, nil
}

// filesOf returns the descriptors in control data, also together with an error.
func filesOf(oob []byte) ([]*os.File, error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	var files []*os.File
	for i := range messages {
		fds, e := unix.ParseUnixRights(&messages[i])
		if e != nil {
			err = e // a kind of control message that nobody asked for
			continue
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "received"))
		}
	}
	return files, err
}

// CloseFiles closes all files.
func CloseFiles(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}
