package kvtier

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"sync"
	"time"

	"github.com/kvtier/kvtier/internal/spawn"
	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/tier"
)

// States of a Cache.
const (
	StateOpening = "opening" // neither leader nor member: everything is a miss
	StateLeader  = "leader"
	StateMember  = "member"
	StateClosed  = "closed"
)

const (
	// statsTimeout bounds the question to a leader in another process.
	statsTimeout = time.Second
	// rootCheck is how often a leader looks whether its lock still means its root.
	rootCheck = time.Minute
)

// Cache is this process's part in the cache of one root. All methods may be called
// from any goroutine.
type Cache struct {
	cfg     *Config // filled in
	log     *slog.Logger
	root    *tier.Root
	id      os.FileInfo // of the root directory
	before  *Cache      // of the same root, closing; may be nil
	bell    *bell
	records *recordRing
	events  *eventQueue

	rootCheck time.Duration

	closing chan struct{} // closed by the last Close
	done    chan struct{} // closed when all is ended

	mu           sync.Mutex
	refs         int
	role         Role
	state        string
	detail       string
	leader       *leader         // while leading
	leaderGone   <-chan struct{} // closed when leader is about to close
	control      *control        // while a member
	turns        uint64          // counts changes of state
	changed      chan struct{}   // closed and replaced at every change of state
	members      map[*member]struct{}
	closeTimeout time.Duration
	closeErr     error
}

func newCache(cfg *Config, root *tier.Root, id os.FileInfo) (*Cache, error) {
	b, err := newBell()
	if err != nil {
		return nil, err
	}
	c := &Cache{
		cfg: cfg, root: root, id: id, bell: b,
		records: &recordRing{bell: b}, events: &eventQueue{bell: b}, rootCheck: rootCheck,
		closing: make(chan struct{}), done: make(chan struct{}), changed: make(chan struct{}),
		refs: 1, role: cfg.Role, state: StateOpening, members: make(map[*member]struct{}),
	}
	c.log = slog.New(&recordHandler{ring: c.records, level: cfg.LogLevel})
	return c, nil
}

func (c *Cache) start() {
	if n := c.cfg.maxProcs(runtime.NumCPU()); n > 0 && (c.cfg.GOMAXPROCS > 0 || n < runtime.GOMAXPROCS(0)) {
		runtime.GOMAXPROCS(n)
	}
	// The loop lets go of everything also when it panics.
	spawn.Go("opening loop", func(err error) { c.log.Error("the cache is switched off", "error", err) }, c.run)
}

// share counts one more opener; false when the Cache is closing. The stronger role
// of all openers counts.
func (c *Cache) share(cfg *Config) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.refs == 0 {
		return false
	}
	c.refs++
	if cfg.Role.strength() > c.role.strength() {
		c.role = cfg.Role
	}
	return true
}

// Close ends this opening of the root; the last one ends the Cache, within timeout
// (0: the configured one): it wakes whoever waits, stops copies, and a leader writes
// out what is dirty. After ErrTimeout the rest goes on in the background. Closing
// what is closed is no error.
func (c *Cache) Close(timeout time.Duration) error {
	if timeout <= 0 {
		timeout = c.cfg.CloseTimeout
	}
	c.mu.Lock()
	switch {
	case c.refs > 1:
		c.refs--
		c.mu.Unlock()
		return nil
	case c.refs == 1:
		c.refs = 0
		c.closeTimeout = timeout
		close(c.closing)
	}
	c.mu.Unlock()
	// What is bounded by the same timeout inside gets the chance to say why.
	if err := waitDone(c.done, timeout+timeout/4+100*time.Millisecond); err != nil {
		return fmt.Errorf("closing: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closeErr
}

// State names what the Cache is, and says more in a line for people.
func (c *Cache) State() (state, detail string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state, c.detail
}

// set changes the state and wakes whoever waits for that.
func (c *Cache) set(state, detail string, apply func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if apply != nil {
		apply()
	}
	if c.state == state && c.detail == detail && apply == nil {
		return
	}
	c.state, c.detail = state, detail
	c.turns++
	close(c.changed)
	c.changed = make(chan struct{})
}

// turn numbers the present state, for waitTurn.
func (c *Cache) turn() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.turns
}

// waitTurn waits until the state is another than at that turn; false when stop was
// closed before.
func (c *Cache) waitTurn(turn uint64, stop <-chan struct{}) bool {
	for {
		c.mu.Lock()
		turns, changed := c.turns, c.changed
		c.mu.Unlock()
		if turns != turn {
			return true
		}
		select {
		case <-changed:
		case <-stop:
			return false
		}
	}
}

// attach connects a member to the present leader. It waits until there may be one.
func (c *Cache) attach(h *wire.Hello, stop <-chan struct{}) (link, error) {
	for {
		c.mu.Lock()
		l, gone, attached, turn := c.leader, c.leaderGone, c.control != nil, c.turns
		c.mu.Unlock()
		switch {
		case l != nil:
			hello := *h
			hello.Protocol, hello.PID = wire.Protocol, os.Getpid()
			d, err := newDirectLink(l, &hello, gone)
			if err != nil {
				return nil, &RefusedError{Reason: err.Error()}
			}
			return d, nil
		case attached:
			r, err := dialRing(c.root.RunDir(), h, c.cfg.ConnectTimeout, stop)
			if err != nil {
				return nil, err
			}
			return r, nil
		}
		if !c.waitTurn(turn, stop) {
			return nil, ErrClosed
		}
	}
}

// adopt counts a member, which forget takes out again.
func (c *Cache) adopt(m *member) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.refs == 0 {
		return ErrClosed
	}
	c.members[m] = struct{}{}
	return nil
}

