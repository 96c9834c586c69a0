package sys

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// LockFile is an open file on which this process can hold a POSIX record lock.
//
// Such a lock is the right sign of life of a process (flock and open file
// description locks are inherited by forked children and outlive it), but it has
// two traps: it does not exclude within the process, and closing ANY descriptor
// of the file in the process drops it. So the file must be opened by one owner
// only, once, and nothing else in the process may ever open it.
type LockFile struct{ f *os.File }

// OpenLock opens or creates the file, mode 0600.
func OpenLock(path string) (*LockFile, error) {
	f, err := os.OpenFile(path, unix.O_RDWR|unix.O_CREAT|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	return &LockFile{f}, nil
}

// TryLock takes the write lock over the whole file, or reports that another
// process has it. It never waits.
func (l *LockFile) TryLock() (bool, error) {
	lk := unix.Flock_t{Type: unix.F_WRLCK}
	err := retryErr(func() error { return unix.FcntlFlock(l.f.Fd(), unix.F_SETLK, &lk) })
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("lock %s: %w", l.f.Name(), err)
	}
	return true, nil
}

// Unlock gives the lock back.
func (l *LockFile) Unlock() error {
	lk := unix.Flock_t{Type: unix.F_UNLCK}
	return retryErr(func() error { return unix.FcntlFlock(l.f.Fd(), unix.F_SETLK, &lk) })
}

// Holder gives the pid of the other process that has the lock: 0 when nobody
// has it, or when the process cannot be seen from this pid namespace.
func (l *LockFile) Holder() int {
	lk := unix.Flock_t{Type: unix.F_WRLCK}
	if err := retryErr(func() error { return unix.FcntlFlock(l.f.Fd(), unix.F_GETLK, &lk) }); err != nil || lk.Type == unix.F_UNLCK {
		return 0
	}
	return max(int(lk.Pid), 0)
}

// Held reports whether another process has the lock, also one that cannot be seen
// from this pid namespace.
func (l *LockFile) Held() (bool, error) {
	lk := unix.Flock_t{Type: unix.F_WRLCK}
	if err := retryErr(func() error { return unix.FcntlFlock(l.f.Fd(), unix.F_GETLK, &lk) }); err != nil {
		return false, fmt.Errorf("look at the lock of %s: %w", l.f.Name(), err)
	}
	return lk.Type != unix.F_UNLCK, nil
}

// ReadText gives the first bytes of the file.
func (l *LockFile) ReadText() string {
	b := make([]byte, 1024)
	n, err := l.f.ReadAt(b, 0)
	if err != nil && err != io.EOF {
		return ""
	}
	return string(b[:n])
}

// WriteText replaces the content; only the holder of the lock may do so.
func (l *LockFile) WriteText(s string) error {
	if err := l.f.Truncate(0); err != nil {
		return err
	}
	_, err := l.f.WriteAt([]byte(s), 0)
	return err
}

// Stat describes the open file, to be compared with what the name means now.
func (l *LockFile) Stat() (Stat, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(l.f.Fd()), &st); err != nil {
		return Stat{}, err
	}
	return statOf(&st), nil
}

// Close closes the file and with it drops every lock of this process on it.
func (l *LockFile) Close() error { return l.f.Close() }

// BootID names this boot of the machine; empty when the kernel does not tell.
func BootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// ProcessStart gives the start time of a process in clock ticks since boot,
// which together with pid and boot names it for good; 0 when unknown.
func ProcessStart(pid int) uint64 {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0
	}
	// The command name may hold spaces and brackets: fields count from its last one.
	i := strings.LastIndexByte(string(b), ')')
	if i < 0 {
		return 0
	}
	fields := strings.Fields(string(b[i+1:]))
	const startTime = 22 - 3 // field 22 of proc(5); the first one here is field 3
	if len(fields) <= startTime {
		return 0
	}
	n, err := strconv.ParseUint(fields[startTime], 10, 64)
	if err != nil {
		return 0
	}
	return n
}
