package shm

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/kvtier/kvtier/internal/spawn"
	"github.com/kvtier/kvtier/internal/sys"
)

const (
	// MaxFrame is the longest frame of the socket, in bytes without its length.
	MaxFrame = 4 << 20
	// sendTimeout bounds a Send to a peer that does not read.
	sendTimeout = 10 * time.Second
	// readStep bounds what is allocated ahead of the bytes that came in: the
	// length alone is no reason to reserve 4 MiB.
	readStep = 64 << 10
)

// Conn is one connection of a unix socket that carries frames: u32 length, JSON,
// and descriptors attached to the first byte.
//
// One goroutine calls Recv. The other methods may be called from any.
type Conn struct {
	socket *net.UnixConn
	uid    uint32
	pid    int

	sending sync.Mutex
	sendErr error // guarded by sending; sticky, as a frame may have gone out in part

	noFiles bool   // set by RefuseFiles
	frame   []byte // what Recv has of the present frame, with its length
	files   []*os.File
	recvErr error // sticky

	death   sync.Mutex
	process *sys.Process // guarded by death; nil: cannot be watched, or forgotten
	gone    chan struct{}
	noWatch error
}

// newConn makes a connection with a process of the own user. It takes ownership of
// socket, also when it returns an error.
func newConn(socket *net.UnixConn) (*Conn, error) {
	c, err := connOf(socket)
	if err != nil {
		return nil, err
	}
	if !c.own() {
		_ = c.Close()
		return nil, fmt.Errorf("%w: uid %d", ErrPeerUID, c.uid)
	}
	return c, nil
}

// connOf is newConn for a process of any user.
func connOf(socket *net.UnixConn) (*Conn, error) {
	cred, err := sys.PeerCred(socket)
	if err != nil {
		socket.Close()
		return nil, err
	}
	c := &Conn{socket: socket, uid: cred.UID, pid: int(cred.PID)}
	// At once, not in WatchDeath: without SO_PEERPIDFD the kernel might give the
	// pid to another process meanwhile.
	c.process, c.noWatch = sys.PeerProcess(socket)
	return c, nil
}

// own says whether the peer runs as the user of this process.
func (c *Conn) own() bool { return c.uid == uint32(os.Geteuid()) }

// PeerUID is the user the peer runs as.
func (c *Conn) PeerUID() uint32 { return c.uid }

// PeerPID is the peer's process when it connected; 0 when it cannot be seen from here.
// It may be another process by now.
func (c *Conn) PeerPID() int { return c.pid }

// Send sends v as one frame, and duplicates of files with it, which stay the
// caller's. A json.RawMessage goes out as it is. A peer that does not read for
// ten seconds is given up: after any error but ErrFrame the connection cannot
// send any more.
func (c *Conn) Send(v any, files ...*os.File) error {
	b := bytes.NewBuffer(make([]byte, 4, 512))
	if raw, ok := v.(json.RawMessage); ok {
		b.Write(raw)
	} else {
		enc := json.NewEncoder(b)
		enc.SetEscapeHTML(false) // raw JSON inside v keeps its bytes
		if err := enc.Encode(v); err != nil {
			return fmt.Errorf("sending frame: %w: %w", ErrFrame, err)
		}
	}
	frame := b.Bytes()
	if len(frame)-4 > MaxFrame || len(frame) == 4 || len(files) > sys.MaxFiles {
		return fmt.Errorf("sending frame: %w: %d bytes, %d descriptors", ErrFrame, len(frame)-4, len(files))
	}
	binary.LittleEndian.PutUint32(frame, uint32(len(frame)-4))

	c.sending.Lock()
	defer c.sending.Unlock()
	if c.sendErr != nil {
		return c.sendErr
	}
	err := c.socket.SetWriteDeadline(time.Now().Add(sendTimeout))
	if err == nil {
		err = sys.SendFiles(c.socket, frame, files)
	}
	if err != nil {
		c.sendErr = fmt.Errorf("sending frame: %w", socketError(err))
	}
	return c.sendErr
}

// RefuseFiles makes Recv take no descriptors: a frame with some is ErrPeerBroken, and
// they never belong to this process, which need not even close them. A holder of POSIX
// locks needs it: with any descriptor of a locked file that it closes the lock is gone,
// and a peer can send one. It comes before the first Recv.
func (c *Conn) RefuseFiles() { c.noFiles = true }

// Recv returns the next frame and its descriptors, which are the caller's. It
// waits at most timeout; 0 means until Close or the end of the peer. ErrTimeout
// loses nothing, a later Recv goes on. Other errors are for good: ErrPeerClosed,
// ErrClosed, ErrPeerBroken.
func (c *Conn) Recv(timeout time.Duration) (json.RawMessage, []*os.File, error) {
	if c.recvErr != nil {
		return nil, nil, c.recvErr
	}
	raw, files, err := c.recv(timeout)
	if err == nil {
		return raw, files, nil
	}
	err = fmt.Errorf("receiving frame: %w", socketError(err))
	if !errors.Is(err, ErrTimeout) {
		c.recvErr = err
		sys.CloseFiles(c.files)
		c.frame, c.files = nil, nil
	}
	return nil, nil, err
}

