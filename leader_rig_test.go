package kvtier

import (
	"encoding/binary"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/dcp"
	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/disktest"
	"github.com/kvtier/kvtier/internal/sys"
	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/tier"
)

// The rig runs a leader over a real arena and a real disk tier. Chunks have 16
// tokens of 64 bytes, in slots of 4096 bytes.
const (
	rigC     = 16
	rigB     = 4
	rigRow   = 64
	rigSlot  = 4096
	patience = 10 * time.Second // for conditions that background work brings about
)

// rigT is what the rig needs of a test; a property test has it too.
type rigT interface {
	Helper()
	Errorf(format string, args ...any)
	Fatal(args ...any)
	FailNow()
}

// leaderRig is one leader on a root that outlives it.
type leaderRig struct {
	t    rigT
	l    *leader
	root *tier.Root
	dir  string
	fs   *gatedFS
	now  atomic.Int64 // added to the real clock, ns
	opts leaderOptions
	nop  uint64
	seq  uint32

	idle atomic.Bool // no rank copies; the rig writes slots without a look at the table
}

type rigOption func(*leaderOptions)

func withoutDisk(o *leaderOptions)      { o.disk = nil }
func withSlots(n int64) rigOption       { return func(o *leaderOptions) { o.dramBytes = n * rigSlot } }
func withDiskCap(bytes int64) rigOption { return func(o *leaderOptions) { o.disk.CapBytes = bytes } }
func newLeaderRig(t testing.TB, options ...rigOption) *leaderRig {
	r := &leaderRig{t: t, dir: t.TempDir(), fs: newGatedFS()}
	r.opts = leaderOptions{
		dramBytes: 64 * rigSlot, workers: 1,
		partTimeout: 120 * time.Second, straggleTimeout: 10 * time.Second,
		windowTimeout: 10 * time.Second, leaseTTL: 60 * time.Second,
		disk: &tier.StoreOptions{CapBytes: 1 << 30, FS: r.fs},
		now:  func() time.Time { return time.Now().Add(time.Duration(r.now.Load())) },
	}
	for _, o := range options {
		o(&r.opts)
	}
	r.start()
	t.Cleanup(func() {
		r.fs.open()
		r.stop()
	})
	return r
}

func (r *leaderRig) start() {
	var err error
	r.root, err = tier.OpenRoot(r.dir, tier.RootOptions{AllowNetwork: true})
	require.NoError(r.t, err)
	ok, holder, err := r.root.TryLock()
	require.NoError(r.t, err)
	require.True(r.t, ok, holder)
	r.l, err = startLeader(r.opts, r.root, slog.New(slog.DiscardHandler))
	require.NoError(r.t, err)
}

func (r *leaderRig) stop() {
	if r.l != nil {
		require.NoError(r.t, r.l.close(10*time.Second))
		require.NoError(r.t, r.root.Close())
		r.l = nil
	}
}

// advance moves the leader's clock and lets it look at its deadlines.
func (r *leaderRig) advance(d time.Duration) {
	r.now.Add(int64(d))
	r.l.tick()
}

func (r *leaderRig) op() uint64 { r.nop++; return r.nop }

// rigGroup is the coordinator and the ranks of one group.
type rigGroup struct {
	r     *leaderRig
	id    string
	geo   dcp.Geometry
	coord *attachment
	ranks []*attachment
	acc   *accepted
	root  chunk.Key
}

func rigDeclare(geo dcp.Geometry, rank int) *wire.Declare {
	return &wire.Declare{
		Identity:    wire.Identity{Model: "test/model", KVDtype: "bf16", Encoding: "rows"},
		ChunkTokens: geo.C, BlockTokens: geo.B, DCP: geo.D, Interleave: geo.I, DCPRank: rank,
		Groups: []wire.DeclaredGroup{{Kind: chunk.GroupFull, TokensPerRow: 1, Regions: []wire.DeclaredRegion{
			{Name: "kv", Component: "target", Layer: 0, Head: -1, Bytes: rigRow},
		}}},
	}
}

