package wire

import (
	"encoding/binary"
	"fmt"
)

// Reply is the leader's one answer to a request.
type Reply struct {
	Type   Type   // of the request
	Op     uint64 // of the request
	Seq    uint32 // of the request
	Status Status

	Verdicts []Verdict     // STORE_BEGIN, LOAD_BEGIN: in the order of the keys; LOAD_WAIT: from First on
	Hits     Hits          // LOOKUP, PREFETCH, LEASE
	First    uint32        // LOAD_WAIT: the index of the request
	Test     SelfTestReply // SELFTEST
}

// Verdict decides over one chunk. Slot and Generation mean something with
// Granted and Ready.
type Verdict struct {
	Code             Code
	Slot, Generation uint32
}

// Hits says how much of a run is there. The first three count its leading
// chunks.
type Hits struct {
	Held     uint32 // in DRAM or on disk
	Resident uint32 // verified in DRAM; with LeasePin: pinned
	Leased   uint32
	Pending  uint32 // disk reads inside the pin budget that have not ended
	Bytes    uint64 // still to be read from disk
}

// replyLayout returns the bytes of a reply's body before its verdicts, and how
// many it may have. The reply to LOAD_WAIT is a wait body, which repeats the index,
// and then the verdicts; the one to SELFTEST begins with a body of its own.
func (t Type) replyLayout() (fixed, maxVerdicts int) {
	switch t {
	case Lookup, Prefetch, Lease:
		return hitsBytes, 0
	case StoreBegin, LoadBegin:
		return 0, MaxKeys
	case LoadWait:
		return waitBytes, MaxWindow
	case SelfTest:
		return selfTestBytes, MaxWindow
	}
	return 0, 0
}

// Append appends the encoded reply to dst. The error is ErrInvalid or
// ErrTooMany; dst is then unchanged.
func (r *Reply) Append(dst []byte) ([]byte, error) {
	if !r.Type.known() {
		return dst, fmt.Errorf("%w: %v", ErrInvalid, r.Type)
	}
	fixed, most := r.Type.replyLayout()
	if len(r.Verdicts) > most {
		return dst, fmt.Errorf("%w: %d verdicts for %v", ErrTooMany, len(r.Verdicts), r.Type)
	}
	if len(r.Test.Text) > SelfTestText {
		return dst, fmt.Errorf("%w: a text of %d bytes", ErrTooMany, len(r.Test.Text))
	}
	n := len(r.Verdicts)
	h := header{typ: r.Type, op: r.Op, seq: r.Seq, n: uint32(n), status: r.Status}
	all, msg := h.grow(dst, headerBytes+fixed+n*verdictBytes)
	body, le := msg[headerBytes:], binary.LittleEndian
	switch r.Type {
	case LoadWait:
		le.PutUint32(body, r.First)
	case SelfTest:
		r.Test.put(body)
	case Lookup, Prefetch, Lease:
		le.PutUint32(body[0:], r.Hits.Held)
		le.PutUint32(body[4:], r.Hits.Resident)
		le.PutUint32(body[8:], r.Hits.Leased)
		le.PutUint32(body[12:], r.Hits.Pending)
		le.PutUint64(body[16:], r.Hits.Bytes)
	}
	for i, v := range r.Verdicts {
		e := body[fixed+i*verdictBytes:]
		le.PutUint32(e[0:], uint32(v.Code))
		le.PutUint32(e[4:], v.Slot)
		le.PutUint32(e[8:], v.Generation)
	}
	return all, nil
}

// ParseReply decodes a reply that fills b exactly. The error is ErrMalformed.
func ParseReply(b []byte) (*Reply, error) {
	h, err := parseHeader(b)
	if err != nil {
		return nil, err
	}
	fixed, most := h.typ.replyLayout()
	if int(h.n) > most {
		return nil, fmt.Errorf("%w: reply to %v with n = %d", ErrMalformed, h.typ, h.n)
	}
	if err := h.checkLength(b, fixed, verdictBytes); err != nil {
		return nil, err
	}
	r := &Reply{Type: h.typ, Op: h.op, Seq: h.seq, Status: h.status}
	body, le := b[headerBytes:], binary.LittleEndian
	switch h.typ {
	case Lookup, Prefetch, Lease:
		r.Hits = Hits{
			Held: le.Uint32(body[0:]), Resident: le.Uint32(body[4:]),
			Leased: le.Uint32(body[8:]), Pending: le.Uint32(body[12:]),
			Bytes: le.Uint64(body[16:]),
		}
	case LoadWait:
		r.First = le.Uint32(body)
	case SelfTest:
		t, err := parseSelfTestReply(body)
		if err != nil {
			return nil, err
		}
		r.Test = *t
	}
	if h.n == 0 {
		return r, nil
	}
	r.Verdicts = make([]Verdict, h.n)
	for i := range r.Verdicts {
		e := body[fixed+i*verdictBytes:]
		v := Verdict{Code: Code(le.Uint32(e[0:])), Slot: le.Uint32(e[4:]), Generation: le.Uint32(e[8:])}
		if v.Code < Granted || v.Code > Later {
			return nil, fmt.Errorf("%w: reply to %v with %v", ErrMalformed, h.typ, v.Code)
		}
		r.Verdicts[i] = v
	}
	return r, nil
}
