package crash

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvtier/kvtier/internal/sys"
	"github.com/kvtier/kvtier/tier"
)

const block = 4096

// memDisk is a file system in memory that knows what of it has reached the medium:
// a file by Sync, the names in a directory by SyncAll of that directory, and nothing
// by anything else. A power cut keeps that, and of the rest a random part.
type memDisk struct {
	mu   sync.Mutex
	root string // the path at which it is mounted
	top  *inode
	live map[*inode]struct{} // with a name or open
	next uint64
	dead bool // the process that used it is gone
	left int  // so many calls until it dies; negative: for ever

	fault func(call, path string) error // nil: none
	calls int
	short bool // transfers of at most 5000 bytes

	gates   [3]atomic.Pointer[chan struct{}] // reads, writes, unlinks of chunks: what they wait for
	waiting atomic.Int32

	delay, writeDelay atomic.Int64 // ns that each transfer takes; only writes

	limit int64  // nothing may grow past it
	worst string // the first growth that did
}

type inode struct {
	number  uint64
	dir     bool
	links   int
	opens   int
	data    []byte
	mtime   int64
	names   map[string]*inode
	stable  map[string]*inode // names as they are on the medium
	synced  []byte            // data as it is on the medium
	mtimeOn int64
	wasSync bool
}

func newMemDisk(root string) *memDisk {
	m := &memDisk{root: root, live: map[*inode]struct{}{}, left: -1}
	m.top = m.make(true)
	m.top.links = 1
	return m
}

func (m *memDisk) make(dir bool) *inode {
	m.next++
	n := &inode{number: m.next, dir: dir}
	if dir {
		n.names, n.stable = map[string]*inode{}, map[string]*inode{}
	}
	m.live[n] = struct{}{}
	return n
}

func (n *inode) allocated() int64 {
	if n.dir {
		return block
	}
	return (int64(len(n.data)) + block - 1) / block * block
}

// used is what statfs would say: files without a name that are still open count.
func (m *memDisk) used() (bytes int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.usedLocked()
}

func (m *memDisk) usedLocked() (bytes int64) {
	for n := range m.live {
		bytes += n.allocated()
	}
	return bytes
}

func (m *memDisk) unname(n *inode) {
	n.links--
	m.drop(n)
}

func (m *memDisk) drop(n *inode) {
	if n.links <= 0 && n.opens <= 0 {
		delete(m.live, n)
	}
}

func (m *memDisk) alive() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return !m.dead
}

// set makes the calls fail that fault says; nil: none.
func (m *memDisk) set(fault func(call, path string) error) {
	m.mu.Lock()
	m.fault = fault
	m.mu.Unlock()
}

// dieAfter ends the process that uses the disk, as it sees it, after so many calls.
func (m *memDisk) dieAfter(calls int) {
	m.mu.Lock()
	m.left = calls
	m.mu.Unlock()
}

// enter is at the start of every call. Needs mu.
func (m *memDisk) enter(call, path string) error {
	if m.left == 0 {
		m.dead = true
	}
	if m.dead {
		return &os.PathError{Op: call, Path: path, Err: syscall.EIO}
	}
	if m.left > 0 {
		m.left--
	}
	m.calls++
	if m.fault != nil {
		return m.fault(call, path)
	}
	return nil
}

// holdReads lets reads wait, with their file open, until open is called.
func (m *memDisk) holdReads() (open func()) { return m.hold(0) }

// holdWrites is the same for writes.
func (m *memDisk) holdWrites() (open func()) { return m.hold(1) }

// holdUnlinks is the same for unlinking chunks.
func (m *memDisk) holdUnlinks() (open func()) { return m.hold(2) }

func (m *memDisk) hold(which int) (open func()) {
	gate := make(chan struct{})
	m.gates[which].Store(&gate)
	return func() {
		m.gates[which].Store(nil)
		close(gate)
	}
}

func (m *memDisk) pass(which int) {
	if gate := m.gates[which].Load(); gate != nil {
		m.waiting.Add(1)
		<-*gate
		m.waiting.Add(-1)
	}
}

