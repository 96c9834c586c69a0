package tier

import (
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/disktest"
	"github.com/kvtier/kvtier/internal/sys"
)

// ownDisk is an empty file system for one test, where one can be mounted: only the
// file system itself can say at one instant what lies on it. mounted is false
// for a plain directory.
func ownDisk(t *testing.T, size string) (dir string, mounted bool) {
	dir = t.TempDir()
	if syscall.Mount("tmpfs", dir, "tmpfs", 0, "size="+size) != nil {
		return dir, false
	}
	t.Cleanup(func() { syscall.Unmount(dir, 0) })
	return dir, true
}

// sample watches what lies on a disk of its own until stop, and gives the highest.
func sample(t *testing.T, dir string, mounted bool) (stop func() int64) {
	if !mounted {
		return func() int64 { return 0 }
	}
	var highest int64
	quit, gone := make(chan struct{}), sync.WaitGroup{}
	gone.Go(func() {
		for {
			if fs, err := sys.Statfs(dir); err == nil {
				highest = max(highest, fs.TotalBytes-fs.AvailBytes)
			}
			select {
			case <-quit:
				return
			case <-time.After(time.Millisecond):
			}
		}
	})
	return func() int64 {
		close(quit)
		gone.Wait()
		return highest
	}
}

func TestBudgetHoldsOverRestartsAndNamespaces(t *testing.T) {
	t.Run("directory", func(t *testing.T) { testBudgetHolds(t, t.TempDir(), false) })
	t.Run("disk of its own", func(t *testing.T) {
		dir, mounted := ownDisk(t, "64m")
		testBudgetHolds(t, filepath.Join(dir, "root"), mounted)
	})
}

func testBudgetHolds(t *testing.T, dir string, mounted bool) {
	limit := int64(40 * disktest.CostBytes)
	next := 0
	run := func(model string, o StoreOptions, puts int) {
		stop := sample(t, filepath.Dir(dir), mounted)
		h := openShelf(t, dir, model, o).scanned()
		for range puts {
			require.NoError(t, h.put(next))
			next++
			if next%5 == 0 { // puts of what is there must not count
				require.NoError(t, h.put(next-1))
			}
		}
		h.quiet()
		st := h.store.Stats()
		real := disktest.Allocated(t, dir)
		require.LessOrEqual(t, real, st.UsedBytes, "bytes that nobody has counted")
		require.LessOrEqual(t, st.UsedBytes-real, int64(8192), "bytes that are not there")
		require.LessOrEqual(t, st.UsedBytes, limit)
		require.Zero(t, st.ReservedBytes)
		require.Positive(t, h.disk.Count())
		require.NoError(t, h.get(next-1), "the newest is there")
		h.close()
		require.LessOrEqual(t, stop(), limit)
	}
	run("a", StoreOptions{CapBytes: limit}, 100)
	run("a", StoreOptions{CapBytes: limit}, 60)
	run("b", StoreOptions{CapBytes: limit}, 100)
	run("a", StoreOptions{CapBytes: limit}, 5)
}

func TestBudgetWithASmallerCap(t *testing.T) {
	dir := t.TempDir()
	h := openShelf(t, dir, "m", StoreOptions{}).scanned()
	for n := range 100 {
		require.NoError(t, h.put(n))
	}
	h.close()
	limit := int64(30 * disktest.CostBytes)
	h = openShelf(t, dir, "m", StoreOptions{CapBytes: limit}).scanned()
	// Directories stay, they are counted too: 100 keys lie in about 80 of them.
	h.wait("eviction", func() bool { return disktest.Allocated(t, dir) <= limit })
	h.quiet()
	for n := range 100 {
		if h.disk.Has(shelfKey(n)) {
			require.NoError(t, h.get(n))
			require.GreaterOrEqual(t, n, 50, "an old one stayed and newer ones went")
		}
	}
}

