package tier

import (
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A disk that was full tells nobody that it takes chunks again, and perhaps no other
// chunk comes: what waited in DRAM goes there all the same.
func TestBacklogFollowsWithoutAnotherStore(t *testing.T) {
	fs := &faultFS{}
	store, _ := openTestStore(t, StoreOptions{FS: fs})
	disk, err := store.Namespace(rigNamespace("rig"))
	require.NoError(t, err)
	require.Eventually(t, disk.Scanned, rigWait, time.Millisecond)
	g := newRig(t, rigOptions{slots: 4, disk: disk})
	fs.set(failing("write", syscall.ENOSPC))
	g.store(1, 0, false)
	g.until("the disk is found full", func() bool { return g.space.writing == 0 && g.space.Stats().WriteErrors > 0 })
	g.store(2, 0, false)
	g.do(func() {
		require.Equal(t, 2, g.space.Stats().Backlog, "the one that failed, and the one that was not taken")
	})
	fs.set(nil)
	g.until("both are on disk", func() bool {
		return disk.Has(rigKey(1)) && disk.Has(rigKey(2)) && g.space.Stats().Backlog == 0
	})
}
