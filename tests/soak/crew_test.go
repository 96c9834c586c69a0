package soak

import (
	"bufio"
	"encoding/json"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// silence is how long a worker may say nothing; then it hangs.
const silence = 3 * time.Minute

// hand is one worker process as the soak sees it.
type hand struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	ended chan struct{} // its output has ended

	mu    sync.Mutex
	last  report
	heard time.Time
}

// crew is all workers: each place is filled again when its worker has gone.
type crew struct {
	t     *testing.T
	rng   *rand.Rand
	order order
	hands []*hand
	sum   report // of those that are gone

	Kills, LeaderKills, Stops, Ends int
}

func newCrew(t *testing.T, rng *rand.Rand, o order, size int) *crew {
	c := &crew{t: t, rng: rng, order: o, hands: make([]*hand, size)}
	c.sum.Failed = map[string]uint64{}
	for i := range c.hands {
		c.hire(i)
	}
	t.Cleanup(c.killAll)
	return c
}

// hire fills a place. Every third worker mostly writes.
func (c *crew) hire(i int) {
	o := c.order
	o.Seed = c.rng.Uint64()
	o.Writes = 0.1
	if i%3 == 0 {
		o.Writes = 0.5
	}
	text, err := json.Marshal(o)
	require.NoError(c.t, err)
	h := &hand{cmd: exec.Command(os.Args[0], workerArgument+string(text)), ended: make(chan struct{}), heard: time.Now()}
	h.cmd.Stderr = os.Stderr
	h.in, err = h.cmd.StdinPipe()
	require.NoError(c.t, err)
	out, err := h.cmd.StdoutPipe()
	require.NoError(c.t, err)
	require.NoError(c.t, h.cmd.Start())
	c.hands[i] = h
	go h.listen(out)
}

func (h *hand) listen(out io.Reader) {
	defer close(h.ended)
	lines := bufio.NewReader(out)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil { // a line that a kill has cut is worth nothing
			return
		}
		var r report
		if json.Unmarshal(line, &r) != nil {
			r.Wrong = "it says: " + string(line)
		}
		h.mu.Lock()
		h.last, h.heard = r, time.Now()
		h.mu.Unlock()
	}
}

func (h *hand) report() (report, time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.last, h.heard
}

// leader gives the place of the worker that leads, as far as is known.
func (c *crew) leader() (at int, ok bool) {
	for i, h := range c.hands {
		if r, _ := h.report(); r.State == "leader" {
			return i, true
		}
	}
	return 0, false
}

// check fails the test when a worker has found something wrong, hangs, or has ended
// by itself.
func (c *crew) check() {
	c.t.Helper()
	for i, h := range c.hands {
		r, heard := h.report()
		require.Empty(c.t, r.Wrong, "worker %d", i)
		if r.Disk != nil {
			for name, n := range r.Disk.Errors {
				// A busy machine makes reads slow, and the vandal takes away or cuts what is
				// being written.
				require.Contains(c.t, []string{"slow", "ENOENT", "short"}, name, "%d errors of the disk", n)
			}
		}
		if time.Since(heard) > silence {
			_ = h.cmd.Process.Signal(syscall.SIGQUIT) // shows where it hangs
			<-h.ended
			c.t.Fatalf("worker %d has said nothing for %v", i, silence)
		}
		select {
		case <-h.ended:
			c.t.Fatalf("worker %d has ended: %v", i, h.cmd.Wait())
		default:
		}
	}
}

// add counts what a worker has done that is gone.
func (c *crew) add(h *hand) {
	r, _ := h.report()
	c.sum.Puts += r.Puts
	c.sum.Hits += r.Hits
	c.sum.Misses += r.Misses
	c.sum.Looks += r.Looks
	c.sum.Drops += r.Drops
	for name, n := range r.Failed {
		c.sum.Failed[name] += n
	}
}

// kill ends a worker in the middle of whatever it does.
func (c *crew) kill(i int) {
	h := c.hands[i]
	require.NoError(c.t, h.cmd.Process.Kill())
	<-h.ended
	err := h.cmd.Wait()
	r, _ := h.report()
	require.Empty(c.t, r.Wrong, "worker %d: %v", i, err)
	c.add(h)
	c.Kills++
	if r.State == "leader" {
		c.LeaderKills++
	}
}

// end has a worker close in good order.
func (c *crew) end(i int) {
	h := c.hands[i]
	require.NoError(c.t, h.in.Close())
	<-h.ended
	err := h.cmd.Wait()
	r, _ := h.report()
	require.Empty(c.t, r.Wrong, "worker %d", i)
	require.NoError(c.t, err, "worker %d", i)
	c.add(h)
}

// pause stops a worker for a while, as a machine does that swaps.
func (c *crew) pause(i int, d time.Duration) {
	p := c.hands[i].cmd.Process
	require.NoError(c.t, p.Signal(syscall.SIGSTOP))
	time.Sleep(d)
	require.NoError(c.t, p.Signal(syscall.SIGCONT))
	c.Stops++
}

// disturb does something to one worker, more often than not to the leader.
func (c *crew) disturb() {
	i := c.rng.IntN(len(c.hands))
	if at, ok := c.leader(); ok && c.rng.IntN(2) == 0 {
		i = at
	}
	switch p := c.rng.IntN(10); {
	case p < 6:
		c.kill(i)
		c.hire(i)
	case p < 8:
		c.pause(i, time.Duration(100+c.rng.IntN(600))*time.Millisecond)
	default:
		c.end(i)
		c.Ends++
		c.hire(i)
	}
}

// endAll closes all workers; the last leader writes out what is dirty.
func (c *crew) endAll() {
	for i := range c.hands {
		c.end(i)
		c.hands[i] = nil
	}
}

// killAll leaves no process behind, also after a failure.
func (c *crew) killAll() {
	for _, h := range c.hands {
		if h != nil {
			_ = h.cmd.Process.Kill()
			<-h.ended
			_ = h.cmd.Wait()
		}
	}
}
