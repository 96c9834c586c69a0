package tier

import (
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/sys"
)

func TestStoreBecomesVisibleOnceHashed(t *testing.T) {
	g := newRig(t, rigOptions{slots: 8})
	r := g.grant(1, 0, false)
	require.Equal(t, Assembling, g.state(1))
	g.do(func() {
		_, err := g.space.Grant(rigKey(1), rigKey(0), 0, false)
		require.ErrorIs(t, err, ErrKnown)
		require.ErrorIs(t, g.space.Pin(r), ErrStale, "not readable yet")
		require.NoError(t, g.space.Seal(r))
		require.ErrorIs(t, g.space.Seal(r), ErrTransition)
		require.Equal(t, Sealing, g.space.Look(rigKey(1)).State)
	})
	require.Equal(t, SettledEvent{Key: rigKey(1), Ref: r, Ready: true}, g.settled(r))
	require.Equal(t, Ready, g.state(1))
	g.requireRows(g.space.Bytes(r), rigKey(1))
	g.do(func() {
		require.Equal(t, chunk.HashPayload(g.space.Bytes(r)), g.space.slots[r.Slot].hash)
		require.Equal(t, 1, g.space.Stats().Dirty)
	})
}

// A slot of many megabytes is hashed in pieces; the sum is that of the whole.
func TestHashInPieces(t *testing.T) {
	ns := rigNamespace("large")
	ns.Groups[0].Regions[0].Bytes = 64 << 10
	layout, err := ns.Layout()
	require.NoError(t, err)
	require.Greater(t, layout.PaddedBytes, int64(2*hashPiece))
	pool, _ := rigPool(t, 4*layout.PaddedBytes)
	g := &rig{T: t, events: map[Ref]SettledEvent{}}
	g.space, err = NewSpace(SpaceOptions{Namespace: ns, Layout: layout, Pool: pool, Mu: &g.mu, Log: pool.log,
		Settled: func(e SettledEvent) { g.events[e.Ref] = e }})
	require.NoError(t, err)
	defer func() { require.NoError(t, g.space.Close(rigWait)) }()
	var r Ref
	g.do(func() {
		r, err = g.space.Grant(rigKey(1), rigKey(0), 0, false)
		require.NoError(t, err)
		for i := range g.space.Bytes(r) {
			g.space.Bytes(r)[i] = byte(i*i) >> 3
		}
		require.NoError(t, g.space.Seal(r))
	})
	require.True(t, g.settled(r).Ready)
	g.do(func() { require.Equal(t, chunk.HashPayload(g.space.Bytes(r)), g.space.slots[r.Slot].hash) })
}

// A rank that was too slow may write into its slot for as long as it lives: nobody
// else may get the slot meanwhile.
func TestLateWriterHarmsNobody(t *testing.T) {
	g := newRig(t, rigOptions{slots: 4})
	g.grown(4)
	late := g.grant(1, 0, true)
	g.do(func() {
		g.space.Drop(late)
		require.Equal(t, Free, g.space.Look(rigKey(1)).State, "unindexed at once")
		require.True(t, g.space.table.Check(late, Draining))
	})
	var others []Ref
	for n := 2; n < 5; n++ {
		others = append(others, g.grant(n, 0, true))
	}
	require.ErrorIs(t, g.makeRoom(), ErrNoSlot)
	for _, r := range others {
		require.NotEqual(t, late.Slot, r.Slot)
	}
	clear(g.space.Bytes(late)[:rigRow]) // the late write
	for n, r := range others {
		g.requireRows(g.space.Bytes(r), rigKey(n+2))
	}
	g.do(func() {
		g.space.Drained(late)
		require.False(t, g.space.table.Check(late, Draining))
		stale := g.space.stats.Stale
		g.space.Drained(late)
		require.Equal(t, stale+1, g.space.stats.Stale)
	})
	r := g.grant(9, 0, true)
	require.Equal(t, late.Slot, r.Slot)
	require.Greater(t, r.Generation, late.Generation)
}

