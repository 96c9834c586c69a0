package shm

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"

	"github.com/kvtier/kvtier/internal/sys"
)

// producer writes messages into one ring. It is guarded by the lock of its side.
type producer struct {
	ring   []byte
	tail   *atomic.Uint32 // shared, written here only
	head   *atomic.Uint32 // shared, written by the peer
	sleeps *atomic.Uint32 // shared, written by the peer
	bell   *sys.Event     // the peer's doorbell
	pos    uint32         // what was stored in tail last: the shared word is never read back
}

// put copies a checked message into the ring and publishes it. It returns
// ErrBusy when there is no room, ErrPeerBroken when the peer's cursor is
// impossible. The caller then
// rings the doorbell: endpoint.wake.
func (p *producer) put(m []byte) error {
	used := p.pos - p.head.Load()
	if used > RingBytes || used%align != 0 {
		return fmt.Errorf("%w: read cursor is %d bytes behind", ErrPeerBroken, used)
	}
	size := uint32(len(m))
	offset := p.pos % RingBytes
	toEnd := RingBytes - offset
	need := size
	if size > toEnd {
		need += toEnd
	}
	if need > RingBytes-used {
		return ErrBusy
	}
	if size > toEnd {
		var pad [messageMin]byte // type 0
		binary.LittleEndian.PutUint32(pad[lengthOffset:], toEnd)
		copy(p.ring[offset:], pad[:])
		offset = 0
	}
	copy(p.ring[offset:], m)
	p.pos += need
	p.tail.Store(p.pos)
	return nil
}
