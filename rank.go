package kvtier

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/kvtier/kvtier/dcp"
	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/steps"
	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/tier"
)

// Identity is what must be equal for the bytes of two runs to be interchangeable,
// besides the layout of the rows.
type Identity = wire.Identity

// RankConfig describes a rank and its place in its group.
type RankConfig struct {
	Group string
	Ranks int // of the group, at most 64
	Rank  int

	DCP         int // D
	DCPRank     int
	Interleave  int // I
	BlockTokens int // B, on one rank
	NumBlocks   int // of the page pool: block ids are below it
	ChunkTokens int // C

	Identity   Identity
	Provenance map[string]string
	Groups     []GroupConfig // KV groups
}

// GroupConfig describes one KV group. TokensPerRow is 1, or BlockTokens where pages
// are opaque.
type GroupConfig struct {
	Kind         string // empty: "full"
	TokensPerRow int    // 0: 1
}

// Region is one independently addressable piece of this rank's pages: token l of
// block b lies at Base + b*BlockStride + l*TokenStride and has Bytes bytes. With
// opaque pages Bytes is the width of a whole block.
//
// Base lies outside the Go heap, and its memory stays valid until the rank is
// closed.
type Region struct {
	Name       string
	Component  string // "target" or "draft"
	Layer      int    // global, -1 for none
	Head       int    // global, -1 for none
	Bytes      int
	Replicated bool // other ranks of the same DCP rank hold the same bytes
	AllRows    bool // not sharded over DCP: a page holds all DCP*BlockTokens tokens of its block

	Group       int // index in RankConfig.Groups
	Base        uintptr
	BlockStride int64
	TokenStride int64
}

// Rank moves one rank's pages in and out of the cache. It stays valid over the
// loss of a leader. Its methods may be called from any goroutine.
type Rank struct {
	m        *member
	id       uint64
	part     uint32
	geometry dcp.Geometry
	blocks   int // NumBlocks
	groups   []rankGroup
	loader   *loader

	testing sync.Mutex                     // one self-test at a time
	onTest  func(step string, slot []byte) // only in tests: it may spoil a slot
}

func (r *Rank) testStep(step string, slot []byte) {
	if r.onTest != nil {
		r.onTest(step, slot)
	}
}

// rankGroup holds the regions of one KV group in the order they were declared.
type rankGroup struct {
	kind         string
	tokensPerRow int
	regions      []Region
}

var rankIDs atomic.Uint64

// Register attaches a rank. It returns at once; see Ready. Errors are about the
// arguments: what the group says is told by Ready.
func (c *Cache) Register(d RankConfig, regions []Region) (*Rank, error) {
	r, decl, err := newRank(d, regions)
	if err != nil {
		return nil, err
	}
	r.m = newMember(c, wire.Hello{Group: d.Group, Ranks: d.Ranks, Rank: d.Rank}, decl)
	r.loader = newLoader(r)
	r.m.interrupt = r.loader.interrupt
	if err := r.m.start(); err != nil {
		return nil, err
	}
	r.loader.start()
	return r, nil
}

func newRank(d RankConfig, regions []Region) (*Rank, *wire.Declare, error) {
	if err := checkGroup(d.Group, d.Ranks); err != nil {
		return nil, nil, err
	}
	if d.Rank < 0 || d.Rank >= d.Ranks {
		return nil, nil, fmt.Errorf("%w: rank %d of %d", ErrArgument, d.Rank, d.Ranks)
	}
	r := &Rank{
		id: rankIDs.Add(1), part: uint32(d.Rank), blocks: d.NumBlocks,
		geometry: dcp.Geometry{D: d.DCP, I: d.Interleave, B: d.BlockTokens, C: d.ChunkTokens, Rank: d.DCPRank},
	}
	if err := r.geometry.Validate(); err != nil {
		return nil, nil, fmt.Errorf("%w: %w", ErrArgument, err)
	}
	if d.NumBlocks < 1 || int64(d.NumBlocks) > 1<<32 {
		return nil, nil, fmt.Errorf("%w: %d blocks in the page pool", ErrArgument, d.NumBlocks)
	}
	if len(d.Groups) == 0 || len(d.Groups) > chunk.MaxGroups {
		return nil, nil, fmt.Errorf("%w: %d KV groups, from 1 to %d are possible", ErrArgument, len(d.Groups), chunk.MaxGroups)
	}
	decl := &wire.Declare{
		Identity: d.Identity, ChunkTokens: d.ChunkTokens, BlockTokens: d.BlockTokens,
		DCP: d.DCP, Interleave: d.Interleave, DCPRank: d.DCPRank, Provenance: d.Provenance,
	}
	for _, g := range d.Groups {
		kind, per := g.Kind, g.TokensPerRow
		if kind == "" {
			kind = chunk.GroupFull
		}
		if per == 0 {
			per = 1
		}
		if per != 1 && per != d.BlockTokens {
			return nil, nil, fmt.Errorf("%w: %d tokens per row: it is 1, or the block of %d tokens where pages are opaque", ErrArgument, per, d.BlockTokens)
		}
		r.groups = append(r.groups, rankGroup{kind: kind, tokensPerRow: per})
	}
	for i, reg := range regions {
		if reg.Group < 0 || reg.Group >= len(r.groups) {
			return nil, nil, fmt.Errorf("%w: region %d (%s) names KV group %d of %d", ErrArgument, i, reg.Name, reg.Group, len(r.groups))
		}
		if reg.Base == 0 || reg.Bytes < 1 {
			return nil, nil, fmt.Errorf("%w: region %d (%s) has %d bytes at %#x", ErrArgument, i, reg.Name, reg.Bytes, reg.Base)
		}
		g := &r.groups[reg.Group]
		g.regions = append(g.regions, reg)
	}
	for i, g := range r.groups {
		out := wire.DeclaredGroup{Kind: g.kind, TokensPerRow: g.tokensPerRow}
		if len(g.regions) == 0 {
			return nil, nil, fmt.Errorf("%w: KV group %d has no region", ErrArgument, i)
		}
		if err := r.checkRegions(&g); err != nil {
			return nil, nil, fmt.Errorf("%w: KV group %d: %w", ErrArgument, i, err)
		}
		for _, reg := range g.regions {
			out.Regions = append(out.Regions, wire.DeclaredRegion{
				Name: reg.Name, Component: reg.Component, Layer: reg.Layer, Head: reg.Head,
				Bytes: reg.Bytes, Replicated: reg.Replicated, AllRows: reg.AllRows,
			})
		}
		decl.Groups = append(decl.Groups, out)
	}
	return r, decl, nil
}

