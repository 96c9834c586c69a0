package kvtier

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/dcp"
	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/wire"
)

type groupOutcome struct {
	acc    *accepted
	refuse *wire.Refuse
}

func declareAsync(a *attachment, d *wire.Declare) <-chan groupOutcome {
	out := make(chan groupOutcome, 2)
	a.declare(d, func(acc *accepted, no *wire.Refuse) { out <- groupOutcome{acc, no} })
	return out
}

func within(t *testing.T, c <-chan groupOutcome) groupOutcome {
	t.Helper()
	select {
	case o := <-c:
		return o
	case <-time.After(patience):
		t.Fatal("no outcome")
		return groupOutcome{}
	}
}

func region(name string, layer, bytes int, replicated bool) wire.DeclaredRegion {
	return wire.DeclaredRegion{Name: name, Component: "target", Layer: layer, Head: -1, Bytes: bytes, Replicated: replicated}
}

func TestGroupRefusals(t *testing.T) {
	geo := dcp.Geometry{D: 2, I: 2, B: 4, C: 16}
	for _, c := range []struct {
		name   string
		change func(d []*wire.Declare)
		reason string
	}{
		{"interleave", func(d []*wire.Declare) { d[1].Interleave = 4 }, "rank 1 declares interleave 4, rank 0 declares 2"},
		{"block", func(d []*wire.Declare) { d[1].BlockTokens = 8 }, "block tokens 8"},
		{"chunk", func(d []*wire.Declare) { d[1].ChunkTokens = 32 }, "chunk tokens 32"},
		{"dcp", func(d []*wire.Declare) { d[1].DCP = 1 }, "dcp 1"},
		{"dcp rank", func(d []*wire.Declare) { d[1].DCPRank = 2 }, "DCP rank 2 of 2"},
		{"model", func(d []*wire.Declare) { d[1].Identity.Model = "other" }, "model other"},
		{"weights", func(d []*wire.Declare) { d[1].Identity.Weights = "ab" }, "weights ab"},
		{"scales", func(d []*wire.Declare) { d[1].Identity.KVScales = "ab" }, "KV scales ab"},
		{"width", func(d []*wire.Declare) { d[1].Groups[0].Regions[0].Bytes = 32 }, "rank 1 declares 32 bytes, rank 0 declares 64"},
		{"replicated", func(d []*wire.Declare) { d[1].Groups[0].Regions[0].Replicated = true }, "replicated true"},
		{"all rows", func(d []*wire.Declare) { d[1].Groups[0].Regions[0].AllRows = true }, "all rows true"},
		{"twice", func(d []*wire.Declare) {
			d[1].Groups[0].Regions = append(d[1].Groups[0].Regions, d[1].Groups[0].Regions[0])
		}, "rank 1 declares it twice"},
		{"overlap", func(d []*wire.Declare) { d[1].DCPRank = 0 }, "both hold the rows of DCP rank 0"},
		{"hole", func(d []*wire.Declare) { d[1].Groups[0].Regions[0].Name = "other" }, "no rank with DCP rank"},
		{"groups", func(d []*wire.Declare) { d[1].Groups = append(d[1].Groups, d[1].Groups[0]) }, "KV groups 2"},
		{"kind", func(d []*wire.Declare) { d[1].Groups[0].Kind = "blob" }, "of kind blob"},
		{"geometry", func(d []*wire.Declare) { d[0].Interleave, d[1].Interleave = 3, 3 }, "geometry"},
		{"opaque", func(d []*wire.Declare) { d[0].Groups[0].TokensPerRow, d[1].Groups[0].TokensPerRow = 4, 4 }, "opaque pages"},
		{"budget", func(d []*wire.Declare) {
			d[0].Groups[0].Regions[0].Bytes, d[1].Groups[0].Regions[0].Bytes = 1<<20, 1<<20
		}, "raise dram_gib"},
		{"few slots", func(d []*wire.Declare) {
			d[0].Groups[0].Regions[0].Bytes, d[1].Groups[0].Regions[0].Bytes = 1<<13, 1<<13
		}, "raise dram_gib"},
		{"model name", func(d []*wire.Declare) { d[0].Identity.Model, d[1].Identity.Model = "", "" }, "model is empty"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newLeaderRig(t)
			coord := r.attach("g", 2, -1, true)
			waits := []<-chan groupOutcome{declareAsync(coord, nil)}
			ds := []*wire.Declare{rigDeclare(geo, 0), rigDeclare(geo, 1)}
			c.change(ds)
			for rank, d := range ds {
				waits = append(waits, declareAsync(r.attach("g", 2, rank, false), d))
			}
			first := within(t, waits[0])
			require.NotNil(t, first.refuse)
			require.Contains(t, first.refuse.Reason, c.reason)
			require.True(t, first.refuse.Final)
			for _, w := range waits[1:] {
				require.Equal(t, first, within(t, w), "all members get the same")
			}
			rep := r.call(coord, &wire.Request{Type: wire.StoreBegin, Op: 1, Run: &wire.Run{Keys: make([]chunk.Key, 2)}})
			require.Equal(t, repeat(wire.Declined, 2), codes(rep.Verdicts))
		})
	}
}

