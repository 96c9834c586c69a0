package ranks

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier"
	"github.com/kvtier/kvtier/internal/chunk"
)

// process is a running child.
type process struct {
	t    *testing.T
	spec childSpec
	cmd  *exec.Cmd
	in   io.WriteCloser

	held   chan string
	events chan kvtier.Event
	gone   chan struct{} // closed when it says nothing any more
	ending sync.Once

	mu      sync.Mutex
	next    int
	waiting map[int]chan line
}

var errGone = errors.New("the process is gone")

func start(t *testing.T, spec childSpec) *process {
	t.Helper()
	text, err := json.Marshal(spec)
	require.NoError(t, err)
	p := &process{
		t: t, spec: spec, cmd: exec.Command(os.Args[0]), held: make(chan string, 1), events: make(chan kvtier.Event, 4096),
		gone: make(chan struct{}), waiting: make(map[int]chan line),
	}
	p.cmd.Env = append(os.Environ(), childEnv+"="+string(text))
	p.cmd.Stderr = os.Stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	p.in, err = p.cmd.StdinPipe()
	require.NoError(t, err)
	out, err := p.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, p.cmd.Start())
	go p.read(out)
	t.Cleanup(p.kill)
	return p
}

func (p *process) read(out io.Reader) {
	dec := json.NewDecoder(bufio.NewReader(out))
	for {
		var l line
		if dec.Decode(&l) != nil {
			break
		}
		switch {
		case l.Held != "":
			p.held <- l.Held
		case l.Event != nil:
			p.events <- *l.Event
		default:
			p.mu.Lock()
			c := p.waiting[l.ID]
			delete(p.waiting, l.ID)
			p.mu.Unlock()
			if c != nil {
				c <- l
			}
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.gone)
	for _, c := range p.waiting {
		close(c)
	}
	p.waiting = nil
}

// send asks a child; the answer comes through the channel, which is closed when the
// process ends first.
func (p *process) send(r request) <-chan line {
	c := make(chan line, 1)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.waiting == nil {
		close(c)
		return c
	}
	p.next++
	r.ID = p.next
	p.waiting[r.ID] = c
	raw, err := json.Marshal(r)
	if err == nil {
		_, err = p.in.Write(append(raw, '\n'))
	}
	if err != nil {
		delete(p.waiting, r.ID)
		close(c)
	}
	return c
}

// try asks and waits.
func (p *process) try(r request) (line, error) {
	select {
	case l, ok := <-p.send(r):
		switch {
		case !ok:
			return line{}, errGone
		case l.Err != "":
			return l, errors.New(l.Err)
		}
		return l, nil
	case <-time.After(wait):
		return line{}, fmt.Errorf("%s of rank %d is not answered", r.Cmd, p.spec.Rank)
	}
}

func (p *process) call(r request) line {
	p.t.Helper()
	l, err := p.try(r)
	require.NoError(p.t, err, "%s of rank %d", r.Cmd, p.spec.Rank)
	return l
}

func (p *process) kill() {
	p.ending.Do(func() {
		_ = p.cmd.Process.Kill()
		<-p.gone
		_ = p.cmd.Wait()
	})
}

// freeze stops the process and returns when it does not run any more.
func (p *process) freeze() {
	p.t.Helper()
	require.NoError(p.t, p.cmd.Process.Signal(syscall.SIGSTOP))
	require.Eventually(p.t, func() bool {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
		return err == nil && strings.Contains(string(b), ") T ")
	}, wait, time.Millisecond)
}

func (p *process) thaw() { _ = p.cmd.Process.Signal(syscall.SIGCONT) }

// event waits for the one event of a load.
func (p *process) event(op uint64) kvtier.Event {
	p.t.Helper()
	select {
	case e := <-p.events:
		require.Equal(p.t, op, e.Op, "an event of another load")
		return e
	case <-time.After(wait):
		require.FailNow(p.t, "no event", "load %d of rank %d", op, p.spec.Rank)
	}
	return kvtier.Event{}
}

// group is one engine: its rank processes, and its coordinator here.
type group struct {
	t     *testing.T
	name  string
	shape shape
	conf  func(role string) string
	ranks []*process
	k     *kvtier.Coordinator
	fp    chunk.Fingerprint
}

// opNumbers are unique among all groups of the tests.
var opNumbers atomic.Uint64

const model = "test/ranks"

// root is a cache directory and how it is opened.
type root struct {
	dir   string
	slots int
	slot  int     // bytes of one; 0: 4096
	disk  float64 // GiB; 0: more than any test needs
	extra string  // more settings, each with a comma in front
}

func (r root) config(role string) string {
	slot := max(r.slot, 4096)
	disk := r.disk
	if disk == 0 {
		disk = 0.05
	}
	return fmt.Sprintf(`{"disk_path":%q,"role":%q,"dram_gib":%g,"disk_gib":%g,"free_floor_gib":0,"log_level":"debug",
		"close_timeout_s":20%s}`, r.dir, role, float64(r.slots*slot)/(1<<30), disk, r.extra)
}

// open opens the cache of a root in this process.
func open(t *testing.T, config string) *kvtier.Cache {
	t.Helper()
	cfg, err := kvtier.ParseConfig([]byte(config))
	require.NoError(t, err)
	c, err := kvtier.Open(cfg)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, c.Close(wait))
		if t.Failed() {
			for _, r := range c.Records(1 << 20) {
				t.Log(r.Level, r.Text)
			}
		}
	})
	return c
}