// join attaches a group of D ranks and waits until it is accepted.
func (r *leaderRig) join(id string, d, i int) *rigGroup {
	g := &rigGroup{r: r, id: id, geo: dcp.Geometry{D: d, I: i, B: rigB * i, C: rigC}}
	if d == 1 {
		g.geo.B = rigB
	}
	g.coord = r.attach(id, d, -1, true)
	answers := make(chan *accepted, d+1)
	done := func(a *accepted, no *wire.Refuse) {
		if no != nil {
			r.t.Errorf("group %s refused: %s", id, no.Reason)
		}
		answers <- a
	}
	g.coord.declare(nil, done)
	for rank := range d {
		a := r.attach(id, d, rank, false)
		g.ranks = append(g.ranks, a)
		a.declare(rigDeclare(g.geo, rank), done)
	}
	for range d + 1 {
		select {
		case g.acc = <-answers:
			require.NotNil(r.t, g.acc)
		case <-time.After(patience):
			r.t.Fatal("the group is not decided")
		}
	}
	fp, ok := chunk.ParseFingerprint(g.acc.accept.Fingerprint)
	require.True(r.t, ok)
	var err error
	g.root, err = chunk.Root(fp, nil)
	require.NoError(r.t, err)
	return g
}

func (r *leaderRig) attach(group string, ranks, rank int, coordinator bool) *attachment {
	a, w, err := r.l.attach(&wire.Hello{Protocol: wire.Protocol, Group: group, Ranks: ranks, Rank: rank, Coordinator: coordinator})
	require.NoError(r.t, err)
	require.Equal(r.t, r.l.session(), w.Session)
	a.watchCopies(func() bool { return !r.idle.Load() })
	return a
}

// cancelUnsent cancels an operation that no rank has, at a moment when none copies.
func (g *rigGroup) cancelUnsent(op uint64) {
	g.r.idle.Store(true)
	defer g.r.idle.Store(false)
	g.r.call(g.coord, &wire.Request{Type: wire.Cancel, Op: op, Flags: wire.CancelUnsent})
}

// ask sends a request; the reply comes through the channel.
func (r *leaderRig) ask(a *attachment, req *wire.Request) <-chan *wire.Reply {
	r.seq++
	req.Seq = r.seq
	out := make(chan *wire.Reply, 2)
	a.serve(req, func(rep *wire.Reply) {
		if _, err := rep.Append(nil); err != nil {
			r.t.Errorf("a reply that cannot be encoded: %v", err)
		}
		out <- rep
	})
	return out
}

func (r *leaderRig) wait(c <-chan *wire.Reply) *wire.Reply {
	r.t.Helper()
	select {
	case rep := <-c:
		return rep
	case <-time.After(patience):
		r.t.Fatal("no reply")
		return nil
	}
}

func (r *leaderRig) call(a *attachment, req *wire.Request) *wire.Reply {
	r.t.Helper()
	rep := r.wait(r.ask(a, req))
	require.Equal(r.t, req.Type, rep.Type)
	require.Equal(r.t, req.Op, rep.Op)
	require.Equal(r.t, req.Seq, rep.Seq)
	return rep
}

// chain gives the keys of a prefix of n chunks.
func (g *rigGroup) chain(seed uint32, n int) []chunk.Key {
	tokens := make([]uint32, n*rigC)
	for i := range tokens {
		tokens[i] = seed
	}
	keys, err := chunk.Chain(nil, g.root, rigC, tokens, nil)
	require.NoError(g.r.t, err)
	return keys
}

// content is the payload that a chunk must have: a function of key, row and place.
func content(k chunk.Key, row int) []byte {
	out := make([]byte, rigRow)
	seed := binary.LittleEndian.Uint64(k[:]) + uint64(row)*0x9E3779B97F4A7C15
	for i := 0; i < rigRow; i += 8 {
		seed = seed*6364136223846793005 + 1442695040888963407
		binary.LittleEndian.PutUint64(out[i:], seed)
	}
	return out
}

// rows are those of the chunk that a rank holds.
func (g *rigGroup) rows(ordinal uint32, rank int) []int {
	var out []int
	for t := range rigC {
		if _, r, _ := g.geo.Locate(int(ordinal)*rigC + t); r == rank {
			out = append(out, t)
		}
	}
	return out
}