// checkRegions refuses strides that no row could ever fit, long before the group is
// accepted: each region is looked at as if it were a row of its own.
func (r *Rank) checkRegions(g *rankGroup) error {
	for _, reg := range g.regions {
		c := dcp.Columns{RowStride: reg.Bytes, TokensPerRow: g.tokensPerRow, AllRows: reg.AllRows, Regions: []dcp.Region{r.region(&reg, 0)}}
		if err := dcp.Fits(r.geometry, []dcp.Columns{c}, math.MaxInt); err != nil {
			return fmt.Errorf("region %s of layer %d: %w", reg.Name, reg.Layer, err)
		}
	}
	return nil
}

func (r *Rank) region(reg *Region, rowOffset int) dcp.Region {
	return dcp.Region{
		Base: pointer(reg.Base), Blocks: r.blocks, BlockStride: reg.BlockStride, TokenStride: reg.TokenStride,
		Bytes: reg.Bytes, RowOffset: rowOffset,
	}
}

// ID names the rank in events, unique in this process.
func (r *Rank) ID() uint64 { return r.id }

// Ready waits until the group is accepted; as Coordinator.Ready.
func (r *Rank) Ready(timeout time.Duration) (*Accepted, error) { return r.m.ready(timeout) }

// Close ends the rank within timeout (0: the configured one). Running loads are
// cancelled and still bring their events. After ErrTimeout the pages may still be
// in use.
func (r *Rank) Close(timeout time.Duration) error {
	if timeout <= 0 {
		timeout = r.m.cache.cfg.CloseTimeout
	}
	end := time.Now().Add(timeout)
	err := r.m.close(timeout)
	if err == nil {
		err = waitDone(r.loader.done, max(time.Until(end), 0))
	}
	return err
}

// columns gives this rank's view of a chunk's rows. For stores, regions that
// another rank writes are left out.
func (r *Rank) columns(v *view, store bool) ([]dcp.Columns, error) {
	if len(v.accept.Columns) != len(r.groups) || len(v.layout.Groups) != len(r.groups) {
		return nil, errAcceptance
	}
	out := make([]dcp.Columns, 0, len(r.groups))
	for i := range r.groups {
		g, placed, lay := &r.groups[i], v.accept.Columns[i], &v.layout.Groups[i]
		if len(placed) != len(g.regions) || lay.TokensPerRow != g.tokensPerRow {
			return nil, errAcceptance
		}
		sharded := dcp.Columns{Offset: int(lay.Offset), RowStride: lay.RowStride, TokensPerRow: lay.TokensPerRow}
		whole := sharded
		whole.AllRows = true
		for j := range g.regions {
			reg := &g.regions[j]
			if store && !placed[j].Writes {
				continue
			}
			if placed[j].Offset < 0 || placed[j].Offset > lay.RowBytes-reg.Bytes {
				return nil, errAcceptance
			}
			c := &sharded
			if reg.AllRows {
				c = &whole
			}
			c.Regions = joined(c.Regions, r.region(reg, placed[j].Offset))
		}
		for _, c := range []dcp.Columns{sharded, whole} {
			if len(c.Regions) > 0 {
				// In the order of the row, in which copies can join what lies together there.
				slices.SortFunc(c.Regions, func(a, b dcp.Region) int { return cmp.Compare(a.RowOffset, b.RowOffset) })
				out = append(out, c)
			}
		}
	}
	return out, nil
}