// newGroup starts the ranks of an engine and waits until the group is accepted. c is
// where its coordinator attaches.
func newGroup(t *testing.T, c *kvtier.Cache, name string, s shape, conf func(role string) string) *group {
	t.Helper()
	g := &group{t: t, name: name, shape: s, conf: conf, ranks: make([]*process, s.ranks())}
	g.start(c)
	return g
}

func (g *group) start(c *kvtier.Cache) {
	t := g.t
	t.Helper()
	for rank := range g.ranks {
		g.startRank(rank)
	}
	k, err := c.Coordinate(g.name, g.shape.ranks())
	require.NoError(t, err)
	g.k = k
	t.Cleanup(func() { require.NoError(t, k.Close()) })
	g.ready()
}

func (g *group) startRank(rank int) {
	g.t.Helper()
	g.ranks[rank] = start(g.t, childSpec{
		Config: g.conf("member"), Group: g.name, Ranks: g.shape.ranks(), Rank: rank, Shape: g.shape, Model: model,
	})
}

func (g *group) ready() {
	g.t.Helper()
	for _, r := range g.ranks {
		r.call(request{Cmd: "ready"})
	}
	a, err := g.k.Ready(wait)
	require.NoError(g.t, err)
	g.fp = a.Fingerprint
}

// prefix is a request: its keys and its blocks.
type prefix struct {
	seed  uint32
	root  kvtier.Key
	keys  []kvtier.Key
	table []uint32
}

// newPrefix gives n chunks in the blocks from base on. Equal seeds are equal prompts.
func (g *group) newPrefix(seed uint32, n, base int) *prefix {
	g.t.Helper()
	root, err := chunk.Root(g.fp, nil)
	require.NoError(g.t, err)
	tokens := make([]uint32, n*g.shape.C)
	for i := range tokens {
		tokens[i] = seed<<12 + uint32(i)
	}
	keys, err := chunk.Chain(nil, root, g.shape.C, tokens, nil)
	require.NoError(g.t, err)
	p := &prefix{seed: seed, root: root, keys: keys}
	v := g.shape.B * g.shape.D
	need := (len(tokens) + v - 1) / v
	require.LessOrEqual(g.t, base+need, g.shape.Blocks)
	for i := range need {
		p.table = append(p.table, uint32(base+need-1-i)) // not in order
	}
	return p
}

func (p *prefix) parent(first int) kvtier.Key {
	if first == 0 {
		return p.root
	}
	return p.keys[first-1]
}

// fill computes a prefix on all ranks.
func (g *group) fill(p *prefix) {
	g.t.Helper()
	for _, r := range g.ranks {
		r.call(request{Cmd: "fill", Seed: p.seed, Table: p.table, To: len(p.keys) * g.shape.C})
	}
}

// begin asks for the slots of all chunks from first on. It tries again while there is
// no memory for them yet.
func (g *group) begin(p *prefix, first int) (op kvtier.StoreOp, verdicts []kvtier.Verdict) {
	g.t.Helper()
	for end := time.Now().Add(wait); ; time.Sleep(2 * time.Millisecond) {
		op = kvtier.StoreOp{Op: opNumbers.Add(1), FirstOrdinal: uint32(first)}
		a := g.k.StoreBegin([]kvtier.StoreBegin{{Op: op.Op, Parent: p.parent(first), First: op.FirstOrdinal, Keys: p.keys[first:]}}, wait)[0]
		require.NoError(g.t, a.Err)
		declined := false
		op.Grants, op.Session = nil, a.Session
		for i, v := range a.Verdicts {
			switch v.Code {
			case kvtier.Granted:
				op.Grants = append(op.Grants, kvtier.Grant{Index: uint32(i), Slot: v.Slot, Generation: v.Generation})
			case kvtier.Declined, kvtier.Pending:
				declined = true
			}
		}
		if !declined {
			v := g.shape.B * g.shape.D
			op.Blocks = p.table[first*g.shape.C/v:]
			return op, a.Verdicts
		}
		g.k.Cancel(op.Op, true)
		require.True(g.t, time.Now().Before(end), "no slots: %v", a.Verdicts)
	}
}

