package tier

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/sys"
)

// Why a tool cannot look at, or change, a directory.
var (
	ErrNoRoot = errors.New("is not the root of a cache: it has neither kvtier.json nor a directory of a namespace")
	ErrInUse  = errors.New("is in use")
)

const maxRootFile = 64 << 10

// Inspection is a root as a tool sees it from outside. It makes nothing, and
// changes nothing but by Clear, ClearBeside and Verifier.Remove. The root may be in
// use meanwhile: names come and go, and one that is gone is passed over.
// Not safe for concurrent use.
type Inspection struct {
	root *Root // for path and identity; no lock, no run directory
	fs   Filesystem
}

// Inspect begins to look at a directory that is a root. A root whose kvtier.json was
// deleted is still one. Errors: ErrNotDirectory, ErrNoRoot, ErrNewerRoot,
// ErrDamagedRoot, or the system's.
func Inspect(path string) (*Inspection, error) { return InspectOn(LocalFilesystem{}, path) }

// InspectOn is Inspect through another view of the file system.
func InspectOn(fs Filesystem, path string) (*Inspection, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("root %s: %w", path, err)
	}
	st, err := os.Stat(abs)
	if err != nil {
		return nil, fmt.Errorf("root %s: %w", abs, err)
	}
	if !st.IsDir() {
		return nil, fmt.Errorf("%s: %w", abs, ErrNotDirectory)
	}
	raw := st.Sys().(*syscall.Stat_t)
	i := &Inspection{root: &Root{path: abs, id: sys.Stat{Dev: uint64(raw.Dev), Ino: raw.Ino}}, fs: fs}
	file := filepath.Join(abs, rootFileName)
	b, err := readSmall(i.fs, file, maxRootFile)
	switch {
	case err == nil:
		i.root.file, err = parseRootFile(file, b)
	case absent(err):
		var known []*InspectedNamespace
		if known, err = i.Namespaces(); err == nil && len(known) == 0 {
			err = fmt.Errorf("%s: %w", abs, ErrNoRoot)
		}
	default:
		err = fmt.Errorf("read %s: %w", file, err)
	}
	if err != nil {
		return nil, err
	}
	return i, nil
}

// Path is the absolute path of the root.
func (i *Inspection) Path() string { return i.root.path }

// ID is the random id of the root, and Format the version of kvtier.json: empty and
// 0 when that file is missing.
func (i *Inspection) ID() string  { return i.root.file.Root }
func (i *Inspection) Format() int { return i.root.file.Format }

// Filesystem describes where the root lies.
func (i *Inspection) Filesystem() (sys.Filesystem, error) { return i.fs.Statfs(i.root.path) }

// Leadership says who leads a root.
type Leadership struct {
	Held  bool
	PID   int       // 0: not visible from this pid namespace
	Since time.Time // when the lock was taken
}

// String is for people: "process 42", or "nobody".
func (l Leadership) String() string {
	switch {
	case !l.Held:
		return "nobody"
	case l.PID == 0:
		return "a process that is not visible from here"
	}
	return fmt.Sprintf("process %d", l.PID)
}

// Leader looks who has the lock, without taking it. An error means that it cannot be
// told, as on a file system that is mounted read-only.
func (i *Inspection) Leader() (Leadership, error) {
	path := filepath.Join(i.root.path, lockFileName)
	st, err := i.fs.Lstat(path)
	if absent(err) {
		return Leadership{}, nil
	}
	if err != nil {
		return Leadership{}, err
	}
	probe := &Root{path: i.root.path, id: i.root.id}
	processLocks.Lock()
	p, err := useLock(probe)
	if err != nil {
		processLocks.Unlock()
		return Leadership{}, err
	}
	who := Leadership{Held: p.owner != nil, PID: os.Getpid(), Since: time.Unix(0, st.ModifiedNS)}
	if !who.Held {
		if err = p.follow(probe.path); err == nil {
			who.Held, err = p.file.Held()
			who.PID = p.file.Holder()
		}
	}
	processLocks.Unlock()
	if err = errors.Join(err, p.release(probe)); err != nil || !who.Held {
		return Leadership{}, err
	}
	return who, nil
}

