package tier

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A file of a newer version stays where it is, so its chunk can never be written. It
// must not keep those behind it from the disk.
func TestChunkWhosePlaceIsTakenHoldsNobodyUp(t *testing.T) {
	d := newDiskRig(t, 4)
	d.forget(d.saved(1, 0))
	d.disk.s.mu.Lock()
	d.disk.dir.index.find(rigKey(1)).flags |= entryNewer
	d.disk.s.mu.Unlock()
	d.store(1, 0, false)
	d.store(2, 0, false)
	d.until("the one behind is written", func() bool { return d.disk.Has(rigKey(2)) && d.space.writing == 0 })
	d.do(func() { require.Zero(t, d.space.Stats().Backlog) })
	require.NotZero(t, d.disk.s.Stats().Dropped["newer"])
}
