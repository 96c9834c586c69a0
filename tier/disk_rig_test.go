package tier

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/disktest"
	"github.com/kvtier/kvtier/internal/sys"
)

const (
	shelfPatience = 60 * time.Second
	shelfPoll     = time.Millisecond
)

// shelf is a real disk tier with one namespace, over a file system in which a test
// can make calls fail.
type shelf struct {
	t     rapid.TB
	root  *Root
	store *Store
	disk  *Disk
}

// openStoreAt opens a store in dir; the caller closes it.
func openStoreAt(t rapid.TB, dir string, o StoreOptions) (*Root, *Store) {
	t.Helper()
	r, err := OpenRoot(dir, RootOptions{})
	require.NoError(t, err)
	ok, holder, err := r.TryLock()
	require.NoError(t, err)
	require.True(t, ok, holder)
	if o.CapBytes == 0 {
		o.CapBytes = 64 << 20
	}
	if o.Tick == 0 {
		o.Tick = 10 * time.Millisecond
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	s, err := OpenStore(r, o)
	require.NoError(t, err)
	return r, s
}

// openShelf closes the shelf at the end of the test, if the test has not.
func openShelf(t *testing.T, dir, model string, o StoreOptions) *shelf {
	t.Helper()
	h := newShelf(t, dir, model, o)
	t.Cleanup(h.close)
	return h
}

func newShelf(t rapid.TB, dir, model string, o StoreOptions) *shelf {
	t.Helper()
	r, s := openStoreAt(t, dir, o)
	d, err := s.Namespace(disktest.Namespace(model))
	require.NoError(t, err)
	return &shelf{t: t, root: r, store: s, disk: d}
}

func (h *shelf) close() {
	if h.store == nil {
		return
	}
	require.NoError(h.t, h.store.Close(shelfPatience))
	require.NoError(h.t, h.root.Close())
	h.store = nil
}

func (h *shelf) wait(what string, cond func() bool) {
	h.t.Helper()
	require.Eventually(h.t, cond, shelfPatience, time.Millisecond, what)
}

func (h *shelf) scanned() *shelf {
	h.t.Helper()
	h.wait("scan", func() bool { return h.disk.Scanned() && h.store.Stats().Known })
	return h
}

// quiet waits until eviction has nothing more to do.
func (h *shelf) quiet() {
	h.t.Helper()
	h.wait("eviction", func() bool {
		h.store.mu.Lock()
		defer h.store.mu.Unlock()
		return len(h.store.removals) == 0 && !h.store.unlinking && (h.store.budget.excess() <= 0 || h.store.starved)
	})
}

func shelfKey(n int) chunk.Key {
	return sha256.Sum256(binary.LittleEndian.AppendUint64(nil, uint64(n)))
}

func shelfJob(k chunk.Key, ordinal uint32, parent chunk.Key, done func(error)) WriteJob {
	p := disktest.Payload(k)
	return WriteJob{Key: k, Parent: parent, Ordinal: ordinal, Payload: p, Hash: chunk.HashPayload(p), Done: done}
}

// put writes a chunk and waits for the answer.
func (h *shelf) put(n int) error {
	h.t.Helper()
	return h.putAfter(n, 0, chunk.Key{})
}

func (h *shelf) putAfter(n int, ordinal uint32, parent chunk.Key) error {
	h.t.Helper()
	done := make(chan error, 1)
	if !h.disk.Write(shelfJob(shelfKey(n), ordinal, parent, func(err error) { done <- err })) {
		return errors.New("dropped at once")
	}
	return h.answer(done)
}

func (h *shelf) answer(done chan error) error {
	h.t.Helper()
	select {
	case err := <-done:
		return err
	case <-time.After(shelfPatience):
		h.t.Fatal("no answer")
		return nil
	}
}

// get reads a chunk. Whatever happens, the buffer holds the right bytes or none.
func (h *shelf) get(n int) error {
	h.t.Helper()
	k := shelfKey(n)
	dst := disktest.Used(disktest.PaddedBytes)
	done := make(chan ReadResult, 2)
	h.disk.Read(k, dst, func(r ReadResult) { done <- r })
	select {
	case r := <-done:
		if r.Err == nil {
			require.Equal(h.t, disktest.Payload(k), dst)
			require.Equal(h.t, chunk.HashPayload(dst), r.Hash)
		} else {
			require.Equal(h.t, make([]byte, len(dst)), dst, "bytes left behind by a failed read")
		}
		return r.Err
	case <-time.After(shelfPatience):
		h.t.Fatal("no answer")
		return nil
	}
}

func (h *shelf) file(n int) string { return h.disk.dir.filePath(shelfKey(n)) }

// faultFS makes calls fail: fault decides with the name of the call and the path.
type faultFS struct {
	LocalFilesystem
	mu    sync.Mutex
	fault func(call, path string) error
	short bool // transfers of at most 5000 bytes
}

func (f *faultFS) set(fault func(call, path string) error) {
	f.mu.Lock()
	f.fault = fault
	f.mu.Unlock()
}

func (f *faultFS) check(call, path string) error {
	f.mu.Lock()
	fault := f.fault
	f.mu.Unlock()
	if fault == nil {
		return nil
	}
	return fault(call, path)
}

func (f *faultFS) Open(path string, flags sys.OpenFlag) (OpenFile, error) {
	call := "open"
	if flags&sys.OpenDirect != 0 {
		call = "open direct"
	}
	if err := f.check(call, path); err != nil {
		return nil, err
	}
	file, err := f.LocalFilesystem.Open(path, flags)
	if err != nil {
		return nil, err
	}
	return &faultFile{file, f, path, flags&sys.OpenDirect != 0}, nil
}

func (f *faultFS) Lstat(path string) (sys.Stat, error) {
	if err := f.check("lstat", path); err != nil {
		return sys.Stat{}, err
	}
	return f.LocalFilesystem.Lstat(path)
}

func (f *faultFS) ReadNames(path string) ([]string, error) {
	if err := f.check("readdir", path); err != nil {
		return nil, err
	}
	return f.LocalFilesystem.ReadNames(path)
}

func (f *faultFS) Rename(from, to string) error {
	if err := f.check("rename", to); err != nil {
		return err
	}
	return f.LocalFilesystem.Rename(from, to)
}

func (f *faultFS) Unlink(path string) error {
	if err := f.check("unlink", path); err != nil {
		return err
	}
	return f.LocalFilesystem.Unlink(path)
}

type faultFile struct {
	OpenFile
	fs     *faultFS
	path   string
	direct bool
}

func (f *faultFile) name(call string) string {
	if f.direct {
		return call + " direct"
	}
	return call
}

func (f *faultFile) ReadV(bufs [][]byte, off int64) (int, error) {
	if err := f.fs.check(f.name("read"), f.path); err != nil {
		return 0, err
	}
	if f.fs.short {
		bufs = [][]byte{bufs[0][:min(len(bufs[0]), 8192)]}
	}
	return f.OpenFile.ReadV(bufs, off)
}

func (f *faultFile) WriteV(bufs [][]byte, off int64) (int, error) {
	if err := f.fs.check(f.name("write"), f.path); err != nil {
		return 0, err
	}
	if f.fs.short {
		n, err := f.OpenFile.WriteV([][]byte{bufs[0][:min(len(bufs[0]), 8192)]}, off)
		return min(n, 5000), err
	}
	return f.OpenFile.WriteV(bufs, off)
}

func (f *faultFile) Sync() error {
	if err := f.fs.check("sync", f.path); err != nil {
		return err
	}
	return f.OpenFile.Sync()
}

func (f *faultFile) SyncAll() error {
	if err := f.fs.check("fsync", f.path); err != nil {
		return err
	}
	return f.OpenFile.SyncAll()
}

// failing is a fault for one kind of call on chunk files.
func failing(call string, errno syscall.Errno) func(string, string) error {
	return func(c, path string) error {
		if strings.HasPrefix(c, call) && strings.Contains(path, ".kvc") || strings.HasPrefix(c, call) && strings.HasSuffix(path, ".tmp") {
			return &os.PathError{Op: c, Path: path, Err: errno}
		}
		return nil
	}
}

// corruptingFS flips a bit in so many of the next reads. then is called after the last
// of them, by the reader; it may ask for more.
type corruptingFS struct {
	LocalFilesystem
	times atomic.Int32
	then  func()
}

func corrupting(times int32) *corruptingFS {
	f := &corruptingFS{}
	f.times.Store(times)
	return f
}

func (f *corruptingFS) Open(path string, flags sys.OpenFlag) (OpenFile, error) {
	file, err := f.LocalFilesystem.Open(path, flags)
	if err != nil {
		return nil, err
	}
	return &corruptingFile{file, f}, nil
}

type corruptingFile struct {
	OpenFile
	fs *corruptingFS
}

func (f *corruptingFile) ReadV(bufs [][]byte, off int64) (int, error) {
	n, err := f.OpenFile.ReadV(bufs, off)
	if err != nil || n == 0 || f.fs.times.Load() <= 0 {
		return n, err
	}
	switch left := f.fs.times.Add(-1); {
	case left < 0: // another reader was first
		return n, nil
	case left == 0 && f.fs.then != nil:
		defer f.fs.then()
	}
	bufs[0][0] ^= 1
	return n, nil
}
