package tier

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// BreakerOptions say when the disk tier switches itself off.
type BreakerOptions struct {
	Errors   int           // so many within Window switch off
	Window   time.Duration //
	Off      time.Duration // for how long, doubling each time up to MaxOff
	MaxOff   time.Duration
	SlowRead time.Duration // a p99 read above it counts as an error
	Stuck    time.Duration // all read lanes busy for so long with one read each switch off at once
}

func (o *BreakerOptions) fill() {
	if o.Errors == 0 {
		o.Errors = 8
	}
	if o.Window == 0 {
		o.Window = time.Minute
	}
	if o.Off == 0 {
		o.Off = time.Minute
	}
	if o.MaxOff == 0 {
		o.MaxOff = 10 * time.Minute
	}
	if o.SlowRead == 0 {
		o.SlowRead = time.Second
	}
	if o.Stuck == 0 {
		o.Stuck = 10 * time.Second
	}
}

// latencies is how many of the last reads the p99 is taken over.
const latencies = 128

// breaker keeps a sick disk from costing every request its timeout: after some
// errors the tier is off for a while, then tried again.
type breaker struct {
	o   BreakerOptions
	off atomic.Bool // read on every lookup

	mu     sync.Mutex
	errors []time.Time // within the window, oldest first
	until  time.Time   // end of the off time
	next   time.Duration
	back   time.Time // when the tier came back last
	trial  bool      // came back and nothing has succeeded yet: one error is enough
	away   bool      // the root is not at its path: time alone does not bring it back
	dead   bool      // never comes back
	trips  uint64
	slow   [latencies]bool // ring: was that read slow
	reads  int             // so many were entered
	slowN  int
}

func newBreaker(o BreakerOptions) *breaker {
	o.fill()
	return &breaker{o: o, next: o.Off}
}

// fail counts an error. When it switches the tier off, it returns why.
func (b *breaker) fail(now time.Time, what string) (tripped string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.off.Load() {
		return ""
	}
	keep := 0
	for _, t := range b.errors {
		if now.Sub(t) < b.o.Window {
			b.errors[keep] = t
			keep++
		}
	}
	b.errors = append(b.errors[:keep], now)
	if !b.trial && len(b.errors) < b.o.Errors {
		return ""
	}
	return b.trip(now, fmt.Sprintf("%d errors, the last one: %s", len(b.errors), what))
}

// stuck switches the tier off because no read returns.
func (b *breaker) stuck(now time.Time) (tripped string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.off.Load() {
		return ""
	}
	return b.trip(now, fmt.Sprintf("no read has returned for %v", b.o.Stuck))
}

func (b *breaker) trip(now time.Time, why string) string {
	if !b.back.IsZero() && now.Sub(b.back) > b.o.Window {
		b.next = b.o.Off
	}
	b.until = now.Add(b.next)
	why = fmt.Sprintf("%s; off for %v", why, b.next)
	b.next = min(2*b.next, b.o.MaxOff)
	b.errors = b.errors[:0]
	b.trips++
	b.off.Store(true)
	return why
}

// succeed notes that a read or write went well.
func (b *breaker) succeed() {
	b.mu.Lock()
	b.trial = false
	b.mu.Unlock()
}

// took enters the duration of a read, and reports whether it has to be counted as
// an error: it was slow, and so are more than 1 % of the last ones.
func (b *breaker) took(d time.Duration) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	at := b.reads % latencies
	if b.slow[at] {
		b.slowN--
	}
	b.slow[at] = d > b.o.SlowRead
	if b.slow[at] {
		b.slowN++
	}
	b.reads++
	return b.slow[at] && b.slowN*100 > min(b.reads, latencies)
}

// tick brings the tier back when its time is over.
func (b *breaker) tick(now time.Time) (back bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.off.Load() || b.away || b.dead || now.Before(b.until) {
		return false
	}
	b.back, b.trial = now, true
	b.off.Store(false)
	return true
}

// leave switches off until comeBack, and reports whether it was this call that did it.
func (b *breaker) leave() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	was := b.away || b.dead
	b.away = true
	b.off.Store(true)
	return !was
}

// comeBack ends leave. What the disk did before counts no more.
func (b *breaker) comeBack(now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.dead {
		return
	}
	b.away, b.trial, b.back = false, false, now
	b.errors = b.errors[:0]
	b.off.Store(false)
}

func (b *breaker) isAway() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.away && !b.dead
}

// kill switches off for good, and reports whether it was this call that did it.
func (b *breaker) kill() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	was := b.dead
	b.dead = true
	b.off.Store(true)
	return !was
}

func (b *breaker) state() (state string, trips uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.dead:
		state = "dead"
	case b.off.Load():
		state = "off"
	case b.trial:
		state = "trial"
	default:
		state = "on"
	}
	return state, b.trips
}
