package crash

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/internal/disktest"
	"github.com/kvtier/kvtier/tier"
)

// notRun says why a test that needs a file system of its own cannot run here.
func notRun(t *testing.T, why string, err error) {
	t.Helper()
	t.Skipf("not run: %s: %v", why, err)
}

// loopDisk is a fresh file system in an image file, mounted. A test that cannot have
// one is not run.
func loopDisk(t *testing.T, kind string, mkfs ...string) (dir, image string) {
	t.Helper()
	if os.Geteuid() != 0 {
		notRun(t, "mounting an image needs root", os.ErrPermission)
	}
	tool, err := exec.LookPath("mkfs." + kind)
	if err != nil {
		notRun(t, "no tool to make "+kind, err)
	}
	image = filepath.Join(imageDir(t), kind+".img")
	require.NoError(t, os.WriteFile(image, nil, 0o600))
	require.NoError(t, os.Truncate(image, 320<<20))
	out, err := exec.Command(tool, append(mkfs, image)...).CombinedOutput()
	require.NoError(t, err, string(out))
	return mountImage(t, kind, image), image
}

// imageDir is in memory where that is possible: copying an image should take as
// little time as it can, for a power failure takes none.
func imageDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "kvtier-image-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func mountImage(t *testing.T, kind, image string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	options := "loop"
	if kind == "xfs" {
		options += ",nouuid" // a copy is mounted beside what it is a copy of
	}
	if out, err := exec.Command("mount", "-o", options, image, dir).CombinedOutput(); err != nil {
		notRun(t, "mount "+string(out), err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			_ = syscall.Unmount(dir, syscall.MNT_DETACH)
		}
	})
	return dir
}

// ownTmpfs is a small file system in memory.
func ownTmpfs(t *testing.T, options string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, options); err != nil {
		notRun(t, "mount a tmpfs", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			_ = syscall.Unmount(dir, syscall.MNT_DETACH)
		}
	})
	return dir
}

// copyImage copies what of a sparse file has data.
func copyImage(t *testing.T, from, to string) {
	t.Helper()
	in, err := os.Open(from)
	require.NoError(t, err)
	defer in.Close()
	st, err := in.Stat()
	require.NoError(t, err)
	out, err := os.Create(to)
	require.NoError(t, err)
	defer out.Close()
	require.NoError(t, out.Truncate(st.Size()))
	for end := int64(0); ; {
		begin, err := in.Seek(end, unix.SEEK_DATA)
		if errors.Is(err, syscall.ENXIO) {
			return // no more
		}
		require.NoError(t, err)
		end, err = in.Seek(begin, unix.SEEK_HOLE)
		require.NoError(t, err)
		_, err = io.Copy(io.NewOffsetWriter(out, begin), io.NewSectionReader(in, begin, end-begin))
		require.NoError(t, err)
	}
}

// TestPowerCut copies the image of a mounted file system while chunks are written to
// it: that is what a machine finds whose power has failed at that moment.
func TestPowerCut(t *testing.T) {
	for _, kind := range []struct {
		name string
		mkfs []string
	}{{"ext4", []string{"-q", "-F", "-E", "lazy_itable_init=0"}}, {"xfs", []string{"-q", "-f"}}} {
		for _, durable := range []bool{true, false} {
			name := kind.name
			if durable {
				name += " durable"
			}
			t.Run(name, func(t *testing.T) { powerCut(t, kind.name, kind.mkfs, durable) })
		}
	}
}