func (c *Cache) forget(m *member) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.members, m)
}

// Records removes and returns at most max log records, oldest first.
func (c *Cache) Records(max int) []Record { return c.records.take(max) }

// Events removes and returns at most max events, oldest first.
func (c *Cache) Events(max int) []Event { return c.events.take(max) }

// EventFD is a descriptor that is readable while Events or Records are waiting, for
// poll and its like. It is the Cache's and valid until Close.
func (c *Cache) EventFD() int { return c.bell.fd.FD() }

// memberStats is what Stats says of one rank, coordinator or blob of this process.
type memberStats struct {
	Group       string `json:"group"`
	Rank        int    `json:"rank"`
	Coordinator bool   `json:"coordinator"`
	Session     string `json:"session"`
	Accepted    bool   `json:"accepted"`
	Refused     string `json:"refused,omitempty"`
	Attaches    uint64 `json:"attaches"`
}

// processStats is this process's half of Stats.
type processStats struct {
	Version        string        `json:"version"`
	Root           string        `json:"root"`
	State          string        `json:"state"`
	Detail         string        `json:"detail"`
	Role           string        `json:"role"`
	GOMAXPROCS     int           `json:"gomaxprocs"`
	Panics         uint64        `json:"panics"`
	RecordsDropped uint64        `json:"records_dropped"`
	EventsWaiting  int           `json:"events_waiting"`
	Members        []memberStats `json:"members"`
}

// Stats returns a JSON object: "process" is about this process; "leader" comes from
// the leader, and is null when none answers.
func (c *Cache) Stats() ([]byte, error) {
	c.mu.Lock()
	p := processStats{
		Version: Version, Root: c.root.Path(), State: c.state, Detail: c.detail, Role: c.role.String(),
		GOMAXPROCS: runtime.GOMAXPROCS(0), Panics: spawn.Panics(), Members: []memberStats{},
	}
	members := make([]*member, 0, len(c.members))
	for m := range c.members {
		members = append(members, m)
	}
	c.mu.Unlock()
	p.RecordsDropped = c.records.lost()
	p.EventsWaiting = c.events.len()
	for _, m := range members {
		p.Members = append(p.Members, m.stats())
	}
	led, err := c.leaderStats()
	if err != nil {
		led = []byte("null")
	}
	return json.Marshal(map[string]any{"process": p, "leader": json.RawMessage(led)})
}

// leaderStats asks the leader, wherever it is.
func (c *Cache) leaderStats() ([]byte, error) {
	c.mu.Lock()
	l, k := c.leader, c.control
	c.mu.Unlock()
	switch {
	case l != nil:
		return l.stats(), nil
	case k != nil:
		return k.stats(statsTimeout)
	}
	return nil, ErrNoLeader
}

// pendingStats is the part of a leader's statistics that Flush looks at.
type pendingStats struct {
	Namespaces []struct {
		Arena struct{ Writing, Backlog int } `json:"arena"`
		Slots map[string]int                 `json:"slots"`
	} `json:"namespaces"`
}

// Flush waits until the leader has nothing on its way to disk. What does not go to
// disk (no room, memory only) is not waited for.
func (c *Cache) Flush(timeout time.Duration) error {
	end := time.Now().Add(timeout)
	for retry := firstRetry; ; retry = min(2*retry, lastRetry) {
		text, err := c.leaderStats()
		if err != nil {
			return err
		}
		var s pendingStats
		if err := json.Unmarshal(text, &s); err != nil {
			return fmt.Errorf("reading the leader's statistics: %w", err)
		}
		waiting := 0
		for _, n := range s.Namespaces {
			waiting += n.Arena.Writing + n.Slots[tier.Sealing.String()]
			if n.Arena.Writing > 0 { // else the disk tier takes nothing now
				waiting += n.Arena.Backlog
			}
		}
		if waiting == 0 {
			return nil
		}
		if time.Now().Add(retry).After(end) {
			return fmt.Errorf("%d chunks are not on disk: %w", waiting, ErrTimeout)
		}
		if !pause(retry, c.closing) {
			return ErrClosed
		}
	}
}

func (m *member) stats() memberStats {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := memberStats{
		Group: m.hello.Group, Rank: m.hello.Rank, Coordinator: m.hello.Coordinator,
		Session: fmt.Sprintf("%016x", m.session), Accepted: m.view != nil, Attaches: m.attaches,
	}
	if m.refused != nil {
		s.Refused = m.refused.Reason
	}
	return s
}
