package kvtier

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/dcp"
	"github.com/kvtier/kvtier/internal/wire"
)

// A rank copies by its own geometry into a row that the leader laid out. So it takes no
// acceptance that was agreed for another declaration than its own, whoever is to blame.

// acceptedView is what rank 1 of a group gets that declares ds.
func acceptedView(t *testing.T, ds []*wire.Declare) *view {
	t.Helper()
	r := newLeaderRig(t)
	var waits []<-chan groupOutcome
	for rank, d := range ds {
		waits = append(waits, declareAsync(r.attach("g", len(ds), rank, false), d))
	}
	var o groupOutcome
	for _, w := range waits {
		o = within(t, w)
		require.NotNil(t, o.acc, o.refuse)
	}
	v, err := newView(o.acc.accept)
	require.NoError(t, err)
	return v
}

func acceptanceDeclares() []*wire.Declare {
	geo := dcp.Geometry{D: 2, I: 2, B: 4, C: 16}
	ds := []*wire.Declare{rigDeclare(geo, 0), rigDeclare(geo, 1)}
	for _, d := range ds {
		d.Groups[0].Regions = append(d.Groups[0].Regions, region("scale", 0, 4, false))
	}
	ds[0].Identity.Weights = "abcd" // rank 0 alone knows
	ds[1].Identity.Encoding = ""    // the rows of tokens
	ds[0].Identity.Encoding = ""
	return ds
}

func TestAcceptanceForAnotherDeclarationIsRefused(t *testing.T) {
	mine := acceptanceDeclares()[1]
	require.NoError(t, acceptedView(t, acceptanceDeclares()).fits(mine))
	both := func(change func(d *wire.Declare)) func(ds []*wire.Declare) {
		return func(ds []*wire.Declare) {
			for _, d := range ds {
				change(d)
			}
		}
	}
	for _, c := range []struct {
		name   string
		change func(ds []*wire.Declare) // what the group declares instead
		reason string
	}{
		{"interleave", both(func(d *wire.Declare) { d.Interleave = 4 }), "interleave 4, this rank declares 2"},
		{"block", both(func(d *wire.Declare) { d.BlockTokens = 8 }), "block tokens 8, this rank declares 4"},
		{"chunk", both(func(d *wire.Declare) { d.ChunkTokens = 32 }), "chunk tokens 32, this rank declares 16"},
		{"DCP rank", func(ds []*wire.Declare) { ds[0].DCPRank, ds[1].DCPRank = 1, 0 }, "DCP rank 0, this rank declares 1"},
		{"dcp", both(func(d *wire.Declare) {
			d.DCP, d.DCPRank = 1, 0
			for i := range d.Groups[0].Regions {
				d.Groups[0].Regions[i].Replicated = true
			}
		}), "dcp 1, this rank declares 2"},
		{"groups", both(func(d *wire.Declare) { d.Groups = append(d.Groups, d.Groups[0]) }), "KV groups 2, this rank declares 1"},
		{"model", both(func(d *wire.Declare) { d.Identity.Model = "other" }), "model other"},
		{"attention", both(func(d *wire.Declare) { d.Identity.Attention = "ab" }), "attention ab"},
		{"draft", both(func(d *wire.Declare) { d.Identity.Draft = "mtp" }), "draft model mtp"},
		{"encoding", both(func(d *wire.Declare) { d.Identity.Encoding = "pages" }), "encoding pages, this rank declares rows"},
		{"dtype", both(func(d *wire.Declare) { d.Identity.KVDtype = "fp8" }), "KV dtype fp8"},
		{"scales", both(func(d *wire.Declare) { d.Identity.KVScales = "ab" }), "KV scales ab"},
		{"quantisation", both(func(d *wire.Declare) { d.Identity.Quantisation = "awq" }), "quantisation awq"},
		{"rows of blocks", both(func(d *wire.Declare) {
			d.Identity.Encoding, d.Interleave, d.Groups[0].TokensPerRow = "pages", 4, 4
		}), "interleave 4"},
		{"region", both(func(d *wire.Declare) { d.Groups[0].Regions[1].Name = "other" }), `region "scale" (target, layer 0) is not in the row`},
		{"layer", both(func(d *wire.Declare) { d.Groups[0].Regions[1].Layer = 1 }), `region "scale" (target, layer 0) is not in the row`},
		{"width", both(func(d *wire.Declare) { d.Groups[0].Regions[1].Bytes = 8 }), `region "scale" (target, layer 0) with bytes 8, this rank declares 4`},
		{"a region more", both(func(d *wire.Declare) {
			d.Groups[0].Regions = append(d.Groups[0].Regions, region("more", 0, 4, false))
		}), "group 0 with regions 3, this rank declares 2"},
		{"order of regions", both(func(d *wire.Declare) { slices.Reverse(d.Groups[0].Regions) }), "is placed at 64 of the row, where it lies at 0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ds := acceptanceDeclares()
			c.change(ds)
			err := acceptedView(t, ds).fits(mine)
			require.ErrorIs(t, err, errOtherDeclaration)
			require.ErrorContains(t, err, c.reason)
		})
	}
	t.Run("weights", func(t *testing.T) {
		require.ErrorContains(t, acceptedView(t, acceptanceDeclares()).fits(func() *wire.Declare {
			d := *mine
			d.Identity.Weights = "ef"
			return &d
		}()), "weights abcd, this rank declares ef")
	})
	t.Run("written by no rank", func(t *testing.T) {
		v := acceptedView(t, acceptanceDeclares())
		v.accept.Columns[0][1].Writes = false
		require.ErrorContains(t, v.fits(mine), "written by no rank")
	})
	t.Run("columns of no group", func(t *testing.T) {
		v := acceptedView(t, acceptanceDeclares())
		v.accept.Columns = nil
		require.ErrorContains(t, v.fits(mine), "KV groups with columns 0")
	})
}

