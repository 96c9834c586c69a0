package kvtier

import (
	"fmt"
	"math/bits"

	"github.com/kvtier/kvtier/dcp"
	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/wire"
)

// agreement is what the declarations of all ranks of a group come to.
type agreement struct {
	namespace   *chunk.Namespace
	layout      *chunk.Layout
	canonical   []byte // of the namespace
	fingerprint chunk.Fingerprint
	geometry    dcp.Geometry // Rank is 0
	memoryOnly  bool
	columns     [][][]wire.AcceptedRegion // by rank, group, region as that rank declared it
	dcpRanks    []int                     // by rank
	writers     []uint64                  // by DCP rank: the ranks that write its rows
	period      int                       // expected masks repeat after so many ordinals
	masks       []uint64                  // cache of expected for the first period ordinals, 0 = not known; nil: too many
}

const maxCachedMasks = 1024

// column identifies a region in the row, whoever declares it.
type column struct {
	group           int
	component, name string
	layer, head     int
}

func (c column) String() string {
	s := fmt.Sprintf("region %q (%s, layer %d", c.name, c.component, c.layer)
	if c.head >= 0 {
		s += fmt.Sprintf(", head %d", c.head)
	}
	return s + ")"
}

// claim is what is known of one column while the declarations are gone through.
type claim struct {
	bytes      int
	replicated bool
	allRows    bool
	rank       int      // that declared it first
	holders    []uint64 // by DCP rank: the ranks that hold those rows
}

// agree makes the union of the declarations, one per rank, in the order of ranks.
// The error says what differs, in words for all members.
//
// The rows of a chunk belong to DCP ranks. Of the ranks that hold the same rows of
// a replicated region one writes them, so every byte of a chunk has exactly one
// writer; they take turns from region to region. A region that is not replicated must
// have one holder per DCP rank.
func agree(declared []*wire.Declare) (*agreement, error) {
	d0 := declared[0]
	for r, d := range declared {
		if err := sameAs(d0, d, r); err != nil {
			return nil, err
		}
	}
	ag := &agreement{geometry: dcp.Geometry{D: d0.DCP, I: d0.Interleave, B: d0.BlockTokens, C: d0.ChunkTokens}}
	if err := ag.geometry.Validate(); err != nil {
		return nil, fmt.Errorf("geometry: %w", err)
	}
	claims := make(map[column]*claim)
	ns := &chunk.Namespace{
		Attention: d0.Identity.Attention, ChunkTokens: d0.ChunkTokens, Draft: d0.Identity.Draft,
		Encoding: d0.Identity.Encoding, KVDtype: d0.Identity.KVDtype, KVScales: d0.Identity.KVScales,
		Model: d0.Identity.Model, Quantisation: d0.Identity.Quantisation, Weights: d0.Identity.Weights,
		Groups: make([]chunk.Group, len(d0.Groups)),
	}
	for i, g := range d0.Groups {
		ns.Groups[i] = chunk.Group{Kind: g.Kind, TokensPerRow: g.TokensPerRow}
		if g.TokensPerRow != 1 && g.Kind == chunk.GroupFull && ag.geometry.D > 1 && d0.Interleave != d0.BlockTokens {
			return nil, fmt.Errorf("group %d has opaque pages: with dcp %d the interleave must be the block size %d, it is %d", i, d0.DCP, d0.BlockTokens, d0.Interleave)
		}
	}
	for r, d := range declared {
		ag.memoryOnly = ag.memoryOnly || d.Identity.MemoryOnly
		for gi, g := range d.Groups {
			for _, reg := range g.Regions {
				c := column{gi, reg.Component, reg.Name, reg.Layer, reg.Head}
				known := claims[c]
				if known == nil {
					known = &claim{bytes: reg.Bytes, replicated: reg.Replicated, allRows: reg.AllRows, rank: r, holders: make([]uint64, d0.DCP)}
					claims[c] = known
					ns.Groups[gi].Regions = append(ns.Groups[gi].Regions, chunk.Region{
						Bytes: reg.Bytes, Component: reg.Component, Head: reg.Head, Layer: reg.Layer, Name: reg.Name,
					})
				}
				if err := known.join(c, r, d.DCPRank, reg); err != nil {
					return nil, err
				}
			}
		}
	}
	for gi, g := range ns.Groups {
		for _, reg := range g.Regions {
			c := column{gi, reg.Component, reg.Name, reg.Layer, reg.Head}
			for d, holders := range claims[c].holders {
				if holders == 0 {
					return nil, fmt.Errorf("%v: no rank with DCP rank %d declares it, so its rows would be missing", c, d)
				}
			}
		}
	}
	if err := ag.seal(ns); err != nil {
		return nil, err
	}
	ag.place(declared, claims)
	return ag, nil
}

