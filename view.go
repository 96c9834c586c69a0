package kvtier

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/sys"
	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/tier"
)

// view is what an accepted member sees of one session: the agreed layout and,
// for ranks, arena and slot table.
//
// Who copies holds a use of the view (member.use). The member ends a view by
// taking it away from new users, setting stop and waiting for users; only then
// the mappings go.
type view struct {
	accept      *wire.Accept
	namespace   *chunk.Namespace
	layout      *chunk.Layout
	fingerprint chunk.Fingerprint

	// slot gives the P bytes of a slot, nil for one that does not exist. Both
	// are nil without an arena.
	slot    func(tier.Ref) []byte
	table   *tier.Table
	release []func() error

	stop  atomic.Bool
	users sync.WaitGroup
}

var errAcceptance = errors.New("the leader's acceptance does not fit together")

// newView checks an acceptance. It opens nothing.
func newView(a *wire.Accept) (*view, error) {
	ns, err := chunk.ParseNamespace(a.Namespace)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errAcceptance, err)
	}
	layout, err := ns.Layout()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errAcceptance, err)
	}
	fp := chunk.Fingerprint(sha256.Sum256(a.Namespace))
	if fp.String() != a.Fingerprint || layout.PaddedBytes != a.SlotBytes || ns.ChunkTokens != a.ChunkTokens || a.Slots < 0 {
		return nil, errAcceptance
	}
	return &view{accept: a, namespace: ns, layout: layout, fingerprint: fp}, nil
}

// fits compares an acceptance with what this rank has declared. The rank copies by its
// own geometry, and by the offsets of the acceptance: one that was agreed for another
// declaration would move wrong rows.
func (v *view) fits(d *wire.Declare) error {
	a := v.accept
	for _, n := range []struct {
		what             string
		agreed, declared int
	}{
		{"chunk tokens", a.ChunkTokens, d.ChunkTokens},
		{"block tokens", a.BlockTokens, d.BlockTokens},
		{"dcp", a.DCP, d.DCP},
		{"DCP rank", a.DCPRank, d.DCPRank},
		{"interleave", a.Interleave, d.Interleave},
		{"KV groups", len(v.namespace.Groups), len(d.Groups)},
		{"KV groups with columns", len(a.Columns), len(d.Groups)},
	} {
		if n.agreed != n.declared {
			return otherThanDeclared(n.what, n.agreed, n.declared)
		}
	}
	ns, id := v.namespace, d.Identity
	if id.Encoding == "" {
		id.Encoding = chunk.EncodingRows
	}
	if id.Weights == "" {
		id.Weights = ns.Weights // another rank knows them
	}
	for _, t := range []struct{ what, agreed, declared string }{
		{"model", ns.Model, id.Model},
		{"weights", ns.Weights, id.Weights},
		{"attention", ns.Attention, id.Attention},
		{"draft model", ns.Draft, id.Draft},
		{"encoding", ns.Encoding, id.Encoding},
		{"KV dtype", ns.KVDtype, id.KVDtype},
		{"KV scales", ns.KVScales, id.KVScales},
		{"quantisation", ns.Quantisation, id.Quantisation},
	} {
		if t.agreed != t.declared {
			return otherThanDeclared(t.what, t.agreed, t.declared)
		}
	}
	for i := range d.Groups {
		if err := v.fitsGroup(i, &d.Groups[i]); err != nil {
			return err
		}
	}
	return nil
}

// fitsGroup looks each declared region up in the row.
func (v *view) fitsGroup(i int, d *wire.DeclaredGroup) error {
	g, placed, offsets := &v.namespace.Groups[i], v.accept.Columns[i], v.layout.Groups[i].RegionOffsets
	switch {
	case g.Kind != d.Kind:
		return otherThanDeclared(fmt.Sprintf("group %d of kind", i), g.Kind, d.Kind)
	case g.TokensPerRow != d.TokensPerRow:
		return otherThanDeclared(fmt.Sprintf("group %d with tokens per row", i), g.TokensPerRow, d.TokensPerRow)
	case len(placed) != len(d.Regions):
		return otherThanDeclared(fmt.Sprintf("group %d with regions", i), len(placed), len(d.Regions))
	}
	type known struct{ offset, bytes int }
	row := make(map[column]known, len(g.Regions))
	for j, reg := range g.Regions {
		row[column{i, reg.Component, reg.Name, reg.Layer, reg.Head}] = known{offsets[j], reg.Bytes}
	}
	for j, reg := range d.Regions {
		c := column{i, reg.Component, reg.Name, reg.Layer, reg.Head}
		k, ok := row[c]
		switch {
		case !ok:
			return fmt.Errorf("%w: %v is not in the row", errOtherDeclaration, c)
		case k.bytes != reg.Bytes:
			return otherThanDeclared(fmt.Sprintf("%v with bytes", c), k.bytes, reg.Bytes)
		case k.offset != placed[j].Offset:
			return fmt.Errorf("%w: %v is placed at %d of the row, where it lies at %d", errOtherDeclaration, c, placed[j].Offset, k.offset)
		case !reg.Replicated && !placed[j].Writes:
			return fmt.Errorf("%w: %v would be written by no rank", errOtherDeclaration, c)
		}
	}
	return nil
}

