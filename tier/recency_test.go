package tier

import (
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/disktest"
	"github.com/kvtier/kvtier/internal/sys"
)

// stepClock goes on by 5 us at every look, which is more than the chunks of a prefix
// are apart.
type stepClock struct{ looks, shift atomic.Int64 }

var clockStart = time.Now()

func (c *stepClock) now() time.Time {
	return clockStart.Add(time.Duration(c.looks.Add(1))*5*time.Microsecond + time.Duration(c.shift.Load()))
}

// evictionOrder is the order in which chunks 0 to n-1 would be evicted. It holds them.
func (h *shelf) evictionOrder(n int) (order []int) {
	h.t.Helper()
	numbers := map[chunk.Key]int{}
	for i := range n {
		numbers[shelfKey(i)] = i
	}
	for {
		h.store.mu.Lock()
		_, e := h.store.oldest()
		var k chunk.Key
		if e != nil {
			k = e.key
		}
		h.store.mu.Unlock()
		if e == nil {
			return order
		}
		order = append(order, numbers[k])
		h.disk.Hold(k)
	}
}

func (h *shelf) putChain(first, n int) {
	h.t.Helper()
	for i := range n {
		parent := chunk.Key{}
		if i > 0 {
			parent = shelfKey(first + i - 1)
		}
		require.NoError(h.t, h.putAfter(first+i, uint32(i), parent))
	}
}

// Chunks of a prefix that are put again one after the other: the end of the prefix
// stays the first to go.
func TestRePutPrefixOutlivesItsContinuation(t *testing.T) {
	dir := t.TempDir()
	c := &stepClock{}
	h := openShelf(t, dir, "m", StoreOptions{Now: c.now}).scanned()
	h.putChain(0, 6)
	h.putChain(6, 6)
	c.shift.Add(int64(time.Second))
	h.putChain(0, 6)
	want := []int{11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0}
	h.close()
	h = openShelf(t, dir, "m", StoreOptions{Now: c.now}).scanned()
	require.Equal(t, want, h.evictionOrder(12))
}

// Whatever is evicted of a prefix, its beginning is what is left.
func TestEvictionLeavesBeginningsOfPrefixes(t *testing.T) {
	dir := t.TempDir()
	const chains, length = 12, 6
	c := &stepClock{}
	o := StoreOptions{Now: c.now, CapBytes: 40 * disktest.CostBytes}
	check := func(h *shelf) {
		h.quiet()
		left, broken := 0, 0
		for chain := range chains {
			run := 0
			for ; run < length && h.disk.Has(shelfKey(chain*length+run)); run++ {
			}
			left += run
			if run > 0 && run < length {
				broken++
			}
			for i := run; i < length; i++ {
				require.False(t, h.disk.Has(shelfKey(chain*length+i)), "chain %d: chunk %d is there, %d is not", chain, i, run)
			}
		}
		require.Positive(t, left)
		require.LessOrEqual(t, broken, 1, "eviction takes one prefix after the other")
	}
	h := openShelf(t, dir, "m", o).scanned()
	for chain := range chains {
		c.shift.Add(int64(time.Second))
		h.putChain(chain*length, length)
		for i := range length { // the first one is used all the time
			h.disk.Touch(shelfKey(i), uint32(i))
		}
		check(h)
	}
	require.True(t, h.disk.Has(shelfKey(length-1)))
	h.close()
	o.CapBytes = 15 * disktest.CostBytes
	h = openShelf(t, dir, "m", o).scanned()
	check(h)
	require.True(t, h.disk.Has(shelfKey(0)), "the one that was used most")
}

// Hits that cannot be written because the disk is off, or fails, are written later.
func TestHitsWhileTheDiskIsSickAreNotForgotten(t *testing.T) {
	dir := t.TempDir()
	c := &stepClock{}
	fs := &touchFS{}
	h := openShelf(t, dir, "m", StoreOptions{Now: c.now, FS: fs, Breaker: BreakerOptions{Errors: 3}}).scanned()
	const n = 12
	for i := range n {
		require.NoError(t, h.put(i))
	}
	c.shift.Add(int64(time.Minute))
	fs.fails.Store(true)
	used := c.now()
	for i := range n {
		h.disk.Touch(shelfKey(i), 0)
	}
	h.wait("off", func() bool { return h.store.Stats().State == "off" })
	fs.fails.Store(false)
	c.shift.Add(int64(2 * time.Minute))
	// No further hit on those that the disk did not even see.
	h.wait("the mtimes that were waiting", func() bool { return h.store.Stats().Touched >= n-3 })
	written := func() (young int) {
		for i := range n {
			st, err := sys.Lstat(h.file(i))
			require.NoError(t, err)
			if st.ModifiedNS > used.UnixNano()-int64(time.Second) {
				young++
			}
		}
		return young
	}
	require.GreaterOrEqual(t, written(), n-3)
	h.close() // and at the latest now those that had failed
	require.Equal(t, n, written())
}

// touchFS fails to set mtimes by name.
type touchFS struct {
	LocalFilesystem
	fails atomic.Bool
}

func (f *touchFS) SetModified(path string, ns int64) error {
	if f.fails.Load() {
		return &os.PathError{Op: "utimens", Path: path, Err: syscall.EIO}
	}
	return f.LocalFilesystem.SetModified(path, ns)
}

// coarseFS has time stamps of two seconds, as FAT has.
type coarseFS struct{ LocalFilesystem }

func (coarseFS) Lstat(path string) (sys.Stat, error) {
	st, err := sys.Lstat(path)
	st.ModifiedNS -= st.ModifiedNS % int64(2*time.Second)
	return st, err
}

func TestRecencyWithCoarseTimeStamps(t *testing.T) {
	dir := t.TempDir()
	c := &stepClock{}
	o := StoreOptions{Now: c.now, FS: coarseFS{}}
	h := openShelf(t, dir, "m", o).scanned()
	const n = 30
	for i := range n {
		if i%3 == 0 {
			c.shift.Add(int64(2 * time.Second))
		}
		require.NoError(t, h.put(i))
	}
	h.close()
	h = openShelf(t, dir, "m", o).scanned()
	order := h.evictionOrder(n)
	require.Len(t, order, n)
	for i, k := range order {
		require.Equal(t, i/3, k/3, "those of one instant in any order, others as they were: %v", order)
	}
}

// Mtimes that are all the same, and those of a clock that went wrong: no chunk stays
// for ever, and none of a new one's place is taken by them.
func TestRecencyWithTiesAndFutureTimes(t *testing.T) {
	for name, at := range map[string]time.Time{
		"ties": time.Unix(1700000000, 0), "epoch": time.Unix(0, 0), "before": time.Unix(-1000, 0), "future": time.Now().AddDate(70, 0, 0),
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			h := openShelf(t, dir, "m", StoreOptions{}).scanned()
			for n := range 12 {
				require.NoError(t, h.put(n))
			}
			h.close()
			for n := range 12 {
				require.NoError(t, os.Chtimes(h.file(n), at, at))
			}
			h = openShelf(t, dir, "m", StoreOptions{CapBytes: 20 * disktest.CostBytes}).scanned()
			h.quiet()
			for n := range 12 {
				require.NoError(t, h.get(n))
			}
			old := func() (n int) {
				for i := range 12 {
					if h.disk.Has(shelfKey(i)) {
						n++
					}
				}
				return n
			}
			for n := 20; old() > 0; n++ {
				require.Less(t, n, 60)
				require.NoError(t, h.put(n))
				for i := max(20, n-5); i <= n; i++ {
					require.NoError(t, h.get(i), "new ones stay")
				}
			}
		})
	}
}