func run(parent chunk.Key, first int, keys []chunk.Key) *wire.Run {
	return &wire.Run{Parent: parent, First: uint32(first), Keys: keys}
}

// runOf is the run keys[from:] of a chain.
func (g *rigGroup) runOf(keys []chunk.Key, from int) *wire.Run {
	parent := g.root
	if from > 0 {
		parent = keys[from-1]
	}
	return run(parent, from, keys[from:])
}

func (g *rigGroup) begin(op uint64, rn *wire.Run) []wire.Verdict {
	rep := g.r.call(g.coord, &wire.Request{Type: wire.StoreBegin, Op: op, Run: rn})
	require.Len(g.r.t, rep.Verdicts, len(rn.Keys))
	return rep.Verdicts
}

// write copies one rank's rows into every granted slot and reports.
func (g *rigGroup) write(op uint64, rank int, rn *wire.Run, vs []wire.Verdict) {
	req := &wire.Request{Type: wire.StoreDone, Op: op}
	for i, v := range vs {
		if v.Code != wire.Granted {
			continue
		}
		slot := g.acc.space.Bytes(tier.Ref{Slot: v.Slot, Generation: v.Generation})
		for _, row := range g.rows(rn.First+uint32(i), rank) {
			copy(slot[row*rigRow:], content(rn.Keys[i], row))
		}
		req.Done = append(req.Done, wire.Done{Slot: v.Slot, Generation: v.Generation, Part: uint32(rank)})
	}
	if len(req.Done) > 0 {
		require.Equal(g.r.t, wire.StatusOK, g.r.call(g.ranks[rank], req).Status)
	}
}

// store brings keys[from:], in as many operations as it takes, and waits until all
// are READY.
func (g *rigGroup) store(keys []chunk.Key, from int) {
	g.r.t.Helper()
	limit := time.Now().Add(patience)
	for from < len(keys) {
		require.True(g.r.t, time.Now().Before(limit), "storing does not get on at chunk %d", from)
		op, rn := g.r.op(), g.runOf(keys, from)
		vs := g.begin(op, rn)
		for rank := range g.ranks {
			g.write(op, rank, rn, vs)
		}
		for from < len(keys) && g.state(keys[from]) {
			from++
		}
		time.Sleep(100 * time.Microsecond)
	}
}

// grow waits until the whole arena has memory, which comes in the background.
func (g *rigGroup) grow() {
	g.r.t.Helper()
	slots := g.acc.accept.Slots
	keys := g.chain(1<<31, slots)
	require.Eventually(g.r.t, func() bool {
		op, n := g.r.op(), 0
		for _, v := range g.begin(op, g.runOf(keys, 0)) {
			if v.Code == wire.Granted {
				n++
			}
		}
		g.cancelUnsent(op)
		return n == slots
	}, patience, time.Millisecond)
}

// state says whether a chunk is held now.
func (g *rigGroup) state(k chunk.Key) bool {
	g.r.l.mu.Lock()
	defer g.r.l.mu.Unlock()
	p := g.acc.space.Look(k)
	return p.State == tier.Ready || p.State == tier.Free && p.OnDisk
}

func (g *rigGroup) look(k chunk.Key) tier.Presence {
	g.r.l.mu.Lock()
	defer g.r.l.mu.Unlock()
	return g.acc.space.Look(k)
}

func (g *rigGroup) counts() map[tier.State]int {
	g.r.l.mu.Lock()
	defer g.r.l.mu.Unlock()
	return g.acc.space.Counts()
}

// lease asks for a run with PREFETCH and PIN, and waits for its reads.
func (g *rigGroup) lease(id uint64, rn *wire.Run) wire.Hits {
	g.r.t.Helper()
	rep := g.leaseReply(id, rn, patience)
	require.Equal(g.r.t, wire.StatusOK, rep.Status)
	return rep.Hits
}

func (g *rigGroup) leaseReply(id uint64, rn *wire.Run, timeout time.Duration) *wire.Reply {
	g.r.t.Helper()
	x := *rn
	x.Lease, x.Flags = id, wire.LeasePrefetch|wire.LeasePin
	return g.r.call(g.coord, &wire.Request{Type: wire.Lease, Run: &x, Timeout: timeout})
}

