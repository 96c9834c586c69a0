package kvtier

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/dcp"
	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/sys"
)

const testWait = 10 * time.Second

// engine is what a host has: ranks with pages outside the Go heap, a coordinator,
// and prefixes of tokens. Pages hold the position oracle: every byte is a function
// of (prefix, region, global token, byte).
type engine struct {
	t      *testing.T
	cache  *Cache
	geo    dcp.Geometry
	blocks int
	width  []int      // bytes of each region
	pages  [][][]byte // by rank and region
	ranks  []*Rank
	k      *Coordinator
	fp     chunk.Fingerprint
	ops    uint64
}

type engineConfig struct {
	group      string
	d, i, b, c int
	blocks     int
	width      []int
}

var smallEngine = engineConfig{group: "engine", d: 1, i: 16, b: 16, c: 32, blocks: 64, width: []int{48, 17}}

func identity() Identity {
	return Identity{Model: "test/model", Attention: "aa", KVDtype: "bf16", Weights: "0123"}
}

// startEngine attaches ranks and coordinator; they need not be ready.
func startEngine(t *testing.T, c *Cache, e engineConfig) *engine {
	t.Helper()
	out := &engine{t: t, cache: c, geo: dcp.Geometry{D: e.d, I: e.i, B: e.b, C: e.c}, blocks: e.blocks, width: e.width}
	for rank := range e.d {
		var mine [][]byte
		for _, w := range e.width {
			b, err := sys.NewPages(e.blocks * e.b * w)
			require.NoError(t, err)
			mine = append(mine, b)
		}
		out.pages = append(out.pages, mine)
		out.ranks = append(out.ranks, out.register(e, rank))
	}
	k, err := c.Coordinate(e.group, e.d)
	require.NoError(t, err)
	out.k = k
	t.Cleanup(out.close)
	return out
}

// register attaches a rank with its pages, for the first time or again.
func (e *engine) register(c engineConfig, rank int) *Rank {
	e.t.Helper()
	var regions []Region
	for i, w := range c.width {
		regions = append(regions, Region{
			Name: "kv", Component: "target", Layer: i, Head: -1, Bytes: w,
			Base: uintptr(unsafe.Pointer(&e.pages[rank][i][0])), BlockStride: int64(c.b * w), TokenStride: int64(w),
		})
	}
	id := identity()
	if rank > 0 {
		id.Weights = ""
	}
	r, err := e.cache.Register(RankConfig{
		Group: c.group, Ranks: c.d, Rank: rank, DCP: c.d, DCPRank: rank, Interleave: c.i,
		BlockTokens: c.b, NumBlocks: c.blocks, ChunkTokens: c.c, Identity: id, Groups: []GroupConfig{{}},
	}, regions)
	require.NoError(e.t, err)
	return r
}

func newEngine(t *testing.T, c *Cache, e engineConfig) *engine {
	t.Helper()
	out := startEngine(t, c, e)
	out.ready()
	return out
}

func (e *engine) ready() {
	e.t.Helper()
	for _, r := range e.ranks {
		a, err := r.Ready(testWait)
		require.NoError(e.t, err)
		e.fp = a.Fingerprint
	}
	_, err := e.k.Ready(testWait)
	require.NoError(e.t, err)
}

func (e *engine) close() {
	for i, r := range e.ranks {
		require.NoError(e.t, r.Close(testWait))
		for _, b := range e.pages[i] {
			require.NoError(e.t, sys.FreePages(b))
		}
	}
	require.NoError(e.t, e.k.Close())
	e.ranks = nil
}

// prefix is a request: its keys, and the blocks its tokens lie in.
type prefix struct {
	seed  uint32
	keys  []Key
	root  Key
	table []uint32 // by virtual block
}

// newPrefix gives n chunks and the blocks they need, starting at block base.
func (e *engine) newPrefix(seed uint32, n int, base uint32) *prefix {
	e.t.Helper()
	root, err := chunk.Root(e.fp, nil)
	require.NoError(e.t, err)
	tokens := make([]uint32, n*e.geo.C)
	for i := range tokens {
		tokens[i] = seed<<16 + uint32(i)
	}
	keys, err := chunk.Chain(nil, root, e.geo.C, tokens, nil)
	require.NoError(e.t, err)
	p := &prefix{seed: seed, keys: keys, root: root}
	for i := range ceil(len(tokens), e.geo.VirtualBlock()) {
		p.table = append(p.table, base+uint32(i))
	}
	// Not in order: a table that is the identity would hide mistakes.
	rand.New(rand.NewPCG(uint64(seed), 1)).Shuffle(len(p.table), func(i, j int) { p.table[i], p.table[j] = p.table[j], p.table[i] })
	return p
}