// grown notes a growth of what the tier has to account before it grows.
func (m *memDisk) grown(path string) {
	if m.limit == 0 || m.worst != "" || !strings.HasSuffix(path, ".tmp") {
		return
	}
	if used := m.usedLocked(); used > m.limit {
		m.worst = fmt.Sprintf("%s: %d bytes of %d", filepath.Base(path), used, m.limit)
	}
}

func (m *memDisk) find(path string) (parent *inode, name string, n *inode, err error) {
	rel, err := filepath.Rel(m.root, path)
	if err != nil {
		return nil, "", nil, err
	}
	n = m.top
	for part := range strings.SplitSeq(rel, "/") {
		if part == "." {
			continue
		}
		if n == nil {
			return nil, "", nil, syscall.ENOENT
		}
		if !n.dir {
			return nil, "", nil, syscall.ENOTDIR
		}
		parent, name, n = n, part, n.names[part]
	}
	return parent, name, n, nil
}

// existing is find for calls that need the name.
func (m *memDisk) existing(call, path string) (parent *inode, name string, n *inode, err error) {
	if err := m.enter(call, path); err != nil {
		return nil, "", nil, err
	}
	parent, name, n, err = m.find(path)
	if err == nil && n == nil {
		err = syscall.ENOENT
	}
	if err != nil {
		err = &os.PathError{Op: call, Path: path, Err: err}
	}
	return parent, name, n, err
}

func (m *memDisk) Open(path string, flags sys.OpenFlag) (tier.OpenFile, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	call := "open"
	if flags&sys.OpenCreate != 0 {
		call = "create"
	}
	if err := m.enter(call, path); err != nil {
		return nil, err
	}
	parent, name, n, err := m.find(path)
	switch {
	case err != nil:
	case n == nil && flags&sys.OpenCreate == 0:
		err = syscall.ENOENT
	case n != nil && flags&sys.OpenExclusive != 0:
		err = syscall.EEXIST
	case n != nil && n.dir && flags&(sys.OpenWrite|sys.OpenReadWrite) != 0:
		err = syscall.EISDIR
	case n == nil:
		n = m.make(false)
		n.links = 1
		parent.names[name] = n
	case flags&sys.OpenTruncate != 0:
		n.data = nil
	}
	if err != nil {
		return nil, &os.PathError{Op: call, Path: path, Err: err}
	}
	n.opens++
	return &memFile{m: m, n: n, path: path}, nil
}

func (n *inode) stat() sys.Stat {
	st := sys.Stat{Dev: 1, Ino: n.number, Mode: syscall.S_IFREG | 0o600, Links: uint64(n.links), Size: int64(len(n.data)), Allocated: n.allocated(), ModifiedNS: n.mtime}
	if n.dir {
		st.Mode, st.Size = syscall.S_IFDIR|0o700, block
	}
	return st
}

func (m *memDisk) Lstat(path string) (sys.Stat, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, _, n, err := m.existing("lstat", path)
	if err != nil {
		return sys.Stat{}, err
	}
	return n.stat(), nil
}

func (m *memDisk) ReadNames(dir string) (names []string, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, _, n, err := m.existing("readdir", dir)
	if err != nil {
		return nil, err
	}
	for name := range n.names {
		names = append(names, name)
	}
	return names, nil
}

func (m *memDisk) Mkdir(path string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.enter("mkdir", path); err != nil {
		return err
	}
	parent, name, n, err := m.find(path)
	if err == nil && n != nil {
		err = syscall.EEXIST
	}
	if err != nil {
		return &os.PathError{Op: "mkdir", Path: path, Err: err}
	}
	n = m.make(true)
	n.links = 1
	parent.names[name] = n
	m.grown(path)
	return nil
}

func (m *memDisk) Rmdir(path string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	parent, name, n, err := m.existing("rmdir", path)
	if err != nil {
		return err
	}
	if !n.dir || len(n.names) > 0 {
		return &os.PathError{Op: "rmdir", Path: path, Err: syscall.ENOTEMPTY}
	}
	delete(parent.names, name)
	m.unname(n)
	return nil
}

