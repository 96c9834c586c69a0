package tier

import (
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/sys"
)

// roomRig is an arena over a disk tier that has little room.
type roomRig struct {
	*rig
	store *Store
	disk  *Disk
}

func newRoomRig(t *testing.T, dir string, o StoreOptions) *roomRig {
	t.Helper()
	root, store := openStoreAt(t, dir, o)
	t.Cleanup(func() { require.NoError(t, root.Close()) })
	t.Cleanup(func() { require.NoError(t, store.Close(shelfPatience)) })
	d, err := store.Namespace(rigNamespace("rig"))
	require.NoError(t, err)
	require.Eventually(t, d.Scanned, shelfPatience, time.Millisecond)
	g := newRig(t, rigOptions{slots: 32, disk: d})
	g.grown(32)
	return &roomRig{g, store, d}
}

func (r *roomRig) wait(what string, ok func() bool) {
	r.Helper()
	require.Eventually(r, ok, shelfPatience, time.Millisecond, what)
}

// refused waits until a write has failed and its chunk waits in DRAM.
func (r *roomRig) refused() {
	r.Helper()
	r.wait("a write that finds no room", func() (yes bool) {
		r.do(func() { yes = r.space.writing == 0 && r.space.Stats().WriteErrors > 0 && r.space.Stats().Backlog > 0 })
		return yes
	})
}

// fill takes what is free on a small file system, until it is removed.
func fill(t *testing.T, dir string, leave int64) (filler string) {
	t.Helper()
	filler = filepath.Join(dir, "somebody else's")
	f, err := os.Create(filler)
	require.NoError(t, err)
	defer f.Close()
	for {
		fs, err := sys.Statfs(dir)
		require.NoError(t, err)
		n := min(fs.AvailBytes-leave, 64<<10)
		if n <= 0 {
			return filler
		}
		_, err = f.Write(make([]byte, n))
		require.NoError(t, err)
	}
}

// A chunk whose write found no room, whatever it was that lacked, is on disk when there
// is room, without anything else being stored. The log says once that the disk is full.
func TestChunkThatFoundNoRoomGoesToDiskLater(t *testing.T) {
	ownRoot := func(t *testing.T) (disk, dir string) {
		disk, mounted := ownDisk(t, "2m")
		if !mounted {
			t.Skip("not run: no file system of its own can be mounted here")
		}
		return disk, filepath.Join(disk, "root")
	}
	check := func(t *testing.T, r *roomRig, makeRoom func()) {
		r.keep(1)
		r.refused()
		require.False(t, r.disk.Has(rigKey(1)))
		require.Equal(t, "on", r.store.Stats().State)
		makeRoom()
		r.wait("the chunk on disk", func() bool { return r.disk.Has(rigKey(1)) })
		r.wait("an empty backlog", func() (yes bool) {
			r.do(func() { yes = r.space.Stats().Backlog == 0 })
			return yes
		})
		require.Empty(t, r.store.Stats().Dropped)
		require.Positive(t, r.store.Stats().Postponed["room"])
	}
	t.Run("a full file system", func(t *testing.T) {
		disk, dir := ownRoot(t)
		log := &logLines{}
		r := newRoomRig(t, dir, StoreOptions{Log: log.logger()})
		filler := fill(t, disk, 0)
		check(t, r, func() { require.NoError(t, os.Remove(filler)) })
		require.Positive(t, r.store.Stats().Errors["ENOSPC"])
		require.Len(t, log.lines(), 1)
		require.Contains(t, log.lines()[0], "is full")
	})
	t.Run("the floor", func(t *testing.T) {
		disk, dir := ownRoot(t)
		r := newRoomRig(t, dir, StoreOptions{FreeFloorBytes: 256 << 10})
		filler := fill(t, disk, 128<<10)
		check(t, r, func() { require.NoError(t, os.Remove(filler)) })
		require.Empty(t, r.store.Stats().Errors)
	})
	t.Run("a quota", func(t *testing.T) {
		fs := &faultFS{}
		r := newRoomRig(t, t.TempDir(), StoreOptions{FS: fs})
		fs.set(failing("write", syscall.EDQUOT))
		check(t, r, func() { fs.set(nil) })
	})
	t.Run("the cap", func(t *testing.T) {
		r := newRoomRig(t, t.TempDir(), StoreOptions{CapBytes: 160 << 10})
		last := r.fillCap()
		require.False(t, r.disk.Has(rigKey(last)))
		r.do(func() {
			for n := 100; n <= last; n++ {
				r.space.Unhold(rigKey(n))
			}
		})
		r.wait("the chunk on disk", func() bool { return r.disk.Has(rigKey(last)) })
	})
}

// keep stores a chunk in DRAM, from where it is to go to disk.
func (r *roomRig) keep(n int) { r.rig.store(n, 0, false) }

// fillCap stores chunks that are held until one finds no room, and gives its number.
func (r *roomRig) fillCap() (last int) {
	r.Helper()
	for n := 100; n < 130; n++ {
		r.do(func() { r.space.Hold(rigKey(n)) })
		r.keep(n)
		r.wait("the end of the write", func() (yes bool) {
			r.do(func() { yes = r.space.writing == 0 })
			return yes
		})
		if !r.disk.Has(rigKey(n)) {
			r.refused()
			return n
		}
	}
	r.Fatal("the cap is never reached")
	return 0
}

