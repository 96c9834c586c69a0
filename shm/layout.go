// Package shm connects a member to its leader: a unix socket for what is rare,
// and a pair of rings in a sealed shared segment for requests and replies, with
// doorbells for a side that sleeps. It knows bytes, not chunks.
//
// A peer is not trusted. Whatever it wrote is loaded once, range-checked, and
// copied out; constants and the cursors of the own side are kept privately and
// never read back. A peer that breaks a rule is dropped: the calls return
// [ErrPeerBroken] from then on.
package shm

import (
	"encoding/binary"
	"fmt"
	"structs"
	"sync/atomic"
	"unsafe"
)

const (
	ringMagic   = 0x31474E495254564B // "KVTRING1"
	ringVersion = 1

	// RingBytes is the size of each of the two rings, a power of two.
	RingBytes = 1 << 20
	// MaxMessage is the longest message in bytes.
	MaxMessage = RingBytes / 4
	// Credits is the number of requests in flight.
	Credits = 64
	// SegmentBytes is the size of a ring segment: header, requests, replies.
	SegmentBytes = headerBytes + 2*RingBytes

	headerBytes = 4096
	// maxReserved bounds the replies that are owed to a member. It leaves half of
	// the ring for the one pad that may lie between them.
	maxReserved = RingBytes / 2
	align       = 32
	cacheLines  = 128 // two lines: the neighbour is prefetched
)

// constants is what the leader writes before the segment is sent.
type constants struct {
	_           structs.HostLayout
	magic       uint64
	version     uint32
	headerBytes uint32
	ringBytes   uint32
	maxMessage  uint32
	session     uint64
	member      uint32
	credits     uint32
}

// word is a value that one side writes and the other reads, alone on its lines.
type word struct {
	_ structs.HostLayout
	atomic.Uint32
	_ [cacheLines - 4]byte
}

// header is the first page of the segment. The cursors count bytes and run
// freely over 32 bits.
type header struct {
	_ structs.HostLayout
	constants
	_             [cacheLines - unsafe.Sizeof(constants{})]byte
	requestTail   word // member
	requestHead   word // leader
	requestSleeps word // leader: the consumer of requests waits on its doorbell
	replyTail     word // leader
	replyHead     word // member
	replySleeps   word // member: the consumer of replies waits on its doorbell
	leaderClosed  word
	memberClosed  word
	memberCopies  word // member: how many of its copies are under way
}

// The offsets are part of the protocol.
var (
	_ = [1]struct{}{}[unsafe.Offsetof(constants{}.version)-8]
	_ = [1]struct{}{}[unsafe.Offsetof(constants{}.headerBytes)-12]
	_ = [1]struct{}{}[unsafe.Offsetof(constants{}.ringBytes)-16]
	_ = [1]struct{}{}[unsafe.Offsetof(constants{}.maxMessage)-20]
	_ = [1]struct{}{}[unsafe.Offsetof(constants{}.session)-24]
	_ = [1]struct{}{}[unsafe.Offsetof(constants{}.member)-32]
	_ = [1]struct{}{}[unsafe.Offsetof(constants{}.credits)-36]
	_ = [1]struct{}{}[unsafe.Offsetof(header{}.requestTail)-0x080]
	_ = [1]struct{}{}[unsafe.Offsetof(header{}.requestHead)-0x100]
	_ = [1]struct{}{}[unsafe.Offsetof(header{}.requestSleeps)-0x180]
	_ = [1]struct{}{}[unsafe.Offsetof(header{}.replyTail)-0x200]
	_ = [1]struct{}{}[unsafe.Offsetof(header{}.replyHead)-0x280]
	_ = [1]struct{}{}[unsafe.Offsetof(header{}.replySleeps)-0x300]
	_ = [1]struct{}{}[unsafe.Offsetof(header{}.leaderClosed)-0x380]
	_ = [1]struct{}{}[unsafe.Offsetof(header{}.memberClosed)-0x400]
	_ = [1]struct{}{}[unsafe.Offsetof(header{}.memberCopies)-0x480]
)

// rings divides a mapped segment.
func rings(mem []byte) (h *header, requests, replies []byte) {
	h = (*header)(unsafe.Pointer(unsafe.SliceData(mem)))
	requests = mem[headerBytes:][:RingBytes:RingBytes]
	replies = mem[headerBytes+RingBytes:][:RingBytes:RingBytes]
	return h, requests, replies
}

// check compares a private copy of the constants with what this version uses.
func (c *constants) check() error {
	switch {
	case c.magic != ringMagic:
		return fmt.Errorf("%w: magic %#x", ErrNotRing, c.magic)
	case c.version != ringVersion:
		return fmt.Errorf("%w: version %d", ErrNotRing, c.version)
	case c.headerBytes != headerBytes, c.ringBytes != RingBytes, c.maxMessage != MaxMessage:
		return fmt.Errorf("%w: sizes %d, %d, %d", ErrNotRing, c.headerBytes, c.ringBytes, c.maxMessage)
	case c.credits <= sureCredits || c.credits > Credits:
		return fmt.Errorf("%w: %d credits", ErrNotRing, c.credits)
	}
	return nil
}

// Of a message the ring itself looks at three fields of its header: u32 length
// at 0, u16 type at 4 (0 = pad), u32 seq at 16.
const (
	lengthOffset = 0
	typeOffset   = 4
	seqOffset    = 16
	messageMin   = 32 // the header
)

func messageLength(m []byte) uint32 { return binary.LittleEndian.Uint32(m[lengthOffset:]) }
func messageType(m []byte) uint16   { return binary.LittleEndian.Uint16(m[typeOffset:]) }
func messageSeq(m []byte) uint32    { return binary.LittleEndian.Uint32(m[seqOffset:]) }

// checkMessage refuses what must not be put into a ring.
func checkMessage(m []byte) error {
	if len(m) < messageMin || len(m) > MaxMessage || len(m)%align != 0 {
		return fmt.Errorf("%w: %d bytes", ErrMessage, len(m))
	}
	if n := messageLength(m); int64(n) != int64(len(m)) {
		return fmt.Errorf("%w: length field %d of %d bytes", ErrMessage, n, len(m))
	}
	if messageType(m) == 0 {
		return fmt.Errorf("%w: type 0 is padding", ErrMessage)
	}
	return nil
}

// checkReservation refuses a reply size that no reply can have.
func checkReservation(bytes int) error {
	if bytes < messageMin || bytes > MaxMessage || bytes%align != 0 {
		return fmt.Errorf("%w: reply of %d bytes", ErrMessage, bytes)
	}
	return nil
}
