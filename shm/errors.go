package shm

import "errors"

var (
	// ErrBusy is returned when no credit or no room is left. It is a miss, never
	// a reason to wait.
	ErrBusy = errors.New("ring has no credit or no room")
	// ErrStopped is returned by Next when its stop channel was closed.
	ErrStopped = errors.New("stopped")
	// ErrClosed is returned after Close of this side.
	ErrClosed = errors.New("connection was closed here")
	// ErrPeerClosed is returned when the peer has closed its side in good order
	// and everything it sent before has been taken.
	ErrPeerClosed = errors.New("peer has closed the connection")
	// ErrPeerBroken is returned when the peer broke the protocol. The peer is to
	// be dropped: the same error comes back from every later call.
	ErrPeerBroken = errors.New("peer broke the protocol")
	// ErrPeerUID is returned for a socket whose other end belongs to another user.
	ErrPeerUID = errors.New("peer runs as another user")
	// ErrTimeout is returned when a peer took too long.
	ErrTimeout = errors.New("peer did not answer in time")
	// ErrNotRing is returned for a segment whose header does not fit this version.
	ErrNotRing = errors.New("segment is not a ring of this version")
	// ErrMessage is returned for a message that may not be sent: its length, type
	// or reservation is not what the ring carries.
	ErrMessage = errors.New("message does not fit the ring's format")
	// ErrNoRequest is returned by Reply for a request that is not open, because
	// it never came or has been answered.
	ErrNoRequest = errors.New("no such request is open")
	// ErrFrame is returned for a frame that may not be sent.
	ErrFrame = errors.New("frame is longer than 4 MiB or has too many descriptors")
)
