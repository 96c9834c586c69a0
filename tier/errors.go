package tier

import (
	"errors"
	"fmt"
	"syscall"
)

// Why a root is not opened. The wrapping error says where and what to change.
var (
	ErrNotDirectory = errors.New("is not a directory")
	ErrOwner        = errors.New("belongs to another user")
	ErrUnwritable   = errors.New("cannot be written")
	ErrNetwork      = errors.New("lies on a network file system")
	ErrNewerRoot    = errors.New("was written by a newer version, update kvtier or choose another directory")
	ErrDamagedRoot  = errors.New("does not hold what kvtier wrote there")
	ErrNotLocked    = errors.New("root is not locked by this process, lock it first")
	ErrClosed       = errors.New("is closed")
)

// Why a namespace gets no disk.
var (
	// ErrSidecarForeign: the directory describes another namespace. It is never
	// overwritten, somebody has to move it away.
	ErrSidecarForeign = errors.New("layout.json describes another namespace, move the directory away")
	ErrSidecarNewer   = errors.New("layout.json was written by a newer version, update kvtier")
	ErrTooBig         = errors.New("a chunk file is larger than the disk cap, raise disk_gib")
)

// Why a chunk was not read or written. Every one of them is a miss to the
// engine, never a failure.
var (
	ErrAbsent  = errors.New("chunk is not on disk")
	ErrCorrupt = errors.New("chunk file does not hold what its name says")
	ErrNewer   = errors.New("chunk file was written by a newer version")
	ErrIO      = errors.New("disk error")
	ErrOff     = errors.New("disk tier is off")
	ErrNoRoom  = errors.New("no room on disk")
)

var (
	errForeign  = fmt.Errorf("something else stands in the place of a file of the cache: %w", syscall.ENOTDIR)
	errSlow     = errors.New("slower than a read may be")
	errShort    = fmt.Errorf("fewer bytes arrived than were written: %w", ErrIO)
	errLostRoot = errors.New("the lock file is no longer in the root, somebody has deleted or replaced it")

	errLockTaken = errors.New("another process has locked the root while it was away")
)
