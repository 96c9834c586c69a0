package kvtier

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/internal/sys"
)

// selfTests runs the self-test on all ranks and gives their verdicts.
func (e *engine) selfTests(pages bool, timeout time.Duration) []error {
	out := make([]error, len(e.ranks))
	var wg sync.WaitGroup
	for i, r := range e.ranks {
		wg.Go(func() { out[i] = r.SelfTest(pages, timeout) })
	}
	wg.Wait()
	return out
}

// noise fills all pages with random bytes and gives a copy of them.
func (e *engine) noise(seed uint64) (copies [][][]byte) {
	r := rand.NewChaCha8([32]byte{byte(seed)})
	for _, rank := range e.pages {
		var c [][]byte
		for _, b := range rank {
			_, _ = r.Read(b)
			c = append(c, bytes.Clone(b))
		}
		copies = append(copies, c)
	}
	return copies
}

func (e *engine) requirePages(want [][][]byte) {
	e.t.Helper()
	for rank := range want {
		for region := range want[rank] {
			require.True(e.t, bytes.Equal(want[rank][region], e.pages[rank][region]), "rank %d, region %d is not as it was", rank, region)
		}
	}
}

// requireNothingLeft waits until the leader has neither slots in use nor files.
func (e *engine) requireNothingLeft(dir string) {
	e.t.Helper()
	e.requireIdle()
	var text []byte
	require.Eventually(e.t, func() bool {
		var s struct {
			Namespaces []struct {
				Slots map[string]int `json:"slots"`
			} `json:"namespaces"`
		}
		var err error
		text, err = e.cache.leaderStats()
		require.NoError(e.t, err)
		require.NoError(e.t, json.Unmarshal(text, &s))
		for _, n := range s.Namespaces {
			for state, count := range n.Slots {
				if state != "free" && count > 0 {
					return false
				}
			}
		}
		files, err := filepath.Glob(filepath.Join(dir, "*", "*", "*.kvc"))
		require.NoError(e.t, err)
		return len(files) == 0
	}, testWait, time.Millisecond, "something is left: %s", text)
}

var selfTestEngines = map[string]engineConfig{
	"one rank":            {group: "t1", d: 1, i: 16, b: 16, c: 32, blocks: 16, width: []int{48, 17}},
	"four ranks":          {group: "t2", d: 4, i: 2, b: 8, c: 32, blocks: 16, width: []int{656, 132}},
	"parts of some":       {group: "t3", d: 4, i: 16, b: 16, c: 24, blocks: 9, width: []int{24, 4, 9}},
	"chunks inside pages": {group: "t4", d: 2, i: 64, b: 64, c: 32, blocks: 4, width: []int{40, 4}},
	"pages too few":       {group: "t5", d: 2, i: 4, b: 4, c: 64, blocks: 5, width: []int{40}},
}

func TestSelfTest(t *testing.T) {
	for _, m := range modes {
		for name, cfg := range selfTestEngines {
			t.Run(m.name+"/"+name, func(t *testing.T) {
				dir := t.TempDir()
				e := newEngine(t, m.open(t, dir), cfg)
				before := e.noise(1)
				for _, pages := range []bool{true, false, true} {
					for rank, err := range e.selfTests(pages, testWait) {
						require.NoError(t, err, "rank %d", rank)
					}
					e.requirePages(before)
				}
				e.requireNothingLeft(dir)
				text, err := e.cache.leaderStats()
				require.NoError(t, err)
				var s struct {
					Stores    storeCounters    `json:"stores"`
					Loads     loadCounters     `json:"loads"`
					Published uint64           `json:"published"`
					Fills     uint64           `json:"disk_reads"`
					SelfTests selfTestCounters `json:"self_tests"`
					Disk      struct{ Reads uint64 }
				}
				require.NoError(t, json.Unmarshal(text, &s))
				require.Equal(t, selfTestCounters{Begun: 3, Passed: 3}, s.SelfTests)
				// A user's statistics know nothing of it.
				require.Zero(t, s.Stores)
				require.Zero(t, s.Loads)
				require.Zero(t, s.Published+s.Fills)
				require.Contains(t, string(text), `"self_tests"`)

				if cfg.blocks*cfg.b*cfg.d < cfg.c {
					return
				}
				// The engine works as before.
				p := e.newPrefix(1, 1, 0)
				e.fill(p, 0, cfg.c)
				e.store(p, 0, 1)
				e.held(p, 1)
				e.wipe(9)
				op := e.begin(p, 0, cfg.c)
				e.requireLoaded(e.load(op), op)
				e.requireOnly(p, 0, cfg.c, 9)
			})
		}
	}
}

