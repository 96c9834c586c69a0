package tier

import (
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/sys"
)

// The clock is set back by hours, between two runs or during one: what is evicted
// first after the next start, and the one after that, is what was next before.
func TestOrderOutlivesAClockSetBack(t *testing.T) {
	for name, during := range map[string]bool{"between runs": false, "during a run": true} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			c := &stepClock{}
			o := StoreOptions{Now: c.now}
			h := openShelf(t, dir, "m", o).scanned()
			restart := func() {
				h.close()
				h = openShelf(t, dir, "m", o).scanned()
			}
			var want []int
			put := func(first, n int) {
				for i := first; i < first+n; i++ {
					c.shift.Add(int64(time.Minute))
					require.NoError(t, h.put(i))
					want = append(want, i)
				}
			}
			use := func(i int) {
				h.disk.Touch(shelfKey(i), 0)
				want = append(slices.DeleteFunc(want, func(k int) bool { return k == i }), i)
			}
			c.shift.Add(-int64(4 * time.Hour)) // older than the time that comes again
			put(0, 3)
			c.shift.Add(int64(4 * time.Hour))
			put(3, 12)
			c.shift.Add(-int64(3 * time.Hour))
			if during {
				put(15, 3)
				use(4)
			}
			restart()
			put(20, 3)
			use(5)
			use(8)
			restart()
			put(30, 1)
			use(6)
			c.shift.Add(-int64(time.Hour))
			restart()
			put(40, 2)
			restart()
			require.Equal(t, want, h.evictionOrder(100))
		})
	}
}

// orderFS notes the mtimes that are set by name.
type orderFS struct {
	LocalFilesystem
	mu     sync.Mutex
	stamps []int64
}

func (f *orderFS) SetModified(path string, ns int64) error {
	f.mu.Lock()
	f.stamps = append(f.stamps, ns)
	f.mu.Unlock()
	return f.LocalFilesystem.SetModified(path, ns)
}

// Mtimes in the future become times of the past on disk, in an order in which a kill
// between two of them does no harm. All namespaces are in it; a file that has another
// name elsewhere keeps its time.
func TestTimesInTheFutureAreMended(t *testing.T) {
	dir := t.TempDir()
	const n = 40
	future := time.Now().Add(24 * time.Hour)
	var files []string
	for _, model := range []string{"a", "b"} {
		h := openShelf(t, dir, model, StoreOptions{}).scanned()
		for i := range n {
			require.NoError(t, h.put(i))
		}
		for i := range n {
			files = append(files, h.file(i))
		}
		h.close()
	}
	byAge := make([]string, len(files))
	for i, file := range files {
		rank := i * 37 % len(files)
		at := future.Add(time.Duration(rank) * time.Minute)
		require.NoError(t, os.Chtimes(file, at, at))
		byAge[rank] = file
	}
	linked := files[7]
	require.NoError(t, os.Link(linked, filepath.Join(dir, "elsewhere")))
	modified := func(path string) int64 {
		st, err := sys.Lstat(path)
		require.NoError(t, err)
		return st.ModifiedNS
	}
	before := modified(linked)

	fs := &orderFS{}
	h := openShelf(t, dir, "a", StoreOptions{FS: fs, Touch: time.Hour}).scanned()
	opened := time.Now().UnixNano()
	h.wait("all times", func() bool { return h.store.Stats().Touched >= uint64(len(files)-1) })
	fs.mu.Lock()
	stamps := slices.Clone(fs.stamps)
	fs.mu.Unlock()
	require.Len(t, stamps, len(files)-1)
	require.IsIncreasing(t, stamps)
	require.Equal(t, before, modified(linked))

	h.store.mu.Lock()
	defer h.store.mu.Unlock()
	last := int64(0)
	for _, file := range byAge {
		ns, e := h.store.oldest()
		require.NotNil(t, e)
		require.Equal(t, file, ns.filePath(e.key))
		require.Greater(t, e.stamp, last)
		require.Less(t, e.stamp, opened)
		if file != linked {
			require.Equal(t, e.stamp, modified(file))
		}
		last = e.stamp
		ns.index.hold(e.key)
	}
}

// A chunk that is used while the scan runs is newer than all that the scan finds.
func TestUsedDuringTheScanIsNewer(t *testing.T) {
	dir := t.TempDir()
	c := &stepClock{}
	fs := &faultFS{}
	o := StoreOptions{Now: c.now, FS: fs}
	h := openShelf(t, dir, "m", o).scanned()
	const n = 12
	for i := range n {
		c.shift.Add(int64(time.Minute))
		require.NoError(t, h.put(i))
	}
	h.close()
	c.shift.Add(-int64(3 * time.Hour))
	gate := make(chan struct{})
	open := sync.OnceFunc(func() { close(gate) })
	t.Cleanup(open)
	fs.set(func(call, path string) error {
		if call == "readdir" && len(filepath.Base(path)) == 2 {
			<-gate
		}
		return nil
	})
	h = openShelf(t, dir, "m", o)
	require.Equal(t, 1, h.disk.Probe([]chunk.Key{shelfKey(4)}, time.Minute))
	require.Equal(t, 1, h.disk.Probe([]chunk.Key{shelfKey(2)}, time.Minute))
	h.disk.Touch(shelfKey(4), 0)
	open()
	h.scanned()
	require.Equal(t, []int{0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 4}, h.evictionOrder(n))
}
