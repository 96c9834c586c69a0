package shm

import (
	"errors"
	"fmt"
	"os"

	"github.com/kvtier/kvtier/internal/sys"
)

// A few credits and their minimal replies are kept for SendSure: what ends an
// operation must not wait for the replies of those that wait for its end.
const (
	sureCredits  = 8
	sureReserved = sureCredits * messageMin
)

// RingClient is the member's end of a pair of rings.
//
// One goroutine calls Next, and goes on doing so: the queue of SendSure moves
// when replies come in. The other methods may be called from any.
type RingClient struct {
	endpoint
	session uint64
	member  uint32
	credits uint32
	queue   []sure // guarded by mu; in order
}

// sure is a message that waits for room.
type sure struct {
	msg        []byte
	replyBytes uint32
}

// OpenRing opens what RingServer.Files has passed on. It takes ownership of the
// files and closes them, also on error.
func OpenRing(segment, requestBell, replyBell *os.File) (*RingClient, error) {
	memory, err := sys.OpenSegment(segment, SegmentBytes, true)
	request, err2 := sys.OpenEvent(requestBell)
	reply, err3 := sys.OpenEvent(replyBell)
	if err := errors.Join(err, err2, err3); err != nil {
		release(memory, request, reply)
		return nil, fmt.Errorf("opening ring: %w", err)
	}
	h, requests, replies := rings(memory.Bytes())
	fixed := h.constants // read once
	if err := fixed.check(); err != nil {
		release(memory, request, reply)
		return nil, fmt.Errorf("opening ring: %w", err)
	}
	return &RingClient{
		endpoint: endpoint{
			segment: memory,
			in: consumer{
				ring: replies, tail: &h.replyTail.Uint32, head: &h.replyHead.Uint32,
				sleeps: &h.replySleeps.Uint32, peerClosed: &h.leaderClosed.Uint32,
				bell: reply, spin: defaultSpin(), closed: make(chan struct{}),
			},
			out: producer{
				ring: requests, tail: &h.requestTail.Uint32, head: &h.requestHead.Uint32,
				sleeps: &h.requestSleeps.Uint32, bell: request,
			},
			ownClosed: &h.memberClosed,
			copies:    &h.memberCopies,
			owed:      make(map[uint32]uint32, Credits),
		},
		session: fixed.session, member: fixed.member, credits: fixed.credits,
	}, nil
}

func release(memory *sys.Segment, bells ...*sys.Event) {
	if memory != nil {
		memory.Close()
	}
	for _, b := range bells {
		if b != nil {
			b.Close()
		}
	}
}

// Session is the leader's session.
func (c *RingClient) Session() uint64 { return c.session }

// Member is the number the leader gave to this member.
func (c *RingClient) Member() uint32 { return c.member }

// Send sends a request whose largest reply occupies replyBytes. It never waits.
// The seq inside msg must not be that of an open request. Errors: ErrBusy when
// there is no credit or no room, or messages of SendSure wait for it; ErrClosed,
// ErrPeerClosed, ErrPeerBroken; ErrMessage is a mistake of the caller.
func (c *RingClient) Send(msg []byte, replyBytes int) error {
	if err := errors.Join(checkMessage(msg), checkReservation(replyBytes)); err != nil {
		return fmt.Errorf("sending: %w", err)
	}
	err := c.send(msg, uint32(replyBytes))
	c.wake() // also after an error: a message of SendSure may have gone out
	if err != nil {
		return fmt.Errorf("sending: %w", err)
	}
	return nil
}

func (c *RingClient) send(msg []byte, replyBytes uint32) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.flush(); err != nil {
		return err
	}
	if len(c.queue) > 0 {
		return ErrBusy
	}
	return c.put(msg, replyBytes, c.credits-sureCredits, maxReserved-sureReserved)
}

// SendSure sends a request that must not be lost, at once or as soon as there is
// room, before anything that Send is given later. Messages of SendSure keep
// their order. The queue is not bounded here: the caller sends one message per
// operation or lease that it began. Errors: ErrClosed, ErrPeerClosed,
// ErrPeerBroken; ErrMessage is a mistake of the caller.
func (c *RingClient) SendSure(msg []byte, replyBytes int) error {
	if err := errors.Join(checkMessage(msg), checkReservation(replyBytes)); err != nil {
		return fmt.Errorf("sending: %w", err)
	}
	c.mu.Lock()
	err := c.usable()
	if err == nil {
		c.queue = append(c.queue, sure{msg: append([]byte(nil), msg...), replyBytes: uint32(replyBytes)})
		err = c.flush()
	}
	c.mu.Unlock()
	c.wake()
	if err != nil {
		return fmt.Errorf("sending: %w", err)
	}
	return nil
}

// Queued is the number of messages of SendSure that still wait for room.
func (c *RingClient) Queued() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.queue)
}

// Next returns the next reply, and waits for one until stop is closed; nil never
// is. The bytes are a private copy, valid until the following Next. Errors:
// ErrStopped, ErrClosed, ErrPeerClosed, ErrPeerBroken. It is best called with
// the same channel always: a changed one costs a goroutine.
func (c *RingClient) Next(stop <-chan struct{}) ([]byte, error) {
	c.taking.Lock()
	defer c.taking.Unlock()
	m, err := c.in.next(stop)
	if err != nil {
		return nil, err
	}
	if err := c.answered(m); err != nil {
		return nil, c.in.fail(err)
	}
	c.wake()
	return m, nil
}

// answered frees what m has reserved, after the room in the ring is free, and
// lets waiting messages have it.
func (c *RingClient) answered(m []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	seq := messageSeq(m)
	room, open := c.owed[seq]
	if !open {
		return fmt.Errorf("%w: reply to request %d, which is not open", ErrPeerBroken, seq)
	}
	if uint32(len(m)) > room {
		return fmt.Errorf("%w: reply of %d bytes where %d were reserved", ErrPeerBroken, len(m), room)
	}
	c.settle(seq)
	if err := c.flush(); errors.Is(err, ErrPeerBroken) {
		return err
	}
	return nil
}

// flush sends what waits, as far as there is room. It is called with mu held.
func (c *RingClient) flush() error {
	if err := c.usable(); err != nil {
		return err
	}
	if c.in.peerClosed.Load() != 0 {
		return ErrPeerClosed
	}
	for len(c.queue) > 0 {
		err := c.put(c.queue[0].msg, c.queue[0].replyBytes, c.credits, maxReserved)
		if err == ErrBusy {
			return nil
		}
		if err != nil {
			return err
		}
		c.queue[0] = sure{}
		c.queue = c.queue[1:]
	}
	c.queue = nil
	return nil
}

// put sends one message within the given limits. It is called with mu held.
func (c *RingClient) put(msg []byte, replyBytes, credits, reserved uint32) error {
	seq := messageSeq(msg)
	if !c.reserve(seq, replyBytes, credits, reserved) {
		return ErrBusy
	}
	err := c.out.put(msg)
	if err != nil {
		c.settle(seq)
	}
	if err != nil && err != ErrBusy {
		return c.in.fail(err)
	}
	return err
}
