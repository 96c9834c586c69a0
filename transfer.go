package kvtier

import (
	"errors"
	"sync"
	"time"

	"github.com/kvtier/kvtier/dcp"
	"github.com/kvtier/kvtier/internal/spawn"
	"github.com/kvtier/kvtier/internal/steps"
	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/tier"
)

const (
	maxLoads = 4096 // waiting or running, of one rank
	// waitMargin is what a rank waits longer for a window than it asks the leader
	// to: who is not answered at all has to report, too.
	waitMargin = time.Second
	busyPause  = 2 * time.Millisecond
)

// loader is the one worker of a rank. A load that waits for the leader does not
// hold it up: it goes from window to window of whatever load has one.
type loader struct {
	r    *Rank
	wake chan struct{} // capacity 1
	done chan struct{}

	mu     sync.Mutex
	closed bool
	loads  map[*load]struct{}
	queue  []*load
}

func newLoader(r *Rank) *loader {
	return &loader{r: r, wake: make(chan struct{}, 1), done: make(chan struct{}), loads: make(map[*load]struct{})}
}

func (t *loader) start() {
	spawn.Go("load worker", func(err error) {
		t.r.m.cache.log.Error("loads of a rank are switched off", "rank", t.r.part, "error", err)
		t.finish(EventStale)
	}, func() {
		t.run()
		t.finish(EventCancelled)
	})
}

// finish takes no more loads and reports what is left. No copy is running.
func (t *loader) finish(status EventStatus) {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	t.finishAll(status)
	close(t.done)
}

func (t *loader) add(l *load) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return ErrClosed
	}
	if len(t.loads) >= maxLoads || !t.r.m.cache.events.reserve() {
		return ErrBusy
	}
	t.loads[l] = struct{}{}
	t.enqueue(l)
	return nil
}

// enqueue hands a load to the worker; with mu held.
func (t *loader) enqueue(l *load) {
	l.state = loadReady
	t.queue = append(t.queue, l)
	t.poke()
}

func (t *loader) poke() {
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// runs says whether a load of this number has been begun and not reported.
func (t *loader) runs(op uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for l := range t.loads {
		if l.op.Op == op {
			return true
		}
	}
	return false
}

func (t *loader) cancel(op uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for l := range t.loads {
		if l.op.Op == op {
			t.halt(l, EventCancelled)
		}
	}
}

// interrupt stops everything, when a session ends or the rank closes.
func (t *loader) interrupt() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for l := range t.loads {
		t.halt(l, EventStale)
	}
}

// halt makes a load end as soon as its copy has stopped; with mu held. The first
// reason stands.
func (t *loader) halt(l *load, why EventStatus) {
	if l.failed == EventOK {
		l.failed = why
	}
	l.stop.Store(true)
	if l.state == loadWaiting {
		t.enqueue(l)
	}
}

func (t *loader) run() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		if l := t.pick(); l != nil {
			t.step(l)
			continue
		}
		wait := t.nextDeadline()
		timer.Reset(wait)
		select {
		case <-t.wake:
		case <-timer.C:
			t.expire()
		case <-t.r.m.closing:
			return
		}
	}
}

// pick takes a load out of the queue.
func (t *loader) pick() *load {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.queue) == 0 {
		t.queue = nil
		return nil
	}
	l := t.queue[0]
	t.queue = t.queue[1:]
	l.state = loadRunning
	return l
}

func (t *loader) nextDeadline() time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	wait := time.Hour
	for l := range t.loads {
		if l.state == loadWaiting {
			wait = min(wait, time.Until(l.deadline))
		}
	}
	return max(wait, 0)
}

// expire ends the waits that are over. One that was busy asks again.
func (t *loader) expire() {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	for l := range t.loads {
		if l.state == loadWaiting && !now.Before(l.deadline) {
			t.halt(l, EventTimeout)
		}
	}
}

// step copies what is decided of a load, and then asks for more or ends it.
func (t *loader) step(l *load) {
	v, link, session, release, err := t.r.m.use()
	if err != nil || session != l.op.Session {
		if err == nil {
			release()
		}
		t.end(l, EventStale, t.linkOf(l))
		return
	}
	defer release()
	steps.At(steps.LoadBegun)
	status := t.window(l, v, link)
	switch {
	case status != EventOK:
		t.end(l, status, link)
	case l.next == l.chunks:
		steps.At(steps.LoadAllDone)
		t.end(l, EventOK, link)
	default:
		steps.At(steps.LoadWindow)
		t.ask(l, link)
		steps.At(steps.LoadAsked)
	}
}

// window copies the chunks that have a verdict. Every pinned slot is given back,
// also one that this rank has no rows of, or did not come to.
func (t *loader) window(l *load, v *view, link link) (status EventStatus) {
	t.mu.Lock()
	verdicts := l.verdicts
	l.verdicts = nil
	status = l.failed
	t.mu.Unlock()
	if len(verdicts) == 0 {
		return status
	}
	if len(verdicts) > l.chunks-l.next {
		verdicts = verdicts[:l.chunks-l.next]
	}
	cols, err := t.r.columns(v, false)
	if err != nil {
		status = EventMiss
	}
	var done []wire.Done
	for _, w := range verdicts {
		if status == EventOK {
			status = t.copyChunk(l, v, cols, w)
		}
		if w.Code != wire.Ready {
			continue
		}
		part := wire.Done{Slot: w.Slot, Generation: w.Generation, Part: t.r.part}
		if status != EventOK {
			part.Status = wire.StatusAborted
		}
		done = append(done, part)
	}
	steps.At(steps.LoadCopied)
	if len(done) > 0 {
		link.sure(&wire.Request{Type: wire.LoadDone, Op: l.op.Op, Done: done})
	}
	return status
}