// sameAs compares what must be equal on all ranks.
func sameAs(d0, d *wire.Declare, r int) error {
	differ := func(what string, mine, first any) error {
		return fmt.Errorf("rank %d declares %s %v, rank 0 declares %v", r, what, mine, first)
	}
	a, b := d.Identity, d0.Identity
	switch {
	case a.Weights != "" && a.Weights != b.Weights:
		return differ("weights", a.Weights, b.Weights)
	case a.Model != b.Model:
		return differ("model", a.Model, b.Model)
	case a.Attention != b.Attention:
		return differ("attention", a.Attention, b.Attention)
	case a.Draft != b.Draft:
		return differ("draft model", a.Draft, b.Draft)
	case a.Encoding != b.Encoding:
		return differ("encoding", a.Encoding, b.Encoding)
	case a.KVDtype != b.KVDtype:
		return differ("KV dtype", a.KVDtype, b.KVDtype)
	case a.KVScales != b.KVScales:
		return differ("KV scales", a.KVScales, b.KVScales)
	case a.Quantisation != b.Quantisation:
		return differ("quantisation", a.Quantisation, b.Quantisation)
	case d.ChunkTokens != d0.ChunkTokens:
		return differ("chunk tokens", d.ChunkTokens, d0.ChunkTokens)
	case d.BlockTokens != d0.BlockTokens:
		return differ("block tokens", d.BlockTokens, d0.BlockTokens)
	case d.DCP != d0.DCP:
		return differ("dcp", d.DCP, d0.DCP)
	case d.Interleave != d0.Interleave:
		return differ("interleave", d.Interleave, d0.Interleave)
	case len(d.Groups) != len(d0.Groups):
		return differ("KV groups", len(d.Groups), len(d0.Groups))
	case d.DCP < 1 || d.DCP > wireRanks:
		return fmt.Errorf("rank %d declares dcp %d, must be 1 to %d", r, d.DCP, wireRanks)
	case d.DCPRank < 0 || d.DCPRank >= d.DCP:
		return fmt.Errorf("rank %d declares DCP rank %d of %d", r, d.DCPRank, d.DCP)
	}
	for i := range d.Groups {
		if d.Groups[i].Kind != d0.Groups[i].Kind {
			return differ(fmt.Sprintf("group %d of kind", i), d.Groups[i].Kind, d0.Groups[i].Kind)
		}
		if d.Groups[i].TokensPerRow != d0.Groups[i].TokensPerRow {
			return differ(fmt.Sprintf("group %d with tokens per row", i), d.Groups[i].TokensPerRow, d0.Groups[i].TokensPerRow)
		}
	}
	return nil
}

