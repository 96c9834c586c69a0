package kvtier

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/sys"
)

// mode is how the Cache under test reaches its leader.
type mode struct {
	name string
	open func(t *testing.T, dir string) *Cache
}

var modes = []mode{
	{"direct", func(t *testing.T, dir string) *Cache { return openTest(t, dir, RoleLeader) }},
	// Over the ring, with both ends here: the registry is passed by.
	{"ring", func(t *testing.T, dir string) *Cache {
		openTest(t, dir, RoleLeader)
		return openApart(t, dir, RoleMember)
	}},
	{"process", func(t *testing.T, dir string) *Cache {
		p := startProcess(t, testConfig(dir, RoleLeader))
		require.Equal(t, StateLeader, p.state())
		return openTest(t, dir, RoleMember)
	}},
}

// 64 slots of a blob of the suite.
const suiteDRAM = 64 * suiteBlob
const suiteBlob = 64 << 10

func testConfig(dir string, role Role) string { return testConfigOf(dir, role, suiteDRAM) }

func testConfigOf(dir string, role Role, dram int) string {
	return fmt.Sprintf(`{"disk_path":%q,"role":%q,"dram_gib":%g,"disk_gib":0.1,"free_floor_gib":0,"log_level":"debug",
		"close_timeout_s":10,"load_window_deadline_s":5}`, dir, role, float64(dram)/gib)
}

func parsed(t *testing.T, text string) *Config {
	t.Helper()
	cfg, err := ParseConfig([]byte(text))
	require.NoError(t, err)
	return cfg
}

func openTest(t *testing.T, dir string, role Role) *Cache {
	t.Helper()
	c, err := Open(parsed(t, testConfig(dir, role)))
	require.NoError(t, err)
	watch(t, c)
	return c
}

// openApart opens a second Cache of a root in this process, as if it were another
// one.
func openApart(t *testing.T, dir string, role Role) *Cache {
	t.Helper()
	cfg, err := parsed(t, testConfig(dir, role)).filled()
	require.NoError(t, err)
	root, err := openRoot(cfg)
	require.NoError(t, err)
	id, err := os.Stat(root.Path())
	require.NoError(t, err)
	c, err := newCache(cfg, root, id)
	require.NoError(t, err)
	c.start()
	watch(t, c)
	return c
}

// watch closes the Cache at the end and shows its log when the test failed.
func watch(t *testing.T, c *Cache) {
	t.Cleanup(func() {
		err := c.Close(testWait)
		if t.Failed() {
			for _, r := range c.Records(1 << 20) {
				t.Log(r.Level, r.Text)
			}
		}
		require.NoError(t, err)
	})
}

func requireState(t *testing.T, c *Cache, state string) {
	t.Helper()
	require.Eventually(t, func() bool { s, _ := c.State(); return s == state }, testWait, time.Millisecond,
		"the cache is to become %s", state)
}