func powerCut(t *testing.T, kind string, mkfs []string, durable bool) {
	dir, image := loopDisk(t, kind, mkfs...)
	root := filepath.Join(dir, "root")
	b := open(t, root, tier.StoreOptions{Durable: durable}).scanned()
	const cuts, each = 3, 24
	images := imageDir(t)
	var copies []string
	for cut := range cuts {
		for i := range each {
			if i == each/2 && !durable { // these have reached the disk
				syncDisk(t, dir)
			}
			require.NoError(t, b.put(cut*each+i))
		}
		// More are on their way when the light goes out.
		answers := make(chan error, each)
		queued := 0
		for i := range each {
			if b.start(1000+cut*each+i, func(err error) { answers <- err }) {
				queued++
			}
		}
		to := filepath.Join(images, fmt.Sprintf("cut%d.img", cut))
		copyImage(t, image, to)
		copies = append(copies, to)
		for range queued {
			require.NoError(t, <-answers)
		}
	}
	b.close()
	found, torn := 0, 0
	for cut, image := range copies {
		path := filepath.Join(mountImage(t, kind, image), "root")
		b := open(t, path, tier.StoreOptions{}).scanned()
		for n := range cuts * each {
			published := n < (cut+1)*each
			reached := published && (durable || n < cut*each+each/2)
			err := b.get(n) // no wrong byte: get looks at every one
			switch {
			case err == nil:
				require.True(t, published, "a phantom")
				found++
			case reached:
				t.Fatalf("cut %d: chunk %d: %v", cut, n, err)
			case published:
				torn++
			}
			_ = b.get(1000 + n)
		}
		require.Empty(t, b.store.Stats().Errors)
		require.Empty(t, disktest.Files(t, path, ".tmp"))
		require.NoError(t, b.put(5000))
		require.NoError(t, b.get(5000))
		b.close()
	}
	t.Logf("%d chunks survived, %d did not", found, torn)
}

// syncDisk brings a whole file system to its disk.
func syncDisk(t *testing.T, dir string) {
	t.Helper()
	f, err := os.Open(dir)
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, unix.Syncfs(int(f.Fd())))
}

func TestRemountedReadOnly(t *testing.T) {
	dir := ownTmpfs(t, "size=64m")
	clock := &clock{}
	b := open(t, filepath.Join(dir, "root"), tier.StoreOptions{Now: clock.now}).scanned()
	for n := range 20 {
		require.NoError(t, b.put(n))
	}
	require.NoError(t, b.store.Close(patience)) // the lock file stays open for writing
	require.NoError(t, b.root.Close())
	b = open(t, filepath.Join(dir, "root"), tier.StoreOptions{Now: clock.now}).scanned()
	// A file that is open for writing keeps a file system writable: a bind mount of
	// it can be read-only all the same, and that is what a container gets.
	root := filepath.Join(dir, "root")
	require.NoError(t, syscall.Mount(root, root, "", syscall.MS_BIND, ""))
	defer syscall.Unmount(root, syscall.MNT_DETACH)
	require.NoError(t, syscall.Mount("", root, "", syscall.MS_REMOUNT|syscall.MS_BIND|syscall.MS_RDONLY, ""))
	for n := range 8 { // the breaker bears no more
		require.Equal(t, "on", b.store.Stats().State)
		require.NoError(t, b.get(n))
		require.ErrorIs(t, b.put(100+n), syscall.EROFS)
	}
	require.Equal(t, map[string]uint64{"EROFS": 8}, b.store.Stats().Errors, "one for each put")
	require.Equal(t, "off", b.store.Stats().State)
	require.ErrorIs(t, b.get(0), tier.ErrOff)
	// Writable again: the tier comes back by itself.
	require.NoError(t, syscall.Mount("", root, "", syscall.MS_REMOUNT|syscall.MS_BIND, ""))
	clock.jump(time.Minute)
	b.wait("return", func() bool { return b.store.Stats().State == "trial" })
	for n := range 20 {
		require.NoError(t, b.get(n))
	}
	require.NoError(t, b.put(100))
	require.Equal(t, "on", b.store.Stats().State)
	b.close()
}

// What is written after the disk was unmounted must not land below the mount point.
func TestUnmountedUnderTheTier(t *testing.T) {
	dir := ownTmpfs(t, "size=64m")
	root := filepath.Join(dir, "root")
	b := open(t, root, tier.StoreOptions{Tick: time.Hour}).scanned() // nobody looks in between
	require.NoError(t, b.put(1))
	require.NoError(t, syscall.Unmount(dir, syscall.MNT_DETACH))
	require.NoError(t, os.Mkdir(root, 0o700))
	require.Error(t, b.get(1))
	require.Error(t, b.put(2))
	require.Error(t, b.put(1))
	require.Equal(t, "off", b.store.Stats().State)
	require.NoError(t, b.store.Close(patience))
	require.NoError(t, b.root.Close())
	entries, err := os.ReadDir(root)
	require.NoError(t, err)
	require.Empty(t, entries)
}

