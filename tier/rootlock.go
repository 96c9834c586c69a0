package tier

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/kvtier/kvtier/internal/sys"
)

// lockID names a root by its directory's inode: a path can be written in many ways.
type lockID struct{ dev, ino uint64 }

// processLocks holds the lock files that this process has open, one for each
// root whatever number of Roots point there. A POSIX lock does not exclude
// within the process, and is lost when any descriptor of the file is closed; so
// no second one may exist, and the table decides who in the process leads.
var processLocks = struct {
	sync.Mutex
	open map[lockID]*processLock
}{open: map[lockID]*processLock{}}

type processLock struct {
	id    lockID
	file  *sys.LockFile
	self  sys.Stat // of file
	owner *Root    // who has the lock; nil when nobody in this process does
	users map[*Root]struct{}
}

// lockHolder is the content of the lock file: who holds it, in a form that stays
// true when pids are used again.
type lockHolder struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // clock ticks since boot
	Boot  string `json:"boot"`
}

// TryLock makes this Root the leader of its directory. When somebody else leads,
// holder says who, for people to read. It never waits. Once it has succeeded,
// it succeeds until Close.
func (r *Root) TryLock() (ok bool, holder string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return false, "", fmt.Errorf("root %s: %w", r.path, ErrClosed)
	}
	if r.session != 0 {
		return true, "", nil
	}
	processLocks.Lock()
	defer processLocks.Unlock()
	if r.lock == nil {
		if r.lock, err = useLock(r); err != nil {
			return false, "", err
		}
	}
	p := r.lock
	if p.owner != nil {
		return false, "this process", nil
	}
	if err := p.follow(r.path); err != nil {
		return false, "", err
	}
	got, err := p.file.TryLock()
	if err != nil {
		return false, "", fmt.Errorf("root %s: %w", r.path, err)
	}
	if !got {
		return false, p.holder(), nil
	}
	// The name may have been given to a new file between open and lock: then the
	// lock excludes nobody.
	if same, err := isLockFile(r.path, &p.self); err != nil || !same {
		return false, "", errors.Join(err, p.file.Unlock())
	}
	me := lockHolder{PID: os.Getpid(), Start: sys.ProcessStart(os.Getpid()), Boot: sys.BootID()}
	b, err := json.Marshal(me)
	if err == nil {
		err = p.file.WriteText(string(b) + "\n")
	}
	if err != nil {
		return false, "", errors.Join(fmt.Errorf("root %s: write %s: %w", r.path, lockFileName, err), p.file.Unlock())
	}
	p.owner = r
	r.locked = p.self
	for r.session == 0 {
		var b [8]byte
		rand.Read(b[:])
		r.session = binary.LittleEndian.Uint64(b[:])
	}
	return true, "", nil
}

// Place says where the lock file is by which a Root leads.
type Place int

const (
	// InPlace: in the directory that the path names.
	InPlace Place = iota
	// Away: the path leads to nothing or to something else. The file system was
	// unmounted, or one is mounted over it, or the directory was moved. It may come
	// back as it was, for the lock keeps everybody else from leading there.
	Away
	// Gone: deleted, or taken out of the directory, so that another process can
	// lead at the path. It does not come back.
	Gone
)

// Place looks where the root of this leader is; Gone for a Root that does not lead.
func (r *Root) Place() Place {
	r.mu.Lock()
	locked, lock := r.locked, r.lock
	leads := r.session != 0 && !r.closed
	r.mu.Unlock()
	if !leads {
		return Gone
	}
	// No mutex is held: the disk may hang.
	if same, err := isLockFile(r.path, &locked); err != nil || same {
		return InPlace // an error proves nothing
	}
	if st, err := lock.file.Stat(); err == nil && st.Links == 0 {
		return Gone
	}
	if st, err := os.Stat(r.path); err == nil && r.id.SameFile(statID(st)) {
		// It may have come back between the two looks.
		if same, err := isLockFile(r.path, &locked); err != nil || same {
			return InPlace
		}
		return Gone
	}
	return Away
}

// StillLocked reports whether the lock file by which this Root leads stands in its
// place.
func (r *Root) StillLocked() bool { return r.Place() == InPlace }

// confirmLock makes sure of the lock after the file was away. It is false when
// another process has it.
func (r *Root) confirmLock() (bool, error) {
	r.mu.Lock()
	lock, leads := r.lock, r.session != 0 && !r.closed
	r.mu.Unlock()
	if !leads {
		return false, nil
	}
	return lock.file.TryLock() // no change for who has it
}

// found says for people what the path of a root leads to that is away.
func (r *Root) found() string {
	if _, err := os.Stat(r.path); err != nil {
		return "no directory"
	}
	if _, err := sys.Lstat(filepath.Join(r.path, lockFileName)); err == nil {
		return "another cache"
	}
	return "another directory"
}

// useLock needs processLocks locked.
func useLock(r *Root) (*processLock, error) {
	id := lockID{r.id.Dev, r.id.Ino}
	p := processLocks.open[id]
	if p == nil {
		p = &processLock{id: id, users: map[*Root]struct{}{}}
		if err := p.openFile(r.path); err != nil {
			return nil, err
		}
		processLocks.open[id] = p
	}
	p.users[r] = struct{}{}
	return p, nil
}

// follow opens the lock file anew when its name means another file by now. Only
// while nobody in this process has the lock: closing the old file would drop it.
func (p *processLock) follow(root string) error {
	same, err := isLockFile(root, &p.self)
	if err != nil || same {
		return err
	}
	old := p.file
	if err := p.openFile(root); err != nil {
		return err
	}
	return old.Close()
}

func (p *processLock) openFile(root string) error {
	f, err := sys.OpenLock(filepath.Join(root, lockFileName))
	if err != nil {
		return fmt.Errorf("root %s: %w", root, err)
	}
	st, err := f.Stat()
	if err != nil {
		return errors.Join(fmt.Errorf("root %s: %w", root, err), f.Close())
	}
	p.file, p.self = f, st
	return nil
}

// isLockFile reports whether the name of the lock file still means that file.
func isLockFile(root string, file *sys.Stat) (bool, error) {
	now, err := sys.Lstat(filepath.Join(root, lockFileName))
	if absent(err) || foreign(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("root %s: %w", root, err)
	}
	return file.SameFile(&now), nil
}

func (p *processLock) holder() string {
	var h lockHolder
	err := json.Unmarshal([]byte(p.file.ReadText()), &h)
	// The kernel knows the pid as this pid namespace sees it; the file has it as
	// the holder sees itself.
	if pid := p.file.Holder(); pid != 0 {
		return fmt.Sprintf("process %d", pid)
	}
	if err != nil || h.PID == 0 {
		return "another process"
	}
	return fmt.Sprintf("process %d (its own number, not visible from here)", h.PID)
}

// release takes r out of the table and drops the lock if r has it.
func (p *processLock) release(r *Root) error {
	processLocks.Lock()
	defer processLocks.Unlock()
	delete(p.users, r)
	var err error
	if p.owner == r {
		p.owner = nil
		err = p.file.Unlock()
	}
	if len(p.users) == 0 {
		delete(processLocks.open, p.id)
		err = errors.Join(err, p.file.Close())
	}
	return err
}