func (c *Conn) recv(timeout time.Duration) (json.RawMessage, []*os.File, error) {
	var deadline time.Time
	if timeout > 0 {
		deadline = time.Now().Add(timeout)
	}
	if err := c.socket.SetReadDeadline(deadline); err != nil {
		return nil, nil, err
	}
	for {
		want := 4
		if len(c.frame) >= 4 {
			length := binary.LittleEndian.Uint32(c.frame)
			if length == 0 || length > MaxFrame {
				return nil, nil, fmt.Errorf("%w: frame of %d bytes", ErrPeerBroken, length)
			}
			want += int(length)
		}
		if len(c.frame) == want {
			return c.whole()
		}
		if err := c.more(want - len(c.frame)); err != nil {
			return nil, nil, err
		}
	}
}

// more reads up to n bytes of the present frame.
func (c *Conn) more(n int) error {
	have := len(c.frame)
	part := make([]byte, min(n, readStep))
	got, files, err := c.read(part)
	if errors.Is(err, sys.ErrTooManyFiles) {
		return fmt.Errorf("%w: %w", ErrPeerBroken, err)
	}
	if err != nil {
		return err
	}
	if got == 0 {
		sys.CloseFiles(files)
		if have > 0 {
			return fmt.Errorf("%w: end within a frame", ErrPeerBroken)
		}
		return io.EOF
	}
	if len(files) > 0 && have > 0 {
		sys.CloseFiles(files)
		return fmt.Errorf("%w: descriptors within a frame", ErrPeerBroken)
	}
	c.frame = append(c.frame, part[:got]...)
	if have == 0 {
		c.files = files
	}
	return nil
}

func (c *Conn) read(part []byte) (int, []*os.File, error) {
	if c.noFiles {
		n, err := sys.RecvNoFiles(c.socket, part)
		return n, nil, err
	}
	return sys.RecvFiles(c.socket, part)
}

// whole hands a complete frame over.
func (c *Conn) whole() (json.RawMessage, []*os.File, error) {
	raw := json.RawMessage(c.frame[4:])
	if !json.Valid(raw) {
		return nil, nil, fmt.Errorf("%w: frame is not JSON", ErrPeerBroken)
	}
	files := c.files
	c.frame, c.files = nil, nil
	return raw, files, nil
}

// WantFiles checks that a frame came with exactly n descriptors. If not, all are
// closed and the error is ErrPeerBroken.
func WantFiles(files []*os.File, n int) error {
	if len(files) == n {
		return nil
	}
	sys.CloseFiles(files)
	return fmt.Errorf("%w: frame with %d descriptors, not %d", ErrPeerBroken, len(files), n)
}

// WatchDeath returns a channel that is closed when the peer's process is gone:
// its memory is unmapped, nothing of it writes into shared memory any more. A
// closed socket is not that, and Close does not end the watch; Forget does.
func (c *Conn) WatchDeath() (<-chan struct{}, error) {
	c.death.Lock()
	defer c.death.Unlock()
	if c.gone != nil {
		return c.gone, nil
	}
	if errors.Is(c.noWatch, sys.ErrProcessGone) {
		c.gone = make(chan struct{})
		close(c.gone)
		return c.gone, nil
	}
	if c.noWatch != nil {
		return nil, fmt.Errorf("watching the peer: %w", c.noWatch)
	}
	if c.process == nil {
		return nil, fmt.Errorf("watching the peer: %w", ErrClosed)
	}
	gone, process := make(chan struct{}), c.process
	c.gone = gone
	// A watcher that panics says nothing: a peer that seems to live only keeps
	// its slots, one that seems dead might still write into them.
	spawn.Go("death watch", func(error) {}, func() {
		if process.Wait() == nil {
			process.Close()
			close(gone)
		}
	})
	return gone, nil
}

// Forget ends the watch of WatchDeath, whose channel is then never closed unless
// it is already. It comes after Close, when the peer's death matters no more.
func (c *Conn) Forget() {
	c.death.Lock()
	defer c.death.Unlock()
	if c.process != nil {
		c.process.Close()
		c.process = nil
	}
}

// Close closes the socket. A Recv that waits ends with ErrClosed. A death watch
// goes on; without one nothing is left.
func (c *Conn) Close() error {
	c.death.Lock()
	if c.gone == nil && c.process != nil {
		c.process.Close()
		c.process = nil
	}
	c.death.Unlock()
	return c.socket.Close()
}

// socketError names the errors of the socket.
func socketError(err error) error {
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return ErrTimeout
	case errors.Is(err, net.ErrClosed):
		return ErrClosed
	case errors.Is(err, io.EOF), sys.PeerWentAway(err):
		return ErrPeerClosed
	}
	return err
}
