package tier

import (
	"sync"
	"time"
)

// maxYield is how long a write lets queued reads go first.
const maxYield = 50 * time.Millisecond

// laneJob is one read or write of a chunk file.
type laneJob interface {
	size() int64      // bytes in flight while it runs
	refuse(err error) // answers it without doing it; from any goroutine, no lock held
}

// lanes are the queues of reads and of writes in front of the goroutines that do
// them. Writes have goroutines of their own and stand back while reads are
// queued; each kind has a bound of bytes in flight, which a single job may exceed
// when it is alone. The queues themselves hold no payload: reads are bounded by
// the slots of the arena, writes by the dirty bound.
type lanes struct {
	mu      sync.Mutex
	changed *sync.Cond
	reads   laneQueue
	writes  laneQueue
	gate    bool // writes may run
	stopped bool
}

type laneQueue struct {
	jobs    []laneJob
	limit   int64
	flight  int64       // bytes in flight
	busy    []time.Time // for each lane, since when it runs its job; zero when idle
	running int
}

func newLanes(readLanes, writeLanes int, readBytes, writeBytes int64) *lanes {
	l := &lanes{
		reads:  laneQueue{limit: readBytes, busy: make([]time.Time, readLanes)},
		writes: laneQueue{limit: writeBytes, busy: make([]time.Time, writeLanes)},
	}
	l.changed = sync.NewCond(&l.mu)
	return l
}

func (q *laneQueue) ready() bool {
	return len(q.jobs) > 0 && (q.flight == 0 || q.flight+q.jobs[0].size() <= q.limit)
}

// push queues a job; false once the lanes have stopped.
func (l *lanes) push(q *laneQueue, j laneJob) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stopped {
		return false
	}
	q.jobs = append(q.jobs, j)
	l.changed.Broadcast()
	return true
}

// open lets writes run.
func (l *lanes) open() {
	l.mu.Lock()
	l.gate = true
	l.changed.Broadcast()
	l.mu.Unlock()
}

// shut makes writes wait for open. What runs goes on.
func (l *lanes) shut() {
	l.mu.Lock()
	l.gate = false
	l.mu.Unlock()
}

// next waits for the next job of a lane; nil when the lanes have stopped. The lane
// calls finish after it.
func (l *lanes) next(q *laneQueue, lane int) laneJob {
	l.mu.Lock()
	defer l.mu.Unlock()
	var yieldUntil time.Time
	for !l.stopped {
		if !q.ready() || (q == &l.writes && !l.gate) {
			l.changed.Wait()
			continue
		}
		if q == &l.writes && len(l.reads.jobs) > 0 {
			if yieldUntil.IsZero() {
				yieldUntil = time.Now().Add(maxYield)
			}
			if left := time.Until(yieldUntil); left > 0 {
				alarm := time.AfterFunc(left, l.wake)
				l.changed.Wait()
				alarm.Stop()
				continue
			}
		}
		j := q.jobs[0]
		q.jobs[0] = nil
		q.jobs = q.jobs[1:]
		q.flight += j.size()
		q.running++
		q.busy[lane] = time.Now()
		return j
	}
	return nil
}

func (l *lanes) wake() {
	l.mu.Lock()
	l.changed.Broadcast()
	l.mu.Unlock()
}

func (l *lanes) finish(q *laneQueue, lane int, j laneJob) {
	l.mu.Lock()
	q.flight -= j.size()
	q.running--
	q.busy[lane] = time.Time{}
	l.changed.Broadcast()
	l.mu.Unlock()
}

// take empties both queues and gives what was in them, to be refused.
func (l *lanes) take() []laneJob {
	l.mu.Lock()
	defer l.mu.Unlock()
	jobs := append(l.reads.jobs, l.writes.jobs...)
	l.reads.jobs, l.writes.jobs = nil, nil
	l.changed.Broadcast()
	return jobs
}

// stop ends the lanes after their present job.
func (l *lanes) stop() {
	l.mu.Lock()
	l.stopped = true
	l.changed.Broadcast()
	l.mu.Unlock()
}

// stuck reports whether every read lane has been busy with its job for d.
func (l *lanes) stuck(d time.Duration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, since := range l.reads.busy {
		if since.IsZero() || time.Since(since) < d {
			return false
		}
	}
	return true
}

// drain waits until no write is queued or running, or the time is over: for writes that
// may not run, because the gate is shut, at gate.
func (l *lanes) drain(deadline, gate time.Time) {
	for _, at := range []time.Time{deadline, gate} {
		alarm := time.AfterFunc(time.Until(at), l.wake)
		defer alarm.Stop()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.writes.jobs) > 0 || l.writes.running > 0 {
		now := time.Now()
		if !now.Before(deadline) || !l.gate && l.writes.running == 0 && !now.Before(gate) {
			return
		}
		l.changed.Wait()
	}
}

// depth gives the jobs that are queued or running.
func (l *lanes) depth() (reads, writes int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.reads.jobs) + l.reads.running, len(l.writes.jobs) + l.writes.running
}