func (g *rigGroup) release(id uint64) {
	g.r.call(g.coord, &wire.Request{Type: wire.Release, Run: &wire.Run{Lease: id}})
}

func (g *rigGroup) loadBegin(op, lease uint64, rn *wire.Run) *wire.Reply {
	x := *rn
	x.Lease = lease
	return g.r.call(g.coord, &wire.Request{Type: wire.LoadBegin, Op: op, Run: &x})
}

func (g *rigGroup) loadEnd(op uint64, rank int) {
	g.r.call(g.ranks[rank], &wire.Request{Type: wire.LoadDone, Op: op, Flags: wire.LoadDoneEnd})
}

// load is one rank's whole load, as a member does it: it compares what it reads and
// returns the verdicts it saw.
func (g *rigGroup) load(op uint64, rank int, rn *wire.Run, first []wire.Verdict) []wire.Code {
	verdicts := append([]wire.Verdict(nil), first...)
	var seen []wire.Code
	for i := 0; i < len(rn.Keys); i++ {
		if verdicts[i].Code == wire.Later {
			rep := <-g.r.ask2(g.ranks[rank], &wire.Request{Type: wire.LoadWait, Op: op, First: uint32(i)})
			copy(verdicts[i:], rep.Verdicts)
			if rep.Status != wire.StatusOK {
				seen = append(seen, wire.Failed)
				break
			}
		}
		v := verdicts[i]
		seen = append(seen, v.Code)
		if v.Code != wire.Ready {
			break
		}
		slot := g.acc.space.Bytes(tier.Ref{Slot: v.Slot, Generation: v.Generation})
		for _, row := range g.rows(rn.First+uint32(i), rank) {
			if string(slot[row*rigRow:][:rigRow]) != string(content(rn.Keys[i], row)) {
				g.r.t.Errorf("rank %d, chunk %d, row %d: wrong bytes", rank, i, row)
			}
		}
		<-g.r.ask2(g.ranks[rank], &wire.Request{Type: wire.LoadDone, Op: op,
			Done: []wire.Done{{Slot: v.Slot, Generation: v.Generation, Part: uint32(rank)}}})
	}
	<-g.r.ask2(g.ranks[rank], &wire.Request{Type: wire.LoadDone, Op: op, Flags: wire.LoadDoneEnd})
	return seen
}

// ask2 is ask for goroutines: it leaves seq alone.
func (r *leaderRig) ask2(a *attachment, req *wire.Request) <-chan *wire.Reply {
	out := make(chan *wire.Reply, 2)
	a.serve(req, func(rep *wire.Reply) { out <- rep })
	return out
}

// loadAll runs a load on all ranks at once; all must see the same.
func (g *rigGroup) loadAll(lease uint64, rn *wire.Run) []wire.Code {
	g.r.t.Helper()
	op := g.r.op()
	rep := g.loadBegin(op, lease, rn)
	require.Equal(g.r.t, wire.StatusOK, rep.Status)
	return g.loadRanks(op, rn, rep.Verdicts)
}

func (g *rigGroup) loadRanks(op uint64, rn *wire.Run, verdicts []wire.Verdict) []wire.Code {
	g.r.t.Helper()
	seen := make([][]wire.Code, len(g.ranks))
	var wg sync.WaitGroup
	for rank := range g.ranks {
		wg.Go(func() { seen[rank] = g.load(op, rank, rn, verdicts) })
	}
	wg.Wait()
	for rank := range g.ranks {
		require.Equal(g.r.t, seen[0], seen[rank], "rank %d sees other verdicts", rank)
	}
	return seen[0]
}

// onDisk waits until all these chunks are on disk.
func (g *rigGroup) onDisk(keys []chunk.Key) {
	g.r.t.Helper()
	require.Eventually(g.r.t, func() bool {
		for _, k := range keys {
			if !g.look(k).OnDisk {
				return false
			}
		}
		return true
	}, patience, time.Millisecond)
}

// spoil damages the file of a chunk, which must be there.
func (r *leaderRig) spoil(k chunk.Key) { require.Equal(r.t, 1, r.damage(k)) }