// A disk on which every call takes its time, and one whose reads and unlinks never
// return: answers are bounded, and so is Close.
func TestSlowAndDeadDisks(t *testing.T) {
	t.Run("slow", func(t *testing.T) {
		t.Parallel()
		dir := filepath.Join(t.TempDir(), "root")
		disk, clock := newMemDisk(dir), &clock{}
		b := open(t, dir, tier.StoreOptions{FS: disk, Now: clock.now, Breaker: tier.BreakerOptions{SlowRead: 20 * time.Millisecond}}).scanned()
		for n := range 4 {
			require.NoError(t, b.put(n))
		}
		disk.delay.Store(int64(50 * time.Millisecond)) // stands for 5 s and a limit of 1 s
		for n := range 8 {
			require.NoError(t, b.get(n%4), "late but right")
		}
		require.Equal(t, "off", b.store.Stats().State)
		disk.delay.Store(0)
		clock.jump(time.Minute)
		b.wait("return", func() bool { return b.store.Stats().State == "trial" })
		require.NoError(t, b.get(0))
		b.close()
	})
	t.Run("5 s", func(t *testing.T) {
		t.Parallel()
		dir := filepath.Join(t.TempDir(), "root")
		disk := newMemDisk(dir)
		b := open(t, dir, tier.StoreOptions{FS: disk}).scanned()
		require.NoError(t, b.put(1))
		disk.delay.Store(int64(5 * time.Second))
		answers := make(chan error, 1)
		began := time.Now()
		b.disk.Read(key(1), disktest.Aligned(disktest.PaddedBytes), func(r tier.ReadResult) { answers <- r.Err })
		require.True(t, b.disk.Has(key(1)))
		require.True(t, b.start(2, func(error) {}))
		b.disk.Remove(key(9))
		closed := b.store.Close(300 * time.Millisecond)
		if time.Since(began) < 5*time.Second { // else this machine slept, and nothing is shown
			require.Empty(t, answers, "somebody has waited for the disk")
			require.ErrorIs(t, closed, tier.ErrIO)
		}
		require.NoError(t, <-answers, "it comes all the same")
		require.NoError(t, b.root.Close())
	})
	t.Run("unlinks hang", func(t *testing.T) {
		t.Parallel()
		dir := filepath.Join(t.TempDir(), "root")
		disk := newMemDisk(dir)
		b := open(t, dir, tier.StoreOptions{FS: disk, CapBytes: 10 * disktest.CostBytes}).scanned()
		open := disk.holdUnlinks() // all that follows happens while the evictor hangs
		written := make(chan int, 40)
		for n := range cap(written) {
			b.start(n, func(err error) {
				if err == nil {
					written <- n
				}
			})
		}
		b.wait("eviction", func() bool { return disk.waiting.Load() == 1 })
		newest := 0 // answers may overtake one another
		b.wait("the last that has room", func() bool {
			for len(written) > 0 {
				newest = max(newest, <-written)
			}
			return newest >= 3
		})
		require.NoError(t, b.get(newest), "a read does not wait for eviction")
		b.start(100, func(error) {}) // nor does a put
		require.Error(t, b.store.Close(200*time.Millisecond))
		open()
		require.NoError(t, b.root.Close())
	})
}

// Reads overtake a burst of writes: they come back while all of them are queued. The
// log has what a read waits beside writes that take 20 ms.
func TestReadsOvertakeWrites(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "root")
	disk := newMemDisk(dir)
	b := open(t, dir, tier.StoreOptions{FS: disk}).scanned()
	for n := range 10 {
		require.NoError(t, b.put(n))
	}
	const writes = 60
	answers := make(chan error, 2*writes)
	burst := func(first int) {
		for n := range writes {
			require.True(t, b.start(first+n, func(err error) { answers <- err }))
		}
	}
	open := disk.holdWrites()
	burst(100)
	b.wait("writes under way", func() bool { return disk.waiting.Load() == 2 })
	for n := range 10 {
		require.NoError(t, b.get(n))
	}
	require.Empty(t, answers)
	open()

	disk.writeDelay.Store(int64(20 * time.Millisecond))
	burst(200)
	began := time.Now()
	var worst time.Duration
	for n := range 10 {
		one := time.Now()
		require.NoError(t, b.get(n))
		worst = max(worst, time.Since(one))
	}
	reads := time.Since(began)
	for range 2 * writes {
		require.NoError(t, <-answers)
	}
	t.Logf("10 reads in %v, the slowest took %v; %d writes in %v", reads, worst, writes, time.Since(began))
	b.close()
}
