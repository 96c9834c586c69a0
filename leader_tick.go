package kvtier

import "time"

// How often the loop looks at deadlines while there are any: often while somebody
// waits, seldom for what only ends a promise.
const (
	tickGrowing = 5 * time.Millisecond // somebody waits for the arena to grow, or a self-test for its chunks
	tickWaiting = 50 * time.Millisecond
	tickIdle    = time.Second
)

// loop sends replies that were decided outside of the leader's own critical sections
// and watches deadlines. With nothing to watch it sleeps.
func (l *leader) loop() {
	defer close(l.ended)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-l.stop:
			return
		case <-l.wake:
		case <-timer.C:
		}
		if next := l.tick(); next > 0 {
			timer.Reset(next)
		} else {
			timer.Stop()
		}
	}
}

// tick ends what is over its deadline and says when to look again; 0: when woken.
func (l *leader) tick() time.Duration {
	l.lock()
	defer l.unlock()
	now := l.now()
	waiting, testing, idle := false, false, false
	l.freed = true // an arena that has grown tells nobody
	for _, g := range l.groups {
		g.nameMissing(now)
		idle = idle || g.space == nil && g.refused == nil && !g.named
		for _, o := range g.stores {
			o.expire(now)
			idle = true
		}
		for _, o := range g.loads {
			o.expire(now)
			waiting = waiting || o.decided < o.total
			idle = idle || o.owner.isGone
		}
		if g.test != nil && g.test.expire(now) {
			waiting = true
			testing = testing || g.test.step == testStoring || g.test.step == testLeaving
		}
	}
	for _, a := range l.members {
		for _, le := range a.leases {
			le.expire(now)
			idle = true
			waiting = waiting || len(le.waits) > 0
		}
	}
	for _, sp := range l.spaces {
		sp.giveUpFills(now)
		idle = sp.reopen(now) || idle
		idle = idle || len(sp.fills) > 0
	}
	l.retireVacant()
	l.watching, l.hurrying = waiting || idle, waiting
	switch {
	case l.lacksSlots(), len(l.hungry) > 0, testing:
		l.watching, l.hurrying = true, true
		return tickGrowing
	case waiting:
		return tickWaiting
	case idle:
		return tickIdle
	}
	return 0
}
