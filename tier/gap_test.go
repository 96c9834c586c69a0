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

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/disktest"
)

const formerChunks = 10

// formerModel leaves a namespace below dir that is not in use any more, with a temp
// file of a dead session. It gives the paths that stand there.
func formerModel(t *testing.T, dir string) (ns, temp string, files []string) {
	t.Helper()
	h := openShelf(t, dir, "former", StoreOptions{}).scanned()
	for n := range formerChunks {
		require.NoError(t, h.put(n))
		files = append(files, h.file(n))
	}
	temp = filepath.Join(h.disk.dir.subPath(shelfKey(0)), chunk.TempName(shelfKey(0), h.store.session, 99))
	require.NoError(t, os.WriteFile(temp, make([]byte, disktest.FileBytes), 0o600))
	h.close()
	return h.disk.dir.path, temp, files
}

// refusing fails the calls for which at says so.
func refusing(errno syscall.Errno, at func(call, path string) bool) func(string, string) error {
	return func(call, path string) error {
		if at(call, path) {
			return &os.PathError{Op: call, Path: path, Err: errno}
		}
		return nil
	}
}

// One file or directory that cannot be read: the others are served, chunks are written
// and the cap counts what was left out; as soon as it can be read it is there.
func TestWhatCannotBeReadIsLeftOut(t *testing.T) {
	for name, c := range map[string]struct {
		errno syscall.Errno
		at    func(ns, temp string, files []string) func(call, path string) bool
	}{
		"a chunk": {syscall.EIO, func(_, _ string, files []string) func(string, string) bool {
			return func(call, path string) bool { return call == "lstat" && path == files[3] }
		}},
		"a temp file": {syscall.EACCES, func(_, temp string, _ []string) func(string, string) bool {
			return func(call, path string) bool { return call == "unlink" && path == temp }
		}},
		"names of a subdirectory": {syscall.EACCES, func(_, _ string, files []string) func(string, string) bool {
			return func(call, path string) bool { return call == "readdir" && path == filepath.Dir(files[3]) }
		}},
		"a subdirectory": {syscall.EIO, func(_, _ string, files []string) func(string, string) bool {
			return func(_, path string) bool { return strings.HasPrefix(path, filepath.Dir(files[3])) }
		}},
		"names of a namespace": {syscall.EIO, func(ns, _ string, _ []string) func(string, string) bool {
			return func(call, path string) bool { return call == "readdir" && path == ns }
		}},
		"a sidecar": {syscall.EIO, func(ns, _ string, _ []string) func(string, string) bool {
			return func(_, path string) bool { return path == filepath.Join(ns, sidecarName) }
		}},
		"all subdirectories": {syscall.EACCES, func(ns, _ string, _ []string) func(string, string) bool {
			return func(_, path string) bool { return strings.HasPrefix(path, ns+"/") }
		}},
		"a namespace": {syscall.EACCES, func(ns, _ string, _ []string) func(string, string) bool {
			return func(_, path string) bool { return strings.HasPrefix(path, ns) }
		}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			ns, temp, files := formerModel(t, dir)
			began := time.Now()
			var shift atomic.Int64
			fs := &faultFS{}
			fs.set(refusing(c.errno, c.at(ns, temp, files)))
			h := openShelf(t, dir, "m", StoreOptions{
				FS: fs, Now: func() time.Time { return began.Add(time.Duration(shift.Load())) },
				Breaker: BreakerOptions{Errors: 1 << 30},
			})
			for n := range 20 {
				require.NoError(t, h.put(n))
				require.NoError(t, h.get(n))
			}
			st := h.store.Stats()
			require.Positive(t, st.Errors[errnoName(c.errno)])
			require.Empty(t, st.Corrupt)
			require.GreaterOrEqual(t, st.UsedBytes, disktest.Allocated(t, dir), "it lies there and counts")
			for _, file := range files {
				require.FileExists(t, file)
			}
			require.True(t, h.disk.Scanned(), "this namespace has no gap")

			// It fails again, and then it does not.
			again := st.Errors[errnoName(c.errno)]
			shift.Add(int64(scanRetry))
			h.wait("another try", func() bool { return h.store.Stats().Errors[errnoName(c.errno)] > again })
			require.GreaterOrEqual(t, h.store.Stats().UsedBytes, disktest.Allocated(t, dir))
			fs.set(nil)
			shift.Add(int64(10 * scanRetry))
			h.wait("the rest", func() bool {
				st := h.store.Stats()
				return st.Swept == 1 && st.UsedBytes == disktest.Allocated(t, dir) && st.Namespaces[0].Scanned && st.Namespaces[1].Scanned
			})
			d, err := h.store.Namespace(disktest.Namespace("former"))
			require.NoError(t, err)
			former := &shelf{t: t, root: h.root, store: h.store, disk: d}
			for n := range formerChunks {
				require.NoError(t, former.get(n))
			}
			require.Empty(t, h.store.Stats().Rejected)
		})
	}
}

