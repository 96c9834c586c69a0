package shm

import (
	"fmt"
	"os"

	"github.com/kvtier/kvtier/internal/sys"
)

// RingServer is the leader's end of a pair of rings. It counts the credits and
// reservations of its member once more, so that a reply always finds room.
//
// One goroutine calls Next. Reply and Close may be called from any.
type RingServer struct {
	endpoint
	replyBytes func(msg []byte) (int, error)
}

// NewRingServer creates the segment and the doorbells of one member. replyBytes
// says how much room the largest reply to a request needs; an error of it means
// that the request is malformed, and drops the peer.
func NewRingServer(session uint64, member uint32, replyBytes func(msg []byte) (int, error)) (*RingServer, error) {
	segment, err := sys.NewSegment("kvtier-ring", SegmentBytes)
	if err != nil {
		return nil, fmt.Errorf("creating ring: %w", err)
	}
	if err := segment.Populate(0, SegmentBytes); err != nil {
		segment.Close()
		return nil, fmt.Errorf("creating ring: %w", err)
	}
	requestBell, err := sys.NewEvent()
	if err != nil {
		segment.Close()
		return nil, fmt.Errorf("creating ring: %w", err)
	}
	replyBell, err := sys.NewEvent()
	if err != nil {
		segment.Close()
		requestBell.Close()
		return nil, fmt.Errorf("creating ring: %w", err)
	}
	h, requests, replies := rings(segment.Bytes())
	h.constants = constants{
		magic: ringMagic, version: ringVersion, headerBytes: headerBytes,
		ringBytes: RingBytes, maxMessage: MaxMessage,
		session: session, member: member, credits: Credits,
	}
	return &RingServer{
		endpoint: endpoint{
			segment: segment,
			in: consumer{
				ring: requests, tail: &h.requestTail.Uint32, head: &h.requestHead.Uint32,
				sleeps: &h.requestSleeps.Uint32, peerClosed: &h.memberClosed.Uint32,
				bell: requestBell, spin: defaultSpin(), closed: make(chan struct{}),
			},
			out: producer{
				ring: replies, tail: &h.replyTail.Uint32, head: &h.replyHead.Uint32,
				sleeps: &h.replySleeps.Uint32, bell: replyBell,
			},
			ownClosed: &h.leaderClosed,
			copies:    &h.memberCopies,
			owed:      make(map[uint32]uint32, Credits),
		},
		replyBytes: replyBytes,
	}, nil
}

// Files are what the member needs for OpenRing. They stay the server's and are
// open until Close.
func (s *RingServer) Files() (segment, requestBell, replyBell *os.File) {
	return s.segment.File(), s.in.bell.File(), s.out.bell.File()
}

// Next returns the next request, and waits for one until stop is closed; nil
// never is. The bytes are a private copy, valid until the following Next. Errors:
// ErrStopped, ErrClosed, ErrPeerClosed, ErrPeerBroken. It is best called with
// the same channel always: a changed one costs a goroutine.
func (s *RingServer) Next(stop <-chan struct{}) ([]byte, error) {
	s.taking.Lock()
	defer s.taking.Unlock()
	m, err := s.in.next(stop)
	if err != nil {
		return nil, err
	}
	bytes, err := s.replyBytes(m)
	if err == nil {
		err = checkReservation(bytes)
	}
	if err != nil {
		return nil, s.in.fail(fmt.Errorf("%w: %w", ErrPeerBroken, err))
	}
	if !s.admit(messageSeq(m), uint32(bytes)) {
		return nil, s.in.fail(fmt.Errorf("%w: request %d of %d reply bytes is over its credits or its seq is in use",
			ErrPeerBroken, messageSeq(m), bytes))
	}
	return m, nil
}

func (s *RingServer) admit(seq, bytes uint32) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reserve(seq, bytes, Credits, maxReserved)
}

// Reply sends the one reply to an open request, which it names by its seq. It
// never waits: a member whose ring has no room for what is owed to it broke the
// protocol. Errors: ErrClosed, ErrPeerBroken; ErrMessage and ErrNoRequest are
// mistakes of the caller, who has then not replied.
func (s *RingServer) Reply(msg []byte) error {
	if err := checkMessage(msg); err != nil {
		return fmt.Errorf("replying: %w", err)
	}
	if err := s.reply(msg); err != nil {
		return fmt.Errorf("replying: %w", err)
	}
	s.wake()
	return nil
}

func (s *RingServer) reply(msg []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.usable(); err != nil {
		return err
	}
	seq := messageSeq(msg)
	room, open := s.owed[seq]
	if !open {
		return fmt.Errorf("%w: seq %d", ErrNoRequest, seq)
	}
	if uint32(len(msg)) > room {
		return fmt.Errorf("%w: reply of %d bytes to a request that reserved %d", ErrMessage, len(msg), room)
	}
	if err := s.out.put(msg); err != nil {
		if err == ErrBusy {
			err = fmt.Errorf("%w: no room for a reply that was reserved", ErrPeerBroken)
		}
		return s.in.fail(err)
	}
	s.settle(seq)
	return nil
}