// The pattern goes through the disk: what is damaged there is seen.
func TestSelfTestReadsBackFromDisk(t *testing.T) {
	dir := t.TempDir()
	e := newEngine(t, openTest(t, dir, RoleLeader), selfTestEngines["four ranks"])
	reads := func() uint64 {
		text, err := e.cache.leaderStats()
		require.NoError(t, err)
		var s struct {
			Disk struct {
				Reads uint64 `json:"reads"`
			} `json:"disk"`
		}
		require.NoError(t, json.Unmarshal(text, &s))
		return s.Disk.Reads
	}
	require.Zero(t, reads())
	for _, err := range e.selfTests(false, testWait) {
		require.NoError(t, err)
	}
	require.NotZero(t, reads())
}

func TestSelfTestWithoutDisk(t *testing.T) {
	dir := t.TempDir()
	c, err := Open(parsed(t, fmt.Sprintf(`{"runtime_dir":%q,"name":"n","dram_gib":0.01}`, filepath.Join(dir, "r"))))
	require.NoError(t, err)
	watch(t, c)
	for _, name := range []string{"one rank", "four ranks"} {
		e := newEngine(t, c, selfTestEngines[name])
		before := e.noise(2)
		for _, err := range e.selfTests(true, testWait) {
			require.NoError(t, err)
		}
		e.requirePages(before)
		e.requireNothingLeft(dir)
	}
}

// spoiledRow is the row stride of the engine of the next test: 788 bytes and padding.
// Rank r has the rows 2r, 2r+1 of every eight; it spoils its own, which nobody writes
// after it.
const spoiledRow = 832

// Whatever one rank does wrong, all ranks hear it, and the pages are as they were.
func TestSelfTestSeesWhatIsWrong(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(e *engine)
		text  string
	}{
		"a byte on the way in": {func(e *engine) {
			e.ranks[2].onTest = func(step string, slot []byte) {
				if step == "stored" {
					slot[4*spoiledRow+100] ^= 1
				}
			}
		}, "in the chunk"},
		"a byte on the way out": {func(e *engine) {
			e.ranks[3].onTest = func(step string, slot []byte) {
				if step == "loaded" {
					e.pages[3][0][len(e.pages[3][0])-1] ^= 0x80 // beyond the last token that the test loads, in a page of it
				}
			}
		}, "in the pages"},
		"another place in the row": {func(e *engine) {
			e.ranks[1].onTest = func(step string, slot []byte) {
				if step == "stored" {
					row := slot[2*spoiledRow:][:spoiledRow]
					kv, indexer := bytes.Clone(row[:656]), bytes.Clone(row[656:788])
					copy(row[copy(row, indexer):], kv)
				}
			}
		}, "in the chunk"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			e := newEngine(t, openTest(t, dir, RoleLeader), selfTestEngines["four ranks"])
			before := e.noise(3)
			c.spoil(e)
			var first string
			for rank, err := range e.selfTests(true, testWait) {
				require.ErrorIs(t, err, ErrSelfTest, "rank %d", rank)
				require.ErrorContains(t, err, c.text)
				if first == "" {
					first = err.Error()
				}
				require.Equal(t, first, err.Error(), "rank %d", rank)
			}
			e.requirePages(before)
			e.requireNothingLeft(dir)
			for _, r := range e.ranks {
				r.onTest = nil
			}
			for _, err := range e.selfTests(true, testWait) {
				require.NoError(t, err)
			}
		})
	}
}

