package sys

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

var (
	// ErrNotSealed is returned for a descriptor whose size its sender could
	// still change: a mapping of it could raise SIGBUS at any time.
	ErrNotSealed = errors.New("segment is not sealed as its kind demands")
	// ErrSegmentSize is returned for a size that is not the agreed one, or that
	// this machine cannot map.
	ErrSegmentSize = errors.New("segment has another size than agreed")
	// ErrNotCreator is returned where only the creator of a segment has the
	// descriptor that is needed.
	ErrNotCreator = errors.New("segment was received, only its creator can do this")
)

// Seals of every segment; a table adds F_SEAL_FUTURE_WRITE.
const sizeSeals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// populateStep bounds one fallocate call: kernels before 6.11 undo a whole
// interrupted call, so a long one might never end in a process with timers.
const populateStep = 4 << 20

// Segment is a sealed memfd and one shared mapping of it. The mapping is not
// inherited by forked children and not written to core dumps.
//
// Bytes and Populate may be used from any goroutine. Close must not overlap with
// an access to the bytes: the owner of a Segment ends its users first.
type Segment struct {
	file *os.File // nil at a receiver: a held descriptor would outlive the mapping in forked children
	mem  []byte
	once sync.Once
	err  error
}

// NewSegment creates a segment of exactly size bytes, mapped read-write and
// sealed against any later change of its size. Its pages are not there yet: see
// Populate.
func NewSegment(name string, size int64) (*Segment, error) {
	return create(name, size, false)
}

// NewTable creates a fully populated segment that nobody but this mapping can
// ever write: receivers map it read-only.
func NewTable(name string, size int64) (*Segment, error) {
	return create(name, size, true)
}

func create(name string, size int64, table bool) (*Segment, error) {
	if size <= 0 || int64(int(size)) != size {
		return nil, fmt.Errorf("creating segment %s of %d bytes: %w", name, size, ErrSegmentSize)
	}
	if err := checkFileLimit(size); err != nil {
		return nil, fmt.Errorf("creating segment %s: %w", name, err)
	}
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) {
		fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return nil, fmt.Errorf("creating segment %s: memfd_create: %w", name, err)
	}
	s := &Segment{file: os.NewFile(uintptr(fd), name)}
	if err := s.setUp(fd, size, table); err != nil {
		s.Close()
		return nil, fmt.Errorf("creating segment %s: %w", name, err)
	}
	return s, nil
}

func (s *Segment) setUp(fd int, size int64, table bool) error {
	if err := ignoreEINTR(func() error { return unix.Ftruncate(fd, size) }); err != nil {
		return fmt.Errorf("ftruncate to %d bytes: %w", size, err)
	}
	// Mapped before it is sealed: F_SEAL_FUTURE_WRITE refuses a writable mapping
	// to its creator as well.
	if err := s.mapShared(fd, size, true); err != nil {
		return err
	}
	seals := sizeSeals
	if table {
		if err := s.Populate(0, size); err != nil {
			return err
		}
		seals |= unix.F_SEAL_FUTURE_WRITE
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		return fmt.Errorf("sealing: %w", err)
	}
	return nil
}