// copyChunk brings chunk l.next into the pages.
func (t *loader) copyChunk(l *load, v *view, cols []dcp.Columns, w Verdict) EventStatus {
	if w.Code != wire.Ready {
		return EventMiss
	}
	g := t.r.geometry
	ref := tier.Ref{Slot: w.Slot, Generation: w.Generation}
	slot := v.slot(ref)
	if slot == nil || !v.table.Check(ref, tier.Ready) {
		return EventMiss
	}
	clip := dcp.Span{First: int(l.op.FirstToken), Tokens: int(l.op.Tokens)}
	ordinal := int(l.op.FirstToken)/g.C + l.next
	steps.At(steps.LoadChunk)
	err := dcp.Scatter(slot, g, cols, ordinal, clip, l.op.Blocks, int(l.op.FirstToken)/(g.B*g.D), &l.stop)
	if err != nil {
		t.mu.Lock()
		why := l.failed
		t.mu.Unlock()
		if why != EventOK && errors.Is(err, dcp.ErrStopped) {
			return why
		}
		t.r.m.cache.log.Warn("a chunk could not be copied", "op", l.op.Op, "index", l.next, "error", err)
		return EventMiss
	}
	if !v.table.Check(ref, tier.Ready) {
		return EventMiss
	}
	l.next++
	return EventOK
}

// ask gets the verdicts of the next window.
func (t *loader) ask(l *load, link link) {
	limit := t.r.m.cache.cfg.LoadWindowDeadline
	t.mu.Lock()
	if l.failed != EventOK {
		t.enqueue(l)
		t.mu.Unlock()
		return
	}
	l.turn++
	turn := l.turn
	l.state = loadWaiting
	l.deadline = time.Now().Add(limit + waitMargin)
	t.mu.Unlock()
	req := &wire.Request{Type: wire.LoadWait, Op: l.op.Op, First: uint32(l.next), Timeout: limit}
	first := uint32(l.next)
	err := link.send(req, func(r *wire.Reply, err error) { t.decided(l, turn, first, r, err) })
	if err == nil {
		return
	}
	if errors.Is(err, ErrBusy) {
		// Its own unanswered requests fill the ring; they are answered in time.
		pause(busyPause, t.r.m.closing)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if l.state == loadWaiting && l.turn == turn {
		if !errors.Is(err, ErrBusy) {
			l.failed = EventStale
		}
		t.enqueue(l)
	}
}

// decided takes the answer to a LOAD_WAIT.
func (t *loader) decided(l *load, turn, first uint32, r *wire.Reply, err error) {
	status := EventOK
	switch {
	case err != nil:
		status = EventStale
	case r.Status == wire.StatusTimeout:
		status = EventTimeout
	case r.Status == wire.StatusStale:
		status = EventStale
	case r.Status != wire.StatusOK, r.First != first, len(r.Verdicts) == 0, r.Verdicts[0].Code == wire.Later:
		status = EventMiss
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if l.state != loadWaiting || l.turn != turn {
		return
	}
	if status != EventOK {
		if l.failed == EventOK {
			l.failed = status
		}
	} else {
		l.verdicts = leadingDecided(r.Verdicts)
	}
	t.enqueue(l)
}

func leadingDecided(verdicts []Verdict) []Verdict {
	for i, v := range verdicts {
		if v.Code == wire.Later {
			return verdicts[:i]
		}
	}
	return verdicts
}

// end reports a load. The worker is not copying for it any more. link is nil when
// the leader does not know the operation.
func (t *loader) end(l *load, status EventStatus, link link) {
	t.mu.Lock()
	if _, known := t.loads[l]; !known {
		t.mu.Unlock()
		return
	}
	delete(t.loads, l)
	t.mu.Unlock()
	if link != nil {
		link.sure(&wire.Request{Type: wire.LoadDone, Op: l.op.Op, Flags: wire.LoadDoneEnd})
		steps.At(steps.LoadEnded)
	}
	e := Event{Kind: EventLoad, Op: l.op.Op, Rank: t.r.id, Status: status, FirstFailed: uint32(l.next)}
	if status == EventOK {
		e.Tokens = l.op.Tokens
	} else if l.next > 0 {
		c := t.r.geometry.C
		end := (int(l.op.FirstToken)/c + l.next) * c
		e.Tokens = uint32(min(end-int(l.op.FirstToken), int(l.op.Tokens)))
	}
	t.r.m.cache.events.put(e)
}

func (t *loader) finishAll(status EventStatus) {
	for {
		t.mu.Lock()
		var l *load
		for l = range t.loads {
			break
		}
		t.mu.Unlock()
		if l == nil {
			return
		}
		t.end(l, status, t.linkOf(l))
	}
}

// linkOf gives the link to the leader that knows a load, accepted there or not; nil
// when it is gone. That leader waits for the end of the load in any case.
func (t *loader) linkOf(l *load) link {
	link, session, err := t.r.m.attached()
	if err != nil || session != l.op.Session {
		return nil
	}
	return link
}