func newBlob(t *testing.T, c *Cache) *Blob {
	t.Helper()
	b, err := c.Blob("test/blob", suiteBlob, 64, Identity{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	require.NoError(t, b.Ready(testWait))
	return b
}

// TestSuite runs the same over every kind of link.
func TestSuite(t *testing.T) {
	for _, m := range modes {
		t.Run(m.name, func(t *testing.T) {
			for _, c := range []struct {
				name string
				run  func(t *testing.T, c *Cache)
			}{
				{"blob", suiteBlobs},
				{"blob longer than DRAM", suiteBlobsOverDRAM},
				{"pages", suitePages},
				{"pages of two ranks", suiteTwoRanks},
				{"clip", suiteClip},
				{"windows", suiteWindows},
				{"cancel", suiteCancel},
				{"leases", suiteLeases},
				{"refusals", suiteRefusals},
				{"stale", suiteStale},
				{"reset and stats", suiteStats},
				{"group refused", suiteGroupRefused},
				{"goodbye", suiteGoodbye},
				{"close while waiting", suiteCloseWhileWaiting},
			} {
				t.Run(c.name, func(t *testing.T) { c.run(t, m.open(t, t.TempDir())) })
			}
		})
	}
}

func suiteBlobs(t *testing.T, c *Cache) {
	b := newBlob(t, c)
	require.NotZero(t, b.Fingerprint())
	got := make([]byte, suiteBlob)
	require.ErrorIs(t, b.Get(blobKey(0), got, testWait), ErrMiss)
	parent := Key{}
	for i := range 5 {
		require.NoError(t, b.Put(blobKey(i), parent, uint32(i), payload(uint64(i), suiteBlob), testWait))
		parent = blobKey(i)
	}
	for i := range 5 {
		require.NoError(t, b.Get(blobKey(i), got, testWait))
		require.Equal(t, payload(uint64(i), suiteBlob), got)
	}
	// What is held is not stored again.
	require.NoError(t, b.Put(blobKey(1), blobKey(0), 1, payload(99, suiteBlob), testWait))
	require.NoError(t, b.Get(blobKey(1), got, testWait))
	require.Equal(t, payload(1, suiteBlob), got)

	require.ErrorIs(t, b.Put(blobKey(50), blobKey(49), 50, payload(50, suiteBlob), testWait), ErrDeclined, "its parent is not held")
	require.ErrorIs(t, b.Put(blobKey(5), parent, 5, make([]byte, 3), testWait), ErrArgument)
	require.ErrorIs(t, b.Get(blobKey(1), make([]byte, suiteBlob+1), testWait), ErrArgument)

	keys := []Key{blobKey(0), blobKey(1), blobKey(2), blobKey(3), blobKey(4), blobKey(5)}
	held, resident, err := b.Lookup(keys)
	require.NoError(t, err)
	require.Equal(t, 5, held)
	require.Equal(t, 5, resident)

	require.NoError(t, c.Flush(testWait))
	require.NoError(t, b.Remove(keys[2:4]))
	held, _, err = b.Lookup(keys)
	require.NoError(t, err)
	require.Equal(t, 2, held)
	require.ErrorIs(t, b.Get(blobKey(2), got, testWait), ErrMiss)
	require.NoError(t, b.Get(blobKey(4), got, testWait))
}

// More than the arena holds comes back from disk.
func suiteBlobsOverDRAM(t *testing.T, c *Cache) {
	b := newBlob(t, c)
	const n = 96
	parent := Key{}
	for i := range n {
		require.NoError(t, b.Put(blobKey(i), parent, uint32(i), payload(uint64(i), suiteBlob), testWait))
		parent = blobKey(i)
		if i%8 == 7 {
			require.NoError(t, c.Flush(testWait))
		}
	}
	got := make([]byte, suiteBlob)
	for i := range n {
		require.NoError(t, b.Get(blobKey(i), got, testWait), "chunk %d", i)
		require.Equal(t, payload(uint64(i), suiteBlob), got)
	}
}

func suitePages(t *testing.T, c *Cache) {
	e := newEngine(t, c, smallEngine)
	p := e.newPrefix(1, 6, 3)
	e.fill(p, 0, 6*e.geo.C)
	for _, v := range e.store(p, 0, 6) {
		require.Equal(t, Granted, v.Code)
	}
	e.held(p, 6)
	for _, v := range e.store(p, 0, 6) {
		require.Equal(t, Have, v.Code)
	}
	other := e.newPrefix(1, 6, 40) // the same tokens in other blocks
	e.wipe(0xEE)
	op := e.begin(other, 0, 6*e.geo.C)
	e.requireLoaded(e.load(op), op)
	e.requireOnly(other, 0, 6*e.geo.C, 0xEE)
}

func suiteTwoRanks(t *testing.T, c *Cache) {
	// D*I > C: a chunk lies on one of the ranks only.
	for i, cfg := range []engineConfig{
		{group: "a", d: 2, i: 4, b: 8, c: 32, blocks: 32, width: []int{24}},
		{group: "b", d: 2, i: 64, b: 64, c: 32, blocks: 8, width: []int{40, 4}},
		{group: "c", d: 2, i: 1, b: 4, c: 12, blocks: 64, width: []int{656}},
	} {
		e := newEngine(t, c, cfg)
		seed := uint32(10 + i)
		p := e.newPrefix(seed, 5, 1)
		e.fill(p, 0, 5*cfg.c)
		e.store(p, 0, 3)
		e.store(p, 3, 2)
		e.held(p, 5)
		e.wipe(0x11)
		op := e.begin(p, 0, 5*cfg.c)
		e.requireLoaded(e.load(op), op)
		e.requireOnly(p, 0, 5*cfg.c, 0x11)
	}
}

func suiteClip(t *testing.T, c *Cache) {
	e := newEngine(t, c, engineConfig{group: "clip", d: 2, i: 2, b: 4, c: 24, blocks: 64, width: []int{20, 3}})
	p := e.newPrefix(3, 8, 2)
	e.fill(p, 0, 8*24)
	e.store(p, 0, 8)
	e.held(p, 8)
	for _, r := range [][2]int{{5, 100}, {24, 25}, {47, 49}, {0, 1}, {30, 40}, {100, 192}} {
		e.wipe(0x77)
		op := e.begin(p, r[0], r[1])
		e.requireLoaded(e.load(op), op)
		e.requireOnly(p, r[0], r[1], 0x77)
	}
}

// A prefix longer than a window, and than the arena, streams through it.
func suiteWindows(t *testing.T, c *Cache) {
	const w = 1024
	e := newEngine(t, c, engineConfig{group: "long", d: 1, i: 8, b: 8, c: 64, blocks: 1200, width: []int{w}})
	const n = 120 // chunks of 64 KiB: twice the arena
	p := e.newPrefix(4, n, 0)
	e.fill(p, 0, n*64)
	for i := 0; i < n; i += 8 {
		for _, v := range e.store(p, i, 8) {
			require.Equal(t, Granted, v.Code)
		}
		e.held(p, i+8)
		require.NoError(t, c.Flush(testWait))
	}
	e.wipe(0x55)
	op := e.begin(p, 10, n*64-7)
	later := 0
	for _, v := range op.Verdicts {
		if v.Code == Later {
			later++
		}
	}
	require.Greater(t, later, n/2, "most of it is in later windows")
	e.requireLoaded(e.load(op), op)
	e.requireOnly(p, 10, n*64-7, 0x55)
	e.requireIdle()
}

func suiteCancel(t *testing.T, c *Cache) {
	e := newEngine(t, c, smallEngine)
	p := e.newPrefix(5, 4, 0)
	e.fill(p, 0, 4*e.geo.C)
	e.store(p, 0, 4)
	e.held(p, 4)
	for range 20 {
		op := e.begin(p, 0, 4*e.geo.C)
		require.NoError(t, e.ranks[0].Load(op))
		e.ranks[0].CancelLoad(op.Op)
		ev := e.events(1)[0]
		require.Equal(t, op.Op, ev.Op)
		require.Contains(t, []EventStatus{EventOK, EventCancelled}, ev.Status)
		if ev.Status == EventOK {
			require.EqualValues(t, 4, ev.FirstFailed)
		}
	}
	// Nothing of the cancelled ones is left pinned: all can be removed and stored.
	op := e.begin(p, 0, 4*e.geo.C)
	e.requireLoaded(e.load(op), op)
	// A coordinator that cancels what no rank got.
	op = e.begin(p, 0, e.geo.C)
	e.k.Cancel(op.Op, true)
	op.Verdicts = nil
	// Over a ring the rank's question may be there first, once.
	ev := e.load(op)[0]
	if ev.Status == EventOK {
		ev = e.load(op)[0]
	}
	require.Contains(t, []EventStatus{EventMiss, EventStale}, ev.Status)
	require.Zero(t, ev.FirstFailed)
}

func suiteLeases(t *testing.T, c *Cache) {
	e := newEngine(t, c, smallEngine)
	p := e.newPrefix(6, 4, 0)
	e.fill(p, 0, 4*e.geo.C)
	e.store(p, 0, 2)
	e.held(p, 2)
	_, err := e.k.LeaseResult(7, 0)
	require.ErrorIs(t, err, ErrStale)
	require.NoError(t, e.k.Lease(7, p.root, 0, p.keys, LeasePin))
	h, err := e.k.LeaseResult(7, testWait)
	require.NoError(t, err)
	require.EqualValues(t, 2, h.Held)
	require.EqualValues(t, 2, h.Resident)
	require.EqualValues(t, 2, h.Leased)
	require.EqualValues(t, 1, h.Seq)

	e.store(p, 2, 2)
	e.held(p, 4)
	require.NoError(t, e.k.Lease(7, p.root, 0, p.keys, LeasePin))
	h, err = e.k.LeaseResult(7, testWait)
	require.NoError(t, err)
	require.EqualValues(t, 4, h.Leased)
	require.EqualValues(t, 2, h.Seq)
	require.EqualValues(t, 2, h.Sent)
	e.k.Renew([]uint64{7, 8})
	e.k.Release(7)
	e.k.Release(7)
	_, err = e.k.LeaseResult(7, 0)
	require.ErrorIs(t, err, ErrStale)
	require.ErrorIs(t, e.k.Lease(0, p.root, 0, p.keys, 0), ErrArgument)
	// The leader has forgotten it, too.
	verdicts, _, err := e.k.LoadBegin(1000, 7, p.root, 0, p.keys[:1], testWait)
	if err == nil {
		require.Equal(t, Failed, verdicts[0].Code)
	}
}

func suiteRefusals(t *testing.T, c *Cache) {
	e := newEngine(t, c, smallEngine)
	p := e.newPrefix(7, 2, 0)
	for _, op := range []LoadOp{
		{Op: 1, Tokens: 0},
		{Op: 1, FirstToken: 1 << 31, Tokens: 1 << 31},
		{Op: 1, Tokens: 32, Blocks: []uint32{1}},
		{Op: 1, Tokens: 32, Blocks: []uint32{1, 64}},
		{Op: 1, Tokens: 32, Blocks: []uint32{1, 2}, Verdicts: make([]Verdict, 2)},
	} {
		require.ErrorIs(t, e.ranks[0].Load(op), ErrArgument)
	}
	require.Empty(t, c.Events(10))
	// A store whose blocks do not exist is told to the leader, who frees the slot.
	out := e.k.StoreBegin([]StoreBegin{{Op: 90, Parent: p.root, Keys: p.keys[:1]}, {Op: 91}}, testWait)
	require.NoError(t, out[0].Err)
	require.ErrorIs(t, out[1].Err, ErrArgument)
	v := out[0].Verdicts[0]
	require.Equal(t, Granted, v.Code)
	require.ErrorIs(t, e.ranks[0].Store(StoreOp{Session: out[0].Session, Op: 90,
		Grants: []Grant{{Slot: v.Slot, Generation: v.Generation}}, Blocks: []uint32{1, 99}}), ErrArgument)
	require.Eventually(t, func() bool { return e.store(p, 0, 1)[0].Code == Granted }, testWait, time.Millisecond)

	// The same rank twice.
	twin := startEngine(t, c, smallEngine)
	_, err := twin.ranks[0].Ready(300 * time.Millisecond)
	var refused *RefusedError
	require.ErrorAs(t, err, &refused)
	require.ErrorContains(t, err, "attached already")

	_, err = c.Register(RankConfig{Group: "x", Ranks: 1, DCP: 1, Interleave: 3, BlockTokens: 16, NumBlocks: 4, ChunkTokens: 32, Groups: []GroupConfig{{}}}, nil)
	require.ErrorIs(t, err, ErrArgument)
	_, err = c.Coordinate("", 1)
	require.ErrorIs(t, err, ErrArgument)
	_, err = c.Coordinate("x", 65)
	require.ErrorIs(t, err, ErrArgument)
}

// What belongs to another session is a miss, and nothing of it is written.
func suiteStale(t *testing.T, c *Cache) {
	e := newEngine(t, c, smallEngine)
	p := e.newPrefix(8, 2, 0)
	e.fill(p, 0, 2*e.geo.C)
	e.store(p, 0, 2)
	e.held(p, 2)
	e.wipe(0xAB)
	op := e.begin(p, 0, 2*e.geo.C)
	other := op
	other.Session++
	ev := e.load(other)[0]
	require.Equal(t, EventStale, ev.Status)
	require.Zero(t, ev.FirstFailed)
	e.requireOnly(p, 0, 0, 0xAB)
	require.ErrorIs(t, e.ranks[0].Store(StoreOp{Session: op.Session + 1, Op: 5}), ErrStale)

	// A verdict of another use of the slot is not copied.
	other = op
	other.Verdicts = append([]Verdict(nil), op.Verdicts...)
	other.Verdicts[1].Generation++
	ev = e.load(other)[0]
	require.Equal(t, EventMiss, ev.Status)
	require.EqualValues(t, 1, ev.FirstFailed)
	require.EqualValues(t, e.geo.C, ev.Tokens)
	e.requireOnly(p, 0, e.geo.C, 0xAB)
	// Nor one that names no slot at all.
	op = e.begin(p, 0, e.geo.C)
	op.Verdicts = []Verdict{{Code: Ready, Slot: 1 << 30}}
	require.Equal(t, EventMiss, e.load(op)[0].Status)
}

func suiteStats(t *testing.T, c *Cache) {
	e := newEngine(t, c, smallEngine)
	epoch, err := e.k.Reset()
	require.NoError(t, err)
	require.NotZero(t, epoch)
	require.Eventually(t, func() bool {
		text, err := c.Stats()
		require.NoError(t, err)
		s := string(text)
		return strings.Contains(s, `"resets":1`) && strings.Contains(s, `"group":"engine"`) && strings.Contains(s, `"accepted":true`)
	}, testWait, time.Millisecond)
	require.NotZero(t, e.k.Session())
	require.GreaterOrEqual(t, c.EventFD(), 0)
}

// All members of a group that does not fit together hear why, also those that come
// later, and may be closed.
func suiteGroupRefused(t *testing.T, c *Cache) {
	register := func(rank, width int) *Rank {
		b, err := sys.NewPages(4 * 16 * width)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, sys.FreePages(b)) })
		r, err := c.Register(RankConfig{
			Group: "odd", Ranks: 2, Rank: rank, DCP: 2, DCPRank: rank, Interleave: 16, BlockTokens: 16, NumBlocks: 4, ChunkTokens: 32,
			Identity: identity(), Groups: []GroupConfig{{}},
		}, []Region{{Name: "kv", Component: "target", Layer: 0, Head: -1, Bytes: width,
			Base: uintptr(unsafe.Pointer(&b[0])), BlockStride: int64(16 * width), TokenStride: int64(width)}})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, r.Close(testWait)) })
		return r
	}
	refused := func(ready func(time.Duration) (*Accepted, error)) {
		_, err := ready(testWait)
		var refused *RefusedError
		require.ErrorAs(t, err, &refused)
		require.True(t, refused.Final)
		require.Contains(t, refused.Reason, "declares 12 bytes")
	}
	a, b := register(0, 8), register(1, 12)
	refused(a.Ready)
	refused(b.Ready)
	k, err := c.Coordinate("odd", 2)
	require.NoError(t, err)
	defer k.Close()
	refused(k.Ready)
	_, err = k.Lookup(Key{}, 0, make([]Key, 1), testWait)
	require.ErrorIs(t, err, ErrNotAccepted)
	require.ErrorIs(t, a.Store(StoreOp{Session: 1}), ErrStale)
}