// Hold takes the lock of a root that nobody leads, so that no leader begins while
// its directories are cleared; an engine that comes meanwhile waits and tries
// again. It works for the owner of the root only: a lock file made by another user
// would keep the owner out. Errors: ErrInUse, ErrOwner, ErrUnwritable, or the
// system's.
func (i *Inspection) Hold() (release func() error, err error) {
	r, err := OpenRoot(i.root.path, RootOptions{AllowNetwork: true})
	if err != nil {
		return nil, err
	}
	ok, holder, err := r.TryLock()
	if err == nil && !ok {
		err = fmt.Errorf("%s: %s leads it: %w", i.root.path, holder, ErrInUse)
	}
	if err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r.Close, nil
}

// SidecarState says what can be known of the namespace of a directory.
type SidecarState string

const (
	SidecarGood       SidecarState = "good"
	SidecarMissing    SidecarState = "missing"
	SidecarDamaged    SidecarState = "damaged"
	SidecarForeign    SidecarState = "foreign" // it describes another namespace than the directory's name
	SidecarNewer      SidecarState = "newer"
	SidecarUnreadable SidecarState = "unreadable"
)

// InspectedNamespace is one directory of chunks. The pointers and Fingerprint are
// set where the sidecar is good.
type InspectedNamespace struct {
	Name        string // of the directory
	Prefix      string // of the fingerprint, 32 hex digits of Name
	Sidecar     SidecarState
	SidecarErr  error // why it is not good
	Fingerprint chunk.Fingerprint
	Namespace   *chunk.Namespace
	Layout      *chunk.Layout

	i    *Inspection
	path string
}

// Namespaces lists the directories of namespaces, by name.
func (i *Inspection) Namespaces() ([]*InspectedNamespace, error) {
	names, err := i.fs.ReadNames(i.root.path)
	if err != nil {
		return nil, fmt.Errorf("root %s: %w", i.root.path, err)
	}
	slices.Sort(names)
	var found []*InspectedNamespace
	for _, name := range names {
		prefix, ok := chunk.ParseDirName(name)
		if !ok {
			continue
		}
		n := &InspectedNamespace{Name: name, Prefix: prefix, i: i, path: filepath.Join(i.root.path, name)}
		st, err := i.fs.Lstat(n.path)
		if absent(err) || err == nil && !st.Directory() {
			continue
		}
		n.readSidecar()
		found = append(found, n)
	}
	return found, nil
}

// readSidecar takes the description only if it is the one that the directory's name
// promises.
func (n *InspectedNamespace) readSidecar() {
	b, err := readSmall(n.i.fs, filepath.Join(n.path, sidecarName), maxSidecar)
	switch {
	case absent(err):
		n.Sidecar, n.SidecarErr = SidecarMissing, err
		return
	case err != nil:
		n.Sidecar, n.SidecarErr = SidecarUnreadable, err
		return
	}
	ns, err := chunk.ParseNamespace(b)
	var fp chunk.Fingerprint
	if err == nil {
		fp, err = ns.Fingerprint()
	}
	if err == nil && !strings.HasPrefix(fp.String(), n.Prefix) {
		n.Sidecar, n.SidecarErr = SidecarForeign, ErrSidecarForeign
		return
	}
	var layout *chunk.Layout
	if err == nil {
		layout, err = ns.Layout()
	}
	switch {
	case errors.Is(err, chunk.ErrNewerFormat):
		n.Sidecar, n.SidecarErr = SidecarNewer, err
	case err != nil:
		n.Sidecar, n.SidecarErr = SidecarDamaged, err
	default:
		n.Sidecar, n.Namespace, n.Fingerprint, n.Layout = SidecarGood, ns, fp, layout
	}
}