// store stores a prefix by all ranks and waits until it is held.
func (g *group) store(p *prefix) {
	g.t.Helper()
	g.fill(p)
	op, _ := g.begin(p, 0)
	if len(op.Grants) > 0 {
		for _, r := range g.ranks {
			r.call(request{Cmd: "store", Store: &op})
		}
	}
	g.held(p, len(p.keys))
}

func (g *group) lookup(p *prefix) int {
	h, err := g.k.Lookup(p.root, 0, p.keys, wait)
	if err != nil {
		return -1
	}
	return int(h.Held)
}

func (g *group) held(p *prefix, n int) {
	g.t.Helper()
	require.Eventually(g.t, func() bool { return g.lookup(p) == n }, wait, 2*time.Millisecond, "%d chunks of prefix %d are to be held", n, p.seed)
}

// plan leases and begins a load of a whole prefix.
func (g *group) plan(p *prefix) kvtier.LoadOp {
	g.t.Helper()
	op := opNumbers.Add(1)
	require.NoError(g.t, g.k.Lease(op, p.root, 0, p.keys, kvtier.LeasePrefetch|kvtier.LeasePin))
	_, err := g.k.LeaseResult(op, wait)
	require.NoError(g.t, err)
	verdicts, session, err := g.k.LoadBegin(op, op, p.root, 0, p.keys, wait)
	require.NoError(g.t, err)
	return kvtier.LoadOp{
		Session: session, Op: op, Tokens: uint32(len(p.keys) * g.shape.C), Blocks: p.table, Verdicts: verdicts,
	}
}

// load loads a prefix on all ranks and checks every byte.
func (g *group) load(p *prefix) {
	g.t.Helper()
	for _, r := range g.ranks {
		r.call(request{Cmd: "wipe"})
	}
	op := g.plan(p)
	for _, r := range g.ranks {
		r.call(request{Cmd: "load", Load: &op})
	}
	for _, r := range g.ranks {
		e := r.event(op.Op)
		require.Equal(g.t, kvtier.EventOK, e.Status, "prefix %d, rank %d: %+v", p.seed, r.spec.Rank, e)
		r.call(request{Cmd: "check", Seed: p.seed, Table: p.table, Loaded: int(op.Tokens), To: int(op.Tokens)})
	}
}

// leaderStats is what the tests look at.
type leaderStats struct {
	Members int `json:"members"`
	Loads   struct {
		Ignored int `json:"done_ignored"`
	} `json:"loads"`
	Namespaces []struct {
		Arena struct {
			Slots int
		} `json:"arena"`
		Slots   map[string]int `json:"slots"`
		Charged int            `json:"slots_charged"`
		Fills   int            `json:"disk_reads_running"`
	} `json:"namespaces"`
	Groups []groupStats `json:"groups"`
}

type groupStats struct {
	Group       string `json:"group"`
	State       string `json:"state"`
	Coordinated bool   `json:"coordinator"` // one is attached
	Stores      int    `json:"stores_running"`
	Loads       int    `json:"loads_running"`
	Leases      int    `json:"leases"`
	requests
}

// of gives what is told of a group.
func (s *leaderStats) of(group string) (g groupStats, ok bool) {
	i := slices.IndexFunc(s.Groups, func(g groupStats) bool { return g.Group == group })
	if i < 0 {
		return g, false
	}
	return s.Groups[i], true
}

func statsOf(t *testing.T, c *kvtier.Cache) (s leaderStats, text []byte, ok bool) {
	t.Helper()
	text, err := c.Stats()
	require.NoError(t, err)
	var all struct {
		Leader *leaderStats `json:"leader"`
	}
	require.NoError(t, json.Unmarshal(text, &all))
	if all.Leader == nil {
		return leaderStats{}, text, false
	}
	return *all.Leader, text, true
}

// requireQuiet waits until nothing is under way and every slot is free or holds a
// chunk: the count adds up.
func requireQuiet(t *testing.T, c *kvtier.Cache) {
	t.Helper()
	var text []byte
	quiet := func() bool {
		s, raw, ok := statsOf(t, c)
		text = raw
		if !ok || len(s.Namespaces) == 0 {
			return false
		}
		for _, n := range s.Namespaces {
			sum := 0
			for state, count := range n.Slots {
				sum += count
				if state != "free" && state != "ready" && count > 0 {
					return false
				}
			}
			if sum != n.Arena.Slots || n.Charged > 0 || n.Fills > 0 {
				return false
			}
		}
		for _, g := range s.Groups {
			if g.Stores+g.Loads+g.Leases > 0 {
				return false
			}
		}
		return true
	}
	for end := time.Now().Add(wait); !quiet(); time.Sleep(2 * time.Millisecond) {
		require.True(t, time.Now().Before(end), "something is left: %s", text)
	}
}