// Padding is zero, else two topologies would have two checksums for one chunk.
func TestSelfTestSeesPadding(t *testing.T) {
	e := newEngine(t, openTest(t, t.TempDir(), RoleLeader), selfTestEngines["one rank"])
	e.ranks[0].onTest = func(step string, slot []byte) {
		if step == "loaded" {
			slot[3*128+65] = 7 // rows have 65 bytes of 128
		}
	}
	err := e.selfTests(true, testWait)[0]
	require.ErrorIs(t, err, ErrSelfTest)
	require.ErrorContains(t, err, "row 3 of group 0 has 0x07 in its padding, byte 65")
}

// badEngine has regions that are described wrongly on one of two ranks.
func badEngine(t *testing.T, c *Cache, describe func(rank int, regions []Region)) (*engine, []byte) {
	t.Helper()
	e := startEngine(t, c, engineConfig{group: "bad", d: 2, i: 8, b: 8, c: 32, blocks: 16, width: []int{32, 32}})
	for _, r := range e.ranks {
		require.NoError(t, r.Close(testWait))
	}
	e.ranks = nil
	all, err := sys.NewPages(2 * 16 * 8 * 64 * 2)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, sys.FreePages(all)) })
	for rank := range 2 {
		// [block][token][32 of layer 0 | 32 of layer 1]
		base := uintptr(unsafe.Pointer(&all[rank*16*8*64*2]))
		regions := make([]Region, 2)
		for i := range regions {
			regions[i] = Region{
				Name: "kv", Component: "target", Layer: i, Head: -1, Bytes: 32,
				Base: base + uintptr(i*32), BlockStride: 8 * 64, TokenStride: 64,
			}
		}
		describe(rank, regions)
		id := identity()
		if rank > 0 {
			id.Weights = ""
		}
		r, err := c.Register(RankConfig{
			Group: "bad", Ranks: 2, Rank: rank, DCP: 2, DCPRank: rank, Interleave: 8,
			BlockTokens: 8, NumBlocks: 16, ChunkTokens: 32, Identity: id, Groups: []GroupConfig{{}},
		}, regions)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, r.Close(testWait)) })
		e.ranks = append(e.ranks, r)
	}
	e.ready()
	t.Cleanup(func() { e.ranks, e.pages = nil, nil })
	return e, all
}

func TestSelfTestSeesWrongDescriptions(t *testing.T) {
	for name, c := range map[string]struct {
		describe func(rank int, regions []Region)
		text     string
	}{
		"right": {func(int, []Region) {}, ""},
		"two regions at one address": {func(rank int, regions []Region) {
			if rank == 1 {
				regions[1].Base = regions[0].Base
			}
		}, "rank"},
		"token stride of one region": {func(rank int, regions []Region) {
			if rank == 1 {
				regions[0].TokenStride, regions[0].BlockStride = 32, 8*32
			}
		}, "rank"},
		"block stride too short by one region": {func(rank int, regions []Region) {
			if rank == 0 {
				regions[1].Base -= 16
			}
		}, "rank"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			e, all := badEngine(t, openTest(t, dir, RoleLeader), c.describe)
			r := rand.NewChaCha8([32]byte{7})
			_, _ = r.Read(all)
			before := bytes.Clone(all)
			for rank, err := range e.selfTests(true, testWait) {
				if c.text == "" {
					require.NoError(t, err)
				} else {
					require.ErrorIs(t, err, ErrSelfTest, "rank %d", rank)
					require.ErrorContains(t, err, c.text)
				}
			}
			require.True(t, bytes.Equal(before, all), "the pages are not as they were")
		})
	}
}

