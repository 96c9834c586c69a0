package wire

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/internal/chunk"
)

// Request is one message of a member. Which of the last five fields belongs to
// it follows from the type.
type Request struct {
	Type    Type
	Flags   uint16        // CancelUnsent, LoadDoneEnd
	Op      uint64        // chosen by the coordinator; 0 where there is none
	Seq     uint32        // repeated by the one reply
	Timeout time.Duration // how long the reply may be deferred; whole milliseconds on the wire

	Run   *Run          // LOOKUP, PREFETCH, LEASE, RELEASE, STORE_BEGIN, LOAD_BEGIN
	Renew []uint64      // LEASE with LeaseRenew: lease ids, in place of keys
	First uint32        // LOAD_WAIT: index of the window's first chunk in the operation
	Done  []Done        // STORE_DONE, LOAD_DONE
	Test  *SelfTestBody // SELFTEST
}

// Run is a leading piece of a prefix: consecutive chunks behind a parent.
type Run struct {
	Parent chunk.Key
	First  uint32 // ordinal of Keys[0]
	Flags  uint32 // LeasePrefetch, LeasePin, LeaseRenew; StoreNoDisk
	Lease  uint64 // 0 = none
	Keys   []chunk.Key
}

// Done ends the use of one slot by one part of an operation.
type Done struct {
	Slot, Generation uint32
	Part             uint32 // rank in its group
	Status           Status // StatusOK, else the part was aborted
}

// shape is what the layout of a request depends on.
type shape struct {
	fixed, entry int    // bytes of the body before the entries, and of an entry
	flags        uint16 // header flags that may be set
	runFlags     uint32 // run flags that may be set
	counts       bool   // n may be other than 0
}

func (t Type) shape() shape {
	switch t {
	case Lookup, Prefetch, LoadBegin:
		return shape{fixed: runBytes, entry: keyBytes, counts: true}
	case Lease:
		return shape{fixed: runBytes, entry: keyBytes, counts: true, runFlags: LeasePrefetch | LeasePin | LeaseRenew}
	case StoreBegin:
		return shape{fixed: runBytes, entry: keyBytes, counts: true, runFlags: StoreNoDisk}
	case Release:
		return shape{fixed: runBytes}
	case LoadWait:
		return shape{fixed: waitBytes}
	case StoreDone:
		return shape{entry: doneBytes, counts: true}
	case LoadDone:
		return shape{entry: doneBytes, counts: true, flags: LoadDoneEnd}
	case Cancel:
		return shape{flags: CancelUnsent}
	case SelfTest:
		return shape{fixed: selfTestBytes}
	}
	return shape{}
}

func (t Type) hasRun() bool { return t.shape().fixed == runBytes }

// Append appends the encoded request to dst. The error is ErrInvalid or
// ErrTooMany; dst is then unchanged.
func (r *Request) Append(dst []byte) ([]byte, error) {
	n, err := r.check()
	if err != nil {
		return dst, err
	}
	s := r.Type.shape()
	h := header{typ: r.Type, flags: r.Flags, op: r.Op, seq: r.Seq, n: uint32(n), timeout: milliseconds(r.Timeout)}
	all, msg := h.grow(dst, headerBytes+s.fixed+n*s.entry)
	body, le := msg[headerBytes:], binary.LittleEndian
	switch {
	case r.Type.hasRun():
		copy(body, r.Run.Parent[:])
		le.PutUint32(body[32:], r.Run.First)
		le.PutUint32(body[36:], r.Run.Flags)
		le.PutUint64(body[40:], r.Run.Lease)
		body = body[runBytes:]
		for i := range r.Run.Keys {
			copy(body[i*keyBytes:], r.Run.Keys[i][:])
		}
		for i, id := range r.Renew {
			le.PutUint64(body[i*keyBytes:], id)
		}
	case r.Type == LoadWait:
		le.PutUint32(body, r.First)
	case r.Type == SelfTest:
		r.Test.put(body)
	default:
		for i, d := range r.Done {
			e := body[i*doneBytes:]
			le.PutUint32(e[0:], d.Slot)
			le.PutUint32(e[4:], d.Generation)
			le.PutUint32(e[8:], d.Part)
			le.PutUint32(e[12:], uint32(d.Status))
		}
	}
	return all, nil
}

