package kvtier

import (
	"bytes"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"runtime"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvtier/kvtier/dcp"
	"github.com/kvtier/kvtier/internal/wire"
)

// Whole topologies against a count of bytes: ranks with their regions, as an engine
// has them, go through registration, the leader's union, and the copies. Where a byte
// has to be is computed from the formula of the design, a byte at a time.
//
// Each of these mutants makes tests here fail, and was tried:
//   - every holder of a replicated region writes it; nobody but the lowest is expected
//   - all rows taken as the rank's own, in the columns of a load
//   - regions joined that follow each other in the page only, or in the row only
//   - the head's number, or the layer's, left out of a column's identity

const (
	oracleLayers = 2
	unwritten    = 0xA5
)

// oracleTopology is TP ranks, of which each D share the tokens; the TP/D groups of
// them share the heads.
type oracleTopology struct {
	d, i, b, tp int
}

// oracleModel is what no topology changes.
type oracleModel struct {
	c, heads      int
	latent, index int // bytes of a token in a layer; the index is not sharded
	head          int // bytes of a token in a head
}

// oracleByte is what a region holds.
func oracleByte(c column, token, at int) byte {
	x := uint32(token)*2654435761 + uint32(at)*40503 + uint32(c.layer)*97 + uint32(c.head+1)*7919
	for _, r := range c.name {
		x = x*31 + uint32(r)
	}
	x ^= x >> 15
	x *= 0x2c1b3c6d
	return byte(x>>13) % unwritten // never what stands for unwritten
}

// oracleRank is one rank and its memory.
type oracleRank struct {
	t      oracleTopology
	rank   *Rank
	decl   *wire.Declare
	table  []uint32
	places []oraclePlace
	memory [][]byte
}

// oraclePlace is one region in one of the rank's arrays.
type oraclePlace struct {
	c                        column
	bytes                    int
	allRows                  bool
	memory                   int
	at, blockStride, tokStep int
}

func newOracleRank(t require.TestingT, m oracleModel, top oracleTopology, rank, tokens int, rng *rand.Rand) *oracleRank {
	o := &oracleRank{t: top}
	virtual := top.b * top.d
	need := (tokens + virtual - 1) / virtual
	blocks := need + 2
	for _, id := range rng.Perm(blocks)[:need] {
		o.table = append(o.table, uint32(id))
	}
	var regions []Region
	array := func(perBlock int, columns []column, widths []int, allRows, replicated, tokenMajor bool) {
		sum := 0
		for _, w := range widths {
			sum += w
		}
		at := 0
		for n, c := range columns {
			p := oraclePlace{c: c, bytes: widths[n], allRows: allRows, memory: len(o.memory), at: at, blockStride: sum * perBlock, tokStep: widths[n]}
			if at += widths[n] * perBlock; tokenMajor {
				at -= widths[n] * (perBlock - 1)
				p.tokStep = sum
			}
			o.places = append(o.places, p)
		}
		o.memory = append(o.memory, bytes.Repeat([]byte{unwritten}, sum*perBlock*blocks))
		for _, p := range o.places[len(o.places)-len(columns):] {
			regions = append(regions, Region{
				Name: p.c.name, Component: p.c.component, Layer: p.c.layer, Head: p.c.head, Bytes: p.bytes, Replicated: replicated, AllRows: allRows,
				Base: uintptr(unsafe.Pointer(&o.memory[p.memory][p.at])), BlockStride: int64(p.blockStride), TokenStride: int64(p.tokStep),
			})
		}
	}
	groups := top.tp / top.d
	for layer := range oracleLayers {
		array(top.b, []column{{0, "target", "latent", layer, -1}}, []int{m.latent}, false, groups > 1, false)
		// The page of an index: all values, then all scales.
		array(virtual, []column{{0, "target", "index", layer, -1}, {0, "target", "scale", layer, -1}}, []int{m.index, 4}, true, groups > 1, false)
		var heads []column
		var widths []int
		for h := range m.heads {
			if h*groups/m.heads == rank/top.d || groups > m.heads && rank/top.d/(groups/m.heads) == h {
				// In the page a head's K and V lie together, in the row all K do.
				heads = append(heads, column{0, "draft", "k", layer, h}, column{0, "draft", "v", layer, h})
				widths = append(widths, m.head, m.head)
			}
		}
		array(top.b, heads, widths, false, groups > m.heads, rng.IntN(2) == 0)
	}
	if rng.IntN(2) == 0 {
		rng.Shuffle(len(regions), func(i, j int) { regions[i], regions[j] = regions[j], regions[i] })
	}
	var err error
	o.rank, o.decl, err = newRank(RankConfig{
		Group: "g", Ranks: top.tp, Rank: rank, DCP: top.d, DCPRank: rank % top.d, Interleave: top.i, BlockTokens: top.b,
		NumBlocks: blocks, ChunkTokens: m.c, Identity: Identity{Model: "m", KVDtype: "u8", Weights: "00", Draft: "d", Encoding: "rows"}, Groups: []GroupConfig{{}},
	}, regions)
	require.NoError(t, err)
	return o
}

