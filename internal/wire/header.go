package wire

import (
	"encoding/binary"
	"fmt"
	"math"
	"time"
)

// header is the first 32 bytes of a message:
// u32 length | u16 type | u16 flags | u64 op | u32 seq | u32 n | u32 timeout ms | i32 status.
type header struct {
	typ     Type
	flags   uint16
	op      uint64
	seq     uint32
	n       uint32
	timeout uint32
	status  Status
}

// padded rounds bytes up to what a message occupies.
func padded(bytes int) int { return (bytes + align - 1) &^ (align - 1) }

// grow appends a zeroed message of the given unpadded length and writes its
// header. It returns the whole slice and the message in it.
func (h *header) grow(dst []byte, bytes int) (all, msg []byte) {
	start, length := len(dst), padded(bytes)
	dst = append(dst, make([]byte, length)...)
	msg = dst[start:]
	le := binary.LittleEndian
	le.PutUint32(msg[0:], uint32(length))
	le.PutUint16(msg[4:], uint16(h.typ))
	le.PutUint16(msg[6:], h.flags)
	le.PutUint64(msg[8:], h.op)
	le.PutUint32(msg[16:], h.seq)
	le.PutUint32(msg[20:], h.n)
	le.PutUint32(msg[24:], h.timeout)
	le.PutUint32(msg[28:], uint32(h.status))
	return dst, msg
}

// parseHeader reads the header of a message that fills b exactly.
func parseHeader(b []byte) (header, error) {
	if len(b) < headerBytes || len(b) > MaxMessage || len(b)%align != 0 {
		return header{}, fmt.Errorf("%w: %d bytes", ErrMalformed, len(b))
	}
	le := binary.LittleEndian
	if length := le.Uint32(b); uint64(length) != uint64(len(b)) {
		return header{}, fmt.Errorf("%w: length %d in %d bytes", ErrMalformed, length, len(b))
	}
	h := header{
		typ:     Type(le.Uint16(b[4:])),
		flags:   le.Uint16(b[6:]),
		op:      le.Uint64(b[8:]),
		seq:     le.Uint32(b[16:]),
		n:       le.Uint32(b[20:]),
		timeout: le.Uint32(b[24:]),
		status:  Status(le.Uint32(b[28:])),
	}
	if !h.typ.known() {
		return header{}, fmt.Errorf("%w: %v", ErrMalformed, h.typ)
	}
	if h.n > MaxKeys {
		return header{}, fmt.Errorf("%w: %v with n = %d", ErrMalformed, h.typ, h.n)
	}
	return h, nil
}

// checkLength compares the length of a message with what its n needs.
func (h *header) checkLength(b []byte, fixed, entry int) error {
	if want := padded(headerBytes + fixed + int(h.n)*entry); len(b) != want {
		return fmt.Errorf("%w: %v with n = %d has %d bytes, not %d", ErrMalformed, h.typ, h.n, len(b), want)
	}
	return nil
}

// milliseconds rounds up, so that a short wait does not become none.
func milliseconds(d time.Duration) uint32 {
	if d <= 0 {
		return 0
	}
	ms := (int64(d-1) / int64(time.Millisecond)) + 1
	return uint32(min(ms, math.MaxUint32))
}