// check says whether the fields go together, and returns n.
func (r *Request) check() (n int, err error) {
	if !r.Type.known() {
		return 0, fmt.Errorf("%w: %v", ErrInvalid, r.Type)
	}
	if r.Type.hasRun() != (r.Run != nil) {
		return 0, fmt.Errorf("%w: a run with %v", ErrInvalid, r.Type)
	}
	if (r.Type == SelfTest) != (r.Test != nil) {
		return 0, fmt.Errorf("%w: a self-test with %v", ErrInvalid, r.Type)
	}
	if r.Test != nil {
		if err := r.Test.check(); err != nil {
			return 0, err
		}
	}
	renews := false
	if r.Run != nil {
		renews = r.Type == Lease && r.Run.Flags&LeaseRenew != 0
		n = len(r.Run.Keys)
		if renews {
			n = len(r.Renew)
		}
	} else {
		n = len(r.Done)
	}
	s := r.Type.shape()
	switch {
	case n > MaxKeys:
		return 0, fmt.Errorf("%w: %v with %d", ErrTooMany, r.Type, n)
	case n > 0 && !s.counts:
		return 0, fmt.Errorf("%w: entries with %v", ErrInvalid, r.Type)
	case renews && len(r.Run.Keys) > 0, !renews && len(r.Renew) > 0:
		return 0, fmt.Errorf("%w: lease ids go with the renew flag, and without keys", ErrInvalid)
	case r.Run != nil && len(r.Done) > 0:
		return 0, fmt.Errorf("%w: done entries with %v", ErrInvalid, r.Type)
	}
	return n, r.checkFlags(n)
}

func (r *Request) checkFlags(n int) error {
	s := r.Type.shape()
	if r.Flags&^s.flags != 0 {
		return fmt.Errorf("%w: %v with flags 0x%x", ErrInvalid, r.Type, r.Flags)
	}
	if r.Run != nil && r.Run.Flags&^s.runFlags != 0 {
		return fmt.Errorf("%w: %v with run flags 0x%x", ErrInvalid, r.Type, r.Run.Flags)
	}
	if r.Flags&LoadDoneEnd != 0 && n > 0 {
		return fmt.Errorf("%w: the end of a load names no slots", ErrInvalid)
	}
	return nil
}

// ReplyBytes is the most that the reply to r occupies, in bytes: what has to be
// reserved before r is sent.
func (r *Request) ReplyBytes() int {
	n := 0
	if r.Run != nil {
		n = len(r.Run.Keys)
	}
	return replyBytes(r.Type, n)
}

func replyBytes(t Type, n int) int {
	switch t {
	case Lookup, Prefetch, Lease:
		return headerBytes + hitsBytes
	case StoreBegin, LoadBegin:
		return padded(headerBytes + n*verdictBytes)
	case LoadWait:
		return headerBytes + waitBytes + MaxWindow*verdictBytes
	case SelfTest:
		return headerBytes + selfTestBytes + MaxWindow*verdictBytes
	}
	return headerBytes
}

// RequestReplyBytes is ReplyBytes of an encoded request. It checks no more than
// type, n and length.
func RequestReplyBytes(b []byte) (int, error) {
	h, err := parseHeader(b)
	if err != nil {
		return 0, err
	}
	s := h.typ.shape()
	if err := h.checkLength(b, s.fixed, s.entry); err != nil {
		return 0, err
	}
	return replyBytes(h.typ, int(h.n)), nil
}

// ParseRequest decodes a request that fills b exactly. The error is ErrMalformed.
func ParseRequest(b []byte) (*Request, error) {
	h, err := parseHeader(b)
	if err != nil {
		return nil, err
	}
	s := h.typ.shape()
	if err := h.checkLength(b, s.fixed, s.entry); err != nil {
		return nil, err
	}
	if h.n > 0 && !s.counts {
		return nil, fmt.Errorf("%w: %v with n = %d", ErrMalformed, h.typ, h.n)
	}
	r := &Request{
		Type: h.typ, Flags: h.flags, Op: h.op, Seq: h.seq,
		Timeout: time.Duration(h.timeout) * time.Millisecond,
	}
	body, n, le := b[headerBytes:], int(h.n), binary.LittleEndian
	switch {
	case h.typ.hasRun():
		r.Run = &Run{
			Parent: chunk.Key(body[:32]),
			First:  le.Uint32(body[32:]),
			Flags:  le.Uint32(body[36:]),
			Lease:  le.Uint64(body[40:]),
		}
		r.parseEntries(body[runBytes:], n)
	case h.typ == LoadWait:
		r.First = le.Uint32(body)
	case h.typ == SelfTest:
		var err error
		if r.Test, err = parseSelfTestBody(body); err == nil {
			err = r.Test.check()
		}
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
		}
	case n > 0:
		r.Done = make([]Done, n)
		for i := range r.Done {
			e := body[i*doneBytes:]
			r.Done[i] = Done{
				Slot: le.Uint32(e[0:]), Generation: le.Uint32(e[4:]),
				Part: le.Uint32(e[8:]), Status: Status(le.Uint32(e[12:])),
			}
		}
	}
	if err := r.checkFlags(n); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return r, nil
}

// parseEntries reads the n keys of a run, or the ids of a renewal.
func (r *Request) parseEntries(b []byte, n int) {
	if n == 0 {
		return
	}
	if r.Type == Lease && r.Run.Flags&LeaseRenew != 0 {
		r.Renew = make([]uint64, n)
		for i := range r.Renew {
			r.Renew[i] = binary.LittleEndian.Uint64(b[i*keyBytes:])
		}
		return
	}
	r.Run.Keys = make([]chunk.Key, n)
	for i := range r.Run.Keys {
		r.Run.Keys[i] = chunk.Key(b[i*keyBytes:][:keyBytes])
	}
}