// joined appends a region, or makes it part of the last one when both follow each
// other in the page and in the row: heads that lie together are one copy.
func joined(regions []dcp.Region, reg dcp.Region) []dcp.Region {
	if n := len(regions); n > 0 {
		last := &regions[n-1]
		if unsafe.Add(last.Base, last.Bytes) == reg.Base && last.RowOffset+last.Bytes == reg.RowOffset &&
			last.BlockStride == reg.BlockStride && last.TokenStride == reg.TokenStride && last.Blocks == reg.Blocks {
			last.Bytes += reg.Bytes
			return regions
		}
	}
	return append(regions, reg)
}

// pointer makes a pointer of an address outside the Go heap.
func pointer(address uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&address)) }

// Grant is a slot that this rank is to fill: chunk Index of the operation.
type Grant struct {
	Index            uint32
	Slot, Generation uint32
}

// StoreOp is one store operation as it came from the coordinator.
type StoreOp struct {
	Session      uint64
	Op           uint64
	FirstOrdinal uint32 // of index 0
	Grants       []Grant
	// Blocks of the virtual blocks from floor(FirstOrdinal*C/V) on, up to the end
	// of the last granted chunk.
	Blocks []uint32
}

// Store copies this rank's rows into the granted slots, on the caller's thread, and
// tells the leader, also about what could not be copied. ErrStale: the grants are
// of a leader that is gone, there is nothing to do. With another error some chunks
// are aborted.
func (r *Rank) Store(s StoreOp) error {
	v, l, session, release, err := r.m.use()
	if err == ErrNotAccepted {
		// The coordinator has heard of the acceptance first. Whoever waits for this
		// rank's part learns that it does not come.
		if l, session, err := r.m.attached(); err == nil && session == s.Session {
			report(l, s.Op, r.aborted(s.Grants))
		}
	}
	if err != nil {
		if err == ErrClosed {
			return err
		}
		return ErrStale
	}
	defer release()
	if session != s.Session {
		return ErrStale
	}
	done := r.aborted(s.Grants)
	steps.At(steps.StoreBegun)
	err = r.fill(v, &s, done)
	steps.At(steps.StoreCopied)
	report(l, s.Op, done)
	steps.At(steps.StoreDone)
	return err
}

// aborted is the answer to grants of which nothing is copied.
func (r *Rank) aborted(grants []Grant) []wire.Done {
	done := make([]wire.Done, len(grants))
	for i, g := range grants {
		done[i] = wire.Done{Slot: g.Slot, Generation: g.Generation, Part: r.part, Status: wire.StatusAborted}
	}
	return done
}

// report answers every grant of an operation.
func report(l link, op uint64, done []wire.Done) {
	for batch := range slices.Chunk(done, MaxKeys) {
		l.sure(&wire.Request{Type: wire.StoreDone, Op: op, Done: batch})
	}
}

// fill copies and sets the status of what was copied.
func (r *Rank) fill(v *view, s *StoreOp, done []wire.Done) error {
	cols, err := r.columns(v, true)
	if err != nil {
		return err
	}
	if err := r.checkBlocks(s.Blocks); err != nil {
		return err
	}
	virtual := r.geometry.B * r.geometry.D
	firstBlock := int(s.FirstOrdinal) * r.geometry.C / virtual
	var failed error
	for i, g := range s.Grants {
		ordinal := int(s.FirstOrdinal) + int(g.Index)
		if len(cols) == 0 || r.geometry.Parts(ordinal)>>r.geometry.Rank&1 == 0 {
			// Nothing of it is here. It may be complete already: its slot's state
			// says nothing about this rank.
			done[i].Status = wire.StatusOK
			continue
		}
		ref := tier.Ref{Slot: g.Slot, Generation: g.Generation}
		slot := v.slot(ref)
		if slot == nil || !v.table.Check(ref, tier.Assembling) {
			failed = fmt.Errorf("chunk %d: %w", g.Index, ErrStale)
			continue
		}
		steps.At(steps.StoreChunk)
		if err := dcp.Gather(slot, r.geometry, cols, ordinal, s.Blocks, firstBlock, &v.stop); err != nil {
			failed = fmt.Errorf("chunk %d: %w", g.Index, err)
			if v.stop.Load() {
				return failed
			}
			continue
		}
		if !v.table.Check(ref, tier.Assembling) {
			failed = fmt.Errorf("chunk %d: %w", g.Index, ErrStale)
			continue
		}
		done[i].Status = wire.StatusOK
	}
	return failed
}

func (r *Rank) checkBlocks(blocks []uint32) error {
	for i, b := range blocks {
		if int64(b) >= int64(r.blocks) {
			return fmt.Errorf("%w: block id %d at %d, the page pool has %d", ErrArgument, b, i, r.blocks)
		}
	}
	return nil
}