func TestGroupUnion(t *testing.T) {
	r := newLeaderRig(t)
	// TP 4 with DCP 2 and two pipeline stages of a latent each; the indexer is
	// replicated, and ranks 2 and 3 hold what 0 and 1 hold.
	ds := make([]*wire.Declare, 4)
	geo := dcp.Geometry{D: 2, I: 8, B: 8, C: 16}
	var waits []<-chan groupOutcome
	for rank := range ds {
		ds[rank] = rigDeclare(geo, rank%2)
		ds[rank].Groups[0].Regions = []wire.DeclaredRegion{region("scale", 0, 4, true), region("latent", 0, 64, true)}
	}
	ds[0].Identity.Weights = "abcd" // rank 0 alone knows
	for rank := range ds {
		waits = append(waits, declareAsync(r.attach("g", 4, rank, false), ds[rank]))
	}
	for rank, w := range waits {
		o := within(t, w)
		require.Nil(t, o.refuse)
		// The two that hold the same take turns.
		require.Equal(t, [][]wire.AcceptedRegion{{{Offset: 64, Writes: rank >= 2}, {Offset: 0, Writes: rank < 2}}}, o.acc.accept.Columns)
		var ns chunk.Namespace
		require.NoError(t, json.Unmarshal(o.acc.accept.Namespace, &ns))
		require.Equal(t, "abcd", ns.Weights)
		require.True(t, o.acc.accept.DiskEnabled)
	}
	g := r.l.groups["g"]
	require.Equal(t, uint64(0b1111), g.agreement.expected(0))
}

// The expected parts over all ranks, against counting token by token.
func TestExpectedParts(t *testing.T) {
	for _, geo := range []dcp.Geometry{{D: 1, I: 1, B: 4, C: 16}, {D: 2, I: 1, B: 4, C: 16}, {D: 4, I: 8, B: 8, C: 16}, {D: 8, I: 64, B: 64, C: 256}, {D: 3, I: 2, B: 4, C: 10}} {
		stages := 2
		ds := make([]*wire.Declare, stages*geo.D)
		for rank := range ds {
			ds[rank] = rigDeclare(geo, rank%geo.D)
			ds[rank].Groups[0].Regions[0].Layer = rank / geo.D // a pipeline stage
		}
		ag, err := agree(ds)
		require.NoError(t, err)
		for ordinal := range uint32(40) {
			var want uint64
			for i := range geo.C {
				_, d, _ := geo.Locate(int(ordinal)*geo.C + i)
				for s := range stages {
					want |= 1 << (s*geo.D + d)
				}
			}
			require.Equal(t, want, ag.expected(ordinal), "%+v ordinal %d", geo, ordinal)
			require.Equal(t, want, ag.expected(ordinal), "from the cache")
		}
	}
}

