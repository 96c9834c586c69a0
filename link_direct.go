package kvtier

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/internal/wire"
)

// directLink connects a member to the leader in its own process.
type directLink struct {
	a     *attachment
	w     *wire.Welcome
	calls calls
	ready chan declaration
	gone  <-chan struct{} // closed when the leader goes

	// serving is held for reading while the attachment is used, and for writing
	// to end it: nothing may reach an attachment after gone.
	serving sync.RWMutex
	closed  bool

	copies atomic.Int32 // under way
}

func newDirectLink(l *leader, h *wire.Hello, gone <-chan struct{}) (*directLink, error) {
	a, w, err := l.attach(h)
	if err != nil {
		return nil, err
	}
	d := &directLink{a: a, w: w, ready: make(chan declaration, 1), gone: gone}
	a.watchCopies(func() bool { return d.copies.Load() != 0 })
	return d, nil
}

func (d *directLink) welcome() *wire.Welcome { return d.w }

func (d *directLink) send(req *wire.Request, done func(*wire.Reply, error)) error {
	// The same check as on a ring, so that a caller's mistake shows on both.
	if _, err := req.Append(nil); err != nil {
		return err
	}
	d.serving.RLock()
	defer d.serving.RUnlock()
	if d.closed {
		return ErrNoLeader
	}
	req.Seq = d.calls.add(done)
	if req.Seq == 0 {
		return ErrNoLeader
	}
	d.a.serve(req, func(r *wire.Reply) { d.calls.answer(r) })
	return nil
}

// sure cannot fail here: the leader takes what comes.
func (d *directLink) sure(req *wire.Request) { _ = d.send(req, nil) }

func (d *directLink) declare(decl *wire.Declare) error {
	d.serving.RLock()
	defer d.serving.RUnlock()
	if d.closed {
		return ErrNoLeader
	}
	rank := decl != nil
	d.a.declare(decl, func(acc *accepted, refuse *wire.Refuse) {
		answer := declaration{refuse: refuse}
		if refuse == nil {
			answer.open = func() (*view, error) { return directView(acc, rank) }
		}
		d.ready <- answer // room for the one answer that comes
	})
	return nil
}

func (d *directLink) declared() <-chan declaration { return d.ready }

func (d *directLink) remove(keys []Key, _ time.Duration) error {
	d.serving.RLock()
	defer d.serving.RUnlock()
	if d.closed {
		return ErrNoLeader
	}
	d.a.remove(keys)
	return nil
}

func (d *directLink) reset(epoch []byte) error {
	d.serving.RLock()
	defer d.serving.RUnlock()
	if d.closed {
		return ErrNoLeader
	}
	d.a.reset(epoch)
	return nil
}

func (d *directLink) beginCopy() { d.copies.Add(1) }

func (d *directLink) endCopy() { d.copies.Add(-1) }

func (d *directLink) lost() <-chan struct{} { return d.gone }

func (d *directLink) close() {
	d.serving.Lock()
	was := d.closed
	d.closed = true
	d.serving.Unlock()
	if was {
		return
	}
	d.a.goodbye()
	d.a.dead()
	d.calls.end()
}
