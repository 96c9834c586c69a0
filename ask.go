package kvtier

import (
	"errors"
	"sync"
	"time"

	"github.com/kvtier/kvtier/internal/wire"
)

// outcome is what a request came to.
type outcome struct {
	reply *wire.Reply
	err   error
}

var errShortAnswer = errors.New("the leader's answer has another number of verdicts than the request has keys")

// verdicts gives the n verdicts of an outcome.
func (a outcome) verdicts(n int) ([]Verdict, error) {
	if a.err != nil {
		return nil, a.err
	}
	if err := statusError(a.reply.Status); err != nil {
		return nil, err
	}
	if len(a.reply.Verdicts) != n {
		return nil, errShortAnswer
	}
	return a.reply.Verdicts, nil
}

// gather waits for the answers of several requests at once. After wait has
// returned, late answers are dropped.
type gather struct {
	mu      sync.Mutex
	open    int
	answers map[int]outcome
	sent    bool          // all requests are out
	over    bool          // wait has returned
	done    chan struct{} // closed when all requests are out and answered
}

func newGather() *gather { return &gather{answers: make(map[int]outcome), done: make(chan struct{})} }

func (g *gather) expect() {
	g.mu.Lock()
	g.open++
	g.mu.Unlock()
}

func (g *gather) withdraw() {
	g.mu.Lock()
	g.open--
	g.mu.Unlock()
}

func (g *gather) answer(i int, r *wire.Reply, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.over {
		return
	}
	g.answers[i] = outcome{reply: r, err: err}
	g.open--
	if g.open == 0 && g.sent {
		close(g.done)
	}
}

// wait returns what was answered, by request.
func (g *gather) wait(timeout time.Duration, stop <-chan struct{}) map[int]outcome {
	g.mu.Lock()
	g.sent = true
	waiting := g.open > 0
	g.mu.Unlock()
	if waiting {
		timer := time.NewTimer(timeout)
		defer timer.Stop()
		select {
		case <-g.done:
		case <-timer.C:
		case <-stop:
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.over = true
	return g.answers
}

// ask sends one request over the present link and waits for the reply.
func (m *member) ask(req *wire.Request, timeout time.Duration) (*wire.Reply, uint64, error) {
	l, session, err := m.attached()
	if err != nil {
		return nil, 0, err
	}
	r, err := askOver(l, req, timeout, m.closing)
	return r, session, err
}

// takeBack ends an operation whose begin was not answered in time, and of which no rank
// has heard: granted later, its slots would have no writer and their keys no other store
// until the deadline.
func takeBack(l link, op uint64) {
	l.sure(&wire.Request{Type: wire.Cancel, Op: op, Flags: wire.CancelUnsent})
}

// askOver returns a reply whose status is OK, or an error.
func askOver(l link, req *wire.Request, timeout time.Duration, stop <-chan struct{}) (*wire.Reply, error) {
	g := newGather()
	g.expect()
	if err := l.send(req, func(r *wire.Reply, err error) { g.answer(0, r, err) }); err != nil {
		return nil, err
	}
	a, ok := g.wait(timeout, stop)[0]
	switch {
	case !ok:
		return nil, ErrTimeout
	case a.err != nil:
		return nil, a.err
	}
	if err := statusError(a.reply.Status); err != nil {
		return nil, err
	}
	return a.reply, nil
}