var errOtherDeclaration = errors.New("the leader has accepted another declaration than this rank's")

func otherThanDeclared(what string, agreed, declared any) error {
	return fmt.Errorf("%w: %s %v, this rank declares %v", errOtherDeclaration, what, agreed, declared)
}

// directView uses the leader's own mapping of the arena.
func directView(acc *accepted, rank bool) (*view, error) {
	v, err := newView(acc.accept)
	if err != nil || !rank {
		return v, err
	}
	space := acc.space
	v.slot = func(r tier.Ref) []byte {
		if int64(r.Slot) >= int64(v.accept.Slots) {
			return nil
		}
		return space.Bytes(r)
	}
	// The table is mapped once more, as in another process: the leader's own
	// mapping may go before this member is done.
	f, err := sys.DupFile(space.TableFile())
	if err != nil {
		return nil, err
	}
	if err := v.openTable(f); err != nil {
		return nil, err
	}
	return v, nil
}

// ringView maps arena and table; it owns the files.
func ringView(a *wire.Accept, arena, table *os.File) (*view, error) {
	v, err := newView(a)
	if err != nil {
		arena.Close()
		table.Close()
		return nil, err
	}
	seg, err := sys.OpenSegment(arena, int64(a.Slots)*a.SlotBytes, true)
	if err != nil {
		table.Close()
		return nil, fmt.Errorf("mapping the arena: %w", err)
	}
	v.release = append(v.release, seg.Close)
	bytes, size := seg.Bytes(), a.SlotBytes
	v.slot = func(r tier.Ref) []byte {
		if int64(r.Slot) >= int64(a.Slots) {
			return nil
		}
		off := int64(r.Slot) * size
		return bytes[off : off+size : off+size]
	}
	if err := v.openTable(table); err != nil {
		v.close()
		return nil, err
	}
	return v, nil
}

func (v *view) openTable(f *os.File) error {
	seg, err := sys.OpenSegment(f, tier.TableBytes(v.accept.Slots), false)
	if err != nil {
		return fmt.Errorf("mapping the slot table: %w", err)
	}
	if v.table, err = tier.OpenTable(seg); err != nil {
		return errors.Join(err, seg.Close())
	}
	v.release = append(v.release, seg.Close)
	return nil
}

// close unmaps. No user may be left.
func (v *view) close() {
	for _, release := range v.release {
		_ = release() // nothing can be done about a mapping that stays
	}
	v.release = nil
}

// Accepted is what a group and its leader agreed on.
type Accepted struct {
	Session     uint64
	Namespace   []byte // canonical JSON, whose SHA-256 is the fingerprint
	Fingerprint [32]byte

	ChunkTokens int
	BlockTokens int
	DCP         int
	Interleave  int

	SlotBytes int64
	Slots     int
	// DiskEnabled and the budgets are the leader's.
	DiskEnabled  bool
	DiskBytesCap int64
	DRAMBytes    int64
}

func (v *view) accepted(session uint64) *Accepted {
	a := v.accept
	return &Accepted{
		Session: session, Namespace: a.Namespace, Fingerprint: v.fingerprint,
		ChunkTokens: a.ChunkTokens, BlockTokens: a.BlockTokens, DCP: a.DCP, Interleave: a.Interleave,
		SlotBytes: a.SlotBytes, Slots: a.Slots,
		DiskEnabled: a.DiskEnabled, DiskBytesCap: a.DiskBytesCap, DRAMBytes: a.DRAMBytes,
	}
}