func oracle(seed uint32, region, token, at int) byte {
	x := uint64(seed)*0x9E3779B97F4A7C15 ^ uint64(region)<<40 ^ uint64(token)<<12 ^ uint64(at)
	x ^= x >> 29
	x *= 0xBF58476D1CE4E5B9
	return byte(x >> 32)
}

// at is where a token's bytes of a region lie.
func (e *engine) at(p *prefix, region, token int) []byte {
	block, rank, local := e.geo.Locate(token)
	w := e.width[region]
	off := (int(p.table[block])*e.geo.B + local) * w
	return e.pages[rank][region][off : off+w]
}

// fill computes the KV of tokens [from, to).
func (e *engine) fill(p *prefix, from, to int) {
	for token := from; token < to; token++ {
		for region := range e.width {
			for i := range e.at(p, region, token) {
				e.at(p, region, token)[i] = oracle(p.seed, region, token, i)
			}
		}
	}
}

func (e *engine) wipe(value byte) {
	for _, rank := range e.pages {
		for _, b := range rank {
			for i := range b {
				b[i] = value
			}
		}
	}
}

// requireOnly checks that exactly the tokens [from, to) of p hold their KV and that
// every other byte of all pages is value.
func (e *engine) requireOnly(p *prefix, from, to int, value byte) {
	e.t.Helper()
	want := make([][][]byte, len(e.pages))
	for r, rank := range e.pages {
		for _, b := range rank {
			w := make([]byte, len(b))
			for i := range w {
				w[i] = value
			}
			want[r] = append(want[r], w)
		}
	}
	for token := from; token < to; token++ {
		block, rank, local := e.geo.Locate(token)
		for region, w := range e.width {
			off := (int(p.table[block])*e.geo.B + local) * w
			for i := range w {
				want[rank][region][off+i] = oracle(p.seed, region, token, i)
			}
		}
	}
	for r, rank := range e.pages {
		for region, b := range rank {
			for i := range b {
				if b[i] != want[r][region][i] {
					e.t.Fatalf("rank %d, region %d, byte %d of %d: 0x%02x, want 0x%02x", r, region, i, len(b), b[i], want[r][region][i])
				}
			}
		}
	}
}

// store stores chunks [first, first+n) of p and gives the verdicts. While something
// is declined it tries again: the arena grows on demand, a moment behind.
func (e *engine) store(p *prefix, first, n int) []Verdict {
	e.t.Helper()
	end := time.Now().Add(testWait)
	all := e.offer(p, first, n)
	for {
		declined := slices.IndexFunc(all, func(v Verdict) bool { return v.Code == Declined })
		if declined < 0 || time.Now().After(end) {
			return all
		}
		time.Sleep(time.Millisecond)
		copy(all[declined:], e.offer(p, first+declined, n-declined))
	}
}

// offer tries once. Everything that is granted is stored by all ranks.
func (e *engine) offer(p *prefix, first, n int) []Verdict {
	e.t.Helper()
	e.ops++
	parent := p.root
	if first > 0 {
		parent = p.keys[first-1]
	}
	out := e.k.StoreBegin([]StoreBegin{{Op: e.ops, Parent: parent, First: uint32(first), Keys: p.keys[first : first+n]}}, testWait)
	require.Len(e.t, out, 1)
	require.NoError(e.t, out[0].Err)
	require.Len(e.t, out[0].Verdicts, n)
	op := StoreOp{Session: out[0].Session, Op: e.ops, FirstOrdinal: uint32(first)}
	for i, v := range out[0].Verdicts {
		if v.Code == Granted {
			op.Grants = append(op.Grants, Grant{Index: uint32(i), Slot: v.Slot, Generation: v.Generation})
		}
	}
	virtual := e.geo.VirtualBlock()
	op.Blocks = p.table[first*e.geo.C/virtual : ceil((first+n)*e.geo.C, virtual)]
	if len(op.Grants) > 0 {
		for _, r := range e.ranks {
			require.NoError(e.t, r.Store(op))
		}
	}
	return out[0].Verdicts
}