func TestBudgetCountsStrangersOfOurs(t *testing.T) {
	dir := t.TempDir()
	a := openShelf(t, dir, "a", StoreOptions{}).scanned()
	for n := range 30 {
		require.NoError(t, a.put(n))
	}
	a.close()
	limit := int64(45 * disktest.CostBytes)
	b := openShelf(t, dir, "b", StoreOptions{CapBytes: limit}).scanned()
	for n := range 30 {
		require.NoError(t, b.put(1000+n))
	}
	b.quiet()
	st := b.store.Stats()
	require.Positive(t, st.EvictedOther, "the other namespace is older")
	require.Zero(t, st.EvictedSelf)
	require.Equal(t, 30, b.disk.Count())
	require.LessOrEqual(t, disktest.Allocated(t, dir), limit)
	require.Len(t, st.Namespaces, 2)
}

func TestBudgetNamespaceFloor(t *testing.T) {
	dir := t.TempDir()
	limit := int64(60 * disktest.CostBytes)
	a := openShelf(t, dir, "a", StoreOptions{CapBytes: limit, NamespaceFloor: 10 * disktest.FileBytes}).scanned()
	for n := range 20 {
		require.NoError(t, a.put(n))
	}
	d, err := a.store.Namespace(disktest.Namespace("b"))
	require.NoError(t, err)
	b := &shelf{t: t, root: a.root, store: a.store, disk: d}
	for n := range 80 {
		require.NoError(t, b.put(1000+n))
	}
	b.quiet()
	require.Equal(t, 10, a.disk.Count())
	require.Positive(t, a.store.Stats().EvictedSelf)
	require.Equal(t, uint64(10), a.store.Stats().EvictedOther)
	// Its own chunks replace each other all the same, and one that nobody uses any
	// more has no floor.
	for n := 20; n < 80; n++ {
		require.NoError(t, a.put(n))
	}
	a.close()
	b = openShelf(t, dir, "b", StoreOptions{CapBytes: limit, NamespaceFloor: 10 * disktest.FileBytes}).scanned()
	for n := range 100 {
		require.NoError(t, b.put(2000+n))
	}
	b.quiet()
	for _, n := range b.store.Stats().Namespaces {
		require.Equal(t, n.InUse, n.Files > 0, n.Name)
	}
}

func TestBudgetWithoutRoomDropsInTime(t *testing.T) {
	h := openShelf(t, t.TempDir(), "m", StoreOptions{CapBytes: 12 * disktest.CostBytes}).scanned()
	n := 0
	for ; n < 6; n++ {
		h.disk.Hold(shelfKey(n))
		require.NoError(t, h.put(n))
	}
	var err error
	for ; err == nil && n < 40; n++ { // nothing can be evicted
		h.disk.Hold(shelfKey(n))
		err = h.put(n)
	}
	require.ErrorIs(t, err, ErrNoRoom)
	require.Positive(t, h.store.Stats().Postponed["room"])
	for i := range n - 1 {
		require.NoError(t, h.get(i), "held")
	}
	for i := range n {
		h.disk.Unhold(shelfKey(i))
	}
	require.NoError(t, h.put(n))
	require.NoError(t, h.get(n))
}

func TestBudgetFreeFloor(t *testing.T) {
	fs := &floorFS{avail: 100 * disktest.CostBytes}
	h := openShelf(t, t.TempDir(), "m", StoreOptions{FreeFloorBytes: 50 * disktest.CostBytes, FS: fs}).scanned()
	for n := range 20 {
		require.NoError(t, h.put(n))
	}
	require.Equal(t, 20, h.disk.Count())
	fs.set(45 * disktest.CostBytes) // somebody else fills the disk
	h.wait("eviction", func() bool { return h.disk.Count() < 15 })
	require.False(t, h.disk.Has(shelfKey(0)))
	fs.set(0)
	h.wait("eviction", func() bool { return h.disk.Count() == 0 })
	require.ErrorIs(t, h.put(50), ErrNoRoom)
}

type floorFS struct {
	LocalFilesystem
	mu    sync.Mutex
	avail int64
}

func (f *floorFS) set(n int64) {
	f.mu.Lock()
	f.avail = n
	f.mu.Unlock()
}

