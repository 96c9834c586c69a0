package ranks

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/wire"
)

// messages are valid ones of each type, that fit what settle has made.
func (t *attacker) messages() []*wire.Request {
	run := func(flags uint32, lease uint64, keys ...chunk.Key) *wire.Run {
		return &wire.Run{Flags: flags, Lease: lease, Keys: keys}
	}
	g := wire.Verdict{}
	if len(t.grants) > 0 {
		g = t.grants[0]
	}
	k := t.keys
	const soon = 20 * time.Millisecond
	return []*wire.Request{
		{Type: wire.Lookup, Run: run(0, 0, k[0], k[1])},
		{Type: wire.Prefetch, Run: run(0, 0, k[0])},
		{Type: wire.Lease, Timeout: soon, Run: run(wire.LeasePin|wire.LeasePrefetch, 5, k[0])},
		{Type: wire.Lease, Renew: []uint64{1, 5}, Run: run(wire.LeaseRenew, 0)},
		{Type: wire.Release, Run: run(0, 5)},
		{Type: wire.StoreBegin, Op: 4, Run: run(0, 0, t.key(), t.key())},
		{Type: wire.StoreDone, Op: 3, Done: []wire.Done{{Slot: g.Slot, Generation: g.Generation}}},
		{Type: wire.LoadBegin, Op: 5, Run: run(0, 5, k[0])},
		{Type: wire.LoadWait, Op: 2, Timeout: soon},
		{Type: wire.LoadDone, Op: 2, Done: []wire.Done{{Slot: t.ready.Slot, Generation: t.ready.Generation}}},
		{Type: wire.LoadDone, Op: 2, Flags: wire.LoadDoneEnd},
		{Type: wire.Cancel, Op: 3},
		{Type: wire.Cancel, Op: 4, Flags: wire.CancelUnsent},
		{Type: wire.SelfTest, Timeout: soon, Test: &wire.SelfTestBody{Step: wire.SelfTestJoin, Chunks: 1}},
		{Type: wire.SelfTest, Timeout: soon, Test: &wire.SelfTestBody{Step: wire.SelfTestReport, Report: wire.ReportWrong, Text: "no"}},
		{Type: wire.SelfTest, Test: &wire.SelfTestBody{Step: wire.SelfTestLeave}},
	}
}

// field is a number in a message.
type field struct{ offset, bytes int }

// fieldsOf are the header's, and the 4-byte words of the body's beginning.
func fieldsOf(m []byte) []field {
	f := []field{{0, 4}, {4, 2}, {6, 2}, {8, 8}, {16, 4}, {20, 4}, {24, 4}, {28, 4}}
	for at := 32; at < min(len(m), 96); at += 4 {
		f = append(f, field{at, 4})
	}
	return f
}

const mutations = 7

// mutate changes one field: 0, 1, the most, one more, one less, anything, its high bit.
func mutate(m []byte, f field, how int, r *rand.Rand) {
	var b [8]byte
	copy(b[:], m[f.offset:f.offset+f.bytes])
	v := binary.LittleEndian.Uint64(b[:])
	switch how {
	case 0:
		v = 0
	case 1:
		v = 1
	case 2:
		v = ^uint64(0)
	case 3:
		v++
	case 4:
		v--
	case 5:
		v = r.Uint64()
	case 6:
		v ^= 1 << (f.bytes*8 - 1)
	}
	binary.LittleEndian.PutUint64(b[:], v)
	copy(m[f.offset:f.offset+f.bytes], b[:f.bytes])
}

// mutated is how many attacks there are with each field of these messages.
func mutated(messages []*wire.Request) int {
	n := 0
	for _, req := range messages {
		m, err := req.Append(nil)
		if err != nil {
			panic(err)
		}
		n += len(fieldsOf(m)) * mutations
	}
	return n
}

// ringAttacks is how many attacks of kind ring there are.
func ringAttacks() int { return mutated((&attacker{keys: make([]chunk.Key, 2)}).messages()) }

// ring sends the nth mutated one of these messages, and then one that is right: either it
// is answered or the peer is dropped.
func (t *attacker) ring(messages []*wire.Request, n int, r *rand.Rand) error {
	for _, req := range messages {
		t.seq++
		req.Seq = t.seq
		m, err := req.Append(nil)
		if err != nil {
			return err
		}
		fields := fieldsOf(m)
		if n >= len(fields)*mutations {
			n -= len(fields) * mutations
			t.seq--
			continue
		}
		mutate(m, fields[n/mutations], n%mutations, r)
		t.put(m)
		t.seq += 2 // a seq that was made one more is in use now
		_, err = t.ask(&wire.Request{Type: wire.Lookup, Run: &wire.Run{Keys: t.keys}})
		return err
	}
	return errors.New("no such attack")
}

// soup puts random bytes, lengths and cursors into the ring.
func (t *attacker) soup(r *rand.Rand) error {
	t.patience = 50 * time.Millisecond
	b := make([]byte, 32*(1+r.IntN(64)))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	switch r.IntN(5) {
	case 0: // a length that is possible
		binary.LittleEndian.PutUint32(b, uint32(len(b)))
	case 1: // and a type
		binary.LittleEndian.PutUint32(b, uint32(len(b)))
		binary.LittleEndian.PutUint16(b[4:], uint16(1+r.IntN(12)))
		binary.LittleEndian.PutUint16(b[6:], uint16(r.IntN(4)))
		binary.LittleEndian.PutUint32(b[20:], uint32(r.IntN(len(b)/16)))
	case 2: // a word of the header
		binary.LittleEndian.PutUint32(t.seg[r.IntN(rings/4)*4:], r.Uint32())
	case 3: // a cursor
		t.word([]int{requestTail, requestHead, replyTail, replyHead}[r.IntN(4)]).Store(r.Uint32())
		_ = t.bell.Signal()
	}
	t.put(b)
	_, err := t.ask(&wire.Request{Type: wire.Lookup, Run: &wire.Run{Keys: t.keys}})
	return err
}

// hoardedRuns is how many loads, and how many leases, of the most keys that fit a message
// a hoarder has on one connection.
const hoardedRuns = 300

// hoard begins loads and leases of what is not there, and ends none.
func (t *attacker) hoard() error {
	keys := append([]chunk.Key{t.keys[0]}, make([]chunk.Key, wire.MaxKeys-1)...)
	for i := range keys[1:] {
		keys[1+i] = t.key()
	}
	for i := range hoardedRuns {
		for _, req := range []*wire.Request{
			{Type: wire.LoadBegin, Op: uint64(1000 + i), Run: &wire.Run{Keys: keys[i%2:]}},
			{Type: wire.Lease, Run: &wire.Run{Lease: uint64(1000 + i), Flags: uint32(i % 4), Keys: keys[i%2:]}},
		} {
			if r, err := t.ask(req); err != nil {
				return err
			} else if r.Status != wire.StatusOK && r.Status != wire.StatusBusy {
				return fmt.Errorf("a %v is answered %v", req.Type, r.Status)
			}
		}
	}
	return nil
}
