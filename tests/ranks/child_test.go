package ranks

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/kvtier/kvtier"
)

// wait bounds every wait of these tests; nothing is expected to take so long.
const wait = 60 * time.Second

// childSpec is what a child is to be. With Rank < 0 it only opens the cache: the
// leader.
type childSpec struct {
	Config string
	Group  string
	Ranks  int
	Rank   int
	Shape  shape
	Model  string
	Attack *attackSpec `json:",omitempty"` // it is no rank, it is hostile
}

// request is a line that a child reads. Each is answered by one line with its ID.
type request struct {
	ID  int
	Cmd string // ready, fill, wipe, check, sum, store, load, selftest, hold, go, close, stats

	Seed             uint32
	Table            []uint32
	From, Loaded, To int
	Store            *kvtier.StoreOp `json:",omitempty"`
	Load             *kvtier.LoadOp  `json:",omitempty"`
	Pages            bool
	Timeout          time.Duration
	Step             string // hold: stop there at the nth time
	Nth              int
}

// line is what a child says: the answer to a request, or with ID 0 by itself.
type line struct {
	ID    int
	Err   string          `json:",omitempty"`
	State string          `json:",omitempty"`
	Held  string          `json:",omitempty"` // came to a step and stops there until go
	Event *kvtier.Event   `json:",omitempty"`
	Sum   uint64          `json:",omitempty"`
	Text  json.RawMessage `json:",omitempty"`
}

// child is the process of one rank, or of a leader.
type child struct {
	spec  childSpec
	cache *kvtier.Cache
	pages *pages
	rank  *kvtier.Rank

	mu      sync.Mutex
	out     *json.Encoder
	held    chan struct{} // closed by go
	holdAt  string
	holdNth int
	came    map[string]uint64 // to each step
}

func runChild(text string) error {
	c := &child{out: json.NewEncoder(os.Stdout), came: map[string]uint64{}}
	if err := json.Unmarshal([]byte(text), &c.spec); err != nil {
		return err
	}
	if c.spec.Attack != nil {
		return c.spec.Attack.run(c)
	}
	cfg, err := kvtier.ParseConfig([]byte(c.spec.Config))
	if err != nil {
		return err
	}
	if c.cache, err = kvtier.Open(cfg); err != nil {
		return err
	}
	if c.spec.Rank >= 0 {
		if err := c.register(); err != nil {
			return err
		}
		go c.events()
	}
	hookSteps(c.step)
	in := bufio.NewReader(os.Stdin)
	for {
		raw, err := in.ReadBytes('\n')
		if err != nil {
			break // the parent is gone, or wants an end
		}
		var r request
		if err := json.Unmarshal(raw, &r); err != nil {
			return err
		}
		go c.serve(&r)
	}
	if c.rank != nil {
		_ = c.rank.Close(wait)
	}
	return c.cache.Close(wait)
}

func (c *child) register() (err error) {
	s := c.spec
	if c.pages, err = newPages(s.Shape, s.Rank); err != nil {
		return err
	}
	c.rank, err = c.cache.Register(rankConfig(s), c.pages.describe())
	return err
}

func rankConfig(s childSpec) kvtier.RankConfig {
	id := kvtier.Identity{Model: s.Model, Attention: "aa", KVDtype: "u8"}
	if s.Rank == 0 {
		id.Weights = "0123"
	}
	return kvtier.RankConfig{
		Group: s.Group, Ranks: s.Ranks, Rank: s.Rank, DCP: s.Shape.D, DCPRank: s.Shape.geometry(s.Rank).Rank, Interleave: s.Shape.I,
		BlockTokens: s.Shape.B, NumBlocks: s.Shape.Blocks, ChunkTokens: s.Shape.C, Identity: id,
		Groups: []kvtier.GroupConfig{{}},
	}
}

func (c *child) say(l line) {
	c.mu.Lock()
	defer c.mu.Unlock()
	_ = c.out.Encode(l)
}

func (c *child) events() {
	for {
		for _, e := range c.cache.Events(64) {
			c.say(line{Event: &e})
		}
		time.Sleep(500 * time.Microsecond)
	}
}

// step stops where it was told to, once.
func (c *child) step(name string) {
	c.mu.Lock()
	c.came[name]++
	if c.holdAt != name {
		c.mu.Unlock()
		return
	}
	if c.holdNth--; c.holdNth > 0 {
		c.mu.Unlock()
		return
	}
	c.holdAt = ""
	held := make(chan struct{})
	c.held = held
	c.mu.Unlock()
	c.say(line{Held: name})
	<-held
}

func (c *child) serve(r *request) {
	out := line{ID: r.ID}
	if err := c.do(r, &out); err != nil {
		out.Err = err.Error()
	}
	c.say(out)
}

func (c *child) do(r *request, out *line) error {
	switch r.Cmd {
	case "state":
		for {
			if state, _ := c.cache.State(); state != kvtier.StateOpening {
				out.State = state
				return nil
			}
			time.Sleep(time.Millisecond)
		}
	case "ready":
		_, err := c.rank.Ready(wait)
		return err
	case "fill":
		c.pages.fill(r.Seed, r.Table, r.From, r.To)
	case "wipe":
		c.pages.wipe()
	case "check":
		return c.pages.check(r.Seed, r.Table, r.From, r.Loaded, r.To)
	case "sum":
		out.Sum = c.pages.sum()
	case "store":
		return c.rank.Store(*r.Store)
	case "load":
		return c.rank.Load(*r.Load)
	case "selftest":
		return c.rank.SelfTest(r.Pages, r.Timeout)
	case "hold":
		c.mu.Lock()
		c.holdAt, c.holdNth = r.Step, r.Nth
		c.mu.Unlock()
	case "go":
		c.mu.Lock()
		c.holdAt = ""
		if c.held != nil {
			close(c.held)
			c.held = nil
		}
		c.mu.Unlock()
	case "count":
		c.mu.Lock()
		out.Sum = c.came[r.Step]
		c.mu.Unlock()
	case "stats":
		var err error
		out.Text, err = c.cache.Stats()
		return err
	case "records":
		for _, rec := range c.cache.Records(1000) {
			fmt.Fprintln(os.Stderr, "child", os.Getpid(), rec.Level, rec.Text)
		}
	default:
		return fmt.Errorf("no command %q", r.Cmd)
	}
	return nil
}
