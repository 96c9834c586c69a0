package kvtier

import (
	"fmt"
	"sync"
	"time"

	"github.com/kvtier/kvtier/internal/wire"
)

// link connects one member to the leader, either in the same process or through
// a ring of shared memory. It is good for one session: after a loss the member
// asks for a new one.
type link interface {
	welcome() *wire.Welcome

	// send hands a request over without waiting. An error means that it was not
	// sent (ErrBusy, ErrNoLeader). Else done is called exactly once, with the
	// reply or with ErrNoLeader when the link ends; it may be called before send
	// returns and on any goroutine, so it must not block and must not use the
	// link, and the caller holds no lock that done takes. The request, and what it
	// points to, is not used after send has returned; its Seq is the link's.
	send(req *wire.Request, done func(*wire.Reply, error)) error

	// sure sends what ends things. It is dropped only when the link is lost, and
	// then means nothing any more.
	sure(req *wire.Request)

	// declare says what the rank has; a coordinator without a rank declares nil.
	// The answer for the group comes through declared.
	declare(d *wire.Declare) error
	declared() <-chan declaration

	// remove forgets at most MaxKeys chunks and waits until that is done.
	remove(keys []Key, timeout time.Duration) error

	// reset tells the leader that the group begins a new epoch.
	reset(epoch []byte) error

	// beginCopy and endCopy bracket everything that touches slots, the look whether
	// the slot is meant for this rank included. The link is not closed between them.
	beginCopy()
	endCopy()

	lost() <-chan struct{}

	// close says goodbye and ends the link. No copy of this session may be
	// running. Idempotent.
	close()
}

// declaration is the leader's answer to a group: a view to be opened, or why not.
type declaration struct {
	open   func() (*view, error)
	refuse *wire.Refuse
}

// calls are the requests of a link that have not been answered.
type calls struct {
	mu      sync.Mutex
	seq     uint32
	waiting map[uint32]func(*wire.Reply, error)
	ended   bool
}

// add registers a request; 0 means that the link has ended.
func (c *calls) add(done func(*wire.Reply, error)) (seq uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return 0
	}
	c.seq++
	if c.seq == 0 {
		c.seq = 1
	}
	if c.waiting == nil {
		c.waiting = make(map[uint32]func(*wire.Reply, error))
	}
	c.waiting[c.seq] = done
	return c.seq
}

// answer ends the request that the reply belongs to; false for one nobody made.
func (c *calls) answer(r *wire.Reply) bool {
	c.mu.Lock()
	done, ok := c.waiting[r.Seq]
	delete(c.waiting, r.Seq)
	c.mu.Unlock()
	if ok && done != nil {
		done(r, nil)
	}
	return ok
}

// withdraw forgets a request that could not be sent; false when it has been
// answered already.
func (c *calls) withdraw(seq uint32) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, ok := c.waiting[seq]
	delete(c.waiting, seq)
	return ok
}

// end answers everything that waits with ErrNoLeader, and refuses what comes.
func (c *calls) end() {
	c.mu.Lock()
	c.ended = true
	waiting := c.waiting
	c.waiting = nil
	c.mu.Unlock()
	for _, done := range waiting {
		if done != nil {
			done(nil, ErrNoLeader)
		}
	}
}

// statusError makes an error of what the leader answered; nil for OK.
func statusError(s wire.Status) error {
	switch s {
	case wire.StatusOK:
		return nil
	case wire.StatusBusy:
		return ErrBusy
	case wire.StatusStale:
		return ErrStale
	case wire.StatusRefused:
		return ErrNotAccepted
	case wire.StatusTimeout:
		return ErrTimeout
	case wire.StatusAborted:
		return ErrDeclined
	}
	return fmt.Errorf("leader answered %v", s)
}
