// Package wire encodes, decodes and checks what travels between a member and its
// leader: the binary messages of the rings and the JSON frames of the socket. It
// does no I/O. Whatever it parses is copied: nothing it returns refers to the
// bytes it was given.
package wire

import "strconv"

// Type names a request and the reply to it.
type Type uint16

// Type 0 belongs to the ring, which pads with it.
const (
	Lookup Type = 1 + iota
	Prefetch
	Lease
	Release
	StoreBegin
	StoreDone
	LoadBegin
	LoadWait
	LoadDone
	Cancel
	SelfTest
	typeEnd
)

// Types is one more than the highest type.
const Types = int(typeEnd)

var typeNames = [...]string{
	Lookup: "LOOKUP", Prefetch: "PREFETCH", Lease: "LEASE", Release: "RELEASE",
	StoreBegin: "STORE_BEGIN", StoreDone: "STORE_DONE",
	LoadBegin: "LOAD_BEGIN", LoadWait: "LOAD_WAIT", LoadDone: "LOAD_DONE", Cancel: "CANCEL",
	SelfTest: "SELFTEST",
}

func (t Type) known() bool { return t >= Lookup && t <= SelfTest }

func (t Type) String() string {
	if t.known() {
		return typeNames[t]
	}
	return "type " + strconv.Itoa(int(t))
}

// Status is the outcome of a request, or of one part in a DONE.
type Status int32

const (
	StatusOK      Status = 0
	StatusBusy    Status = -1
	StatusStale   Status = -2
	StatusRefused Status = -3
	StatusTimeout Status = -4
	StatusAborted Status = -5
	StatusFailed  Status = -6 // SELFTEST: bytes came back wrong
)

func (s Status) String() string {
	switch s {
	case StatusOK:
		return "OK"
	case StatusBusy:
		return "BUSY"
	case StatusStale:
		return "STALE"
	case StatusRefused:
		return "REFUSED"
	case StatusTimeout:
		return "TIMEOUT"
	case StatusAborted:
		return "ABORTED"
	case StatusFailed:
		return "FAILED"
	}
	return "status " + strconv.Itoa(int(s))
}

// Code is the verdict over one chunk.
type Code uint32

const (
	Granted  Code = 1 + iota // the slot is the operation's to fill
	Have                     // held already
	Pending                  // another operation is bringing it
	Declined                 // no room, or a chunk behind a hole
	Ready                    // pinned and readable
	Failed                   // cannot be read, for all ranks alike
	Later                    // decided by a LOAD_WAIT of its window
)

var codeNames = [...]string{
	Granted: "GRANTED", Have: "HAVE", Pending: "PENDING", Declined: "DECLINED",
	Ready: "READY", Failed: "FAILED", Later: "LATER",
}

func (c Code) String() string {
	if c >= Granted && c <= Later {
		return codeNames[c]
	}
	return "code " + strconv.Itoa(int(c))
}

// Flags of a run (Run.Flags).
const (
	LeasePrefetch uint32 = 1 // LEASE: start disk reads
	LeasePin      uint32 = 2 // LEASE: hold the slots of what is resident
	LeaseRenew    uint32 = 4 // LEASE: the body lists lease ids instead of keys

	StoreNoDisk uint32 = 1 // STORE_BEGIN: the chunks stay in DRAM
)

// Flags of a header (Request.Flags).
const (
	CancelUnsent uint16 = 1 // CANCEL: no rank knows the operation
	LoadDoneEnd  uint16 = 2 // LOAD_DONE without entries: all pins of the operation end
)

const (
	// MaxMessage is the longest message in bytes, a quarter of a ring.
	MaxMessage = 256 << 10
	// MaxKeys is the most entries of a message: the keys that fit one.
	MaxKeys = (MaxMessage - headerBytes - runBytes) / keyBytes
	// MaxWindow is the most verdicts that one LOAD_WAIT is answered with.
	MaxWindow = 32

	headerBytes  = 32
	runBytes     = 64
	keyBytes     = 32
	verdictBytes = 16
	doneBytes    = 16
	hitsBytes    = 32
	waitBytes    = 32
	align        = 32
)

// Both sides of every connection rely on this number.
var _ = [1]struct{}{}[MaxKeys-8189]
