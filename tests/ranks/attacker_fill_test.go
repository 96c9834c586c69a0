package ranks

import (
	"fmt"
	"time"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/shm"
)

// filling is what a peer asks for without reading an answer.
type filling struct {
	name         string
	small, large int  // requests: of two keys, and of the most that fit
	over         bool // its answers need more than a ring
}

var fillings = []filling{
	{"as many requests as there are credits", shm.Credits, 0, false},
	{"large answers", shm.Credits - 3, 3, false},
	{"a ring full of requests", 5000, 0, false},
	{"more answers than a ring holds", 20000, 0, true},
	{"more large answers than a ring holds", 0, 20, true},
}

// requests of a filling. Of those with many keys nothing is held.
func (t *attacker) requests(f filling) (out []*wire.Request) {
	for i := range f.large {
		out = append(out, &wire.Request{Type: wire.LoadBegin, Op: uint64(200 + i), Run: &wire.Run{Keys: make([]chunk.Key, wire.MaxKeys)}})
	}
	for i := range f.small {
		run := &wire.Run{Keys: t.keys}
		out = append(out, []*wire.Request{
			{Type: wire.Lookup, Run: run}, {Type: wire.LoadWait, Op: 2}, {Type: wire.StoreBegin, Op: uint64(1000 + i), Run: run},
			{Type: wire.Lease, Run: &wire.Run{Lease: uint64(100 + i%4), Flags: wire.LeasePin, Keys: t.keys}},
		}[i%4])
	}
	return out
}

// fill fills the own ring with requests, and may read the answers later.
func (a *attackSpec) fill(c *child) error {
	h := validHello()
	t, err := a.joinAs(h, validDeclare())
	if err != nil {
		return err
	}
	open := map[uint32]*wire.Request{}
	return obey(c, func(q *request, out *line) error {
		switch q.Cmd {
		case "ready":
		case "fill":
			out.State = h.Group
			for _, req := range t.requests(fillings[a.From]) {
				t.seq++
				req.Seq = t.seq
				m, err := req.Append(nil)
				if err != nil {
					return err
				}
				open[req.Seq] = req
				t.awaitRoom(uint32(len(m)))
				t.put(m)
			}
		case "drain": // every request has its one answer, whatever its order
			for range len(open) {
				r, err := t.next()
				if err != nil {
					return err
				}
				req := open[r.Seq]
				if req == nil || req.Type != r.Type || req.Op != r.Op {
					return fmt.Errorf("an answer to nothing: %+v", r)
				}
				delete(open, r.Seq)
			}
			_, err := t.ask(&wire.Request{Type: wire.Lookup, Run: &wire.Run{Keys: t.keys}})
			return err
		default:
			return fmt.Errorf("no command %q", q.Cmd)
		}
		return nil
	})
}

// awaitRoom waits until the leader has taken so much that a message of n bytes, and the
// padding before it, fit into the ring; or until it takes nothing any more.
func (t *attacker) awaitRoom(n uint32) {
	if toEnd := shm.RingBytes - t.tail%shm.RingBytes; n > toEnd {
		n += toEnd
	}
	for n > shm.RingBytes-(t.tail-t.word(requestHead).Load()) && t.word(closedBy).Load() == 0 {
		time.Sleep(20 * time.Microsecond)
	}
}