func (m *memDisk) Rename(from, to string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	oldParent, oldName, n, err := m.existing("rename", from)
	if err != nil {
		return err
	}
	parent, name, there, err := m.find(to)
	if err == nil && there != nil && there.dir {
		err = syscall.EISDIR
	}
	if err != nil {
		return &os.LinkError{Op: "rename", Old: from, New: to, Err: err}
	}
	delete(oldParent.names, oldName)
	parent.names[name] = n
	if there != nil {
		m.unname(there)
	}
	return nil
}

func (m *memDisk) Unlink(path string) error {
	if strings.HasSuffix(path, ".kvc") {
		m.pass(2)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	parent, name, n, err := m.existing("unlink", path)
	if err != nil {
		return err
	}
	if n.dir {
		return &os.PathError{Op: "unlink", Path: path, Err: syscall.EISDIR}
	}
	delete(parent.names, name)
	m.unname(n)
	return nil
}

func (m *memDisk) SetModified(path string, ns int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, _, n, err := m.existing("utimens", path)
	if err != nil {
		return err
	}
	n.mtime = ns
	return nil
}

func (m *memDisk) Statfs(path string) (sys.Filesystem, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.enter("statfs", path); err != nil {
		return sys.Filesystem{}, err
	}
	return sys.Filesystem{TotalBytes: 1 << 40, AvailBytes: 1<<40 - m.usedLocked()}, nil
}

type memFile struct {
	m    *memDisk
	n    *inode
	path string
	shut bool
}

func (f *memFile) call(name string) (unlock func(), err error) {
	f.m.mu.Lock()
	return f.m.mu.Unlock, f.m.enter(name, f.path)
}

func (f *memFile) ReadV(bufs [][]byte, off int64) (total int, err error) {
	if strings.HasSuffix(f.path, ".kvc") {
		f.m.pass(0)
	}
	time.Sleep(time.Duration(f.m.delay.Load()))
	unlock, err := f.call("read")
	defer unlock()
	if err != nil {
		return 0, err
	}
	if f.n.dir {
		return 0, syscall.EISDIR
	}
	for _, b := range bufs {
		if f.m.short {
			b = b[:min(len(b), 5000)]
		}
		if off >= int64(len(f.n.data)) {
			break
		}
		n := copy(b, f.n.data[off:])
		off, total = off+int64(n), total+n
		if n < len(b) || f.m.short {
			break
		}
	}
	return total, nil
}

func (f *memFile) WriteV(bufs [][]byte, off int64) (total int, err error) {
	if strings.HasSuffix(f.path, ".tmp") {
		f.m.pass(1)
	}
	time.Sleep(time.Duration(f.m.delay.Load() + f.m.writeDelay.Load()))
	unlock, err := f.call("write")
	defer unlock()
	if err != nil {
		return 0, err
	}
	for _, b := range bufs {
		if f.m.short {
			b = b[:min(len(b), 5000)]
		}
		if need := off + int64(len(b)) - int64(len(f.n.data)); need > 0 {
			f.n.data = append(f.n.data, make([]byte, need)...)
		}
		copy(f.n.data[off:], b)
		off, total = off+int64(len(b)), total+len(b)
		if f.m.short {
			break
		}
	}
	f.m.grown(f.path)
	return total, nil
}

func (f *memFile) Stat() (sys.Stat, error) {
	unlock, err := f.call("fstat")
	defer unlock()
	if err != nil {
		return sys.Stat{}, err
	}
	return f.n.stat(), nil
}

func (f *memFile) SetModified(ns int64) error {
	unlock, err := f.call("utimens")
	defer unlock()
	if err == nil {
		f.n.mtime = ns
	}
	return err
}

func (f *memFile) Sync() error {
	unlock, err := f.call("fdatasync")
	defer unlock()
	if err == nil {
		f.n.keep()
	}
	return err
}

func (f *memFile) SyncAll() error {
	unlock, err := f.call("fsync")
	defer unlock()
	if err == nil {
		f.n.keep()
	}
	return err
}

func (n *inode) keep() {
	if n.dir {
		n.stable = maps.Clone(n.names)
		return
	}
	n.synced, n.mtimeOn, n.wasSync = append([]byte(nil), n.data...), n.mtime, true
}

func (f *memFile) DropCache() error {
	unlock, err := f.call("fadvise")
	defer unlock()
	return err
}

func (f *memFile) Close() error {
	// Close gives the descriptor back whatever it says.
	unlock, err := f.call("close")
	defer unlock()
	if !f.shut {
		f.shut = true
		f.n.opens--
		f.m.drop(f.n)
	}
	return err
}

// killed is the disk as the next process finds it after this one was killed:
// everything that a call has done is there.
func (m *memDisk) killed() *memDisk {
	return m.after(func(n *inode) map[string]*inode { return n.names }, func(n *inode) ([]byte, int64) { return n.data, n.mtime })
}

// powerCut is the disk after the power has failed.
func (m *memDisk) powerCut(r *rand.Rand) *memDisk {
	names := func(n *inode) map[string]*inode {
		kept := map[string]*inode{}
		for name, to := range n.stable {
			if n.names[name] == to || r.IntN(2) == 0 {
				kept[name] = to
			}
		}
		for name, to := range n.names {
			if n.stable[name] != to && r.IntN(2) == 0 {
				kept[name] = to
			}
		}
		return kept
	}
	content := func(n *inode) ([]byte, int64) {
		mtime := n.mtime
		if n.wasSync && r.IntN(2) == 0 {
			mtime = n.mtimeOn
		}
		if n.wasSync && string(n.synced) == string(n.data) {
			return n.data, mtime
		}
		// The size is the old or the new one, each block is old, new, or zero.
		size := len(n.data)
		if r.IntN(2) == 0 {
			size = len(n.synced)
		}
		if r.IntN(4) == 0 {
			size = min(size, block*r.IntN(5))
		}
		torn := make([]byte, size)
		for off := 0; off < size; off += block {
			from := n.data
			switch r.IntN(3) {
			case 0:
				continue
			case 1:
				from = n.synced
			}
			if off < len(from) {
				copy(torn[off:min(off+block, size)], from[off:])
			}
		}
		return torn, mtime
	}
	return m.after(names, content)
}

func (m *memDisk) after(names func(*inode) map[string]*inode, content func(*inode) ([]byte, int64)) *memDisk {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.dead = true
	c := newMemDisk(m.root)
	seen := map[*inode]*inode{}
	var walk func(n, to *inode)
	walk = func(n, to *inode) {
		to.names = map[string]*inode{}
		for name, child := range names(n) {
			twin := seen[child]
			if twin == nil {
				twin = c.make(child.dir)
				seen[child] = twin
				if child.dir {
					walk(child, twin)
				} else {
					data, mtime := content(child)
					twin.data, twin.mtime = append([]byte(nil), data...), mtime
					twin.keep()
				}
			} else if child.dir {
				continue // one directory has one name
			}
			twin.links++
			to.names[name] = twin
		}
		to.keep()
	}
	walk(m.top, c.top)
	return c
}

// edit changes a file from outside; false when there is none.
func (m *memDisk) edit(path string, change func(data []byte) []byte) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, _, n, err := m.find(path)
	if err != nil || n == nil || n.dir {
		return false
	}
	n.data = change(n.data)
	n.keep()
	return true
}

// lose removes a file from outside, for good.
func (m *memDisk) lose(path string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	parent, name, n, err := m.find(path)
	if err != nil || n == nil {
		return false
	}
	delete(parent.names, name)
	delete(parent.stable, name)
	m.unname(n)
	return true
}

// files gives the paths that end so.
func (m *memDisk) files(suffix string) (paths []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var walk func(path string, n *inode)
	walk = func(path string, n *inode) {
		for name, child := range n.names {
			if child.dir {
				walk(filepath.Join(path, name), child)
			} else if strings.HasSuffix(name, suffix) {
				paths = append(paths, filepath.Join(path, name))
			}
		}
	}
	walk(m.root, m.top)
	return paths
}