func (f *floorFS) Statfs(string) (sys.Filesystem, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return sys.Filesystem{TotalBytes: 1 << 40, AvailBytes: f.avail}, nil
}

func TestEvictionOrderAfterARestart(t *testing.T) {
	dir := t.TempDir()
	var calls atomic.Int64
	began := time.Now()
	slow := StoreOptions{Now: func() time.Time { return began.Add(time.Duration(calls.Add(1)) * 5 * time.Microsecond) }}
	h := openShelf(t, dir, "m", slow).scanned()
	// Two prefixes of ten, the older one is used again.
	for n := range 20 {
		parent := chunk.Key{}
		if n%10 > 0 {
			parent = shelfKey(n - 1)
		}
		require.NoError(t, h.putAfter(n, uint32(n%10), parent))
	}
	for n := range 10 {
		h.disk.Touch(shelfKey(n), uint32(n))
	}
	h.close()

	h = openShelf(t, dir, "m", StoreOptions{}).scanned()
	var order []int
	for range 20 {
		h.store.mu.Lock()
		_, e := h.store.oldest()
		for n := range 20 {
			if e.key == shelfKey(n) {
				order = append(order, n)
			}
		}
		h.store.mu.Unlock()
		h.disk.Hold(shelfKey(order[len(order)-1]))
	}
	require.Equal(t, []int{19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0}, order)
}

func TestFullFileSystem(t *testing.T) {
	dir := t.TempDir()
	fs := &faultFS{}
	h := openShelf(t, dir, "m", StoreOptions{FS: fs}).scanned()
	for n := range 10 {
		require.NoError(t, h.put(n))
	}
	used := h.store.Stats().UsedBytes
	// Full once: eviction makes room, the chunk is written.
	calls := 0
	fs.set(func(call, path string) error {
		if call == "write direct" {
			if calls++; calls == 1 {
				return &os.PathError{Op: call, Path: path, Err: syscall.ENOSPC}
			}
		}
		return nil
	})
	require.NoError(t, h.put(10))
	require.Less(t, h.disk.Count(), 11)
	require.False(t, h.disk.Has(shelfKey(0)))
	// Full for good: postponed, and for a moment nothing is tried.
	fs.set(failing("write", syscall.ENOSPC))
	require.ErrorIs(t, h.put(11), ErrNoRoom)
	require.Error(t, h.put(12))
	require.Empty(t, h.store.Stats().Dropped, "what is offered again is not lost")
	require.Equal(t, map[string]uint64{"room": 2}, h.store.Stats().Postponed, "one was tried, one was not taken")
	require.Equal(t, "on", h.store.Stats().State, "reads are not to suffer")
	require.NoError(t, h.get(10))
	require.Empty(t, disktest.Files(t, dir, ".tmp"))
	fs.set(nil)
	h.wait("the end of the pause", func() bool { return h.put(13) == nil })
	h.quiet()
	st := h.store.Stats()
	require.Less(t, st.UsedBytes, used+4*disktest.CostBytes)
	require.LessOrEqual(t, disktest.Allocated(t, dir), st.UsedBytes)
	require.Equal(t, uint64(3), st.Errors["ENOSPC"])
}

// A real full file system, where one can be mounted.
func TestFullTmpfs(t *testing.T) {
	dir, mounted := ownDisk(t, "512k")
	if !mounted {
		t.Skip("cannot mount a file system here")
	}
	h := openShelf(t, filepath.Join(dir, "root"), "m", StoreOptions{}).scanned()
	stored := 0
	for n := range 200 {
		err := h.put(n)
		if err == nil {
			stored++
			require.NoError(t, h.get(n))
			continue
		}
		if err.Error() != "dropped at once" {
			require.ErrorIs(t, err, ErrNoRoom)
		}
	}
	require.Greater(t, stored, 100)
	require.Equal(t, "on", h.store.Stats().State)
	require.Empty(t, disktest.Files(t, dir, ".tmp"))
	h.close()
}
