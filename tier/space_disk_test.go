package tier

import (
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/spawn"
	"github.com/kvtier/kvtier/internal/sys"
)

// gateFS is the local file system with a gate that opening a chunk, to read or to
// write it, has to pass.
type gateFS struct {
	LocalFilesystem
	mu      sync.Mutex
	gate    chan struct{}
	waiting atomic.Int32
}

func (f *gateFS) Open(path string, flags sys.OpenFlag) (OpenFile, error) {
	if ext := filepath.Ext(path); ext == ".kvc" || ext == ".tmp" {
		f.mu.Lock()
		gate := f.gate
		f.mu.Unlock()
		if gate != nil {
			f.waiting.Add(1)
			<-gate
			f.waiting.Add(-1)
		}
	}
	return f.LocalFilesystem.Open(path, flags)
}

// shut makes them wait until the returned function is called.
func (f *gateFS) shut() (open func()) {
	gate := make(chan struct{})
	f.mu.Lock()
	f.gate = gate
	f.mu.Unlock()
	return sync.OnceFunc(func() {
		f.mu.Lock()
		f.gate = nil
		f.mu.Unlock()
		close(gate)
	})
}

type diskRig struct {
	*rig
	disk *Disk
	root string
	fs   *gateFS
}

func openTestStore(t *testing.T, o StoreOptions) (*Store, string) {
	t.Helper()
	dir := t.TempDir()
	o.CapBytes, o.Tick = 1<<30, time.Second
	root, store := openStoreAt(t, dir, o)
	t.Cleanup(func() { require.NoError(t, root.Close()) })
	t.Cleanup(func() { require.NoError(t, store.Close(rigWait)) })
	return store, dir
}

func newDiskRig(t *testing.T, slots int) *diskRig {
	t.Helper()
	return newDiskRigWith(t, slots, StoreOptions{})
}

// newDiskRigWith takes all options but the file system, which is its own.
func newDiskRigWith(t *testing.T, slots int, o StoreOptions) *diskRig {
	t.Helper()
	d := &diskRig{fs: &gateFS{}}
	o.FS = d.fs
	store, root := openTestStore(t, o)
	disk, err := store.Namespace(rigNamespace("rig"))
	require.NoError(t, err)
	require.Eventually(t, disk.Scanned, rigWait, time.Millisecond)
	d.disk, d.root = disk, root
	d.rig = newRig(t, rigOptions{slots: slots, disk: disk})
	d.grown(slots)
	return d
}

// saved brings a chunk to disk.
func (d *diskRig) saved(n, ordinal int) Ref {
	d.Helper()
	r := d.store(n, ordinal, false)
	d.clean(r)
	require.True(d, d.disk.Has(rigKey(n)))
	return r
}

func (d *diskRig) clean(r Ref) {
	d.Helper()
	d.until("written", func() bool {
		sl := &d.space.slots[r.Slot]
		return sl.generation == r.Generation && sl.durability == clean && sl.users == 0
	})
}

// forget makes a chunk leave the arena, as if it had been evicted.
func (d *diskRig) forget(r Ref) {
	d.do(func() { d.space.evictSlot(r.Slot) })
}

func (d *diskRig) fill(n, ordinal int) (r Ref) {
	d.Helper()
	d.do(func() {
		var err error
		r, err = d.space.Fill(rigKey(n), uint32(ordinal))
		require.NoError(d, err)
		require.Equal(d, Filling, d.space.Look(rigKey(n)).State)
		_, err = d.space.Fill(rigKey(n), uint32(ordinal))
		require.ErrorIs(d, err, ErrKnown)
	})
	return r
}

func (d *diskRig) file(n int) (path string) {
	d.Helper()
	found, err := filepath.Glob(filepath.Join(d.root, "*", chunk.SubDir(rigKey(n)), chunk.FileName(rigKey(n))))
	require.NoError(d, err)
	require.Len(d, found, 1)
	return found[0]
}

