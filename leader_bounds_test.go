package kvtier

import (
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/tier"
)

// What a coordinator asks for must not fill the leader's memory: what is over a bound is
// answered BUSY or shorter, and what was let go costs nothing.

// noChain gives keys that no chain has.
func noChain(n int) []chunk.Key {
	keys := make([]chunk.Key, n)
	for i := range keys {
		keys[i][0], keys[i][1], keys[i][2], keys[i][3] = 7, 7, byte(i), byte(i>>8)
	}
	return keys
}

// heap is what the process keeps.
func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// remembered is what the leader's own books say.
func (r *leaderRig) remembered() (loads, loadChunks, leases, leased int) {
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	return r.l.loads, r.l.loadChunks, r.l.leases, r.l.leased
}

func (r *leaderRig) requireNothingRemembered() {
	r.t.Helper()
	loads, loadChunks, leases, leased := r.remembered()
	require.Equal(r.t, [4]int{}, [4]int{loads, loadChunks, leases, leased})
}

func TestFailedLoadsAndEmptyLeasesTakeNoMemory(t *testing.T) {
	r := newLeaderRig(t)
	g := r.join("g", 1, 1)
	keys := g.chain(1, 1)
	g.store(keys, 0)
	const n = 500
	long := g.runOf(append(keys, noChain(wire.MaxKeys-1)...), 0)
	before := heap()
	for i := range n {
		rep := g.loadBegin(uint64(1000+i), 0, long)
		require.Equal(t, append(repeat(wire.Ready, 1), repeat(wire.Failed, wire.MaxKeys-1)...), codes(rep.Verdicts))
		g.lease(uint64(1+i), long)
	}
	loads, loadChunks, leases, leased := r.remembered()
	require.Equal(t, [4]int{n, n, n, n}, [4]int{loads, loadChunks, leases, leased})
	require.Less(t, heap()-before, int64(64<<20), "8,189 keys and verdicts of each would be 340 MiB")

	// They are failed all the same, wherever one asks.
	for _, first := range []uint32{1, 500, wire.MaxKeys - 1} {
		rep := r.call(g.ranks[0], &wire.Request{Type: wire.LoadWait, Op: 1000, First: first})
		require.Equal(t, repeat(wire.Failed, len(rep.Verdicts)), codes(rep.Verdicts))
		require.Len(t, rep.Verdicts, min(r.l.spaces[g.fingerprint()].window(), wire.MaxKeys-int(first)))
	}
	for i := range n {
		g.loadEnd(uint64(1000+i), 0)
		g.release(uint64(1 + i))
	}
	r.quiet()
	r.requireNothingRemembered()
}

func TestLoadsOfAGroupAreBounded(t *testing.T) {
	r := newLeaderRig(t)
	g, other := r.join("g", 1, 1), r.join("other", 1, 1)
	keys := g.chain(1, 2)
	g.store(keys, 0)
	short := g.runOf(noChain(3), 0)
	for i := range maxLoads {
		require.Equal(t, wire.StatusOK, g.loadBegin(uint64(1000+i), 0, short).Status, "load %d", i)
	}
	h := g.lease(1, g.runOf(keys, 0))
	rep := g.loadBegin(1, 1, g.runOf(keys, 0))
	require.Equal(t, wire.StatusBusy, rep.Status)
	require.Equal(t, repeat(wire.Failed, 2), codes(rep.Verdicts))
	require.Equal(t, h, g.lease(1, g.runOf(keys, 0)), "its lease is as it was")
	require.EqualValues(t, 1, r.l.count.Loads.Busy)
	require.Equal(t, repeat(wire.Ready, 2), other.loadAll(0, other.runOf(keys, 0)), "others are not concerned")
	// One that ends makes room.
	g.loadEnd(1000, 0)
	require.Equal(t, repeat(wire.Ready, 2), g.loadAll(1, g.runOf(keys, 0)))
	for i := range maxLoads {
		g.loadEnd(uint64(1000+i), 0)
	}
	r.quiet()
	r.requireNothingRemembered()
}

// Loads that wait for the disk keep their keys. Together they are of so many chunks at
// most, in a group and in all.
func TestChunksOfLoadsAreBounded(t *testing.T) {
	r, g, keys := restarted(t, 2)
	r.fs.closeReads()
	long := g.runOf(append(keys, noChain(wire.MaxKeys-2)...), 0)
	groups := []*rigGroup{g}
	for _, id := range []string{"b", "c", "d", "e"} {
		groups = append(groups, r.join(id, 1, 1))
	}
	begun := make([]int, len(groups))
	fill := func(g *rigGroup) (n int) {
		for g.loadBegin(r.op(), 0, long).Status == wire.StatusOK {
			n++
		}
		return n
	}
	const most = maxLoadChunks / wire.MaxKeys
	for i, g := range groups[:loadsOfAll] {
		begun[i] = fill(g)
		require.Equal(t, most, begun[i])
	}
	// What all may have is not quite used up: a group's share is not a whole number of loads.
	last := groups[loadsOfAll]
	require.Equal(t, (loadsOfAll*maxLoadChunks-loadsOfAll*most*wire.MaxKeys)/wire.MaxKeys, fill(last))
	_, chunks, _, _ := r.remembered()
	require.LessOrEqual(t, chunks, loadsOfAll*maxLoadChunks)
	// The reads are late: all fail, and only that is remembered.
	r.advance(11 * time.Second)
	_, chunks, _, _ = r.remembered()
	require.Zero(t, chunks)
	r.fs.open()
	for _, g := range groups {
		g.coord.gone()
		g.coord.dead()
		for _, a := range g.ranks {
			a.dead()
		}
	}
	r.quiet()
	r.requireNothingRemembered()
}

