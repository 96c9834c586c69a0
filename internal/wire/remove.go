package wire

import (
	"fmt"

	"github.com/kvtier/kvtier/internal/chunk"
)

// Remove asks the leader to forget chunks of the member's namespace. It is rare,
// so it goes over the socket. Removed answers it when it is done.
type Remove struct {
	Keys []byte `json:"keys"` // 32 bytes each, at most MaxKeys
}

// Removed answers Remove.
type Removed struct{}

// NewRemove packs keys.
func NewRemove(keys []chunk.Key) *Remove {
	r := &Remove{Keys: make([]byte, 0, len(keys)*keyBytes)}
	for i := range keys {
		r.Keys = append(r.Keys, keys[i][:]...)
	}
	return r
}

// Unpack gives the keys, or ErrMalformed.
func (r *Remove) Unpack() ([]chunk.Key, error) {
	if len(r.Keys)%keyBytes != 0 || len(r.Keys) > MaxKeys*keyBytes {
		return nil, fmt.Errorf("%w: %d bytes of keys to remove", ErrMalformed, len(r.Keys))
	}
	keys := make([]chunk.Key, len(r.Keys)/keyBytes)
	for i := range keys {
		keys[i] = chunk.Key(r.Keys[i*keyBytes:][:keyBytes])
	}
	return keys, nil
}

func (r Remove) MarshalJSON() ([]byte, error) {
	type plain Remove // without this method
	return encode(frameRemove, plain(r))
}

func (r Removed) MarshalJSON() ([]byte, error) {
	type plain Removed // without this method
	return encode(frameRemoved, plain(r))
}