// A chunk that is evicted from DRAM before there is room is lost, and the others follow.
func TestChunkThatFoundNoRoomIsEvicted(t *testing.T) {
	fs := &faultFS{}
	r := newRoomRig(t, t.TempDir(), StoreOptions{FS: fs})
	fs.set(failing("write", syscall.ENOSPC))
	ref := r.rig.store(1, 0, false)
	r.refused()
	r.keep(2)
	r.do(func() { r.space.evictSlot(ref.Slot) })
	fs.set(nil)
	r.wait("the other chunk on disk", func() bool { return r.disk.Has(rigKey(2)) })
	require.False(t, r.disk.Has(rigKey(1)))
	r.do(func() {
		require.Zero(t, r.space.Stats().Backlog)
		require.EqualValues(t, 1, r.space.Stats().EvictedDirty)
	})
}

// A disk that stays full is tried at a slow rhythm, with one chunk, however many wait
// and however often they are offered: each try costs a file that is evicted in vain.
func TestFullDiskIsNotTriedAllTheTime(t *testing.T) {
	fs := &stillFS{}
	var clock, tries atomic.Int64
	clock.Store(time.Now().UnixNano())
	log := &logLines{}
	r := newRoomRig(t, t.TempDir(), StoreOptions{
		FS: fs, Now: func() time.Time { return time.Unix(0, clock.Load()) }, Log: log.logger(),
	})
	full := failing("write", syscall.ENOSPC)
	fs.set(func(call, path string) error {
		if strings.HasPrefix(call, "open") && filepath.Ext(path) == ".tmp" {
			tries.Add(1)
		}
		return full(call, path)
	})
	r.keep(1)
	r.refused()
	require.EqualValues(t, 2, tries.Load(), "one, and one after eviction")
	offer := func() { // as stores do, and the timer
		for range 100 {
			r.do(func() {
				r.space.noRoom = false
				r.space.offerBacklog()
			})
		}
		r.wait("the end of the writes", func() (yes bool) {
			r.do(func() { yes = r.space.writing == 0 })
			return yes
		})
	}
	for n := 2; n < 20; n++ {
		r.keep(n)
	}
	offer()
	require.EqualValues(t, 2, tries.Load(), "in the same moment")
	// The pauses double up to a minute.
	for i, pause := range []time.Duration{1, 2, 4, 8, 16, 32, 60, 60} {
		clock.Add(int64(pause*time.Second) - 1)
		offer()
		require.EqualValues(t, 2+2*i, tries.Load(), pause)
		clock.Add(1)
		offer()
		require.EqualValues(t, 4+2*i, tries.Load(), pause)
	}
	require.Len(t, log.lines(), 1)
	require.Contains(t, log.lines()[0], "is full")
	// A success ends it: all of them follow.
	fs.set(nil)
	clock.Add(int64(time.Minute))
	r.wait("all on disk", func() bool {
		for n := 1; n < 20; n++ {
			if !r.disk.Has(rigKey(n)) {
				return false
			}
		}
		return true
	})
}

// Chunks that are in the queue when the disk is found full are not tried: each would
// have a file evicted in vain.
func TestQueuedChunksDoNotTryAFullDisk(t *testing.T) {
	fs := &stillFS{}
	var tries atomic.Int64
	now := time.Now()
	r := newRoomRig(t, t.TempDir(), StoreOptions{FS: fs, WriteLanes: 1, Now: func() time.Time { return now }})
	gate := make(chan struct{})
	full := failing("write", syscall.ENOSPC)
	fs.set(func(call, path string) error {
		if strings.HasPrefix(call, "open") && filepath.Ext(path) == ".tmp" {
			tries.Add(1)
			<-gate
		}
		return full(call, path)
	})
	for n := 1; n <= 10; n++ {
		r.keep(n)
	}
	r.wait("the queue", func() (yes bool) {
		r.do(func() { yes = r.space.writing == 10 && tries.Load() == 1 })
		return yes
	})
	close(gate)
	r.wait("all of them in DRAM", func() (yes bool) {
		r.do(func() { yes = r.space.writing == 0 && r.space.Stats().Backlog == 10 })
		return yes
	})
	require.EqualValues(t, 2, tries.Load())
	require.Empty(t, r.store.Stats().Dropped)
}

// stillFS has always the same free, whatever others do on the disk of the test.
type stillFS struct{ faultFS }

func (f *stillFS) Statfs(string) (sys.Filesystem, error) {
	return sys.Filesystem{TotalBytes: 1 << 30, AvailBytes: 1 << 29}, nil
}

// When somebody frees room the pause of a full disk ends, however long it has become.
func TestFreedRoomEndsThePause(t *testing.T) {
	disk, mounted := ownDisk(t, "2m")
	if !mounted {
		t.Skip("not run: no file system of its own can be mounted here")
	}
	now := time.Now() // stands still: no pause ends by itself
	r := newRoomRig(t, filepath.Join(disk, "root"), StoreOptions{Now: func() time.Time { return now }})
	filler := fill(t, disk, 0)
	r.keep(1)
	r.refused()
	require.NoError(t, os.Remove(filler))
	r.wait("the chunk on disk", func() bool { return r.disk.Has(rigKey(1)) })
}

// Whoever waits for the disk at the end does not wait for one that has no room.
func TestNothingDrainsToADiskWithoutRoom(t *testing.T) {
	r := newRoomRig(t, t.TempDir(), StoreOptions{CapBytes: 160 << 10})
	r.fillCap()
	r.wait("a write that has just failed", func() (yes bool) {
		r.do(func() {
			yes = r.space.noRoom && r.space.writing == 0
			before := r.store.Stats().Postponed["room"]
			for range 100 {
				require.False(t, yes && r.space.Draining())
			}
			require.True(t, !yes || before == r.store.Stats().Postponed["room"])
		})
		return yes
	})
}
