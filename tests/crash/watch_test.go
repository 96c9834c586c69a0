package crash

import (
	"fmt"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/disktest"
	"github.com/kvtier/kvtier/internal/sys"
	"github.com/kvtier/kvtier/tier"
)

// watchedFS lets one call that changes something run at a time, and looks after each what
// lies there as a stranger does, with lstat: no moment is left between two looks.
type watchedFS struct {
	tier.LocalFilesystem
	t    *testing.T
	root string

	mu      sync.Mutex
	looks   int
	highest int64
	at      string // the call after which that was seen
}

// watch is to be deferred by a call.
func (f *watchedFS) watch(call, path string) (look func()) {
	f.mu.Lock()
	return func() {
		defer f.mu.Unlock()
		f.looks++
		if bytes := disktest.Allocated(f.t, f.root); bytes > f.highest {
			f.highest, f.at = bytes, fmt.Sprintf("%s %s", call, filepath.Base(path))
		}
	}
}

// anew gives the highest since the last time, and begins anew.
func (f *watchedFS) anew() (highest int64, at string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	highest, at = f.highest, f.at
	f.highest, f.at = 0, ""
	return highest, at
}

func (f *watchedFS) Open(path string, flags sys.OpenFlag) (tier.OpenFile, error) {
	if flags&sys.OpenCreate != 0 {
		defer f.watch("create", path)()
	}
	file, err := f.LocalFilesystem.Open(path, flags)
	if err != nil {
		return nil, err
	}
	return &watchedFile{file, f, path}, nil
}

func (f *watchedFS) Mkdir(path string) error {
	defer f.watch("mkdir", path)()
	return f.LocalFilesystem.Mkdir(path)
}

func (f *watchedFS) Rmdir(path string) error {
	defer f.watch("rmdir", path)()
	return f.LocalFilesystem.Rmdir(path)
}

func (f *watchedFS) Rename(from, to string) error {
	defer f.watch("rename", to)()
	return f.LocalFilesystem.Rename(from, to)
}

func (f *watchedFS) Unlink(path string) error {
	defer f.watch("unlink", path)()
	return f.LocalFilesystem.Unlink(path)
}

type watchedFile struct {
	tier.OpenFile
	fs   *watchedFS
	path string
}

func (f *watchedFile) WriteV(bufs [][]byte, off int64) (int, error) {
	defer f.fs.watch("write", f.path)()
	return f.OpenFile.WriteV(bufs, off)
}

func (f *watchedFile) Sync() error {
	defer f.fs.watch("sync", f.path)()
	return f.OpenFile.Sync()
}

func (f *watchedFile) Close() error {
	defer f.fs.watch("close", f.path)()
	return f.OpenFile.Close()
}

// The cap holds after every single call on file systems that allocate in their own way:
// in blocks of 1 KiB with ext4, where a directory grows by small steps; ahead of need and
// late with xfs.
func TestCapAfterEachCall(t *testing.T) {
	for _, kind := range []struct {
		name, fs string
		mkfs     []string
	}{
		{"ext4 in blocks of 1 KiB", "ext4", []string{"-q", "-F", "-b", "1024"}},
		{"xfs", "xfs", []string{"-q", "-f"}},
	} {
		t.Run(kind.name, func(t *testing.T) {
			dir, _ := loopDisk(t, kind.fs, kind.mkfs...)
			root := filepath.Join(dir, "root")
			disk := &watchedFS{t: t, root: root}
			next, lies := 0, int64(0)
			for _, files := range []int64{40, 40, 15} { // the last one begins above its cap
				limit := files * disktest.CostBytes
				o := tier.StoreOptions{FS: disk, CapBytes: limit, Tick: 2 * time.Millisecond}
				b := openLater(t, root, o)
				b.scanned()
				b.wait("shrinking", func() bool { return b.store.Stats().UsedBytes <= limit })
				b.idle()
				highest, at := disk.anew()
				require.LessOrEqual(t, highest, max(limit, lies), at)
				answers := make(chan error, 2)
				for range 60 { // by two lanes at once
					for range 2 {
						require.True(t, b.start(next, func(err error) { answers <- err }))
						next++
					}
					for range 2 {
						require.NoError(t, <-answers)
					}
					if next%12 == 0 {
						b.disk.Remove(key(next - 2))
						require.NoError(t, b.get(next-1))
					}
				}
				b.idle()
				st := b.store.Stats()
				require.Positive(t, st.EvictedSelf)
				require.Greater(t, b.disk.Count(), int(files)/3, "the room is used")
				b.booksMatch(root, kind.fs)
				b.close()
				highest, at = disk.anew()
				require.LessOrEqual(t, highest, limit, at)
				require.Greater(t, highest, limit*3/4, "it is not by chance")
				lies = disktest.Allocated(t, root)
			}
			t.Logf("%d looks", disk.looks)
		})
	}
}
