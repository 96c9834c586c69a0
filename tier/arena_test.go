package tier

import (
	"fmt"
	"log/slog"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// allocated is what the kernel has given for the arena.
func (g *rig) allocated() int64 {
	var st syscall.Stat_t
	require.NoError(g, syscall.Fstat(int(g.space.ArenaFile().Fd()), &st))
	return st.Blocks * 512
}

func TestArenaIsSparseAndGrowsAheadOfNeed(t *testing.T) {
	g := newRig(t, rigOptions{slots: 400})
	require.Equal(t, 400, g.space.Slots())
	var st syscall.Stat_t
	require.NoError(t, syscall.Fstat(int(g.space.ArenaFile().Fd()), &st))
	require.EqualValues(t, 400*rigChunk, st.Size, "its final size from the start")
	ahead := g.space.ahead()
	require.Less(t, ahead, 100)
	g.grown(ahead)
	require.EqualValues(t, ahead*rigChunk, g.allocated())
	g.do(func() { require.Equal(t, 400, g.space.Available()) })
	for n := range 400 {
		g.until("a slot", func() bool {
			_, err := g.space.Grant(rigKey(n), rigKey(0), 0, true)
			return err == nil
		})
	}
	require.EqualValues(t, 400*rigChunk, g.allocated())
	require.EqualValues(t, 400*rigChunk, g.space.pool.Used())
	g.do(func() {
		_, err := g.space.Grant(rigKey(1000), rigKey(0), 0, true)
		require.ErrorIs(t, err, ErrNoSlot)
		require.Zero(t, g.space.Available())
	})
}

// While there is room to grow, a chunk that exists nowhere else is not evicted.
func TestGrowthBeforeLoss(t *testing.T) {
	g := newRig(t, rigOptions{slots: 64})
	stored := 0
	for n := range 64 {
		g.until("a slot", func() bool {
			r, err := g.space.Grant(rigKey(n), rigKey(0), 0, true)
			if err == nil {
				require.NoError(t, g.space.Seal(r))
				stored++
			}
			return err == nil
		})
	}
	g.until("sealed", func() bool { return g.space.Counts()[Ready] == 64 })
	g.do(func() { require.Zero(t, g.space.Stats().Evicted) })
}

func TestGrowthStopsAtTheContainersLimit(t *testing.T) {
	for name, tree := range map[string]struct{ mount, group, current, limit, full, room string }{
		"v2": {"25 1 0:22 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n", "0::/pod/engine\n",
			"sys/fs/cgroup/pod/memory.current", "sys/fs/cgroup/pod/memory.max", "1000000000", "100000000"},
		"v1": {"35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n", "4:memory:/pod/engine\n",
			"sys/fs/cgroup/memory/pod/memory.usage_in_bytes", "sys/fs/cgroup/memory/pod/memory.limit_in_bytes", "1000000000", "100000000"},
	} {
		t.Run(name, func(t *testing.T) {
			pool, root := rigPool(t, 100*rigChunk)
			rigFile(t, root, "proc/self/mountinfo", tree.mount)
			rigFile(t, root, "proc/self/cgroup", tree.group)
			rigFile(t, root, tree.limit, "1000000000")
			rigFile(t, root, tree.current, tree.room)
			g := newRig(t, rigOptions{pool: pool})
			g.grown(g.space.ahead())
			rigFile(t, root, tree.current, tree.full)
			granted := 0
			g.until("refused", func() bool {
				_, err := g.space.Grant(rigKey(granted), rigKey(0), 0, true)
				if err == nil {
					granted++
				}
				return err != nil && g.space.stats.Limit != ""
			})
			require.Less(t, granted, 100)
			g.do(func() {
				require.Contains(t, g.space.Stats().Limit, "/"+tree.limit)
				require.Zero(t, g.space.Available(), "nothing more is promised")
			})
			require.EqualValues(t, granted*rigChunk, g.allocated())
			// Memory is there again: it goes on.
			rigFile(t, root, tree.current, tree.room)
			g.do(func() { g.clock = g.clock.Add(2 * stall) })
			g.until("growth", func() bool {
				_, err := g.space.Grant(rigKey(granted), rigKey(0), 0, true)
				return err == nil
			})
			g.do(func() { require.Empty(t, g.space.Stats().Limit) })
		})
	}
}

func openError(t *testing.T, pool *Pool) error {
	t.Helper()
	ns := rigNamespace("refused")
	layout, err := ns.Layout()
	require.NoError(t, err)
	g := &rig{}
	_, err = NewSpace(SpaceOptions{Namespace: ns, Layout: layout, Pool: pool, Mu: &g.mu, Log: slog.New(slog.DiscardHandler)})
	require.Error(t, err)
	return err
}

func TestOpeningNamesTheLimit(t *testing.T) {
	pool, root := rigPool(t, 100*rigChunk)
	rigFile(t, root, "proc/meminfo", "MemTotal: 1000000 kB\nMemAvailable: 65540 kB\n")
	err := openError(t, pool)
	require.ErrorIs(t, err, ErrMemoryLimit)
	require.ErrorContains(t, err, "MemAvailable")
	require.Zero(t, pool.Used())

	pool, _ = rigPool(t, 3*rigChunk)
	require.ErrorIs(t, openError(t, pool), ErrSlotTooBig)

	pool, _ = rigPool(t, 100*rigChunk)
	pool.fileLimit = func() int64 { return 2 * rigChunk }
	require.ErrorIs(t, openError(t, pool), ErrSlotTooBig)
	pool.fileLimit = func() int64 { return 20*rigChunk + 5 }
	require.Equal(t, 20, newRig(t, rigOptions{pool: pool}).space.Slots(), "RLIMIT_FSIZE makes it smaller")
}

func TestPoolIsSharedByNamespaces(t *testing.T) {
	pool, _ := rigPool(t, 16*rigChunk)
	a := newRig(t, rigOptions{pool: pool, model: "first"})
	a.grown(8)
	for n := range 10 {
		a.until("a slot", func() bool { _, err := a.space.Grant(rigKey(n), rigKey(0), 0, true); return err == nil })
	}
	a.grown(16)
	err := openError(t, pool)
	require.ErrorIs(t, err, ErrPoolFull)
	require.ErrorContains(t, err, "first@")

	// Nobody is attached to it any more: free slots are given, then chunks.
	a.space.SetAttached(false)
	b := newRig(t, rigOptions{pool: pool, model: "second"})
	b.grown(6)
	require.LessOrEqual(t, pool.Used(), pool.Bytes())
	require.EqualValues(t, 10*rigChunk, a.allocated(), "what is in use stays")
	b.until("no more room", func() bool { return b.space.stats.Limit != "" })
	b.do(func() { require.Contains(t, b.space.stats.Limit, "second@") })

	a.do(func() {
		for n := range 10 {
			require.NoError(t, a.space.Seal(a.space.Look(rigKey(n)).Ref))
		}
	})
	a.until("sealed", func() bool { return a.space.Counts()[Ready] == 10 })
	b.do(func() { b.clock = b.clock.Add(2 * stall) })
	for n := range 16 {
		b.until("a slot", func() bool { _, err := b.space.Grant(rigKey(n), rigKey(0), 0, true); return err == nil })
	}
	require.EqualValues(t, 16*rigChunk, b.allocated())
	require.Zero(t, a.allocated())
	require.Equal(t, pool.Bytes(), pool.Used())
}

func TestShrinkGivesPagesBackAndTheyReturnAsZero(t *testing.T) {
	g := newRig(t, rigOptions{slots: 8})
	g.grown(8)
	for n := range 4 {
		g.store(n, n, true)
	}
	require.Zero(t, g.space.Shrink(rigChunk), "a group is attached")
	g.space.SetAttached(false)
	require.EqualValues(t, rigChunk, g.space.Shrink(1))
	require.EqualValues(t, 7*rigChunk, g.allocated())
	require.EqualValues(t, 5*rigChunk, g.space.Shrink(5*rigChunk))
	require.Equal(t, Free, g.state(3))
	require.Equal(t, Free, g.state(2))
	require.Equal(t, Ready, g.state(1), "the suffix goes first")
	require.EqualValues(t, 2*rigChunk, g.space.Shrink(100*rigChunk))
	require.Zero(t, g.space.pool.Used())
	g.space.SetAttached(true)
	seen := map[uint32]bool{}
	for n := range 8 {
		var r Ref
		g.until("a slot", func() (ok bool) {
			var err error
			r, err = g.space.Grant(rigKey(n), rigKey(0), 0, true)
			return err == nil
		})
		require.False(t, seen[r.Slot])
		seen[r.Slot] = true
		require.Equal(t, make([]byte, rigChunk), g.space.Bytes(r))
	}
}

func TestPaddingCoversWhatRowsDoNot(t *testing.T) {
	layout, err := rigNamespace("p").Layout()
	require.NoError(t, err)
	covered := make([]byte, rigChunk)
	for row := range rigRows {
		for i := range rigRow {
			covered[row*128+i]++
		}
	}
	padding(layout, func(off, n int64) {
		for i := range n {
			covered[off+i]++
		}
	})
	for at, times := range covered {
		require.EqualValues(t, 1, times, fmt.Sprint(at))
	}
}

func TestFreeMemory(t *testing.T) {
	bytes, limit, err := FreeMemory()
	require.NoError(t, err)
	require.Positive(t, bytes)
	require.NotEmpty(t, limit)
}