// A region that reaches beyond its memory is a failed test and no crash.
func TestSelfTestSeesUnmappedMemory(t *testing.T) {
	dir := t.TempDir()
	e := newEngine(t, openTest(t, dir, RoleLeader), selfTestEngines["four ranks"])
	reg := &e.ranks[1].groups[0].regions[0]
	// As large as the region, so that the test reaches nothing else, and kept, so that
	// nothing else comes there.
	hole, err := unix.Mmap(-1, 0, e.blocks*int(reg.BlockStride), unix.PROT_NONE, unix.MAP_ANON|unix.MAP_PRIVATE)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Munmap(hole)) })
	right := reg.Base
	reg.Base = uintptr(unsafe.Pointer(unsafe.SliceData(hole)))
	before := e.noise(4)
	for rank, err := range e.selfTests(true, testWait) {
		require.ErrorIs(t, err, ErrSelfTest, "rank %d", rank)
		require.ErrorContains(t, err, "not mapped")
	}
	reg.Base = right
	e.requirePages(before)
	e.requireNothingLeft(dir)
}

// A rank that never comes, ends, or is stopped costs the others the timeout at most.
func TestSelfTestIsBounded(t *testing.T) {
	dir := t.TempDir()
	c := openTest(t, dir, RoleLeader)
	e := newEngine(t, c, selfTestEngines["four ranks"])
	before := e.noise(5)
	absent := e.ranks[3]

	e.ranks = e.ranks[:3]
	for _, err := range e.selfTests(true, 200*time.Millisecond) {
		require.ErrorIs(t, err, ErrTimeout)
		require.ErrorContains(t, err, "ranks [3] did not come")
	}
	e.ranks = append(e.ranks, absent)
	e.requirePages(before)

	// One that stays away after it got slots.
	stay := make(chan struct{})
	absent.onTest = func(step string, _ []byte) {
		if step == "stored" {
			<-stay
		}
	}
	late := make(chan error, 1)
	go func() { late <- absent.SelfTest(true, 500*time.Millisecond) }()
	e.ranks = e.ranks[:3]
	for _, err := range e.selfTests(true, 500*time.Millisecond) {
		require.ErrorIs(t, err, ErrTimeout)
		require.ErrorContains(t, err, "[3]")
	}
	// Its slots are not used again until it has come back.
	var st struct {
		Namespaces []struct {
			Slots map[string]int `json:"slots"`
		} `json:"namespaces"`
	}
	text, err := c.leaderStats()
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &st))
	require.Equal(t, 2, st.Namespaces[0].Slots["draining"])
	close(stay)
	require.ErrorIs(t, <-late, ErrTimeout)
	absent.onTest = nil
	e.ranks = append(e.ranks, absent)
	e.requirePages(before)
	e.requireNothingLeft(dir)

	// One that ends.
	absent.onTest = func(step string, _ []byte) {
		if step == "stored" {
			go absent.Close(testWait)
			<-absent.m.closing
		}
	}
	verdicts := e.selfTests(true, testWait)
	for _, err := range verdicts[:3] {
		require.ErrorIs(t, err, ErrTimeout)
	}
	require.Error(t, verdicts[3])
	require.NoError(t, absent.Close(testWait))
	e.requirePages(before)
	e.requireNothingLeft(dir)
}

func TestSelfTestNeedsALeaderAndAGroup(t *testing.T) {
	dir := t.TempDir()
	leader := leadingProcess(t, dir)
	c := openTest(t, dir, RoleMember)
	e := newEngine(t, c, selfTestEngines["one rank"])
	require.NoError(t, e.ranks[0].SelfTest(true, testWait))
	busy := make(chan struct{})
	var once sync.Once
	e.ranks[0].onTest = func(step string, _ []byte) {
		if step == "stored" {
			once.Do(func() {
				leader.kill()
				close(busy)
			})
		}
	}
	done := make(chan error, 1)
	before := e.noise(6)
	go func() { done <- e.ranks[0].SelfTest(true, testWait) }()
	<-busy
	require.Error(t, <-done)
	e.ranks[0].onTest = nil
	e.requirePages(before)
	require.Eventually(t, func() bool { return e.k.Session() == 0 }, testWait, time.Millisecond)
	require.ErrorIs(t, e.ranks[0].SelfTest(true, testWait), ErrNoLeader)
	// What a killed leader left on disk is nobody's, and in nobody's way.
	leadingProcess(t, dir)
	e.ready()
	require.NoError(t, e.ranks[0].SelfTest(true, testWait))
}