func TestChunkGoesToDiskAndComesBack(t *testing.T) {
	d := newDiskRig(t, 8)
	d.do(func() { require.Equal(t, Presence{}, d.space.Look(rigKey(1))) })
	r := d.saved(1, 3)
	d.do(func() {
		require.Equal(t, Presence{State: Ready, Ref: r, OnDisk: true}, d.space.Look(rigKey(1)))
		require.False(t, d.space.OnlyInDRAM(rigKey(1)))
		st := d.space.Stats()
		require.Zero(t, st.Dirty)
		require.Zero(t, st.Writing)
	})
	hash := d.space.slots[r.Slot].hash
	d.forget(r)
	d.do(func() { require.Equal(t, Presence{OnDisk: true}, d.space.Look(rigKey(1))) })
	for i := range 8 { // whatever lay in the slot before
		b := d.space.Bytes(Ref{Slot: uint32(i)})
		fillRows(b, rigKey(99))
	}
	back := d.fill(1, 3)
	require.NoError(t, d.settled(back).Err)
	d.requireRows(d.space.Bytes(back), rigKey(1))
	d.do(func() {
		sl := &d.space.slots[back.Slot]
		require.Equal(t, hash, sl.hash)
		require.Equal(t, rigKey(0), sl.parent)
		require.EqualValues(t, 3, sl.ordinal)
		require.True(t, d.space.table.Check(back, Ready))
	})
}

func TestCleanLeavesBeforeDirty(t *testing.T) {
	d := newDiskRig(t, 4)
	d.store(0, 0, true)
	d.do(func() { d.clock = d.clock.Add(time.Second) })
	d.saved(1, 1)
	d.saved(2, 0)
	d.store(3, 0, true)
	require.Equal(t, []int{1, 2, 0, 3}, d.leaving(0, 1, 2, 3), "the memory-only chunks last, although one is oldest")
	d.do(func() {
		st := d.space.Stats()
		require.EqualValues(t, 4, st.Evicted)
		require.Zero(t, st.EvictedDirty, "nothing that was meant for disk was lost")
	})
}

func TestDirtyEvictionIsCounted(t *testing.T) {
	d := newDiskRig(t, 4)
	for n := range 4 {
		d.saved(n, 0)
	}
	d.disk.Remove(rigKey(2)) // the disk tier has lost it meanwhile
	require.Equal(t, []int{0, 1, 3, 2}, func() []int {
		d.do(func() {
			for n := range 4 {
				d.space.Touch(rigKey(n), 0)
				d.clock = d.clock.Add(time.Second)
			}
		})
		return d.leaving(0, 1, 2, 3)
	}())
	d.do(func() { require.EqualValues(t, 1, d.space.Stats().EvictedDirty) })
}

func TestHeldChunkKeepsOneCopy(t *testing.T) {
	d := newDiskRig(t, 4)
	d.saved(0, 0)
	d.saved(1, 0)
	d.store(2, 0, true)
	d.do(func() {
		for n := range 3 {
			d.space.Hold(rigKey(n))
		}
	})
	d.disk.Remove(rigKey(1)) // the file of a held chunk vanishes: its slot is the only copy
	d.until("the file is gone", func() bool { return !d.disk.Has(rigKey(1)) })
	d.grant(10, 0, true)
	d.grant(11, 0, true)
	require.Equal(t, Free, d.state(0), "there is a copy on disk")
	require.ErrorIs(t, d.makeRoom(), ErrNoSlot)
	require.Equal(t, Ready, d.state(1))
	require.Equal(t, Ready, d.state(2))
	d.do(func() { d.space.Unhold(rigKey(1)) })
	require.NoError(t, d.makeRoom())
	require.Equal(t, Free, d.state(1))
}

func TestFillFailures(t *testing.T) {
	d := newDiskRig(t, 4)
	r := d.fill(7, 0)
	require.ErrorIs(t, d.settled(r).Err, ErrAbsent)
	require.Equal(t, Free, d.state(7))

	kept := d.saved(1, 0)
	d.forget(kept)
	path := d.file(1)
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	for row := range rigRows {
		b[row*128+rigRow]++ // padding: the slot must not keep it
	}
	b[rigChunk-1]++
	require.NoError(t, os.WriteFile(path, b, 0o600))
	r = d.fill(1, 0)
	require.ErrorIs(t, d.settled(r).Err, ErrCorrupt)
	require.Equal(t, Free, d.state(1))
	d.do(func() {
		require.EqualValues(t, 2, d.space.Stats().FillErrors)
		require.False(t, d.space.table.Check(r, Filling))
		padding(d.space.layout, func(off, n int64) {
			require.Equal(t, make([]byte, n), d.space.Bytes(r)[off:off+n])
		})
	})
}

