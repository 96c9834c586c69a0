package kvtier

import (
	"time"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/spawn"
)

// reopenAfter is how long a namespace stays memory only before its directory is tried
// again.
const reopenAfter = 10 * time.Second

// reopening is the disk of a namespace that could not be opened, whether the disk was
// sick, full or held something that somebody has to move away: what was in the way may
// go. The groups that use the namespace keep it open, so nobody else would try again.
type reopening struct {
	namespace *chunk.Namespace
	at        time.Time     // of the next try
	running   chan struct{} // closed when the one under way has ended; nil: none is
}

// reopen tries again if it is time, and says whether there is a next time. The caller
// holds mu.
func (sp *space) reopen(now time.Time) bool {
	r := sp.reopening
	if r == nil {
		return false
	}
	if wait := r.at.Sub(now); r.running != nil || wait > 0 && wait <= reopenAfter { // more: the clock was set back
		return true
	}
	running := make(chan struct{})
	r.running = running
	spawn.Go("disk of a namespace", sp.l.fail, func() {
		defer close(running)
		d, err := sp.l.store.Namespace(r.namespace)
		sp.l.lock()
		defer sp.l.unlock()
		r.running = nil
		if sp.l.closed || sp.l.spaces[sp.fingerprint] != sp {
			return // nobody uses it any more
		}
		if err != nil {
			r.at = sp.l.now().Add(reopenAfter)
			return
		}
		sp.reopening, sp.disk = nil, d
		sp.SetDisk(d)
		sp.l.log.Info("namespace is kept on disk from now on", "namespace", sp.fingerprint.String()[:32])
	})
	return true
}

// awaitReopened waits for tries under way, for this long at most. Of one that hangs in
// the disk a closed leader uses nothing any more.
func awaitReopened(running []chan struct{}, timeout time.Duration) {
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	for _, ended := range running {
		select {
		case <-ended:
		case <-timer.C:
			return
		}
	}
}
