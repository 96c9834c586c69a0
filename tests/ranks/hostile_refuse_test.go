package ranks

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/sys"
	"github.com/kvtier/kvtier/internal/wire"
)

// Who does not fit is told why.
func TestLeaderRefusesWithAReason(t *testing.T) {
	b := newBesieged(t)
	a := &attackSpec{Dir: b.r.dir}
	for name, c := range map[string]struct {
		hello   func(*wire.Hello)
		declare func(*wire.Declare)
		reason  string
		final   bool
	}{
		"version":        {hello: func(h *wire.Hello) { h.Protocol++ }, reason: "use the same version", final: true},
		"older version":  {hello: func(h *wire.Hello) { h.Protocol-- }, reason: "use the same version", final: true},
		"duplicate rank": {hello: func(h *wire.Hello) { h.Group, h.Ranks, h.Rank, h.Coordinator = "good", 2, 1, false }, reason: "attached already"},
		"duplicate coordinator": {hello: func(h *wire.Hello) { h.Group, h.Ranks, h.Rank = "good", 2, -1 },
			reason: "has a coordinator already"},
		"another size":    {hello: func(h *wire.Hello) { h.Group, h.Ranks, h.Rank = "good", 3, 2 }, reason: "has 2 ranks"},
		"too many ranks":  {hello: func(h *wire.Hello) { h.Ranks = 65 }, reason: "must be 1 to 64", final: true},
		"rank beyond":     {hello: func(h *wire.Hello) { h.Rank = 1 }, reason: "rank 1 of a group of 1", final: true},
		"geometry":        {declare: func(d *wire.Declare) { d.Interleave = 3 }, reason: "does not divide", final: true},
		"two DCP ranks":   {declare: func(d *wire.Declare) { d.DCP = 2 }, reason: "no rank with DCP rank 1", final: true},
		"no model":        {declare: func(d *wire.Declare) { d.Identity.Model = "" }, reason: "model", final: true},
		"a huge chunk":    {declare: func(d *wire.Declare) { d.Groups[0].Regions[0].Bytes = 1 << 20 }, reason: "raise dram_gib", final: true},
		"a region twice":  {declare: func(d *wire.Declare) { d.Groups[0].Regions = append(d.Groups[0].Regions, d.Groups[0].Regions[0]) }, reason: "twice", final: true},
		"no region":       {declare: func(d *wire.Declare) { d.Groups[0].Regions = nil }, reason: "region", final: true},
		"a foreign group": {declare: func(d *wire.Declare) { d.Groups[0].Kind = "other" }, reason: "other", final: true},
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := a.dial()
			require.NoError(t, err)
			defer conn.Forget()
			defer conn.Close()
			h, d := validHello(), validDeclare()
			if c.hello != nil {
				c.hello(h)
			}
			require.NoError(t, conn.Send(h))
			f, files, err := recv(conn)
			require.NoError(t, err)
			sys.CloseFiles(files)
			if c.declare != nil {
				require.IsType(t, &wire.Welcome{}, f)
				c.declare(d)
				require.NoError(t, conn.Send(d))
				f, files, err = recv(conn)
				require.NoError(t, err)
				sys.CloseFiles(files)
			}
			require.IsType(t, &wire.Refuse{}, f)
			require.Contains(t, f.(*wire.Refuse).Reason, c.reason)
			require.Equal(t, c.final, f.(*wire.Refuse).Final)
			_ = conn.Send(&wire.Goodbye{})
		})
	}
	b.works()
}

// A rank that declares something else than the other one of its group is refused with the
// reason, and so is the other.
func TestRankThatDiffersIsRefusedWithAReason(t *testing.T) {
	b := newBesieged(t)
	a := &attackSpec{Dir: b.r.dir}
	region := func(d *wire.Declare) *wire.DeclaredRegion { return &d.Groups[0].Regions[1] }
	for name, c := range map[string]struct {
		differ func(*wire.Declare)
		reason string
	}{
		"model":          {func(d *wire.Declare) { d.Identity.Model = "evil" }, "model"},
		"weights":        {func(d *wire.Declare) { d.Identity.Weights = "4567" }, "weights"},
		"attention":      {func(d *wire.Declare) { d.Identity.Attention = "bb" }, "attention"},
		"draft":          {func(d *wire.Declare) { d.Identity.Draft = "small" }, "draft model"},
		"encoding":       {func(d *wire.Declare) { d.Identity.Encoding = "pages" }, "encoding"},
		"KV dtype":       {func(d *wire.Declare) { d.Identity.KVDtype = "fp8" }, "KV dtype"},
		"KV scales":      {func(d *wire.Declare) { d.Identity.KVScales = "cc" }, "KV scales"},
		"quantisation":   {func(d *wire.Declare) { d.Identity.Quantisation = "int4" }, "quantisation"},
		"chunk tokens":   {func(d *wire.Declare) { d.ChunkTokens = 48 }, "chunk tokens 48"},
		"block tokens":   {func(d *wire.Declare) { d.BlockTokens = 16 }, "block tokens 16"},
		"dcp":            {func(d *wire.Declare) { d.DCP = 1 }, "dcp 1"},
		"interleave":     {func(d *wire.Declare) { d.Interleave = 4 }, "interleave 4"},
		"DCP rank":       {func(d *wire.Declare) { d.DCPRank = 2 }, "DCP rank 2 of 2"},
		"same DCP rank":  {func(d *wire.Declare) { d.DCPRank = 0 }, "both hold the rows of DCP rank 0"},
		"two groups":     {func(d *wire.Declare) { d.Groups = append(d.Groups, d.Groups[0]) }, "KV groups 2"},
		"kind":           {func(d *wire.Declare) { d.Groups[0].Kind = "other" }, "kind other"},
		"tokens per row": {func(d *wire.Declare) { d.Groups[0].TokensPerRow = 8 }, "tokens per row 8"},
		"bytes":          {func(d *wire.Declare) { region(d).Bytes++ }, "18 bytes"},
		"replicated":     {func(d *wire.Declare) { region(d).Replicated = true }, "replicated true"},
		"all rows":       {func(d *wire.Declare) { region(d).AllRows = true }, "all rows true"},
		"name":           {func(d *wire.Declare) { region(d).Name = "other" }, "no rank with DCP rank"},
		"component":      {func(d *wire.Declare) { region(d).Component = "draft" }, "no rank with DCP rank"},
		"layer":          {func(d *wire.Declare) { region(d).Layer = 7 }, "no rank with DCP rank"},
		"head":           {func(d *wire.Declare) { region(d).Head = 3 }, "no rank with DCP rank"},
	} {
		t.Run(name, func(t *testing.T) {
			group := evilGroup()
			good, bad := rankDeclare(), rankDeclare()
			good.DCPRank, good.Identity.Weights = 0, "0123"
			c.differ(bad)
			var conns []*rawConn
			for rank, d := range []*wire.Declare{good, bad} {
				conn, err := a.dialRaw()
				require.NoError(t, err)
				defer conn.Close()
				h := rankHello(group)
				h.Rank = rank
				conn.frame(h)
				require.NoError(t, conn.until("welcome"))
				conn.frame(d)
				conns = append(conns, conn)
			}
			for rank, conn := range conns {
				require.NoError(t, conn.until("refuse"))
				require.Contains(t, conn.refusal.Reason, c.reason, "rank %d", rank)
				require.True(t, conn.refusal.Final)
				conn.frame(&wire.Goodbye{})
			}
		})
	}
	b.works()
}