// Over the links: a rank that comes back to a leader which has agreed on another
// geometry is refused with the reason and copies nothing. When the leader says what is
// right it works again, without anybody's doing.
func TestRankRefusesAnotherGeometry(t *testing.T) {
	for _, link := range []string{"direct", "ring"} {
		t.Run(link, func(t *testing.T) {
			dir := t.TempDir()
			leader := openTest(t, dir, RoleLeader)
			requireState(t, leader, StateLeader)
			c := leader
			if link == "ring" {
				c = openApart(t, dir, RoleMember)
			}
			cfg := smallEngine
			cfg.d, cfg.i = 2, 4
			e := newEngine(t, c, cfg)
			p := e.newPrefix(1, 4, 0)
			e.fill(p, 0, 4*e.geo.C)
			e.store(p, 0, 2)
			e.held(p, 2)

			l := leader.leader
			agree := func(interleave int) {
				l.lock()
				defer l.unlock()
				l.groups[cfg.group].agreement.geometry.I = interleave
			}
			require.NoError(t, e.ranks[1].Close(testWait))
			agree(8)
			e.ranks[1] = e.register(cfg, 1)
			require.Eventually(t, func() bool {
				_, err := e.ranks[1].Ready(10 * time.Millisecond)
				var refused *RefusedError // perhaps first for the goodbye of its predecessor, not heard yet
				return errors.As(err, &refused) && !refused.Final &&
					refused.Reason == "the leader has accepted another declaration than this rank's: interleave 8, this rank declares 4"
			}, testWait, time.Millisecond)
			require.ErrorIs(t, e.ranks[1].SelfTest(true, time.Second), ErrNotAccepted)
			require.ErrorIs(t, e.ranks[1].Store(StoreOp{Session: e.k.Session(), Op: 1000}), ErrStale)

			agree(4)
			e.ready()
			e.store(p, 2, 2)
			e.held(p, 4)
			e.wipe(0xEE)
			op := e.begin(p, 0, 4*e.geo.C)
			e.requireLoaded(e.load(op), op)
			e.requireOnly(p, 0, 4*e.geo.C, 0xEE)
			e.requireIdle()
		})
	}
}