// each calls visit for all bytes that this rank has of the tokens [lo, hi).
func (o *oracleRank) each(lo, hi int, visit func(c column, token, at int, b *byte)) {
	virtual := o.t.b * o.t.d
	for _, p := range o.places {
		for token := lo; token < hi; token++ {
			off := token % virtual
			local := off/(o.t.d*o.t.i)*o.t.i + off%o.t.i
			if p.allRows {
				local = off
			} else if off/o.t.i%o.t.d != o.rank.geometry.Rank {
				continue
			}
			from := p.at + int(o.table[token/virtual])*p.blockStride + local*p.tokStep
			for at := range p.bytes {
				visit(p.c, token, at, &o.memory[p.memory][from+at])
			}
		}
	}
}

func (o *oracleRank) snapshot() (out [][]byte) {
	for _, m := range o.memory {
		out = append(out, bytes.Clone(m))
	}
	return out
}

// oracleGroup is all ranks, accepted.
type oracleGroup struct {
	ranks []*oracleRank
	ag    *agreement
	views []*view
}

func newOracleGroup(t require.TestingT, m oracleModel, top oracleTopology, tokens int, rng *rand.Rand) *oracleGroup {
	g := &oracleGroup{}
	var declared []*wire.Declare
	for rank := range top.tp {
		g.ranks = append(g.ranks, newOracleRank(t, m, top, rank, tokens, rng))
		declared = append(declared, g.ranks[rank].decl)
	}
	var err error
	g.ag, err = agree(declared)
	require.NoError(t, err, "%+v %+v", m, top)
	for rank := range g.ranks {
		g.views = append(g.views, &view{accept: &wire.Accept{Columns: g.ag.columns[rank]}, layout: g.ag.layout})
	}
	return g
}

// slot is the chunk as the design lays it out: row by row, region by region.
func (g *oracleGroup) slot(m oracleModel, ordinal int) []byte {
	lay, ns := g.ag.layout.Groups[0], g.ag.namespace.Groups[0]
	out := bytes.Repeat([]byte{unwritten}, int(lay.Offset)+m.c*lay.RowStride)
	for row := range m.c {
		at := int(lay.Offset) + row*lay.RowStride
		for _, reg := range ns.Regions {
			for b := range reg.Bytes {
				out[at] = oracleByte(column{0, reg.Component, reg.Name, reg.Layer, reg.Head}, ordinal*m.c+row, b)
				at++
			}
		}
	}
	return out
}

// store gathers the chunk of all ranks, each into a slot of its own, and demands that
// every byte of the rows has one writer, and that the expected ranks are the writers.
func (g *oracleGroup) store(t require.TestingT, m oracleModel, ordinal int) []byte {
	want := g.slot(m, ordinal)
	whole := bytes.Repeat([]byte{unwritten}, len(want))
	var writers uint64
	for rank, o := range g.ranks {
		o.each(0, (ordinal+1)*m.c, func(c column, token, at int, b *byte) { *b = oracleByte(c, token, at) })
		before := o.snapshot()
		cols, err := o.rank.columns(g.views[rank], true)
		require.NoError(t, err)
		part := bytes.Repeat([]byte{unwritten}, len(want))
		require.NoError(t, dcp.Gather(part, o.rank.geometry, cols, ordinal, o.table, 0, nil))
		require.Equal(t, before, o.memory)
		for i, b := range part {
			if b != unwritten {
				if whole[i] != unwritten {
					require.Fail(t, "two writers", "%+v, byte %d", o.t, i)
				}
				whole[i] = b
				writers |= 1 << rank
			}
		}
	}
	if !bytes.Equal(want, whole) {
		require.Equal(t, want, whole, "%+v %+v ordinal %d", m, g.ranks[0].t, ordinal)
	}
	require.Equal(t, writers, g.ag.expected(uint32(ordinal)), "%+v: expected parts", g.ranks[0].t)
	return whole
}

