package tier

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/kvtier/kvtier/internal/sys"
)

// Filesystem is every system call that the disk tier makes on the chunk files
// and their directories. It exists so that a test can put a failing or slow disk
// in between; the real one is LocalFilesystem. Errors carry a syscall.Errno.
type Filesystem interface {
	Open(path string, flags sys.OpenFlag) (OpenFile, error)
	Lstat(path string) (sys.Stat, error)
	ReadNames(dir string) ([]string, error)
	Mkdir(path string) error // EEXIST is an error
	Rmdir(path string) error // of an empty directory
	Rename(from, to string) error
	Unlink(path string) error
	SetModified(path string, ns int64) error
	Statfs(path string) (sys.Filesystem, error)
}

// OpenFile is one open file of a Filesystem; see sys.File.
type OpenFile interface {
	ReadV(bufs [][]byte, off int64) (int, error)
	WriteV(bufs [][]byte, off int64) (int, error)
	Stat() (sys.Stat, error)
	SetModified(ns int64) error
	Sync() error
	SyncAll() error
	DropCache() error
	Close() error
}

// LocalFilesystem is the kernel's.
type LocalFilesystem struct{}

func (LocalFilesystem) Open(path string, flags sys.OpenFlag) (OpenFile, error) {
	f, err := sys.Open(path, flags, 0o600)
	if err != nil {
		return nil, err // not a nil *sys.File in an interface
	}
	return f, nil
}
func (LocalFilesystem) Lstat(path string) (sys.Stat, error)        { return sys.Lstat(path) }
func (LocalFilesystem) ReadNames(dir string) ([]string, error)     { return sys.ReadNames(dir) }
func (LocalFilesystem) Mkdir(path string) error                    { return sys.Mkdir(path) }
func (LocalFilesystem) Rmdir(path string) error                    { return sys.Rmdir(path) }
func (LocalFilesystem) Rename(from, to string) error               { return sys.Rename(from, to) }
func (LocalFilesystem) Unlink(path string) error                   { return sys.Unlink(path) }
func (LocalFilesystem) SetModified(path string, ns int64) error    { return sys.SetModified(path, ns) }
func (LocalFilesystem) Statfs(path string) (sys.Filesystem, error) { return sys.Statfs(path) }

// absent reports the one error that means that a name is gone. Every other one
// says only that this attempt failed.
func absent(err error) bool { return errors.Is(err, syscall.ENOENT) }

// exists reports that a name is taken.
func exists(err error) bool { return errors.Is(err, syscall.EEXIST) }

// foreign reports that something stands in a place of ours that is not what we put
// there, as a directory or a link. That says nothing about the disk.
func foreign(err error) bool {
	return errors.Is(err, syscall.EISDIR) || errors.Is(err, syscall.ENOTDIR) || errors.Is(err, syscall.ELOOP)
}

// denied reports that this user may not do it, which the disk has no part in.
func denied(err error) bool {
	return errors.Is(err, syscall.EACCES) || errors.Is(err, syscall.EPERM)
}

// invalid is what a file system says that has no direct I/O.
func invalid(err error) bool { return errors.Is(err, syscall.EINVAL) }

// noSpace reports that the file system, or this user's quota, is full.
func noSpace(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// errnoName names the system error inside err for a counter.
func errnoName(err error) string {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		switch {
		case errors.Is(err, errSlow):
			return "slow"
		case errors.Is(err, errShort):
			return "short"
		}
		return "other"
	}
	if name, ok := errnoNames[errno]; ok {
		return name
	}
	return fmt.Sprintf("errno %d", int(errno))
}

var errnoNames = map[syscall.Errno]string{
	syscall.EPERM: "EPERM", syscall.ENOENT: "ENOENT", syscall.EIO: "EIO", syscall.ENXIO: "ENXIO",
	syscall.EAGAIN: "EAGAIN", syscall.ENOMEM: "ENOMEM", syscall.EACCES: "EACCES", syscall.EBUSY: "EBUSY",
	syscall.EEXIST: "EEXIST", syscall.ENODEV: "ENODEV", syscall.ENOTDIR: "ENOTDIR", syscall.EISDIR: "EISDIR",
	syscall.EINVAL: "EINVAL", syscall.ENFILE: "ENFILE", syscall.EMFILE: "EMFILE", syscall.EFBIG: "EFBIG",
	syscall.ENOSPC: "ENOSPC", syscall.EROFS: "EROFS", syscall.EMLINK: "EMLINK", syscall.ELOOP: "ELOOP",
	syscall.ENAMETOOLONG: "ENAMETOOLONG", syscall.EDQUOT: "EDQUOT", syscall.ESTALE: "ESTALE",
	syscall.ETIMEDOUT: "ETIMEDOUT", syscall.EUCLEAN: "EUCLEAN", syscall.ENOTEMPTY: "ENOTEMPTY",
}
