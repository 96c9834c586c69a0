package tier

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/kvtier/kvtier/internal/sys"
)

const (
	rootFormat   = 1
	rootFileName = "kvtier.json"
	rootTempTail = ".new" // kvtier.json.<16 hex>.new
	lockFileName = "LOCK"
	runDirName   = "run"
)

// RootOptions say what a root may be.
type RootOptions struct {
	// AllowNetwork takes a directory on NFS, CIFS, FUSE and the like, where locks
	// may not exclude and a full or dead server blocks for minutes.
	AllowNetwork bool
}

// Root is one directory that processes share: its lock says who leads, its run
// directory holds the leader's socket. A root opened with OpenRoot also holds
// chunks. Safe for concurrent use.
type Root struct {
	path   string
	id     sys.Stat // of the directory
	file   rootFile
	run    *os.File
	chunks bool

	mu      sync.Mutex
	lock    *processLock // nil until the first TryLock
	session uint64       // not 0 while this Root has the lock
	locked  sys.Stat     // of the lock file, from then on
	closed  bool
}

// rootFile is kvtier.json.
type rootFile struct {
	Format int    `json:"format"`
	Root   string `json:"root"` // random id, 32 hex digits
	// FreeBytes is what the file system had free when the root was made: a floor
	// computed from it does not shrink as the cache itself fills the disk.
	FreeBytes int64 `json:"free_bytes"`
}

// OpenRoot opens a root with chunks, making the directory (0700) if it is not
// there. It takes no lock and opens no lock file.
func OpenRoot(path string, o RootOptions) (*Root, error) {
	if path == "" {
		return nil, fmt.Errorf("disk path is empty: name a directory: %w", ErrNotDirectory)
	}
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("disk path %s: %w", path, err)
	}
	if !o.AllowNetwork {
		if err := refuseNetwork(abs); err != nil {
			return nil, err
		}
	}
	r, err := openRoot(abs)
	if err != nil {
		return nil, err
	}
	r.chunks = true
	return r, nil
}

// OpenRuntimeRoot opens a root without chunks: the place where the processes
// that use the same name meet when there is no disk path. It lies in the user's
// runtime directory, or else in the directory for temporary files.
func OpenRuntimeRoot(name string) (*Root, error) {
	uid := strconv.Itoa(os.Geteuid())
	dir := filepath.Join("/run/user", uid)
	if st, err := sys.Lstat(dir); err == nil && st.Directory() && int(st.UID) == os.Geteuid() && sys.Writable(dir) == nil {
		return OpenRuntimeRootIn(filepath.Join(dir, "kvtier"), name)
	}
	return OpenRuntimeRootIn(filepath.Join(os.TempDir(), "kvtier-"+uid), name)
}

// OpenRuntimeRootIn is OpenRuntimeRoot inside a directory of the caller's choice,
// which is made (0700) if it is not there.
func OpenRuntimeRootIn(dir, name string) (*Root, error) {
	if name == "" {
		return nil, errors.New("a cache without a disk path needs a name, set one")
	}
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("runtime directory %s: %w", dir, err)
	}
	// Others can write in the directory above: what lies there by this name counts
	// only if it is ours, and nobody else may enter it.
	if err := makeOwnDir(abs); err != nil {
		return nil, err
	}
	st, err := sys.Lstat(abs)
	if err != nil {
		return nil, err
	}
	if !st.Directory() || st.Mode&0o077 != 0 {
		return nil, fmt.Errorf("runtime directory %s is open to other users, make it 0700: %w", abs, ErrOwner)
	}
	return openRoot(filepath.Join(abs, runtimeName(name)))
}

// runtimeName is a file name for any text; the digest keeps two texts apart that
// look alike once they are made harmless.
func runtimeName(name string) string {
	plain := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '-', r == '_':
			return r
		}
		return '_'
	}, name)
	sum := sha256.Sum256([]byte(name))
	return plain[:min(len(plain), 64)] + "-" + hex.EncodeToString(sum[:8])
}

func openRoot(path string) (*Root, error) {
	if err := makeOwnDir(path); err != nil {
		return nil, err
	}
	id, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("root %s: %w", path, err)
	}
	r := &Root{path: path, id: *statID(id)}
	if r.file, err = loadRootFile(path); err != nil {
		return nil, err
	}
	run := filepath.Join(path, runDirName)
	if err := makeOwnDir(run); err != nil {
		return nil, err
	}
	if r.run, err = os.OpenFile(run, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0); err != nil {
		return nil, fmt.Errorf("root %s: %w", path, err)
	}
	return r, nil
}

// statID is what tells one file from another, and nothing else of it.
func statID(info os.FileInfo) *sys.Stat {
	raw := info.Sys().(*syscall.Stat_t)
	return &sys.Stat{Dev: uint64(raw.Dev), Ino: raw.Ino}
}

