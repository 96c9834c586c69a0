package tier

import "github.com/kvtier/kvtier/internal/chunk"

// arenaIndex finds the slot of a key, and knows which keys are held. Both maps are
// free of pointers, so the garbage collector does not walk them. Guarded by
// Space.mu.
type arenaIndex struct {
	slots map[chunk.Key]uint32
	held  map[chunk.Key]uint32 // how often; also keys that have no slot
}

func newArenaIndex() arenaIndex {
	return arenaIndex{slots: map[chunk.Key]uint32{}, held: map[chunk.Key]uint32{}}
}

func (x *arenaIndex) find(k chunk.Key) (uint32, bool) {
	i, ok := x.slots[k]
	return i, ok
}

func (x *arenaIndex) add(k chunk.Key, i uint32) { x.slots[k] = i }

func (x *arenaIndex) remove(k chunk.Key) { delete(x.slots, k) }

func (x *arenaIndex) hold(k chunk.Key) { x.held[k]++ }

// unhold reports whether k was held at all.
func (x *arenaIndex) unhold(k chunk.Key) bool {
	switch n := x.held[k]; n {
	case 0:
		return false
	case 1:
		delete(x.held, k)
	default:
		x.held[k] = n - 1
	}
	return true
}

func (x *arenaIndex) isHeld(k chunk.Key) bool { return x.held[k] != 0 }
