package tier

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/chunk"
)

// legalChanges is the table of formats.md, section 5, written down a second time.
var legalChanges = map[State]map[event]State{
	Free:       {granted: Assembling, fetched: Filling},
	Assembling: {complete: Sealing, dropped: Draining, removed: Draining},
	Filling:    {verified: Ready, unread: Free, givenUp: Draining, removed: Draining},
	Sealing:    {hashed: Ready, removed: Draining},
	Ready:      {evicted: Free, removed: Draining},
	Draining:   {drained: Free},
}

// bring takes a fresh slot to a state, without workers and without disk.
func (g *rig) bring(k chunk.Key, to State) Ref {
	s := g.space
	i, ok := s.popFree()
	require.True(g, ok)
	r := Ref{i, s.slots[i].generation}
	s.slots[i].key = k
	path := map[State][]event{
		Free: nil, Assembling: {granted}, Filling: {fetched}, Sealing: {granted, complete},
		Ready: {granted, complete, hashed}, Draining: {granted, dropped},
	}[to]
	for _, e := range path {
		require.NoError(g, s.change(r, e))
	}
	require.Equal(g, to, s.slots[i].state)
	return r
}

func TestEveryStateAndEvent(t *testing.T) {
	for from := range stateCount {
		for e := range eventCount {
			t.Run(from.String()+"/"+e.String(), func(t *testing.T) {
				g := newRig(t, rigOptions{slots: 8})
				g.do(func() {
					s, k := g.space, rigKey(5)
					r := g.bring(k, from)
					sl := &s.slots[r.Slot]
					if from == Draining {
						require.ErrorIs(t, s.change(r, drained), ErrTransition, "a rank may still write")
						sl.users = 0
					}
					before := *sl
					to, legal := legalChanges[from][e]
					err := s.change(r, e)
					if !legal {
						require.ErrorIs(t, err, ErrTransition)
						require.Equal(t, before, *sl)
						require.True(t, s.table.Check(r, from))
						if from == Free {
							s.pushFree(r.Slot)
						}
						return
					}
					require.NoError(t, err)
					require.Equal(t, to, sl.state)
					_, indexed := s.index.find(k)
					require.Equal(t, to != Free && to != Draining, indexed)
					if to == Free {
						require.Equal(t, r.Generation+1, sl.generation)
						require.False(t, s.table.Check(r, Free), "the old use is over")
						require.ErrorIs(t, s.change(r, granted), ErrStale)
					} else {
						require.Equal(t, r.Generation, sl.generation)
					}
					require.True(t, s.table.Check(Ref{r.Slot, sl.generation}, to))
				})
			})
		}
	}
}

func TestUseKeepsSlotFromBecomingFree(t *testing.T) {
	g := newRig(t, rigOptions{slots: 8})
	g.do(func() {
		s := g.space
		r := g.bring(rigKey(1), Ready)
		require.NoError(t, s.Pin(r))
		require.ErrorIs(t, s.change(r, evicted), ErrTransition)
		s.Remove(rigKey(1))
		require.True(t, s.is(r, Draining))
		require.ErrorIs(t, s.change(r, drained), ErrTransition)
		s.Unpin(r)
		require.True(t, s.table.Check(Ref{r.Slot, r.Generation + 1}, Free))
	})
}

func TestReferencesThatNeverWere(t *testing.T) {
	g := newRig(t, rigOptions{slots: 8})
	g.do(func() {
		s := g.space
		for _, r := range []Ref{{}, {Slot: 7}, {Slot: 8, Generation: 1}, {Slot: none, Generation: 1}, {Slot: 0, Generation: 9}} {
			require.ErrorIs(t, s.Pin(r), ErrStale)
			require.Error(t, s.Seal(r))
			before := s.stats.Stale
			s.Unpin(r)
			s.Drop(r)
			s.Drained(r)
			s.GiveUpFill(r)
			require.Equal(t, before+4, s.stats.Stale)
			require.False(t, s.table.Check(r, Ready))
		}
		s.Unhold(rigKey(9))
		require.Equal(t, map[State]int{Free: 8, Assembling: 0, Filling: 0, Sealing: 0, Ready: 0, Draining: 0}, s.Counts())
	})
	require.Nil(t, g.space.Bytes(Ref{Slot: 8}))
}

func TestGenerationSkipsZero(t *testing.T) {
	require.EqualValues(t, 1, nextGeneration(none))
	require.EqualValues(t, 2, nextGeneration(1))
}