// held waits until n leading chunks of p are held.
func (e *engine) held(p *prefix, n int) {
	e.t.Helper()
	end := time.Now().Add(testWait)
	for {
		h, err := e.k.Lookup(p.root, 0, p.keys, testWait)
		if err == nil && int(h.Held) == n {
			return
		}
		if time.Now().After(end) {
			stats, _ := e.cache.Stats()
			e.t.Fatalf("%d chunks are to be held, answer %+v, %v; %s", n, h, err, stats)
		}
		time.Sleep(time.Millisecond)
	}
}

// begin leases and begins a load of tokens [from, to) of p into the same blocks.
func (e *engine) begin(p *prefix, from, to int) LoadOp {
	e.t.Helper()
	e.ops++
	lease := e.ops
	require.NoError(e.t, e.k.Lease(lease, p.root, 0, p.keys, LeasePrefetch|LeasePin))
	_, err := e.k.LeaseResult(lease, testWait)
	require.NoError(e.t, err)
	first, end := from/e.geo.C, ceil(to, e.geo.C)
	parent := p.root
	if first > 0 {
		parent = p.keys[first-1]
	}
	verdicts, session, err := e.k.LoadBegin(e.ops, lease, parent, uint32(first), p.keys[first:end], testWait)
	require.NoError(e.t, err)
	virtual := e.geo.VirtualBlock()
	return LoadOp{
		Session: session, Op: e.ops, FirstToken: uint32(from), Tokens: uint32(to - from), Verdicts: verdicts,
		Blocks: p.table[from/virtual : ceil(to, virtual)],
	}
}

// load runs a load on all ranks and gives the events, one of each rank.
func (e *engine) load(op LoadOp) []Event {
	e.t.Helper()
	for _, r := range e.ranks {
		require.NoError(e.t, r.Load(op))
	}
	return e.events(len(e.ranks))
}

// events waits for n events and makes sure that each rank has one.
func (e *engine) events(n int) []Event {
	e.t.Helper()
	var out []Event
	require.Eventually(e.t, func() bool {
		out = append(out, e.cache.Events(100)...)
		return len(out) >= n
	}, testWait, time.Millisecond, "%d events are to come", n)
	require.Len(e.t, out, n)
	return out
}

// requireLoaded checks that a load of chunks succeeded on every rank.
func (e *engine) requireLoaded(events []Event, op LoadOp) {
	e.t.Helper()
	end := int(op.FirstToken) + int(op.Tokens)
	chunks := ceil(end, e.geo.C) - int(op.FirstToken)/e.geo.C
	seen := map[uint64]bool{}
	for _, ev := range events {
		require.Equal(e.t, Event{Kind: EventLoad, Op: op.Op, Rank: ev.Rank, Status: EventOK, FirstFailed: uint32(chunks), Tokens: op.Tokens}, ev)
		seen[ev.Rank] = true
	}
	require.Len(e.t, seen, len(e.ranks))
}

func (e *engine) requireIdle() {
	e.t.Helper()
	requireIdle(e.t, e.cache)
}

// requireIdle waits until the leader has nothing of its groups under way and nothing
// pinned for them.
func requireIdle(t *testing.T, c *Cache) {
	t.Helper()
	var text []byte
	require.Eventually(t, func() bool {
		var s struct {
			Groups []struct {
				Charged int `json:"slots_charged"`
				Stores  int `json:"stores_running"`
				Loads   int `json:"loads_running"`
				Leases  int `json:"leases"`
			} `json:"groups"`
		}
		var err error
		text, err = c.leaderStats()
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(text, &s))
		for _, g := range s.Groups {
			if g.Charged+g.Stores+g.Loads+g.Leases > 0 {
				return false
			}
		}
		return len(s.Groups) > 0
	}, testWait, time.Millisecond, "something is left: %s", text)
}

func payload(seed uint64, n int) []byte {
	b := make([]byte, n)
	r := rand.NewPCG(seed, 7)
	for i := 0; i+8 <= n; i += 8 {
		binary.LittleEndian.PutUint64(b[i:], r.Uint64())
	}
	return b
}

func blobKey(i int) Key { return chunk.Digest(fmt.Sprint("blob ", i)) }
