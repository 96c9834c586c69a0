package kvtier

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvtier/kvtier/internal/spawn"
	"github.com/kvtier/kvtier/internal/wire"
)

const (
	firstBackoff = 50 * time.Millisecond
	lastBackoff  = time.Second
)

// member is one attachment of this process: a rank, a coordinator, or both. It
// outlives links: after the loss of one it attaches and declares again in the
// background, and whoever uses it sees misses meanwhile.
type member struct {
	cache *Cache
	hello wire.Hello
	decl  *wire.Declare // nil for a coordinator alone

	// interrupt sets the stop flags of all running copies; ended is told when a
	// session is over and no copy of it runs. Both may be nil. They run on the
	// member's goroutine without locks.
	interrupt func()
	ended     func()

	closing chan struct{} // closed by beginClose
	done    chan struct{} // closed when the goroutine has ended

	mu       sync.Mutex
	link     link
	session  uint64
	view     *view
	refused  *RefusedError
	closed   bool
	attaches uint64
	changed  chan struct{} // closed and replaced at every change of the above
}

func newMember(c *Cache, h wire.Hello, d *wire.Declare) *member {
	return &member{
		cache: c, hello: h, decl: d,
		closing: make(chan struct{}), done: make(chan struct{}), changed: make(chan struct{}),
	}
}

// start lets the cache know the member and begins to attach.
func (m *member) start() error {
	if err := m.cache.adopt(m); err != nil {
		return err
	}
	spawn.Go("member", func(err error) {
		m.cache.log.Error("a member is switched off", "group", m.hello.Group, "rank", m.hello.Rank, "error", err)
		m.finish()
	}, m.run)
	return nil
}

func (m *member) run() {
	backoff := firstBackoff
	for !m.isClosing() {
		began := time.Now()
		l, err := m.cache.attach(&m.hello, m.closing)
		if err == nil {
			m.serve(l)
		}
		if time.Since(began) > lastBackoff {
			backoff = firstBackoff // it worked for a while: the next leader may be there at once
		}
		var refused *RefusedError
		if errors.As(err, &refused) {
			m.refuse(refused)
		}
		if !pause(backoff, m.closing) {
			break
		}
		backoff = min(2*backoff, lastBackoff)
	}
	m.finish()
}

// serve holds one link until it is lost or the member closes, or until the group is
// refused and may be declared again. After a final refusal it stays, so that members
// that come later hear the same; another leader may decide otherwise.
func (m *member) serve(l link) {
	m.mu.Lock()
	m.link, m.session, m.refused = l, l.welcome().Session, nil
	m.attaches++
	m.broadcast()
	m.mu.Unlock()
	defer m.detach(l)

	if err := l.declare(m.decl); err != nil {
		return
	}
	for {
		select {
		case <-m.closing:
			return
		case <-l.lost():
			return
		case answer := <-l.declared():
			if answer.refuse != nil {
				m.refuse(&RefusedError{Reason: answer.refuse.Reason, Final: answer.refuse.Final})
				if answer.refuse.Final {
					continue
				}
				pause(lastBackoff, m.closing)
				return
			}
			v, err := m.open(answer)
			if err != nil {
				m.refuse(&RefusedError{Reason: err.Error()})
				pause(lastBackoff, m.closing)
				return
			}
			m.mu.Lock()
			m.view, m.refused = v, nil
			m.broadcast()
			m.mu.Unlock()
		}
	}
}

// open gives the view of an acceptance, if it is for what this member has declared.
func (m *member) open(answer declaration) (*view, error) {
	v, err := answer.open()
	if err != nil {
		return nil, fmt.Errorf("cannot use the leader's memory: %w", err)
	}
	if m.decl != nil {
		if err := v.fits(m.decl); err != nil {
			v.close()
			return nil, err
		}
	}
	return v, nil
}

// detach ends a session: first nobody can begin, then running copies stop, then
// operations end, then the mappings go, and only then the leader hears goodbye.
func (m *member) detach(l link) {
	m.mu.Lock()
	v := m.view
	m.link, m.session, m.view = nil, 0, nil
	m.broadcast()
	m.mu.Unlock()
	if v != nil {
		v.stop.Store(true)
	}
	if m.interrupt != nil {
		m.interrupt()
	}
	if v != nil {
		v.users.Wait()
		v.close()
	}
	l.close()
	if m.ended != nil {
		m.ended()
	}
}

// use gives the view of the present session for a copy. The caller calls release
// when it has stopped; until then the leader takes it to be copying, so it looks at
// the slot table only in between.
func (m *member) use() (v *view, l link, session uint64, release func(), err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.closed:
		return nil, nil, 0, nil, ErrClosed
	case m.link == nil:
		return nil, nil, 0, nil, ErrNoLeader
	case m.view == nil:
		return nil, nil, 0, nil, ErrNotAccepted
	}
	v, l = m.view, m.link
	v.users.Add(1)
	l.beginCopy()
	return v, l, m.session, func() {
		l.endCopy()
		v.users.Done()
	}, nil
}

// attached gives the present link.
func (m *member) attached() (link, uint64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.closed:
		return nil, 0, ErrClosed
	case m.link == nil:
		return nil, 0, ErrNoLeader
	}
	return m.link, m.session, nil
}

// ready waits until the group is accepted. A refusal that is not final is the
// error only when time is over.
func (m *member) ready(timeout time.Duration) (*Accepted, error) {
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	for {
		m.mu.Lock()
		v, session, refused, closed, changed := m.view, m.session, m.refused, m.closed, m.changed
		m.mu.Unlock()
		switch {
		case closed:
			return nil, ErrClosed
		case v != nil:
			return v.accepted(session), nil
		case refused != nil && refused.Final:
			return nil, refused
		}
		select {
		case <-changed:
		case <-timer.C:
			if refused != nil {
				return nil, refused
			}
			return nil, ErrTimeout
		}
	}
}

// close ends the member within timeout; what is left then goes on ending in the
// background.
func (m *member) close(timeout time.Duration) error {
	m.beginClose()
	return waitDone(m.done, timeout)
}

func (m *member) beginClose() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.closed {
		m.closed = true
		close(m.closing)
		m.broadcast()
	}
}

func (m *member) finish() {
	m.beginClose()
	m.cache.forget(m)
	close(m.done)
}

func (m *member) isClosing() bool {
	select {
	case <-m.closing:
		return true
	default:
		return false
	}
}

func (m *member) refuse(r *RefusedError) {
	m.mu.Lock()
	said := m.refused != nil && *m.refused == *r
	m.refused = r
	m.broadcast()
	m.mu.Unlock()
	if !said {
		m.cache.log.Warn("refused by the leader", "group", m.hello.Group, "rank", m.hello.Rank, "reason", r.Reason, "final", r.Final)
	}
}

// broadcast wakes whoever waits for a change; with mu held.
func (m *member) broadcast() {
	close(m.changed)
	m.changed = make(chan struct{})
}

// signal is a channel that may be closed more than once.
type signal struct {
	C    chan struct{}
	once sync.Once
}

func newSignal() *signal { return &signal{C: make(chan struct{})} }

func (s *signal) close() { s.once.Do(func() { close(s.C) }) }

// pause waits, and reports false when it was ended by stop.
func pause(d time.Duration, stop <-chan struct{}) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-stop:
		return false
	}
}

func waitDone(done <-chan struct{}, timeout time.Duration) error {
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-done:
		return nil
	case <-timer.C:
		return ErrTimeout
	}
}
