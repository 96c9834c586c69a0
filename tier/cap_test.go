package tier

import (
	"errors"
	"flag"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/disktest"
	"github.com/kvtier/kvtier/internal/sys"
)

var rePuts = flag.Int("reputs", 1_000_000, "how often chunks that are there are put again")

// Ten times what fits, by two namespaces at once, over restarts with ever smaller
// caps: the file system never has more of us than the cap, whoever looks whenever.
// Only what lies there when a smaller cap begins to hold is above it, and shrinks.
func TestCapWithTenTimesTheWorkingSet(t *testing.T) {
	disk, mounted := ownDisk(t, "64m")
	if !mounted {
		t.Skip("not run: only a file system of its own says at one moment what lies on it, and none can be mounted here")
	}
	dir := filepath.Join(disk, "root")
	next := 0
	for _, files := range []int64{60, 60, 25, 12} {
		limit := files * disktest.CostBytes
		before := disktest.Allocated(t, disk)
		stop := sample(t, disk, mounted)
		h := openShelf(t, dir, "m", StoreOptions{CapBytes: limit})
		d, err := h.store.Namespace(disktest.Namespace("second"))
		require.NoError(t, err)
		other := &shelf{t: t, root: h.root, store: h.store, disk: d}
		h.wait("the new cap", func() bool { st := h.store.Stats(); return st.Known && st.UsedBytes <= limit })
		require.LessOrEqual(t, stop(), max(before+8192, limit), "more came while it had to shrink")

		stop = sample(t, disk, mounted)
		var all sync.WaitGroup
		for _, s := range []*shelf{h, other} {
			first := next
			next += int(files) * 5
			all.Go(func() {
				for n := first; n < first+int(files)*5; n++ {
					if err := s.put(n); err != nil {
						t.Errorf("chunk %d: %v", n, err)
						return
					}
					// The other one may have put a whole cap of chunks since.
					if err := s.get(n); err != nil && !errors.Is(err, ErrAbsent) {
						t.Errorf("chunk %d: %v", n, err)
					}
				}
			})
		}
		all.Wait()
		h.quiet()
		st := h.store.Stats()
		require.Positive(t, st.EvictedSelf+st.EvictedOther)
		require.Empty(t, st.Errors)
		require.Equal(t, disktest.Allocated(t, dir), st.UsedBytes)
		require.Greater(t, h.disk.Count()+other.disk.Count(), int(files)/3, "the room is used")
		h.close()
		require.LessOrEqual(t, stop(), limit)
	}
}

// Puts of what is there cost nothing and evict nothing, however many: with a cap that
// is used up, and between puts that do take room.
func TestRePutsAreFree(t *testing.T) {
	const held = 20
	h := openShelf(t, t.TempDir(), "m", StoreOptions{CapBytes: 40 * disktest.CostBytes}).scanned()
	jobs := make([]WriteJob, held)
	answers := make(chan error, held)
	for n := range jobs {
		require.NoError(t, h.put(n))
		jobs[n] = shelfJob(shelfKey(n), 0, chunk.Key{}, func(err error) { answers <- err })
	}
	h.quiet()
	before := h.store.Stats()
	for done := 0; done < *rePuts; done += held {
		for _, j := range jobs {
			require.True(t, h.disk.Write(j))
		}
		for range jobs {
			require.NoError(t, h.answer(answers))
		}
	}
	after := h.store.Stats()
	require.Equal(t, before.UsedBytes, after.UsedBytes)
	require.Zero(t, after.ReservedBytes)
	require.Zero(t, after.DirtyBytes)
	require.Equal(t, before.Writes, after.Writes)
	require.Zero(t, after.EvictedSelf+after.EvictedOther)
	require.GreaterOrEqual(t, after.Present, uint64(*rePuts))
	require.Equal(t, disktest.Allocated(t, h.root.Path()), after.UsedBytes)
	// They are uses: what nobody puts again goes first.
	for n := held; n < held+30; n++ {
		require.NoError(t, h.put(n))
		for i, j := range jobs[:5] {
			require.True(t, h.disk.Write(j), i)
			require.NoError(t, h.answer(answers))
		}
	}
	require.Equal(t, before.Writes+30, h.store.Stats().Writes, "the five were there all the time")
}

func TestChunkLargerThanTheCap(t *testing.T) {
	h := openShelf(t, t.TempDir(), "m", StoreOptions{CapBytes: 20 * disktest.CostBytes}).scanned()
	for n := range 8 {
		require.NoError(t, h.put(n))
	}
	large := disktest.Namespace("large")
	large.Groups[0].Regions[0].Bytes = 21 * disktest.CostBytes
	for range 3 {
		_, err := h.store.Namespace(large)
		require.ErrorIs(t, err, ErrTooBig)
		require.ErrorContains(t, err, "raise disk_gib")
	}
	h.quiet()
	require.Equal(t, 8, h.disk.Count())
	require.Zero(t, h.store.Stats().EvictedSelf+h.store.Stats().EvictedOther)
	require.Len(t, h.store.Stats().Namespaces, 1)
}

