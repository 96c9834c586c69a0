package shm

import (
	"errors"
	"sync"
	"time"

	"github.com/kvtier/kvtier/internal/sys"
)

// endpoint is what both sides of a pair of rings have in common.
type endpoint struct {
	segment *sys.Segment
	in      consumer
	taking  sync.Mutex // held by Next, so that Close does not unmap under it; comes before mu
	once    sync.Once
	result  error // of Close

	mu        sync.Mutex // guards the fields below
	out       producer
	ownClosed *word             // shared, written here only
	copies    *word             // shared, written by the member
	owed      map[uint32]uint32 // seq of each open request: bytes reserved for its reply
	reserved  uint32            // sum over owed
	shutDown  bool              // nobody touches the segment any more, but for a Next that ends
}

// SetSpin sets how long Next looks at its ring before it sleeps, instead of the
// default: DefaultSpin with four CPUs or more, else 0. It comes before the first
// Next. More than a few peers that are busy at the same time on as few CPUs are
// better off without.
func (e *endpoint) SetSpin(d time.Duration) { e.in.spin = d }

// usable is called with mu held.
func (e *endpoint) usable() error {
	if e.shutDown {
		return ErrClosed
	}
	if err := e.in.broken.Load(); err != nil {
		return *err
	}
	return nil
}

// reserve notes that a reply is owed, within the given limits. It returns false
// when seq is owed already or a limit would be passed. It is called with mu held.
func (e *endpoint) reserve(seq, bytes, maxRequests, maxBytes uint32) bool {
	if _, known := e.owed[seq]; known {
		return false
	}
	if uint32(len(e.owed)) >= maxRequests || bytes > maxBytes || e.reserved > maxBytes-bytes {
		return false
	}
	e.owed[seq] = bytes
	e.reserved += bytes
	return true
}

// settle ends a reservation. It is called with mu held.
func (e *endpoint) settle(seq uint32) {
	e.reserved -= e.owed[seq]
	delete(e.owed, seq)
}

// wake rings the peer's doorbell if the peer sleeps. It comes after a put. The
// consumer, in the other order, says that it sleeps and then looks at the tail,
// so that one of both sees the other. It is called without mu: a system call
// under it would delay everybody who replies.
func (e *endpoint) wake() {
	e.mu.Lock()
	sleeps := !e.shutDown && e.out.sleeps.Load() != 0
	e.mu.Unlock()
	if sleeps {
		// It fails only when this side is being closed, which wakes the peer too.
		_ = e.out.bell.Signal()
	}
}

// Close tells the peer, ends a Next that waits, and unmaps the segment. It may
// be called from any goroutine and more than once.
func (e *endpoint) Close() error {
	e.once.Do(func() {
		e.mu.Lock()
		e.shutDown = true
		e.ownClosed.Store(1)
		e.mu.Unlock()
		_ = e.out.bell.Signal()
		e.in.end()
		e.taking.Lock()
		defer e.taking.Unlock()
		e.result = errors.Join(e.segment.Close(), e.out.bell.Close())
	})
	return e.result
}