// Heads over tensor parallelism, data that several ranks hold, pages with the rows of
// all ranks, and opaque pages.
func TestSelfTestOfOtherLayouts(t *testing.T) {
	const b, blocks = 8, 12
	for name, c := range map[string]struct {
		ranks, d, i, tokensPerRow, chunk int
		regions                          func(rank int) []Region
	}{
		"heads of two ranks and data of both": {ranks: 2, d: 1, i: b, tokensPerRow: 1, chunk: 24, regions: func(rank int) []Region {
			return []Region{
				{Name: "k", Layer: 0, Head: rank, Bytes: 24}, {Name: "v", Layer: 0, Head: rank, Bytes: 24},
				{Name: "latent", Layer: 1, Head: -1, Bytes: 100, Replicated: true},
			}
		}},
		"replicas of two DCP ranks": {ranks: 4, d: 2, i: 2, tokensPerRow: 1, chunk: 24, regions: func(int) []Region {
			return []Region{{Name: "latent", Layer: 0, Head: -1, Bytes: 40, Replicated: true}, {Name: "scale", Layer: 0, Head: -1, Bytes: 3, Replicated: true}}
		}},
		"an indexer with all rows": {ranks: 2, d: 2, i: 4, tokensPerRow: 1, chunk: 24, regions: func(int) []Region {
			return []Region{{Name: "latent", Layer: 0, Head: -1, Bytes: 40}, {Name: "indexer", Layer: 0, Head: -1, Bytes: 12, AllRows: true}}
		}},
		"opaque pages": {ranks: 2, d: 2, i: b, tokensPerRow: b, chunk: 24, regions: func(int) []Region {
			return []Region{{Name: "page", Layer: 0, Head: -1, Bytes: 700}, {Name: "page", Layer: 1, Head: -1, Bytes: 300}}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			cache := openTest(t, dir, RoleLeader)
			e := &engine{t: t, cache: cache}
			for rank := range c.ranks {
				regions := c.regions(rank)
				var mine [][]byte
				for i := range regions {
					r := &regions[i]
					tokens := b / c.tokensPerRow
					if r.AllRows {
						tokens = b * c.d
					}
					r.Component, r.BlockStride = "target", int64(tokens*r.Bytes)
					if c.tokensPerRow == 1 {
						r.TokenStride = int64(r.Bytes)
					}
					m, err := sys.NewPages(blocks * int(r.BlockStride))
					require.NoError(t, err)
					t.Cleanup(func() { require.NoError(t, sys.FreePages(m)) })
					r.Base = uintptr(unsafe.Pointer(&m[0]))
					mine = append(mine, m)
				}
				e.pages = append(e.pages, mine)
				id := identity()
				if c.tokensPerRow > 1 {
					id.Encoding = "opaque-test"
				}
				if rank > 0 {
					id.Weights = ""
				}
				r, err := cache.Register(RankConfig{
					Group: "other", Ranks: c.ranks, Rank: rank, DCP: c.d, DCPRank: rank % c.d, Interleave: c.i,
					BlockTokens: b, NumBlocks: blocks, ChunkTokens: c.chunk, Identity: id,
					Groups: []GroupConfig{{TokensPerRow: c.tokensPerRow}},
				}, regions)
				require.NoError(t, err)
				t.Cleanup(func() { require.NoError(t, r.Close(testWait)) })
				e.ranks = append(e.ranks, r)
			}
			for _, r := range e.ranks {
				_, err := r.Ready(testWait)
				require.NoError(t, err)
			}
			before := e.noise(8)
			for _, pages := range []bool{true, false} {
				for rank, err := range e.selfTests(pages, testWait) {
					require.NoError(t, err, "rank %d", rank)
				}
				e.requirePages(before)
			}
			e.requireNothingLeft(dir)
		})
	}
}