// Chunks that are named by leases again and again cost no slot, and yet are bounded.
func TestNamesInLeasesAreBounded(t *testing.T) {
	r := newLeaderRig(t)
	g, other := r.join("g", 1, 1), r.join("other", 1, 1)
	keys := g.chain(1, 10)
	g.store(keys, 0)
	g.lease(1, g.runOf(keys, 0))
	add := func(a *attachment, n int) { a.leased += n; r.l.leased += n }
	add(g.coord, maxLeasedChunks-14)
	require.Equal(t, wire.Hits{Held: 10, Resident: 4, Leased: 4}, g.lease(2, g.runOf(keys, 0)))
	require.EqualValues(t, 1, r.l.count.Misses.OverCap)
	require.Equal(t, wire.Hits{Held: 10, Resident: 10, Leased: 10}, g.lease(1, g.runOf(keys, 0)), "what it has it keeps")
	require.Equal(t, wire.Hits{Held: 9, Resident: 9, Leased: 9}, g.lease(1, g.runOf(keys, 1)), "it does not compete with itself")
	require.Equal(t, wire.Hits{Held: 10, Resident: 10, Leased: 10}, other.lease(1, other.runOf(keys, 0)))
	// All members together.
	r.l.leased += (leasesOfAll - 1) * maxLeasedChunks
	require.Equal(t, wire.Hits{Held: 10}, other.lease(2, other.runOf(keys, 0)))
	r.l.leased -= (leasesOfAll - 1) * maxLeasedChunks
	add(g.coord, -(maxLeasedChunks - 14))

	// Leases as such.
	r.l.leases += leasesOfAll * maxLeases
	require.Equal(t, wire.StatusBusy, other.leaseReply(3, other.runOf(keys, 0), 0).Status)
	require.Equal(t, wire.StatusOK, other.leaseReply(1, other.runOf(keys, 0), 0).Status)
	r.l.leases -= leasesOfAll * maxLeases

	// One that a load takes over is named until all of it is decided.
	op := r.op()
	vs := g.loadBegin(op, 1, g.runOf(keys, 1)).Verdicts
	_, _, leases, leased := r.remembered()
	require.Equal(t, []wire.Code{wire.Ready, wire.Later}, codes(vs[7:9]))
	require.Equal(t, 3, leases)
	require.Equal(t, 9+4+10, leased)
	require.Equal(t, repeat(wire.Ready, 9), g.loadRanks(op, g.runOf(keys, 1), vs))
	g.release(2)
	other.release(1)
	other.release(2)
	r.quiet()
	r.requireNothingRemembered()
}

// A read that does not end must not collect all who ever waited for it.
func TestReadKeepsOnlyWhoWaits(t *testing.T) {
	r, g, keys := restarted(t, 2)
	r.fs.closeReads()
	rn := g.runOf(keys, 0)
	for i := range 50 {
		x := *rn
		x.Lease, x.Flags = 1, wire.LeasePrefetch|uint32(i%2)*wire.LeasePin // another lease in its place
		r.call(g.coord, &wire.Request{Type: wire.Lease, Run: &x})
		x.Keys = keys[:1+i%2] // and the same one, shorter and longer
		r.call(g.coord, &wire.Request{Type: wire.Lease, Run: &x})
		op := r.op()
		g.loadBegin(op, 0, rn)
		r.call(g.coord, &wire.Request{Type: wire.Cancel, Op: op, Flags: wire.CancelUnsent})
	}
	fills, waits, loads := 0, 0, 0
	r.l.mu.Lock()
	for _, f := range r.l.spaces[g.fingerprint()].fills {
		fills, waits, loads = fills+1, max(waits, len(f.waits)), loads+len(f.loads)
	}
	r.l.mu.Unlock()
	require.Equal(t, 2, fills)
	require.LessOrEqual(t, waits, 1)
	require.Zero(t, loads)
	op := r.op()
	rep := g.loadBegin(op, 1, rn)
	r.fs.open()
	require.Equal(t, repeat(wire.Ready, 2), g.loadRanks(op, rn, rep.Verdicts))
	require.Equal(t, tier.Ready, g.look(keys[1]).State)
	r.quiet()
	r.requireNothingRemembered()
}
