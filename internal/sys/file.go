package sys

import (
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// OpenFlag says how Open opens a file. Close-on-exec is always set, and a
// symbolic link in the last component is always refused (ELOOP).
type OpenFlag int

const (
	OpenRead      OpenFlag = unix.O_RDONLY
	OpenWrite     OpenFlag = unix.O_WRONLY
	OpenReadWrite OpenFlag = unix.O_RDWR
	OpenCreate    OpenFlag = unix.O_CREAT
	OpenExclusive OpenFlag = unix.O_EXCL
	OpenTruncate  OpenFlag = unix.O_TRUNC
	OpenDirectory OpenFlag = unix.O_DIRECTORY
	// OpenNonblock keeps a FIFO or device that stands where a file is expected from
	// blocking the open. It changes nothing for plain files.
	OpenNonblock OpenFlag = unix.O_NONBLOCK
	// OpenDirect asks for I/O past the page cache. Some file systems refuse it at
	// open (EINVAL), some only at the first transfer, some take it and ignore it.
	OpenDirect OpenFlag = unix.O_DIRECT
)

// Stat is what the disk tier wants to know about a name or an open file.
type Stat struct {
	Dev, Ino   uint64
	Mode       uint32 // type and permission bits as in st_mode
	Links      uint64
	UID        uint32
	Size       int64
	Allocated  int64 // bytes really taken: st_blocks * 512
	ModifiedNS int64 // mtime, Unix nanoseconds
}

// Regular reports whether the name is a plain file.
func (s *Stat) Regular() bool { return s.Mode&unix.S_IFMT == unix.S_IFREG }

// Directory reports whether the name is a directory.
func (s *Stat) Directory() bool { return s.Mode&unix.S_IFMT == unix.S_IFDIR }

// SameFile reports whether both describe one inode.
func (s *Stat) SameFile(o *Stat) bool { return s.Dev == o.Dev && s.Ino == o.Ino }

func statOf(st *unix.Stat_t) Stat {
	return Stat{
		Dev: uint64(st.Dev), Ino: st.Ino, Mode: st.Mode, Links: uint64(st.Nlink), UID: st.Uid,
		Size: st.Size, Allocated: st.Blocks * 512, ModifiedNS: st.Mtim.Nano(),
	}
}

// File is an open file without a Go poller behind it: every call blocks its
// thread until the kernel is done. One goroutine at a time may use it.
type File struct{ fd int }

// Open opens path. mode is used when the file is created.
func Open(path string, flags OpenFlag, mode uint32) (*File, error) {
	fd, err := retry(func() (int, error) {
		return unix.Open(path, int(flags)|unix.O_CLOEXEC|unix.O_NOFOLLOW, mode)
	})
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return &File{fd: fd}, nil
}

// ReadV fills bufs from off with one gather read. A short count without an
// error is possible; 0 means the end of the file.
func (f *File) ReadV(bufs [][]byte, off int64) (int, error) {
	return retry(func() (int, error) { return unix.Preadv(f.fd, bufs, off) })
}

// WriteV writes bufs at off with one gather write. A short count without an
// error is possible.
func (f *File) WriteV(bufs [][]byte, off int64) (int, error) {
	return retry(func() (int, error) { return unix.Pwritev(f.fd, bufs, off) })
}

// Truncate sets the size of the file.
func (f *File) Truncate(size int64) error {
	return retryErr(func() error { return unix.Ftruncate(f.fd, size) })
}

// Stat describes the open file, whatever its name is by now.
func (f *File) Stat() (Stat, error) {
	var st unix.Stat_t
	if err := retryErr(func() error { return unix.Fstat(f.fd, &st) }); err != nil {
		return Stat{}, err
	}
	return statOf(&st), nil
}

// SetModified sets the mtime (Unix nanoseconds) and leaves the atime alone.
func (f *File) SetModified(ns int64) error {
	// The file is named by its descriptor: a null path is not offered by the
	// library, and /proc may be absent, so this goes through the raw call.
	ts := modified(ns)
	return retryErr(func() error {
		_, _, errno := unix.Syscall6(unix.SYS_UTIMENSAT, uintptr(f.fd), 0, uintptr(unsafe.Pointer(&ts[0])), 0, 0, 0)
		if errno != 0 {
			return errno
		}
		return nil
	})
}

// Sync makes the data and what is needed to read it durable (fdatasync).
func (f *File) Sync() error { return retryErr(func() error { return unix.Fdatasync(f.fd) }) }

// SyncAll makes data and metadata durable (fsync); for directories.
func (f *File) SyncAll() error { return retryErr(func() error { return unix.Fsync(f.fd) }) }

// DropCache asks the kernel to forget cached pages of the file, so that the
// next read comes from the device.
func (f *File) DropCache() error {
	return retryErr(func() error { return unix.Fadvise(f.fd, 0, 0, unix.FADV_DONTNEED) })
}

// Close closes the file. The descriptor is gone also when an error is returned.
func (f *File) Close() error {
	if f.fd < 0 {
		return os.ErrClosed
	}
	fd := f.fd
	f.fd = -1
	// EINTR is not retried: on Linux the descriptor is released all the same.
	if err := unix.Close(fd); err != nil && err != unix.EINTR {
		return err
	}
	return nil
}

// Lstat describes a name without following a symbolic link.
func Lstat(path string) (Stat, error) {
	var st unix.Stat_t
	if err := retryErr(func() error { return unix.Lstat(path, &st) }); err != nil {
		return Stat{}, &os.PathError{Op: "lstat", Path: path, Err: err}
	}
	return statOf(&st), nil
}

// SetModified sets the mtime (Unix nanoseconds) of a name, not following links.
func SetModified(path string, ns int64) error {
	ts := modified(ns)
	err := retryErr(func() error { return unix.UtimesNanoAt(unix.AT_FDCWD, path, ts[:], unix.AT_SYMLINK_NOFOLLOW) })
	if err != nil {
		return &os.PathError{Op: "utimensat", Path: path, Err: err}
	}
	return nil
}

// Rename moves a name over another one.
func Rename(from, to string) error {
	if err := retryErr(func() error { return unix.Rename(from, to) }); err != nil {
		return &os.LinkError{Op: "rename", Old: from, New: to, Err: err}
	}
	return nil
}

// Link gives a file a second name and fails with EEXIST when that is taken.
func Link(from, to string) error {
	if err := retryErr(func() error { return unix.Link(from, to) }); err != nil {
		return &os.LinkError{Op: "link", Old: from, New: to, Err: err}
	}
	return nil
}

// Unlink removes the name of a file.
func Unlink(path string) error {
	if err := retryErr(func() error { return unix.Unlink(path) }); err != nil {
		return &os.PathError{Op: "unlink", Path: path, Err: err}
	}
	return nil
}

// Mkdir makes a directory that only its owner can enter.
func Mkdir(path string) error {
	if err := retryErr(func() error { return unix.Mkdir(path, 0o700) }); err != nil {
		return &os.PathError{Op: "mkdir", Path: path, Err: err}
	}
	return nil
}

// Rmdir removes an empty directory.
func Rmdir(path string) error {
	if err := retryErr(func() error { return unix.Rmdir(path) }); err != nil {
		return &os.PathError{Op: "rmdir", Path: path, Err: err}
	}
	return nil
}

// ReadNames lists the names in a directory, in the order of the file system.
// A symbolic link in place of the directory is refused.
func ReadNames(path string) ([]string, error) {
	f, err := os.OpenFile(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	names, err := f.Readdirnames(-1)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return names, err
}

// Writable reports with an error whether this process may create names in dir.
func Writable(dir string) error {
	if err := unix.Faccessat(unix.AT_FDCWD, dir, unix.W_OK|unix.X_OK, unix.AT_EACCESS); err != nil {
		return &os.PathError{Op: "access", Path: dir, Err: err}
	}
	return nil
}

// NewPages maps n bytes of private zeroed memory outside the Go heap, page
// aligned as direct I/O needs it. Free them with FreePages.
func NewPages(n int) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", n, err)
	}
	return b, nil
}

// FreePages unmaps what NewPages gave.
func FreePages(b []byte) error { return unix.Munmap(b) }

func modified(ns int64) [2]unix.Timespec {
	return [2]unix.Timespec{{Nsec: unix.UTIME_OMIT}, unix.NsecToTimespec(ns)}
}

func retry(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if err != unix.EINTR {
			return max(n, 0), err
		}
	}
}

func retryErr(call func() error) error {
	for {
		if err := call(); err != unix.EINTR {
			return err
		}
	}
}