// damage changes bytes of the files with this key, and says how many there are.
func (r *leaderRig) damage(k chunk.Key) (found int) {
	for _, path := range disktest.Files(r.t, r.dir, chunk.FileName(k)) {
		found++
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if os.IsNotExist(err) {
			continue // evicted meanwhile
		}
		require.NoError(r.t, err)
		_, err = f.WriteAt([]byte{1, 2, 3, 4, 5}, 100)
		require.NoError(r.t, err)
		require.NoError(r.t, f.Close())
	}
	return found
}

// quiet waits for background work to end, then checks that nothing is left of any
// operation: no pins, no leases, every slot FREE or READY, and all slots there.
func (r *leaderRig) quiet() {
	r.t.Helper()
	var last string
	require.Eventually(r.t, func() bool {
		last = r.leftovers()
		return last == ""
	}, patience, time.Millisecond, "left over: %s", &lateString{&last})
}

type lateString struct{ s *string }

func (l *lateString) String() string { return *l.s }

func (r *leaderRig) leftovers() string {
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	var out []string
	say := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	for _, g := range r.l.groups {
		if len(g.stores) > 0 || len(g.loads) > 0 {
			say("group %s has %d stores, %d loads", g.id, len(g.stores), len(g.loads))
		}
	}
	for _, a := range r.l.members {
		if len(a.leases) > 0 || a.charged != 0 || a.onDisk != 0 {
			say("member %d has %d leases, %d slots, %d by number", a.id, len(a.leases), a.charged, a.onDisk)
		}
	}
	for _, sp := range r.l.spaces {
		c := sp.Counts()
		sum := 0
		for _, n := range c {
			sum += n
		}
		if sum != sp.Slots() || c[tier.Free]+c[tier.Ready] != sum {
			say("slots %v of %d", c, sp.Slots())
		}
		if sp.charged != 0 || len(sp.fills) != 0 || len(sp.loads) != 0 {
			say("%d slots charged, %d fills, %d loads", sp.charged, len(sp.fills), len(sp.loads))
		}
		if s := sp.Stats(); s.Stale != 0 {
			say("%d stale events", s.Stale)
		}
		// A pin or a hold keeps a READY slot from being given away.
		if n := sp.Available(); len(r.l.spaces) == 1 && n != sp.Slots() {
			say("%d slots of %d could be had", n, sp.Slots())
		}
	}
	return strings.Join(out, "; ")
}

// gatedFS is the real file system with a gate before reads of chunks and one before
// the listing of directories.
type gatedFS struct {
	tier.LocalFilesystem
	mu    sync.Mutex
	reads chan struct{} // not nil: reads wait for it to close
	lists chan struct{}

	broken atomic.Bool // reads fail
}

func newGatedFS() *gatedFS { return &gatedFS{} }

func (f *gatedFS) closeReads() { f.mu.Lock(); f.reads = make(chan struct{}); f.mu.Unlock() }
func (f *gatedFS) closeLists() { f.mu.Lock(); f.lists = make(chan struct{}); f.mu.Unlock() }

func (f *gatedFS) open() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range []chan struct{}{f.reads, f.lists} {
		if c != nil {
			close(c)
		}
	}
	f.reads, f.lists = nil, nil
}

func (f *gatedFS) pass(which *chan struct{}) {
	f.mu.Lock()
	c := *which
	f.mu.Unlock()
	if c != nil {
		<-c
	}
}

func (f *gatedFS) ReadNames(dir string) ([]string, error) {
	if len(filepath.Base(dir)) == 2 { // where chunks are; the others are listed at once
		f.pass(&f.lists)
	}
	return f.LocalFilesystem.ReadNames(dir)
}

func (f *gatedFS) Open(path string, flags sys.OpenFlag) (tier.OpenFile, error) {
	o, err := f.LocalFilesystem.Open(path, flags)
	if err != nil {
		return nil, err
	}
	return &gatedFile{o, f}, nil
}

type gatedFile struct {
	tier.OpenFile
	f *gatedFS
}

func (g *gatedFile) ReadV(bufs [][]byte, off int64) (int, error) {
	g.f.pass(&g.f.reads)
	if g.f.broken.Load() {
		return 0, syscall.EIO
	}
	return g.OpenFile.ReadV(bufs, off)
}
