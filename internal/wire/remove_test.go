package wire

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/chunk"
)

func TestRemoveTravels(t *testing.T) {
	keys := []chunk.Key{{1}, {2, 31: 9}}
	raw, err := json.Marshal(NewRemove(keys))
	require.NoError(t, err)
	v, err := ParseFrame(raw)
	require.NoError(t, err)
	got, err := v.(*Remove).Unpack()
	require.NoError(t, err)
	require.Equal(t, keys, got)

	raw, err = json.Marshal(&Removed{})
	require.NoError(t, err)
	v, err = ParseFrame(raw)
	require.NoError(t, err)
	require.Equal(t, &Removed{}, v)
}

func TestRemoveOfHalfAKeyIsMalformed(t *testing.T) {
	_, err := (&Remove{Keys: make([]byte, 33)}).Unpack()
	require.ErrorIs(t, err, ErrMalformed)
	_, err = (&Remove{Keys: make([]byte, (MaxKeys+1)*keyBytes)}).Unpack()
	require.ErrorIs(t, err, ErrMalformed)
}