// The way for writes is open as soon as all that can be read is counted.
func TestWhatIsWrittenBesideAGap(t *testing.T) {
	dir := t.TempDir()
	_, _, files := formerModel(t, dir)
	fs := &faultFS{}
	fs.set(refusing(syscall.EIO, func(call, path string) bool { return call == "lstat" && path == files[3] }))
	h := openShelf(t, dir, "m", StoreOptions{FS: fs})
	h.wait("the first pass", func() bool {
		h.store.mu.Lock()
		defer h.store.mu.Unlock()
		for _, n := range h.store.dirs {
			if n.left > 0 {
				return false
			}
		}
		return len(h.store.dirs) == 2
	})
	st := h.store.Stats()
	require.True(t, st.Known)
	require.Equal(t, int64(disktest.FileBytes), st.UnreadBytes)
}

// What cannot be read is not in the way of the cap: chunks that can be read make room
// for new ones, and when the rest comes back it does not take more than there is.
func TestCapHoldsOverWhatCannotBeRead(t *testing.T) {
	disk, mounted := ownDisk(t, "64m")
	dir := filepath.Join(disk, "root")
	limit := int64(40 * disktest.CostBytes)
	ns, _, files := formerModel(t, dir)
	began := time.Now()
	var shift atomic.Int64
	fs := &faultFS{}
	fs.set(refusing(syscall.EIO, func(call, path string) bool {
		return call == "lstat" && (path == files[1] || path == files[2]) ||
			call == "readdir" && (path == filepath.Dir(files[4]) || path == filepath.Dir(files[5]))
	}))
	stop := sample(t, disk, mounted)
	h := openShelf(t, dir, "m", StoreOptions{
		CapBytes: limit, FS: fs, Now: func() time.Time { return began.Add(time.Duration(shift.Load())) },
	})
	puts := 0
	burst := func() {
		for range 100 {
			require.NoError(t, h.put(puts))
			puts++
		}
		h.quiet()
		require.LessOrEqual(t, disktest.Allocated(t, dir), limit)
		require.LessOrEqual(t, h.store.Stats().UsedBytes, limit)
	}
	burst()
	require.Equal(t, uint64(formerChunks-4), h.store.Stats().EvictedOther, "those that can be read are the oldest")
	for _, n := range []int{1, 2, 4, 5} {
		require.FileExists(t, files[n])
	}
	fs.set(nil)
	shift.Add(int64(scanRetry))
	h.wait("the rest", func() bool { return len(disktest.Files(t, ns, ".kvc")) == 0 || h.store.Stats().Namespaces[0].Scanned })
	burst()
	require.Empty(t, disktest.Files(t, ns, ".kvc"), "by age they are next")
	require.Equal(t, disktest.Allocated(t, dir), h.store.Stats().UsedBytes)
	require.LessOrEqual(t, stop(), limit)
}