// makeOwnDir makes a directory with its parents, or checks that the one that is
// there is a directory, ours, and writable.
func makeOwnDir(path string) error {
	if err := os.MkdirAll(path, 0o700); err != nil {
		switch {
		case errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.EEXIST):
			return fmt.Errorf("%s or a part of it is a file, name a directory: %w", path, ErrNotDirectory)
		case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM), errors.Is(err, syscall.EROFS):
			return fmt.Errorf("%s cannot be made (%v), make it for uid %d or choose another: %w", path, err, os.Geteuid(), ErrUnwritable)
		}
		return fmt.Errorf("make %s: %w", path, err)
	}
	st, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if !st.IsDir() {
		return fmt.Errorf("%s is a file, name a directory: %w", path, ErrNotDirectory)
	}
	if uid := st.Sys().(*syscall.Stat_t).Uid; int(uid) != os.Geteuid() {
		return fmt.Errorf("%s belongs to uid %d and this process runs as uid %d, choose another directory or change its owner: %w",
			path, uid, os.Geteuid(), ErrOwner)
	}
	if err := sys.Writable(path); err != nil {
		return fmt.Errorf("%s: %v, change its mode or mount, or choose another: %w", path, err, ErrUnwritable)
	}
	return nil
}

// refuseNetwork looks at the nearest part of the path that exists.
func refuseNetwork(path string) error {
	for p := path; ; p = filepath.Dir(p) {
		fs, err := sys.Statfs(p)
		if absent(err) && p != filepath.Dir(p) {
			continue
		}
		if err != nil && fs.Network == "" {
			if errors.Is(err, syscall.ENOTDIR) {
				return fmt.Errorf("a part of %s is a file, name a directory: %w", path, ErrNotDirectory)
			}
			return fmt.Errorf("disk path %s: %w", path, err)
		}
		if fs.Network != "" {
			return fmt.Errorf("%s (%s): choose a local disk, or allow it with allow_network_fs: %w", path, fs.Network, ErrNetwork)
		}
		return nil
	}
}

// loadRootFile reads kvtier.json and makes it where it is missing. Several
// processes may do so at once: the first one to link its file wins.
func loadRootFile(dir string) (rootFile, error) {
	path := filepath.Join(dir, rootFileName)
	for range 8 {
		b, err := readSmall(LocalFilesystem{}, path, maxRootFile)
		if err == nil {
			return parseRootFile(path, b)
		}
		if !absent(err) {
			return rootFile{}, fmt.Errorf("root %s: %w", dir, err)
		}
		if err := makeRootFile(dir, path); err != nil && !errors.Is(err, syscall.EEXIST) && !absent(err) {
			return rootFile{}, fmt.Errorf("root %s: %w", dir, err)
		}
	}
	return rootFile{}, fmt.Errorf("root %s: %s cannot be made: %w", dir, rootFileName, ErrUnwritable)
}

func parseRootFile(path string, b []byte) (rootFile, error) {
	var f rootFile
	if err := json.Unmarshal(b, &f); err != nil || f.Format < 1 {
		return f, fmt.Errorf("%s: remove it if the directory is a cache: %w", path, ErrDamagedRoot)
	}
	if f.Format > rootFormat {
		return f, fmt.Errorf("%s has format %d: %w", path, f.Format, ErrNewerRoot)
	}
	return f, nil
}

// isRootTemp says whether a name in the root is one that makeRootFile gives.
func isRootTemp(name string) bool {
	name, begins := strings.CutPrefix(name, rootFileName+".")
	id, ends := strings.CutSuffix(name, rootTempTail)
	b, err := hex.DecodeString(id)
	return begins && ends && err == nil && len(b) == 8 && hex.EncodeToString(b) == id
}

func makeRootFile(dir, path string) error {
	var id [16]byte
	rand.Read(id[:])
	fs, err := sys.Statfs(dir)
	if err != nil {
		return err
	}
	b, err := json.Marshal(rootFile{Format: rootFormat, Root: hex.EncodeToString(id[:]), FreeBytes: fs.AvailBytes})
	if err != nil {
		return err
	}
	temp := path + "." + hex.EncodeToString(id[:8]) + rootTempTail
	if err := writeDurably(LocalFilesystem{}, temp, append(b, '\n')); err != nil {
		return err
	}
	err = sys.Link(temp, path)
	if errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.EOPNOTSUPP) {
		err = sys.Rename(temp, path) // no hard links here: the last one wins, all read its file
	}
	if uerr := sys.Unlink(temp); err == nil && !absent(uerr) {
		err = uerr
	}
	if err == nil {
		err = syncDir(LocalFilesystem{}, dir)
	}
	return err
}

// Path is the absolute path of the root.
func (r *Root) Path() string { return r.path }

// RunDir is the open directory for sockets; it belongs to the Root.
func (r *Root) RunDir() *os.File { return r.run }

// Session is the random number of this leadership: 0 before TryLock succeeded.
func (r *Root) Session() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.session
}

// DiskDefaults gives the cap and the free floor, in bytes, for a root whose
// configuration names none.
func (r *Root) DiskDefaults() (capBytes, floorBytes int64, err error) {
	fs, err := sys.Statfs(r.path)
	if err != nil {
		return 0, 0, err
	}
	capBytes = min(200<<30, fs.TotalBytes/2)
	floorBytes = max(fs.TotalBytes/20, 10<<30)
	return capBytes, min(floorBytes, r.file.FreeBytes/2), nil
}

// Close drops the lock, if this Root has it. Nothing below the root may be in use
// any more. It may be called twice.
func (r *Root) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil
	}
	r.closed = true
	var err error
	if r.lock != nil {
		err = r.lock.release(r)
		r.lock = nil
	}
	r.session = 0
	return errors.Join(err, r.run.Close())
}
