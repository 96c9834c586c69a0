package tier

import (
	"fmt"
	"log/slog"
	"math"
	"strings"
	"sync"

	"github.com/kvtier/kvtier/internal/sys"
)

// Pool is the DRAM budget of a leader: one total over all its namespaces. It lets
// an arena grow only after looking at what the machine and the container have left.
// Safe for concurrent use. Its locks are never held while a Space's lock is taken,
// except step, which no holder of a Space's lock waits for.
type Pool struct {
	bytes     int64
	log       *slog.Logger
	memory    *sys.Memory
	fileLimit func() int64

	step sync.Mutex // one check and the allocation it allows at a time

	mu     sync.Mutex
	used   int64
	spaces []*Space
}

// NewPool makes a budget of this many bytes. Nothing is allocated yet.
func NewPool(bytes int64, log *slog.Logger) *Pool {
	return &Pool{bytes: bytes, log: log, memory: sys.NewMemory(""), fileLimit: sys.FileSizeLimit}
}

// Bytes is the budget.
func (p *Pool) Bytes() int64 { return p.bytes }

// Used is how much of the budget is allocated.
func (p *Pool) Used() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.used
}

// FreeMemory is what this process may still allocate, and the name of the limit
// that says so.
func FreeMemory() (bytes int64, limit string, err error) {
	limits, err := sys.NewMemory("").Limits()
	if err != nil {
		return 0, "", err
	}
	l := tightest(limits)
	return max(0, l.Free-reserve(l)), l.Name, nil
}

// CheckBudget says whether a budget of n bytes is more than this process could ever
// have, however little else runs: the error names the limit and what fits.
func CheckBudget(n int64) error {
	limits, err := sys.NewMemory("").Limits()
	if err != nil {
		return nil // not known: growing looks again, at every step
	}
	return checkBudget(limits, n)
}

func checkBudget(limits []sys.MemoryLimit, n int64) error {
	least := limits[0]
	for _, l := range limits[1:] {
		if l.Total-reserve(l) < least.Total-reserve(least) {
			least = l
		}
	}
	if most := least.Total - reserve(least); n > most {
		return fmt.Errorf("dram_gib asks for %g GiB and %s is %g GiB: raise the limit, or set dram_gib to at most %g less what the engine itself needs",
			inGiB(n), strings.Replace(least.Name, "MemAvailable", "the memory", 1), inGiB(least.Total), inGiB(max(0, most)))
	}
	return nil
}

// inGiB is for people: two digits behind the point.
func inGiB(n int64) float64 { return math.Round(float64(n)/(1<<30)*100) / 100 }

// reserve is what stays untouched below a limit: others allocate between the look
// and the allocation, and the kernel answers the one who is too late by killing.
func reserve(l sys.MemoryLimit) int64 {
	return min(max(l.Total/20, 64<<20), 1<<30)
}

func tightest(limits []sys.MemoryLimit) sys.MemoryLimit {
	least := limits[0]
	for _, l := range limits[1:] {
		if l.Free-reserve(l) < least.Free-reserve(least) {
			least = l
		}
	}
	return least
}

// check says whether n more bytes fit into the memory that is left.
func (p *Pool) check(n int64) error {
	limits, err := p.memory.Limits()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrMemoryLimit, err)
	}
	if l := tightest(limits); l.Free-reserve(l) < n {
		return fmt.Errorf("%s leaves %d bytes of %d, %d are kept in reserve and %d more are needed: %w",
			l.Name, l.Free, l.Total, reserve(l), n, ErrMemoryLimit)
	}
	return nil
}

// back allocates [off, off+n) of a Space's arena. It may wait for other namespaces
// to give memory back, so the caller must not hold any Space's lock.
func (p *Pool) back(s *Space, off, n int64) error {
	if err := p.take(s, n); err != nil {
		return err
	}
	p.step.Lock()
	defer p.step.Unlock()
	err := p.check(n)
	if err == nil {
		if err = s.arena.Populate(off, n); err == nil {
			return nil
		}
		// What a failed call has allocated would not be in anybody's count.
		if undo := sys.PunchHole(s.arena.File(), off, n); undo != nil {
			p.log.Warn("arena memory could not be given back", "error", undo)
		}
	}
	p.give(n)
	return err
}

// take reserves n bytes of the budget for s, if need be from namespaces that no
// group is attached to.
func (p *Pool) take(s *Space, n int64) error {
	if p.tryTake(n) {
		return nil
	}
	idle, names := p.others(s)
	for _, other := range idle {
		other.Shrink(n)
		if p.tryTake(n) {
			return nil
		}
	}
	return fmt.Errorf("%d bytes of %d are in use by %s: %w", p.Used(), p.bytes, names, ErrPoolFull)
}

func (p *Pool) tryTake(n int64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.used+n > p.bytes {
		return false
	}
	p.used += n
	return true
}

func (p *Pool) give(n int64) {
	p.mu.Lock()
	p.used -= n
	p.mu.Unlock()
}

// others returns the idle Spaces besides s, and the names of all that are in use.
func (p *Pool) others(s *Space) (idle []*Space, names string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var busy []string
	for _, other := range p.spaces {
		if other.attached.Load() {
			busy = append(busy, other.name)
		} else if other != s {
			idle = append(idle, other)
		}
	}
	return idle, strings.Join(busy, ", ")
}

// room is what s may hope for: what is unused, and what is held by idle namespaces.
func (p *Pool) room(s *Space) int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.bytes - p.used
	for _, other := range p.spaces {
		if other != s && !other.attached.Load() {
			n += other.backedBytes.Load()
		}
	}
	return n
}

func (p *Pool) join(s *Space) {
	p.mu.Lock()
	p.spaces = append(p.spaces, s)
	p.mu.Unlock()
}

func (p *Pool) leave(s *Space) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, other := range p.spaces {
		if other == s {
			p.spaces = append(p.spaces[:i], p.spaces[i+1:]...)
			p.used -= s.backedBytes.Load()
			return
		}
	}
}