// Who closes is forgotten at once, also while its process goes on.
func suiteGoodbye(t *testing.T, c *Cache) {
	ended := func() int {
		var s struct {
			Ended int `json:"members_ended"`
		}
		text, err := c.leaderStats()
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(text, &s))
		return s.Ended
	}
	b, err := c.Blob("test/blob", suiteBlob, 64, Identity{})
	require.NoError(t, err)
	require.NoError(t, b.Ready(testWait))
	require.Zero(t, ended())
	require.NoError(t, b.Close())
	require.Eventually(t, func() bool { return ended() == 1 }, testWait, time.Millisecond, "%d have ended", ended())
}

func suiteCloseWhileWaiting(t *testing.T, c *Cache) {
	// A group that never becomes whole, a load that never gets its verdict.
	k, err := c.Coordinate("half", 2)
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() {
		_, err := k.Ready(time.Hour)
		ended <- err
	}()
	select {
	case err := <-ended:
		t.Fatal("it cannot be ready: ", err)
	case <-time.After(50 * time.Millisecond):
	}
	start := time.Now()
	require.NoError(t, c.Close(testWait))
	require.ErrorIs(t, <-ended, ErrClosed)
	require.Less(t, time.Since(start), testWait)
	require.NoError(t, c.Close(testWait), "closing what is closed is no error")
	requireState(t, c, StateClosed)
	_, err = c.Coordinate("late", 1)
	require.ErrorIs(t, err, ErrClosed)
	require.ErrorIs(t, k.Lease(1, Key{}, 0, nil, 0), ErrClosed)
	require.NoError(t, k.Close())
}
