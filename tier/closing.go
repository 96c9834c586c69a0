package tier

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvtier/kvtier/internal/spawn"
)

// scanWait is how long Close lets queued writes wait for the end of a scan: most take
// less, and one of a cold disk with millions of files is not worth to stop an engine for.
const scanWait = time.Second

// Close ends the tier: no new work is taken, queued writes are written, removed
// files unlinked and mtimes brought up to date as far as the time allows, the
// rest is refused. One write that hangs does not cost the others what they have: a
// fifth of the time is kept for the end. It returns in time even if a read never comes
// back; then the error says so, and the buffers of such reads and writes must stay
// mapped. It is an error, too, when the file of a removed chunk is left: the next start
// would find it.
func (s *Store) Close(timeout time.Duration) error {
	began := time.Now()
	deadline, drained := began.Add(timeout), began.Add(timeout/5*4)
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	s.changed.Broadcast()
	s.mu.Unlock()

	touched := make(chan struct{}) // beside the writes, which may hang
	spawn.Go("disk close", s.broken, func() {
		defer close(touched)
		s.flushTouches(deadline, true)
	})
	s.lanes.drain(drained, began.Add(scanWait))
	s.mu.Lock()
	s.ending = true
	s.removals = append(s.removals, s.failed...) // one more try: what was removed must not come back
	s.failed = nil
	s.changed.Broadcast()
	s.mu.Unlock()
	close(s.stopTick)
	s.lanes.stop()
	s.refuseQueued(ErrClosed)

	ended := make(chan struct{})
	spawn.Go("disk close", s.broken, func() {
		<-touched
		s.flushTouches(deadline, true)
		s.background.Wait()
		close(ended)
	})
	timer := time.NewTimer(time.Until(deadline))
	defer timer.Stop()
	var err error
	select {
	case <-ended:
	case <-timer.C:
		err = fmt.Errorf("disk tier of %s: reads or writes have not ended in %v: %w", s.root.path, timeout, ErrIO)
	}
	s.mu.Lock()
	stay := len(s.removals) + len(s.failed)
	if err != nil {
		if s.unlinking {
			stay++
		}
		s.removals = nil
		s.abandoned = true // another process may lead from now on
	}
	// Whoever was refused gets his answer before Close returns.
	s.answering = false
	s.changed.Broadcast()
	s.mu.Unlock()
	if err == nil {
		s.answerer.Wait()
	}
	if stay > 0 {
		err = errors.Join(err, fmt.Errorf("disk tier of %s: chunks that were removed, but could not be deleted and will be found at the next start: %d: %w", s.root.path, stay, ErrIO))
	}
	return err
}

// worth is ok for what would otherwise never be done: at the end a sick disk is tried
// once more.
func (s *Store) worth() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ok() || s.lastTry()
}

// lastTry says that the tier ends, and that the disk is not what it has lost. Needs mu.
func (s *Store) lastTry() bool {
	state, _ := s.breaker.state()
	return s.ending && state != "dead" && !s.breaker.isAway()
}
