package kvtier

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/disktest"
)

// The file system of the root is unmounted under a leader: what is in DRAM stays of use,
// what is stored meanwhile is on disk once the same file system is back, and nothing is
// written where something else stands.
func TestLeaderOfARootThatIsAway(t *testing.T) {
	const away = 60 * time.Second // for a slow machine
	disk, empty := t.TempDir(), t.TempDir()
	if err := syscall.Mount("tmpfs", disk, "tmpfs", 0, "size=64m"); err != nil {
		t.Skipf("not run: no file system of its own can be mounted here: %v", err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(disk, syscall.MNT_DETACH) })
	root := filepath.Join(disk, "root")
	cfg, err := parsed(t, testConfig(root, RoleAuto)).filled()
	require.NoError(t, err)
	opened, err := openRoot(cfg)
	require.NoError(t, err)
	c, err := newCache(cfg, opened, nil)
	require.NoError(t, err)
	c.rootCheck = time.Millisecond
	c.start()
	watch(t, c)
	b := newBlob(t, c)
	files := func(n int) func() bool {
		return func() bool { return len(disktest.Files(t, root, ".kvc")) == n }
	}
	require.NoError(t, b.Put(blobKey(0), Key{}, 0, payload(0, suiteBlob), testWait))
	require.Eventually(t, files(1), away, time.Millisecond)

	require.NoError(t, syscall.Mount(empty, disk, "", syscall.MS_BIND, ""))
	off := func() { require.NoError(t, syscall.Unmount(disk, syscall.MNT_DETACH)) }
	tier := func(state string) {
		require.Eventually(t, func() bool {
			c.mu.Lock()
			l := c.leader
			c.mu.Unlock()
			return l != nil && l.snapshot().Disk.State == state
		}, away, time.Millisecond)
	}
	tier("off")
	requireState(t, c, StateLeader)
	got := make([]byte, suiteBlob)
	require.NoError(t, b.Get(blobKey(0), got, testWait), "it is in DRAM")
	require.Equal(t, payload(0, suiteBlob), got)
	require.NoError(t, b.Put(blobKey(1), Key{}, 0, payload(1, suiteBlob), testWait))
	require.NoError(t, b.Get(blobKey(1), got, testWait))
	require.Equal(t, payload(1, suiteBlob), got)
	names, err := os.ReadDir(empty)
	require.NoError(t, err)
	require.Empty(t, names)

	off()
	tier("on")
	require.Eventually(t, files(2), away, time.Millisecond)
	requireState(t, c, StateLeader)
}