// Somebody else fills the disk: chunks go until the floor holds, also while chunks
// are put; and when there is room again, they come back.
func TestFreeFloorOnARealDisk(t *testing.T) {
	disk, mounted := ownDisk(t, "8m")
	if !mounted {
		t.Skip("not run: no file system of its own can be mounted here")
	}
	const floor = 1 << 20
	free := func() int64 {
		fs, err := sys.Statfs(disk)
		require.NoError(t, err)
		return fs.AvailBytes
	}
	h := openShelf(t, filepath.Join(disk, "root"), "m", StoreOptions{FreeFloorBytes: floor}).scanned()
	lowest, stop := sampleFree(disk)
	next := 0
	for ; next < 600; next++ { // more than there is room for
		require.NoError(t, h.put(next))
	}
	stop()
	require.GreaterOrEqual(t, *lowest, int64(floor), "the cache itself went below the floor")
	require.Positive(t, h.store.Stats().EvictedSelf)

	other, err := os.Create(filepath.Join(disk, "somebody else's"))
	require.NoError(t, err)
	defer other.Close()
	for h.disk.Count() > 0 {
		_, err := other.Write(make([]byte, 256<<10))
		require.NoError(t, err)
		h.wait("room", func() bool { return free() >= floor || h.disk.Count() == 0 })
		_ = h.put(next) // perhaps there is room, perhaps not
		next++
	}
	require.ErrorIs(t, h.put(next), ErrNoRoom)
	require.Equal(t, "on", h.store.Stats().State)
	require.NoError(t, other.Truncate(0))
	h.wait("a put with room", func() bool { next++; return h.put(next) == nil })
	require.NoError(t, h.get(next))
	h.close()
}

// sampleFree watches what is free on a disk of its own.
func sampleFree(dir string) (lowest *int64, stop func()) {
	low := int64(1) << 62
	quit, gone := make(chan struct{}), sync.WaitGroup{}
	gone.Go(func() {
		for {
			if fs, err := sys.Statfs(dir); err == nil {
				low = min(low, fs.AvailBytes)
			}
			select {
			case <-quit:
				return
			case <-time.After(time.Millisecond):
			}
		}
	})
	return &low, func() { close(quit); gone.Wait() }
}

// Eviction of a file that somebody has removed before.
func TestEvictionOfWhatIsGone(t *testing.T) {
	h := openShelf(t, t.TempDir(), "m", StoreOptions{CapBytes: 30 * disktest.CostBytes}).scanned()
	for n := range 20 {
		require.NoError(t, h.put(n))
	}
	for n := range 10 {
		require.NoError(t, os.Remove(h.file(n)))
	}
	for n := 20; n < 60; n++ {
		require.NoError(t, h.put(n))
		require.NoError(t, h.get(n))
	}
	h.quiet()
	st := h.store.Stats()
	require.Equal(t, uint64(10), st.Vanished)
	require.Empty(t, st.Errors)
	require.Equal(t, "on", st.State)
	require.Equal(t, disktest.Allocated(t, h.root.Path()), st.UsedBytes)
}

// Eviction passes over what is being read, and takes it afterwards.
func TestEvictionOfWhatIsRead(t *testing.T) {
	fs := &faultFS{}
	h := openShelf(t, t.TempDir(), "m", StoreOptions{FS: fs, CapBytes: 20 * disktest.CostBytes, Breaker: BreakerOptions{SlowRead: shelfPatience}}).scanned()
	require.NoError(t, h.put(0))
	gate, reached := make(chan struct{}), make(chan struct{})
	var once sync.Once
	fs.set(func(call, path string) error {
		if call == "read direct" && path == h.file(0) {
			once.Do(func() { close(reached) })
			<-gate
		}
		return nil
	})
	answer := make(chan error, 1)
	go func() { answer <- h.get(0) }()
	<-reached
	for n := 1; n < 60; n++ {
		require.NoError(t, h.put(n))
	}
	require.FileExists(t, h.file(0))
	require.True(t, h.disk.Has(shelfKey(0)))
	close(gate)
	require.NoError(t, h.answer(answer))
	for n := 60; h.disk.Has(shelfKey(0)); n++ {
		require.NoError(t, h.put(n))
		require.Less(t, n, 100)
	}
	h.quiet()
	require.NoFileExists(t, h.file(0))
	require.Empty(t, h.store.Stats().Errors)
	require.Equal(t, disktest.Allocated(t, h.root.Path()), h.store.Stats().UsedBytes)
}

// Eviction of a file whose successor is being written: the old one goes, the new one
// stays, and the bytes count once.
func TestEvictionOfWhatIsWritten(t *testing.T) {
	dir := t.TempDir()
	h := openShelf(t, dir, "m", StoreOptions{}).scanned()
	require.NoError(t, h.put(0))
	h.close()
	outside := filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.Link(h.file(0), outside)) // not adopted, so that it can be put again

	fs := &faultFS{}
	h = openShelf(t, dir, "m", StoreOptions{FS: fs, CapBytes: 20 * disktest.CostBytes}).scanned()
	gate, reached := make(chan struct{}), make(chan struct{})
	var evicted atomic.Bool
	fs.set(func(call, path string) error {
		switch {
		case call == "rename" && path == h.file(0):
			close(reached)
			<-gate
		case call == "unlink" && path == h.file(0):
			evicted.Store(true)
		}
		return nil
	})
	answer := make(chan error, 1)
	require.True(t, h.disk.Write(shelfJob(shelfKey(0), 0, chunk.Key{}, func(err error) { answer <- err })))
	// Before the rename the lane holds the stripe, so eviction has to come after it:
	// it must not take the new file for the old one.
	<-reached
	for n := 1; n < 8; n++ {
		require.NoError(t, h.put(n))
	}
	h.store.mu.Lock()
	e := h.disk.dir.index.find(shelfKey(0))
	e.flags |= entryUnlinking // as nextVictim does
	h.disk.dir.index.settle(e)
	h.store.mu.Unlock()
	unlinked := make(chan struct{})
	go func() {
		h.store.unlinkEntry(removal{h.disk.dir, shelfKey(0)}, true)
		close(unlinked)
	}()
	close(gate)
	require.NoError(t, h.answer(answer))
	<-unlinked
	require.False(t, evicted.Load())
	require.NoError(t, h.get(0))
	h.quiet()
	require.Equal(t, disktest.Allocated(t, dir), h.store.Stats().UsedBytes)
}
