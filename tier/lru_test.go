package tier

import (
	"cmp"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestQueueKeepsOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		slots := make([]slot, 40)
		q := evictionQueue{kind: cleanQueue}
		in := map[uint32]bool{}
		t.Repeat(map[string]func(*rapid.T){
			"add or remove": func(t *rapid.T) {
				i := rapid.Uint32Range(0, 39).Draw(t, "slot")
				if in[i] {
					q.remove(slots, i)
				} else {
					slots[i].recency, slots[i].ordinal = rapid.Int64Range(0, 5).Draw(t, "recency"), i
					q.add(slots, i)
				}
				in[i] = !in[i]
			},
			"touch": func(t *rapid.T) {
				i := rapid.Uint32Range(0, 39).Draw(t, "slot")
				if in[i] {
					slots[i].recency = rapid.Int64Range(0, 5).Draw(t, "recency")
					q.moved(slots, int(slots[i].place))
				}
			},
			"": func(t *rapid.T) {
				var want []uint32
				for i, is := range in {
					if is {
						want = append(want, i)
					}
				}
				slices.SortFunc(want, func(a, b uint32) int {
					if c := cmp.Compare(slots[a].recency, slots[b].recency); c != 0 {
						return c
					}
					return cmp.Compare(b, a)
				})
				copied := evictionQueue{kind: cleanQueue, order: slices.Clone(q.order)}
				other := slices.Clone(slots)
				var got []uint32
				for len(copied.order) > 0 {
					got = append(got, copied.order[0])
					copied.remove(other, copied.order[0])
				}
				if !slices.Equal(want, got) {
					t.Fatalf("want %v, got %v", want, got)
				}
			},
		})
	})
}

// leaving fills an arena, then needs room again and again, and returns the numbers
// of the chunks in the order they leave.
func (g *rig) leaving(numbers ...int) (order []int) {
	g.Helper()
	for range numbers {
		// One slot too many is wanted: whoever is gone was evicted for it.
		g.grant(1000+len(order), 0, true)
		for _, n := range numbers {
			if g.state(n) == Free && !slices.Contains(order, n) {
				order = append(order, n)
			}
		}
	}
	return order
}

func TestSuffixLeavesBeforePrefix(t *testing.T) {
	g := newRig(t, rigOptions{slots: 6})
	g.grown(6)
	for n := range 6 {
		g.store(n, n%3, true) // two prefixes of three chunks
		if n == 2 {
			g.do(func() { g.clock = g.clock.Add(time.Second) })
		}
	}
	require.Equal(t, []int{2, 1, 0, 5, 4, 3}, g.leaving(0, 1, 2, 3, 4, 5))
}

func TestTouchMakesRecent(t *testing.T) {
	g := newRig(t, rigOptions{slots: 4})
	g.grown(4)
	for n := range 4 {
		g.store(n, 0, true)
		g.do(func() { g.clock = g.clock.Add(time.Second) })
	}
	g.do(func() { g.space.Touch(rigKey(0), 0) })
	require.Equal(t, []int{1, 2, 3, 0}, g.leaving(0, 1, 2, 3))
}

// A chunk that comes back from a pin has the place of its last touch.
func TestUnpinnedReturnsToItsPlace(t *testing.T) {
	g := newRig(t, rigOptions{slots: 4})
	g.grown(4)
	refs := make([]Ref, 4)
	for n := range 4 {
		refs[n] = g.store(n, 0, true)
		g.do(func() { g.clock = g.clock.Add(time.Second) })
	}
	g.do(func() {
		require.NoError(t, g.space.Pin(refs[1]))
		g.space.Unpin(refs[1])
	})
	require.Equal(t, []int{0, 1, 2, 3}, g.leaving(0, 1, 2, 3))
}

func TestPinnedAndHeldAreKept(t *testing.T) {
	g := newRig(t, rigOptions{slots: 4})
	g.grown(4)
	refs := make([]Ref, 4)
	for n := range 4 {
		refs[n] = g.store(n, n, true)
	}
	g.do(func() {
		require.NoError(t, g.space.Pin(refs[3]))
		g.space.Hold(rigKey(2))
		g.space.Hold(rigKey(2))
		require.True(t, g.space.OnlyInDRAM(rigKey(2)))
		require.Equal(t, 2, g.space.Available())
	})
	g.grant(100, 0, true)
	g.grant(101, 0, true)
	require.Equal(t, Free, g.state(0))
	require.Equal(t, Free, g.state(1))
	require.ErrorIs(t, g.makeRoom(), ErrNoSlot)
	g.do(func() { g.space.Unhold(rigKey(2)) })
	require.ErrorIs(t, g.makeRoom(), ErrNoSlot, "held twice")
	g.do(func() { g.space.Unhold(rigKey(2)) })
	require.NoError(t, g.makeRoom())
	require.Equal(t, Free, g.state(2))
	require.Equal(t, Ready, g.state(3), "pinned")
}

// A hold may come before the chunk does.
func TestHoldBeforeStore(t *testing.T) {
	g := newRig(t, rigOptions{slots: 4})
	g.grown(4)
	g.do(func() { g.space.Hold(rigKey(0)) })
	for n := range 4 {
		g.store(n, 0, true)
	}
	g.grant(10, 0, true)
	g.grant(11, 0, true)
	g.grant(12, 0, true)
	require.ErrorIs(t, g.makeRoom(), ErrNoSlot)
	require.Equal(t, Ready, g.state(0))
}