// A read that is not waited for may still write into its slot.
func TestFillGivenUpDrainsUntilTheReadReturns(t *testing.T) {
	for _, how := range []string{"give up", "remove"} {
		t.Run(how, func(t *testing.T) {
			d := newDiskRig(t, 4)
			d.forget(d.saved(1, 0))
			open := d.fs.shut()
			defer open()
			r := d.fill(1, 0)
			d.until("the read is under way", func() bool { return d.fs.waiting.Load() == 1 })
			d.do(func() {
				if how == "remove" {
					d.space.Remove(rigKey(1))
					require.ErrorIs(t, d.events[r].Err, ErrRemoved)
				} else {
					d.space.GiveUpFill(r)
					require.ErrorIs(t, d.events[r].Err, ErrGivenUp)
				}
				require.Equal(t, Free, d.space.Look(rigKey(1)).State)
				require.True(t, d.space.table.Check(r, Draining))
				d.space.GiveUpFill(r)
			})
			for n := 2; n < 5; n++ {
				require.NotEqual(t, r.Slot, d.grant(n, 0, true).Slot)
			}
			require.ErrorIs(t, d.makeRoom(), ErrNoSlot)
			open()
			d.until("drained", func() bool { return d.space.Counts()[Draining] == 0 })
			require.NoError(t, d.makeRoom())
		})
	}
}

func TestRemovedDuringWriteDoesNotComeBack(t *testing.T) {
	d := newDiskRig(t, 8)
	for n := range 50 {
		r := d.store(n, 0, false)
		d.do(func() { d.space.Remove(rigKey(n)) })
		d.until("drained", func() bool { return !d.space.is(r, Draining) && !d.space.is(r, Ready) })
		d.do(func() { require.Equal(t, Presence{}, d.space.Look(rigKey(n))) })
	}
}

func TestPostponedWriteOfAnEvictedChunkIsLost(t *testing.T) {
	g := newDiskRigWith(t, 4, StoreOptions{DirtyBytes: rigChunk})
	open := g.fs.shut()
	defer open()
	written, postponed := g.store(1, 0, false), g.store(2, 0, false)
	g.do(func() {
		st := g.space.Stats()
		require.EqualValues(t, 1, st.WritesPostponed)
		require.Equal(t, 1, st.Writing)
		require.Equal(t, 2, st.Dirty)
		require.True(t, g.space.is(postponed, Ready), "it stays in DRAM")
	})
	// What is being written is passed over, what was postponed is lost.
	g.grant(10, 0, true)
	g.grant(11, 0, true)
	require.NoError(t, g.makeRoom())
	g.grant(12, 0, true)
	require.ErrorIs(t, g.makeRoom(), ErrNoSlot)
	g.do(func() {
		require.True(t, g.space.is(written, Ready))
		require.EqualValues(t, 1, g.space.Stats().EvictedDirty)
	})
	open()
	g.until("written", func() bool { return g.disk.Has(rigKey(1)) && g.space.writing == 0 })
	require.NoError(t, g.makeRoom())
	g.do(func() { require.EqualValues(t, 1, g.space.Stats().EvictedDirty) })
}

// A burst of stores is faster than the disk, whose queue is bounded; what did not fit
// follows when there is room.
func TestPostponedWritesFollow(t *testing.T) {
	g := newDiskRigWith(t, 8, StoreOptions{DirtyBytes: rigChunk})
	open := g.fs.shut()
	defer open()
	for n := range 6 {
		g.store(n, 0, false)
	}
	g.do(func() {
		require.Equal(t, 5, g.space.Stats().Backlog)
		require.True(t, g.space.Draining())
	})
	open()
	g.until("all written", func() bool { return g.disk.Count() == 6 && g.space.dirty == 0 })
	g.do(func() {
		require.Zero(t, g.space.Stats().Backlog)
		require.False(t, g.space.Draining())
	})
}

func TestCloseWaitsForReads(t *testing.T) {
	d := newDiskRig(t, 4)
	d.forget(d.saved(1, 0))
	open := d.fs.shut()
	defer open()
	d.fill(1, 0)
	closed := make(chan error, 1)
	spawn.Go("close", func(err error) { closed <- err }, func() { closed <- d.space.Close(rigWait) })
	select {
	case <-closed:
		t.Fatal("closed under a read")
	case <-time.After(20 * time.Millisecond):
	}
	open()
	require.NoError(t, <-closed)
}