// join adds rank r, which holds the rows of DCP rank d of this column.
func (k *claim) join(c column, r, d int, reg wire.DeclaredRegion) error {
	if reg.Bytes != k.bytes {
		return fmt.Errorf("%v: rank %d declares %d bytes, rank %d declares %d", c, r, reg.Bytes, k.rank, k.bytes)
	}
	if reg.Replicated != k.replicated {
		return fmt.Errorf("%v: rank %d declares replicated %v, rank %d declares %v", c, r, reg.Replicated, k.rank, k.replicated)
	}
	if reg.AllRows != k.allRows {
		return fmt.Errorf("%v: rank %d declares all rows %v, rank %d declares %v", c, r, reg.AllRows, k.rank, k.allRows)
	}
	switch holders := k.holders[d]; {
	case holders>>r&1 != 0:
		return fmt.Errorf("%v: rank %d declares it twice", c, r)
	case holders != 0 && !k.replicated:
		return fmt.Errorf("%v: ranks %d and %d both hold the rows of DCP rank %d, and it is not replicated", c, bits.TrailingZeros64(holders), r, d)
	}
	k.holders[d] |= 1 << r
	return nil
}

// writer is the rank that writes the rows of DCP rank d, for the region with this place
// in the row.
func (k *claim) writer(d, place int) int {
	holders := k.holders[d]
	for range place % bits.OnesCount64(holders) {
		holders &= holders - 1
	}
	return bits.TrailingZeros64(holders)
}

// seal turns the union into namespace, layout and fingerprint.
func (ag *agreement) seal(ns *chunk.Namespace) error {
	if err := ns.Normalize(); err != nil {
		return err
	}
	var err error
	if ag.canonical, err = ns.Canonical(); err != nil {
		return err
	}
	if ag.fingerprint, err = ns.Fingerprint(); err != nil {
		return err
	}
	if ag.layout, err = ns.Layout(); err != nil {
		return err
	}
	ag.namespace = ns
	return nil
}

// place tells every rank where its regions lie and which of them it writes.
func (ag *agreement) place(declared []*wire.Declare, claims map[column]*claim) {
	offsets, places := make(map[column]int, len(claims)), make(map[column]int, len(claims))
	for gi, g := range ag.namespace.Groups {
		for i, reg := range g.Regions {
			c := column{gi, reg.Component, reg.Name, reg.Layer, reg.Head}
			offsets[c], places[c] = ag.layout.Groups[gi].RegionOffsets[i], i
		}
	}
	ag.writers = make([]uint64, ag.geometry.D)
	ag.columns = make([][][]wire.AcceptedRegion, len(declared))
	ag.dcpRanks = make([]int, len(declared))
	for r, d := range declared {
		ag.dcpRanks[r] = d.DCPRank
		ag.columns[r] = make([][]wire.AcceptedRegion, len(d.Groups))
		for gi, g := range d.Groups {
			out := make([]wire.AcceptedRegion, len(g.Regions))
			for i, reg := range g.Regions {
				c := column{gi, reg.Component, reg.Name, reg.Layer, reg.Head}
				writes := claims[c].writer(d.DCPRank, places[c]) == r
				out[i] = wire.AcceptedRegion{Offset: offsets[c], Writes: writes}
				if writes {
					ag.writers[d.DCPRank] |= 1 << r
				}
			}
			ag.columns[r][gi] = out
		}
	}
	span := ag.geometry.D * ag.geometry.I
	ag.period = span / gcd(span, ag.geometry.C)
	if ag.period <= maxCachedMasks {
		ag.masks = make([]uint64, ag.period)
	}
}

// expected gives the ranks whose parts make up the chunk with this ordinal. It is
// never empty. Calls exclude each other: the caller holds the leader's lock.
func (ag *agreement) expected(ordinal uint32) uint64 {
	at := int(ordinal) % ag.period
	if ag.masks != nil && ag.masks[at] != 0 {
		return ag.masks[at]
	}
	var ranks uint64
	for parts := ag.geometry.Parts(at); parts != 0; parts &= parts - 1 {
		ranks |= ag.writers[bits.TrailingZeros64(parts)]
	}
	if ag.masks != nil {
		ag.masks[at] = ranks
	}
	return ranks
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
