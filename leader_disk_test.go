package kvtier

import (
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/disktest"
	"github.com/kvtier/kvtier/internal/sys"
	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/tier"
)

// sickFS lets opening or reading chunk files fail.
type sickFS struct {
	tier.Filesystem
	open, read atomic.Int32 // the errno; 0: none
}

func withSickDisk(f *sickFS) rigOption {
	return func(o *leaderOptions) {
		f.Filesystem, o.disk.FS = o.disk.FS, f
		o.disk.Breaker = tier.BreakerOptions{Errors: 1 << 30}
	}
}

func (f *sickFS) Open(path string, flags sys.OpenFlag) (tier.OpenFile, error) {
	if errno := f.open.Load(); errno != 0 && filepath.Ext(path) == ".kvc" {
		return nil, &os.PathError{Op: "open", Path: path, Err: syscall.Errno(errno)}
	}
	file, err := f.Filesystem.Open(path, flags)
	if err != nil || filepath.Ext(path) != ".kvc" {
		return file, err
	}
	return &sickFile{file, f}, nil
}

type sickFile struct {
	tier.OpenFile
	fs *sickFS
}

func (f *sickFile) ReadV(bufs [][]byte, off int64) (int, error) {
	if errno := f.fs.read.Load(); errno != 0 {
		return 0, syscall.Errno(errno)
	}
	return f.OpenFile.ReadV(bufs, off)
}

// readPaths are the ways in which a leader comes to read chunks. Each gives how many
// leading chunks it got.
var readPaths = map[string]func(r *leaderRig, g *rigGroup, keys []chunk.Key) int{
	"single": func(r *leaderRig, g *rigGroup, keys []chunk.Key) int {
		for i := range keys {
			if c := g.loadAll(0, run(parentOf(g, keys, i), i, keys[i:i+1])); c[0] != wire.Ready {
				return i
			}
		}
		return len(keys)
	},
	"batch": func(r *leaderRig, g *rigGroup, keys []chunk.Key) int {
		got := 0
		for _, c := range g.loadAll(0, g.runOf(keys, 0)) {
			if c == wire.Ready {
				got++
			}
		}
		return got
	},
	"lease": func(r *leaderRig, g *rigGroup, keys []chunk.Key) int {
		hits := g.lease(1, g.runOf(keys, 0))
		g.release(1)
		return int(hits.Resident)
	},
	"prefetch": func(r *leaderRig, g *rigGroup, keys []chunk.Key) int {
		r.call(g.coord, &wire.Request{Type: wire.Prefetch, Run: g.runOf(keys, 0)})
		r.quiet() // its reads have ended
		hits := r.call(g.coord, &wire.Request{Type: wire.Lookup, Run: g.runOf(keys, 0)}).Hits
		return int(hits.Resident)
	},
}

func parentOf(g *rigGroup, keys []chunk.Key, i int) chunk.Key {
	if i == 0 {
		return g.root
	}
	return keys[i-1]
}

// A chunk whose file somebody has removed is a miss on every way to read it, and is
// forgotten with its bytes; what is before it in the prefix is served.
func TestVanishedFileOnEachReadPath(t *testing.T) {
	for name, read := range readPaths {
		t.Run(name, func(t *testing.T) {
			r, g, keys := restarted(t, 5)
			used := r.l.store.Stats().UsedBytes
			require.NoError(t, os.Remove(disktest.Files(t, r.dir, chunk.FileName(keys[3]))[0]))
			require.Equal(t, 3, read(r, g, keys))
			r.quiet()
			require.False(t, g.look(keys[3]).OnDisk)
			st := r.l.store.Stats()
			require.Equal(t, uint64(1), st.Vanished)
			require.Equal(t, used-rigSlot-chunk.FooterBytes, st.UsedBytes)
			require.Empty(t, st.Errors)
			require.Empty(t, st.Corrupt)
			g.store(keys, 3) // it can be brought again
			g.onDisk(keys)
			require.Equal(t, 5, read(r, g, keys))
			r.quiet()
		})
	}
}

// A file that cannot be read now is a miss on every way to read it, and stays: as
// soon as it can be read it is served.
func TestReadErrorsOnEachReadPath(t *testing.T) {
	for name, read := range readPaths {
		for _, errno := range []syscall.Errno{syscall.EIO, syscall.EMFILE, syscall.EACCES, syscall.ENOMEM} {
			t.Run(fmt.Sprintf("%s %v", name, errno), func(t *testing.T) {
				sick := &sickFS{}
				r, g, keys := restarted(t, 3, withSickDisk(sick))
				used := r.l.store.Stats().UsedBytes
				for _, call := range []*atomic.Int32{&sick.open, &sick.read} {
					call.Store(int32(errno))
					require.Zero(t, read(r, g, keys))
					r.quiet()
					call.Store(0)
				}
				st := r.l.store.Stats()
				require.Len(t, st.Errors, 1)
				require.Empty(t, st.Corrupt)
				require.Zero(t, st.Vanished)
				require.Equal(t, used, st.UsedBytes)
				for _, k := range keys {
					require.NotEmpty(t, disktest.Files(t, r.dir, chunk.FileName(k)))
					require.True(t, g.look(k).OnDisk)
				}
				require.Equal(t, 3, read(r, g, keys))
				r.quiet()
			})
		}
	}
}

// A damaged chunk on every way to read it: a miss, counted by its kind, and gone.
func TestDamagedFileOnEachReadPath(t *testing.T) {
	for name, read := range readPaths {
		t.Run(name, func(t *testing.T) {
			r, g, keys := restarted(t, 4)
			r.spoil(keys[2])
			require.Equal(t, 2, read(r, g, keys))
			r.quiet()
			require.Equal(t, map[string]uint64{"payload": 1}, r.l.store.Stats().Corrupt)
			require.Empty(t, disktest.Files(t, r.dir, chunk.FileName(keys[2])))
			require.False(t, g.look(keys[2]).OnDisk)
		})
	}
}

// A chunk that is served from DRAM again and again does not grow old on disk.
func TestHotChunkInDRAMStaysYoungOnDisk(t *testing.T) {
	const files = 14
	r := newLeaderRig(t, withDiskCap(files*(rigSlot+chunk.FooterBytes+4096)), withSlots(256), func(o *leaderOptions) { o.disk.Now = o.now })
	g := r.join("g", 1, 1)
	g.grow()
	hot := g.chain(1, 2)
	g.store(hot, 0)
	g.onDisk(hot)
	for seed := uint32(10); seed < 60; seed++ {
		r.advance(time.Second)
		require.Equal(t, repeat(wire.Ready, 2), g.loadAll(0, g.runOf(hot, 0)))
		g.store(g.chain(seed, 1), 0)
		r.quiet()
	}
	st := r.l.store.Stats()
	require.Positive(t, st.EvictedSelf)
	require.Zero(t, st.Reads, "they came from DRAM all the time")
	for _, k := range hot {
		require.True(t, g.look(k).OnDisk)
	}
	require.False(t, g.look(g.chain(10, 1)[0]).OnDisk, "one that was not used went")
	r.stop()
	r.start() // and its age is on disk as well
	g = r.join("g", 1, 1)
	require.Eventually(t, r.l.spaces[g.fingerprint()].disk.Scanned, patience, time.Millisecond)
	for seed := uint32(60); seed < 66; seed++ {
		g.store(g.chain(seed, 1), 0)
		g.onDisk(g.chain(seed, 1))
	}
	require.Equal(t, repeat(wire.Ready, 2), g.loadAll(0, g.runOf(hot, 0)))
	r.quiet()
}
