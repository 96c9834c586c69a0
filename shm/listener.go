package shm

import (
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/kvtier/kvtier/internal/sys"
)

// Listener accepts connections on a socket in a directory.
type Listener struct {
	socket  *sys.UnixListener
	refusal func(uid uint32) any
}

// Listen listens on a socket called name, mode 0600, in dir, which may lie as
// deep as it likes. A socket of that name is replaced: the caller holds the lock
// that says its listener is dead. dir must remain open until Close.
//
// refusal gives the frame that a process of another user gets before its connection is
// closed. It is called by Accept, once for each.
func Listen(dir *os.File, name string, refusal func(uid uint32) any) (*Listener, error) {
	socket, err := sys.ListenUnix(dir, name)
	if err != nil {
		return nil, err
	}
	return &Listener{socket: socket, refusal: refusal}, nil
}

// Accept returns the next connection of a process of the own user; those of
// others are told so and closed. ErrClosed comes after Close; after any other
// error (too many open files, for instance) accepting may be tried again.
func (l *Listener) Accept() (*Conn, error) {
	for {
		socket, err := l.socket.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return nil, ErrClosed
		}
		if err != nil {
			return nil, fmt.Errorf("accepting: %w", err)
		}
		c, err := connOf(socket)
		if err != nil {
			return nil, fmt.Errorf("accepting: %w", err)
		}
		if c.own() {
			return c, nil
		}
		_ = c.Send(l.refusal(c.uid)) // the first frame, for which there is room
		_ = c.Close()
	}
}

// Close stops listening and removes the socket's name. It is idempotent.
func (l *Listener) Close() error { return l.socket.Close() }

// Dial connects to the socket called name in dir. Nobody listening is
// ErrPeerClosed.
func Dial(dir *os.File, name string, timeout time.Duration) (*Conn, error) {
	socket, err := sys.DialUnix(dir, name, timeout)
	if errors.Is(err, os.ErrNotExist) || sys.PeerWentAway(err) {
		return nil, fmt.Errorf("%w: %w", ErrPeerClosed, err)
	}
	if err != nil {
		return nil, err
	}
	return newConn(socket)
}