// load scatters the tokens of clip to all ranks and compares all their memory.
func (g *oracleGroup) load(t require.TestingT, m oracleModel, slot []byte, ordinal int, clip dcp.Span) {
	lo, hi := max(ordinal*m.c, clip.First), min((ordinal+1)*m.c, clip.First+clip.Tokens)
	for rank, o := range g.ranks {
		cols, err := o.rank.columns(g.views[rank], false)
		require.NoError(t, err)
		empty := o.snapshot()
		o.each(lo, hi, func(c column, token, at int, b *byte) { *b = oracleByte(c, token, at) })
		want := o.snapshot()
		for i := range o.memory {
			copy(o.memory[i], empty[i])
		}
		require.NoError(t, dcp.Scatter(slot, o.rank.geometry, cols, ordinal, clip, o.table, 0, nil))
		for i := range want {
			if !bytes.Equal(want[i], o.memory[i]) {
				require.Equal(t, want[i], o.memory[i], "%+v %+v ordinal %d clip %+v rank %d", m, o.t, ordinal, clip, rank)
			}
		}
	}
	runtime.KeepAlive(g)
}

func TestSmallTopologiesAgainstTheFormula(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 1))
	var tops []oracleTopology
	for d := 1; d <= 3; d++ {
		for _, groups := range []int{1, 2, 4} {
			for _, b := range []int{1, 2, 4} {
				for i := 1; i <= b; i *= 2 {
					tops = append(tops, oracleTopology{d, i, b, d * groups})
				}
			}
		}
	}
	for _, c := range []int{3, 4, 10} {
		m := oracleModel{c: c, heads: 2, latent: 6, index: 3, head: 2}
		for _, from := range tops {
			for ordinal := range 3 {
				slot := newOracleGroup(t, m, from, (ordinal+1)*c, rng).store(t, m, ordinal)
				to := tops[rng.IntN(len(tops))]
				first := ordinal*c - 1 + rng.IntN(c)
				newOracleGroup(t, m, to, (ordinal+1)*c, rng).load(t, m, slot, ordinal, dcp.Span{First: max(first, 0), Tokens: rng.IntN(c + 2)})
			}
		}
	}
}

// Numbers as models have them. D*I may be larger than C, or not divide it.
func TestDrawnTopologiesAgainstTheFormula(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := oracleModel{
			c: rapid.SampledFrom([]int{16, 48, 64, 100, 256}).Draw(t, "C"), heads: rapid.SampledFrom([]int{1, 2, 4}).Draw(t, "heads"),
			latent: rapid.SampledFrom([]int{64, 132, 656}).Draw(t, "latent"), index: rapid.SampledFrom([]int{16, 128}).Draw(t, "index"),
			head: rapid.SampledFrom([]int{8, 64}).Draw(t, "head"),
		}
		draw := func(name string) oracleTopology {
			top := oracleTopology{d: rapid.SampledFrom([]int{1, 2, 3, 4, 8}).Draw(t, name+" D"), b: rapid.SampledFrom([]int{16, 48, 64}).Draw(t, name+" B")}
			top.i = rapid.SampledFrom([]int{1, 2, 16, top.b}).Draw(t, name+" I")
			top.tp = top.d * rapid.SampledFrom([]int{1, 2, 4, 8}).Draw(t, name+" groups")
			return top
		}
		from, to := draw("from"), draw("to")
		ordinal := rapid.IntRange(0, 4).Draw(t, "ordinal")
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		source, target := newOracleGroup(t, m, from, (ordinal+1)*m.c, rng), newOracleGroup(t, m, to, (ordinal+1)*m.c, rng)
		require.Equal(t, source.ag.fingerprint, target.ag.fingerprint, "a topology is no part of what a chunk is")
		slot := source.store(t, m, ordinal)
		clip := dcp.Span{First: rapid.IntRange(0, (ordinal+1)*m.c).Draw(t, "first"), Tokens: rapid.IntRange(0, 2*m.c).Draw(t, "tokens")}
		target.load(t, m, slot, ordinal, clip)
	})
}

// Ranks that hold the same rows share the work.
func TestReplicasShareTheWork(t *testing.T) {
	rng := rand.New(rand.NewPCG(8, 1))
	m := oracleModel{c: 16, heads: 1, latent: 8, index: 4, head: 4}
	for _, top := range []oracleTopology{{1, 1, 4, 4}, {2, 2, 4, 4}, {2, 1, 4, 8}} {
		g := newOracleGroup(t, m, top, m.c, rng)
		require.Equal(t, top.tp, bits.OnesCount64(g.ag.expected(0)), fmt.Sprintf("%+v: all ranks write something", top))
	}
}