// OpenSegment maps a received segment after checking its seals and that it has
// exactly size bytes. With writable false it must be a table, that is: sealed
// against all writers but its creator. It takes ownership of f and closes it in
// any case.
func OpenSegment(f *os.File, size int64, writable bool) (*Segment, error) {
	defer f.Close()
	fd := int(f.Fd())
	if size <= 0 || int64(int(size)) != size {
		return nil, fmt.Errorf("opening segment of %d bytes: %w", size, ErrSegmentSize)
	}
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return nil, fmt.Errorf("opening segment: %w: %w", ErrNotSealed, err)
	}
	want := sizeSeals
	if !writable {
		want |= unix.F_SEAL_FUTURE_WRITE
	}
	if seals&want != want {
		return nil, fmt.Errorf("opening segment: %w: seals 0x%x, need 0x%x", ErrNotSealed, seals, want)
	}
	// Only a sealed size is worth reading: it cannot change after this.
	var st unix.Stat_t
	if err := ignoreEINTR(func() error { return unix.Fstat(fd, &st) }); err != nil {
		return nil, fmt.Errorf("opening segment: fstat: %w", err)
	}
	if st.Size != size {
		return nil, fmt.Errorf("opening segment: %w: %d bytes, agreed %d", ErrSegmentSize, st.Size, size)
	}
	s := &Segment{}
	if err := s.mapShared(fd, size, writable); err != nil {
		s.Close()
		return nil, fmt.Errorf("opening segment: %w", err)
	}
	return s, nil
}

func (s *Segment) mapShared(fd int, size int64, writable bool) error {
	prot := unix.PROT_READ
	if writable {
		prot |= unix.PROT_WRITE
	}
	mem, err := unix.Mmap(fd, 0, int(size), prot, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("mmap of %d bytes: %w", size, err)
	}
	s.mem = mem
	// A forked child must not write into slots it does not own, and a core dump
	// must not hold the prompts of other users.
	if err := unix.Madvise(mem, unix.MADV_DONTFORK); err != nil {
		return fmt.Errorf("madvise DONTFORK: %w", err)
	}
	if err := unix.Madvise(mem, unix.MADV_DONTDUMP); err != nil {
		return fmt.Errorf("madvise DONTDUMP: %w", err)
	}
	return nil
}

// Populate allocates the pages of [off, off+n), so that later accesses cannot
// fail. It does not check the container's memory limit, which the kernel answers
// by killing a process: the caller does so before each step.
func (s *Segment) Populate(off, n int64) error {
	if s.file == nil {
		return fmt.Errorf("populating segment: %w", ErrNotCreator)
	}
	if off < 0 || n < 0 || off > int64(len(s.mem)) || n > int64(len(s.mem))-off {
		return fmt.Errorf("populating [%d, +%d) of %d bytes: %w", off, n, len(s.mem), ErrSegmentSize)
	}
	fd := int(s.file.Fd())
	for n > 0 {
		step := min(n, populateStep)
		err := ignoreEINTR(func() error { return unix.Fallocate(fd, 0, off, step) })
		if err != nil {
			return fmt.Errorf("fallocate of %d bytes at %d: %w", step, off, err)
		}
		off, n = off+step, n-step
	}
	return nil
}

// Bytes is the mapping. It is valid until Close.
func (s *Segment) Bytes() []byte { return s.mem }

// Size is the size in bytes.
func (s *Segment) Size() int64 { return int64(len(s.mem)) }

// File is the memfd, to be passed to peers; the Segment keeps owning it. It is
// nil at a receiver.
func (s *Segment) File() *os.File { return s.file }

// Close unmaps the segment and closes its descriptor. Calling it again returns
// the first result.
func (s *Segment) Close() error {
	s.once.Do(func() {
		if s.mem != nil {
			s.err = unix.Munmap(s.mem)
			s.mem = nil
		}
		if s.file != nil {
			s.err = errors.Join(s.err, s.file.Close())
		}
	})
	return s.err
}

// checkFileLimit refuses a size over RLIMIT_FSIZE. The kernel would answer with
// SIGXFSZ, which ends a host that does not expect it.
func checkFileLimit(size int64) error {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &lim); err != nil {
		return fmt.Errorf("getrlimit RLIMIT_FSIZE: %w", err)
	}
	if uint64(size) > lim.Cur {
		return fmt.Errorf("%d bytes exceed RLIMIT_FSIZE (%d bytes; raise it with ulimit -f): %w", size, lim.Cur, unix.EFBIG)
	}
	return nil
}

// ignoreEINTR repeats call while a signal interrupts it.
func ignoreEINTR(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