func TestGroupForms(t *testing.T) {
	r := newLeaderRig(t)
	geo := dcp.Geometry{D: 2, I: 2, B: 4, C: 16}
	coord := r.attach("g", 2, -1, true)
	wait := declareAsync(coord, nil)
	a0 := r.attach("g", 2, 0, false)
	w0 := declareAsync(a0, rigDeclare(geo, 0))

	for _, h := range []wire.Hello{
		{Protocol: wire.Protocol, Group: "g", Ranks: 2, Rank: 0},
		{Protocol: wire.Protocol, Group: "g", Ranks: 2, Rank: -1, Coordinator: true},
		{Protocol: wire.Protocol, Group: "g", Ranks: 3, Rank: 1},
		{Protocol: wire.Protocol, Group: "g", Ranks: 2, Rank: 2},
		{Protocol: wire.Protocol, Group: "h", Ranks: 65, Rank: 2},
		{Protocol: wire.Protocol + 1, Group: "g", Ranks: 2, Rank: 1},
	} {
		_, _, err := r.l.attach(&h)
		var refused *RefusedError
		require.ErrorAs(t, err, &refused)
	}
	// Incomplete: everything is a miss.
	rep := r.call(coord, &wire.Request{Type: wire.Lease, Run: &wire.Run{Lease: 1, Keys: make([]chunk.Key, 1)}})
	require.Equal(t, wire.StatusRefused, rep.Status)
	require.False(t, r.l.groups["g"].named)
	r.advance(61 * time.Second)
	require.True(t, r.l.groups["g"].named)

	// Rank 0 leaves and is followed before the group is complete.
	a0.gone()
	a0.dead()
	require.NotNil(t, within(t, w0).refuse)
	require.NotNil(t, within(t, declareAsync(r.attach("g", 2, 0, false), nil)).refuse, "a rank declares something")
	r.l.groups["g"].members[0].gone()
	w0 = declareAsync(r.attach("g", 2, 0, false), rigDeclare(geo, 0))
	a1 := r.attach("g", 2, 1, false)
	w1 := declareAsync(a1, rigDeclare(geo, 1))
	for _, w := range []<-chan groupOutcome{wait, w0, w1} {
		require.NotNil(t, within(t, w).acc)
	}
	require.NotNil(t, within(t, declareAsync(a1, rigDeclare(geo, 1))).refuse, "once")
	require.Nil(t, within(t, declareAsync(coord, nil)).acc.accept.Columns)

	// An accepted group that lost a rank is a miss, until the rank is back.
	a1.gone()
	rep = r.call(coord, &wire.Request{Type: wire.Lookup, Run: &wire.Run{Keys: make([]chunk.Key, 1)}})
	require.Equal(t, wire.StatusRefused, rep.Status)
	again := r.attach("g", 2, 1, false)
	other := rigDeclare(geo, 1)
	other.Groups[0].Regions[0].Name = "x"
	require.True(t, within(t, declareAsync(again, other)).refuse.Final)
	require.NotNil(t, within(t, declareAsync(again, rigDeclare(geo, 1))).acc)
	rep = r.call(coord, &wire.Request{Type: wire.Lookup, Run: &wire.Run{Keys: make([]chunk.Key, 1)}})
	require.Equal(t, wire.StatusOK, rep.Status)

	// When all are dead the group is forgotten.
	for _, a := range r.l.members {
		a.dead()
	}
	a1.dead()
	require.Empty(t, r.l.groups)
	require.Empty(t, r.l.members)
	r.quiet()
	r.join("g", 1, 1)
}

func TestMemoryOnlyNeverReachesTheDisk(t *testing.T) {
	r := newLeaderRig(t)
	geo := dcp.Geometry{D: 1, I: 1, B: 4, C: 16}
	d := rigDeclare(geo, 0)
	d.Identity.MemoryOnly, d.Identity.Weights = true, "abcd"
	o := within(t, declareAsync(r.attach("g", 1, 0, false), d))
	require.False(t, o.acc.accept.DiskEnabled)
	require.Nil(t, r.l.groups["g"].space.disk)
}

func TestOneProcessIsCoordinatorAndRank(t *testing.T) {
	r := newLeaderRig(t)
	a := r.attach("g", 1, 0, true)
	o := within(t, declareAsync(a, rigDeclare(dcp.Geometry{D: 1, I: 1, B: 4, C: 16}, 0)))
	g := &rigGroup{r: r, id: "g", geo: dcp.Geometry{D: 1, I: 1, B: 4, C: 16}, coord: a, ranks: []*attachment{a}, acc: o.acc}
	keys := g.chain(1, 3)
	g.store(keys, 0)
	g.lease(1, g.runOf(keys, 0))
	require.Equal(t, repeat(wire.Ready, 3), g.loadAll(1, g.runOf(keys, 0)))
	r.quiet()
}

func TestObserver(t *testing.T) {
	r := newLeaderRig(t)
	a := r.attach("", 0, -1, false)
	for typ := wire.Lookup; typ <= wire.Cancel; typ++ {
		req := &wire.Request{Type: typ}
		switch typ {
		case wire.Lookup, wire.Prefetch, wire.Lease, wire.Release, wire.StoreBegin, wire.LoadBegin:
			req.Run = &wire.Run{Keys: make([]chunk.Key, 1)}
		}
		if typ == wire.Release {
			req.Run.Keys = nil
			require.Equal(t, wire.StatusOK, r.call(a, req).Status)
			continue
		}
		require.NotEqual(t, wire.StatusOK, r.call(a, req).Status, typ)
	}
	require.NotNil(t, within(t, declareAsync(a, rigDeclare(dcp.Geometry{D: 1, I: 1, B: 4, C: 16}, 0))).refuse)
	a.dead()
}
