package shm

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/internal/spawn"
	"github.com/kvtier/kvtier/internal/sys"
)

// DefaultSpin is how long a consumer looks at its ring before it sleeps, on
// machines with CPUs to spare: a peer that answers at once is then heard in a
// tenth of a microsecond, where a wake-up takes tens.
const DefaultSpin = 12 * time.Microsecond

func defaultSpin() time.Duration {
	if runtime.NumCPU() >= 4 {
		return DefaultSpin
	}
	return 0
}

// consumer reads messages from one ring. One goroutine at a time uses it.
type consumer struct {
	ring       []byte
	tail       *atomic.Uint32 // shared, written by the peer
	head       *atomic.Uint32 // shared, written here only
	sleeps     *atomic.Uint32 // shared, written here only
	peerClosed *atomic.Uint32 // shared, written by the peer
	bell       *sys.Event     // the own doorbell
	spin       time.Duration
	pos        uint32 // what was stored in head last: the shared word is never read back
	buf        []byte

	closing  atomic.Bool   // set before the bell is closed
	closed   chan struct{} // closed with it
	broken   atomic.Pointer[error]
	watching <-chan struct{} // the stop channel that ends the present waits
}

// take copies the next message out, or returns nil when there is none. The
// message is valid until the next take.
func (c *consumer) take() ([]byte, error) {
	for {
		available := c.tail.Load() - c.pos
		if available > RingBytes || available%align != 0 {
			return nil, fmt.Errorf("%w: write cursor is %d bytes ahead", ErrPeerBroken, available)
		}
		if available == 0 {
			return nil, nil
		}
		offset := c.pos % RingBytes
		toEnd := uint32(RingBytes) - offset
		// The peer can change these bytes at any time: they are copied once, and
		// only the copy is looked at.
		var head [messageMin]byte
		copy(head[:], c.ring[offset:])
		length := messageLength(head[:])
		if length%align != 0 || length < messageMin || length > min(MaxMessage, available, toEnd) {
			return nil, fmt.Errorf("%w: message of %d bytes, %d available, %d to the end", ErrPeerBroken, length, available, toEnd)
		}
		if messageType(head[:]) == 0 {
			if length != toEnd {
				return nil, fmt.Errorf("%w: padding of %d bytes, %d to the end", ErrPeerBroken, length, toEnd)
			}
			c.advance(length)
			continue
		}
		if cap(c.buf) < int(length) {
			c.buf = make([]byte, max(int(length), 4096))
		}
		m := c.buf[:length]
		copy(m, head[:])
		copy(m[messageMin:], c.ring[offset+messageMin:])
		c.advance(length)
		return m, nil
	}
}

func (c *consumer) advance(bytes uint32) {
	c.pos += bytes
	c.head.Store(c.pos)
}

// next returns the next message and waits for it if need be.
func (c *consumer) next(stop <-chan struct{}) ([]byte, error) {
	for {
		if c.closing.Load() {
			return nil, ErrClosed
		}
		if err := c.broken.Load(); err != nil {
			return nil, *err
		}
		select {
		case <-stop:
			return nil, ErrStopped
		default:
		}
		// Closed is looked at before the ring: what was sent before it counts.
		over := c.peerClosed.Load() != 0
		m, err := c.take()
		if err != nil {
			return nil, c.fail(err)
		}
		if m != nil {
			return m, nil
		}
		if over {
			return nil, ErrPeerClosed
		}
		if c.spin > 0 && c.spinning() {
			continue
		}
		if err := c.sleep(stop); err != nil {
			return nil, err
		}
	}
}

// spinning looks at the ring for a while and reports whether something came.
func (c *consumer) spinning() bool {
	for end := time.Now().Add(c.spin); ; {
		for range 50 {
			if c.tail.Load() != c.pos {
				return true
			}
		}
		if time.Now().After(end) {
			return false
		}
	}
}

// sleep waits on the doorbell.
func (c *consumer) sleep(stop <-chan struct{}) error {
	c.watch(stop)
	c.sleeps.Store(1)
	defer c.sleeps.Store(0)
	// A producer that did not see the flag has stored its tail before: look again.
	if c.tail.Load() != c.pos || c.peerClosed.Load() != 0 {
		return nil
	}
	err := c.bell.Wait()
	switch {
	case err == nil:
		return nil
	case errors.Is(err, os.ErrDeadlineExceeded):
		// By a stop channel: this one, which next sees, or an earlier one. The
		// deadline is lifted before next looks, so none is missed.
		c.bell.SetDeadline(time.Time{})
		return nil
	case errors.Is(err, os.ErrClosed):
		return ErrClosed
	}
	return err
}

var longAgo = time.Unix(1, 0)

// watch arranges that closing stop ends a wait.
func (c *consumer) watch(stop <-chan struct{}) {
	if stop == c.watching {
		return
	}
	c.watching = stop
	c.bell.SetDeadline(time.Time{})
	if stop == nil {
		return
	}
	failed := func(err error) { c.fail(err) }
	spawn.Go("ring stop", failed, func() {
		select {
		case <-stop:
			c.bell.SetDeadline(longAgo)
		case <-c.closed:
		}
	})
}

// fail makes err the answer of every later next and wakes one that waits. It
// returns the first error.
func (c *consumer) fail(err error) error {
	if c.broken.CompareAndSwap(nil, &err) {
		_ = c.bell.Signal()
		return err
	}
	return *c.broken.Load()
}

// end makes next return ErrClosed, also a waiting one.
func (c *consumer) end() {
	if c.closing.CompareAndSwap(false, true) {
		close(c.closed)
		_ = c.bell.Close()
	}
}