func TestRemoveInEveryState(t *testing.T) {
	g := newRig(t, rigOptions{slots: 8})
	g.grown(8)
	assembling := g.grant(1, 0, true)
	ready := g.store(2, 0, true)
	pinned := g.store(3, 0, true)
	g.do(func() {
		s := g.space
		require.NoError(t, s.Pin(pinned))
		s.Remove(rigKey(1))
		s.Remove(rigKey(2))
		s.Remove(rigKey(3))
		s.Remove(rigKey(4))
		require.True(t, s.is(assembling, Draining))
		require.False(t, s.is(ready, Ready))
		require.Equal(t, Free, s.slots[ready.Slot].state)
		require.True(t, s.is(pinned, Draining))
		require.Equal(t, 2, s.Counts()[Draining])
		// The key is free again while its old slot drains.
		_, err := s.Grant(rigKey(3), rigKey(0), 0, true)
		require.NoError(t, err)
		s.Unpin(pinned)
		s.Drained(assembling)
		require.Zero(t, s.Counts()[Draining])
	})
	// SEALING: the waiters are told once, whatever the worker is doing.
	for n := 10; n < 30; n++ {
		g.until("a free slot", func() bool { return g.space.freeCount > 0 })
		r := g.grant(n, 0, true)
		g.do(func() {
			require.NoError(t, g.space.Seal(r))
			g.space.Remove(rigKey(n))
			require.ErrorIs(t, g.events[r].Err, ErrRemoved)
		})
	}
	g.until("all drained", func() bool { return g.space.Counts()[Draining] == 0 })
}

// What waits for a chunk may remove it when it hears of it.
func TestSettledMayCallBack(t *testing.T) {
	g := newRig(t, rigOptions{slots: 4})
	r := g.grant(1, 0, false)
	g.do(func() {
		g.space.settled = func(e SettledEvent) {
			g.events[e.Ref] = e
			g.space.Remove(e.Key)
		}
		require.NoError(t, g.space.Seal(r))
	})
	require.True(t, g.settled(r).Ready)
	require.Equal(t, Free, g.state(1))
	g.do(func() { require.Empty(t, g.space.Stats().Off) })
}

func TestWorkerPanicSwitchesSpaceOff(t *testing.T) {
	g := newRig(t, rigOptions{slots: 8})
	g.grown(8)
	kept := g.store(1, 0, true)
	r, waiting := g.grant(2, 0, true), g.grant(3, 0, true)
	g.do(func() {
		require.NoError(t, g.space.change(waiting, complete)) // in no worker's hands
		inner := g.space.settled
		g.space.settled = func(e SettledEvent) {
			if e.Ref == r && e.Ready {
				panic("boom")
			}
			inner(e)
		}
		require.NoError(t, g.space.Seal(r))
	})
	require.ErrorIs(t, g.settled(waiting).Err, ErrSpaceOff)
	g.do(func() {
		s := g.space
		require.Equal(t, Presence{}, s.Look(rigKey(1)))
		_, err := s.Grant(rigKey(7), rigKey(0), 0, true)
		require.ErrorIs(t, err, ErrSpaceOff)
		_, err = s.Fill(rigKey(7), 0)
		require.ErrorIs(t, err, ErrSpaceOff)
		require.ErrorIs(t, s.Pin(kept), ErrSpaceOff)
		require.Contains(t, s.Stats().Off, "boom")
	})
}

func TestTableForReaders(t *testing.T) {
	g := newRig(t, rigOptions{slots: 8})
	f, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", g.space.TableFile().Fd()))
	require.NoError(t, err)
	seg, err := sys.OpenSegment(f, TableBytes(g.space.Slots()), false)
	require.NoError(t, err)
	defer seg.Close()
	table, err := OpenTable(seg)
	require.NoError(t, err)
	r := g.store(1, 0, true)
	require.True(t, table.Check(r, Ready))
	g.do(func() { g.space.Remove(rigKey(1)) })
	require.False(t, table.Check(r, Ready))
	require.True(t, table.Check(Ref{r.Slot, r.Generation + 1}, Free))
	require.False(t, table.Check(Ref{8, 1}, Free))
}

// A read that does not come back: Close ends in time, and what it may still touch
// stays mapped.
func TestCloseIsBounded(t *testing.T) {
	g := newRig(t, rigOptions{slots: 8})
	r := g.grant(1, 0, true)
	g.do(func() { g.space.inflight++ })
	require.ErrorIs(t, g.space.close(20*time.Millisecond), ErrSpaceBusy)
	require.NotNil(t, g.space.Bytes(r))
	g.space.closing.Do(func() {}) // the rig's Close comes to a Space that was closed
	g.do(g.space.ended)
	<-g.space.quiet
	require.NoError(t, g.space.unmap())
}

func TestCloseIsFinal(t *testing.T) {
	g := newRig(t, rigOptions{slots: 8})
	r := g.grant(2, 0, true)
	require.NoError(t, g.space.Close(rigWait))
	require.NoError(t, g.space.Close(rigWait))
	require.Zero(t, g.space.pool.Used())
	require.Nil(t, g.space.Bytes(r))
	g.do(func() { // late events of a leader that is closing
		g.space.Drop(r)
		g.space.Drained(r)
		require.Equal(t, Presence{}, g.space.Look(rigKey(2)))
		_, err := g.space.Grant(rigKey(3), rigKey(2), 0, true)
		require.ErrorIs(t, err, ErrSpaceOff)
	})
}
