package tier

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/kvtier/kvtier/internal/sys"
)

// tableEntryBytes is one entry of the slot table: u32 generation, u32 state.
const tableEntryBytes = 8

// TableBytes is the exact size of the slot table's segment.
func TableBytes(slots int) int64 { return int64(slots) * tableEntryBytes }

// Table is the slot table: the leader's word on what each slot holds, for ranks to
// look at before and after a copy. A reader cannot write it. It does not own the
// segment, which has to outlive it. Safe for concurrent use.
type Table struct{ words []atomic.Uint64 }

// OpenTable looks at a slot table.
func OpenTable(seg *sys.Segment) (*Table, error) {
	b := seg.Bytes()
	if len(b) == 0 || len(b)%tableEntryBytes != 0 {
		return nil, fmt.Errorf("%d bytes: %w", len(b), ErrTableSize)
	}
	return &Table{words: unsafe.Slice((*atomic.Uint64)(unsafe.Pointer(&b[0])), len(b)/tableEntryBytes)}, nil
}

// Check reports whether r is still that use of its slot, in that state. A copy out
// of a slot is good only if Check(r, Ready) holds after it; before it, it saves the
// work. Any r may be asked for.
func (t *Table) Check(r Ref, want State) bool {
	return r.Slot < uint32(len(t.words)) && t.words[r.Slot].Load() == entry(r.Generation, want)
}

// set is for the leader only. One store for both halves: a reader never sees the
// generation of one use with the state of another. Without effect once the table is
// unmapped.
func (t *Table) set(i, generation uint32, s State) {
	if i < uint32(len(t.words)) {
		t.words[i].Store(entry(generation, s))
	}
}

// entry is the little endian pair as one word.
func entry(generation uint32, s State) uint64 { return uint64(generation) | uint64(s)<<32 }
