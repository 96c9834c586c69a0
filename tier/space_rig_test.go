package tier

import (
	"encoding/binary"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/sys"
)

const (
	rigRows   = 40
	rigRow    = 100 // of a stride of 128: every row has padding, and the chunk a tail
	rigChunk  = 8192
	rigWait   = 10 * time.Second
	plentiful = "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n"
)

// rig is a Space with a leader's lock around it.
type rig struct {
	*testing.T
	mu     sync.Mutex
	space  *Space
	events map[Ref]SettledEvent
	proc   string // the machine as the pool sees it
	clock  time.Time
}

type rigOptions struct {
	model string
	slots int // of the pool
	pool  *Pool
	disk  *Disk
}

func rigNamespace(model string) *chunk.Namespace {
	n := &chunk.Namespace{
		Model: model, ChunkTokens: rigRows, KVDtype: "bf16",
		Groups: []chunk.Group{{Kind: chunk.GroupFull, TokensPerRow: 1, Regions: []chunk.Region{
			{Name: "kv", Component: "target", Layer: 0, Head: -1, Bytes: rigRow},
		}}},
	}
	if err := n.Normalize(); err != nil {
		panic(err)
	}
	return n
}

// rigPool is a pool on a machine whose files lie in the returned directory.
func rigPool(t *testing.T, bytes int64) (*Pool, string) {
	t.Helper()
	root := t.TempDir()
	rigFile(t, root, "proc/meminfo", plentiful)
	p := NewPool(bytes, slog.New(slog.DiscardHandler))
	p.memory = sys.NewMemory(root)
	p.fileLimit = func() int64 { return math.MaxInt64 }
	return p, root
}

func rigFile(t *testing.T, root, name, text string) {
	t.Helper()
	path := filepath.Join(root, name)
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
}

func newRig(t *testing.T, o rigOptions) *rig {
	t.Helper()
	g := &rig{T: t, events: map[Ref]SettledEvent{}, clock: time.Now()}
	if o.model == "" {
		o.model = "rig"
	}
	pool := o.pool
	if pool == nil {
		pool, g.proc = rigPool(t, int64(o.slots)*rigChunk)
	}
	ns := rigNamespace(o.model)
	layout, err := ns.Layout()
	require.NoError(t, err)
	require.EqualValues(t, rigChunk, layout.PaddedBytes)
	g.space, err = NewSpace(SpaceOptions{
		Namespace: ns, Layout: layout, Pool: pool, Disk: o.disk, Mu: &g.mu, Workers: 2,
		Log: slog.New(slog.DiscardHandler),
		Settled: func(e SettledEvent) {
			_, twice := g.events[e.Ref]
			require.False(t, twice, "settled twice")
			g.events[e.Ref] = e
		},
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, g.space.Close(rigWait)) })
	g.do(func() { g.space.now = func() time.Time { return g.clock } })
	return g
}

// do runs fn as the leader would: with the lock.
func (g *rig) do(fn func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	fn()
}

// until waits for a condition that is looked at with the lock held.
func (g *rig) until(what string, ok func() bool) {
	g.Helper()
	require.Eventually(g, func() (now bool) {
		g.do(func() { now = ok() })
		return now
	}, rigWait, time.Millisecond, what)
}

// grown waits until this many slots have memory.
func (g *rig) grown(slots int) {
	g.Helper()
	g.until("growth", func() bool { return g.space.backedBytes.Load() >= int64(slots)*rigChunk })
}

func rigKey(n int) (k chunk.Key) {
	binary.BigEndian.PutUint64(k[:], uint64(n)+1)
	return k
}

// fillRows writes what a chunk's rows hold, as ranks would: rows only.
func fillRows(b []byte, k chunk.Key) {
	for row := range rigRows {
		for i := range rigRow {
			b[row*128+i] = k[i%32] + byte(row*7+i)
		}
	}
}

func (g *rig) requireRows(b []byte, k chunk.Key) {
	g.Helper()
	want := make([]byte, rigChunk)
	fillRows(want, k)
	require.Equal(g, want, b)
}

// grant takes a slot and fills its rows.
func (g *rig) grant(n, ordinal int, noDisk bool) (r Ref) {
	g.Helper()
	g.do(func() {
		var err error
		r, err = g.space.Grant(rigKey(n), rigKey(n-1), uint32(ordinal), noDisk)
		require.NoError(g, err)
	})
	fillRows(g.space.Bytes(r), rigKey(n))
	return r
}

// store brings a chunk to READY.
func (g *rig) store(n, ordinal int, noDisk bool) Ref {
	g.Helper()
	r := g.grant(n, ordinal, noDisk)
	g.do(func() { require.NoError(g, g.space.Seal(r)) })
	e := g.settled(r)
	require.NoError(g, e.Err)
	require.True(g, e.Ready)
	require.Equal(g, rigKey(n), e.Key)
	return r
}

func (g *rig) settled(r Ref) (e SettledEvent) {
	g.Helper()
	g.until("settled", func() (ok bool) { e, ok = g.events[r]; return ok })
	return e
}

func (g *rig) state(n int) (s State) {
	g.do(func() { s = g.space.Look(rigKey(n)).State })
	return s
}

// makeRoom evicts one chunk by wanting a slot in a full arena, and gives the slot
// back.
func (g *rig) makeRoom() (err error) {
	g.do(func() {
		var r Ref
		if r, err = g.space.Grant(rigKey(1<<40), rigKey(0), 0, true); err == nil {
			g.space.Drop(r)
			g.space.Drained(r)
		}
	})
	return err
}
