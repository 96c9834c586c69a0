package sys

import (
	"bufio"
	"fmt"
	"os"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

const testBytes = 3<<20 + 4096

func newSegment(t *testing.T, table bool) *Segment {
	t.Helper()
	s, err := create("test", testBytes, table)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

// passed is what a receiver of the segment gets.
func passed(t *testing.T, s *Segment) *os.File {
	t.Helper()
	fd, err := unix.FcntlInt(s.File().Fd(), unix.F_DUPFD_CLOEXEC, 0)
	require.NoError(t, err)
	return os.NewFile(uintptr(fd), "passed")
}

func TestSegmentIsShared(t *testing.T) {
	s := newSegment(t, false)
	require.EqualValues(t, testBytes, s.Size())
	require.NoError(t, s.Populate(0, testBytes))
	f := passed(t, s)
	r, err := OpenSegment(f, testBytes, true)
	require.NoError(t, err)
	require.ErrorIs(t, f.Close(), os.ErrClosed, "the receiver keeps no descriptor")
	require.Nil(t, r.File())
	s.Bytes()[testBytes-1] = 7
	require.EqualValues(t, 7, r.Bytes()[testBytes-1])
	r.Bytes()[0] = 9
	require.EqualValues(t, 9, s.Bytes()[0])
	require.ErrorIs(t, r.Populate(0, 1), ErrNotCreator)
	require.NoError(t, r.Close())
	require.NoError(t, r.Close(), "idempotent")
}

func TestNobodyResizesASegment(t *testing.T) {
	for _, table := range []bool{false, true} {
		s := newSegment(t, table)
		fd := int(s.File().Fd())
		require.ErrorIs(t, unix.Ftruncate(fd, 0), unix.EPERM)
		require.ErrorIs(t, unix.Ftruncate(fd, testBytes+1), unix.EPERM)
		_, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_WRITE)
		require.Error(t, err, "no seal can be added")
	}
}

func TestNobodyElseWritesATable(t *testing.T) {
	s := newSegment(t, true)
	r, err := OpenSegment(passed(t, s), testBytes, false)
	require.NoError(t, err)
	defer r.Close()
	s.Bytes()[5] = 5
	require.EqualValues(t, 5, r.Bytes()[5], "its creator still writes")

	_, err = OpenSegment(passed(t, s), testBytes, true)
	require.Error(t, err)
	_, err = unix.Pwrite(int(s.File().Fd()), []byte{1}, 0)
	require.ErrorIs(t, err, unix.EPERM)
	require.ErrorIs(t, unix.Fallocate(int(s.File().Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4096), unix.EPERM)
	require.Error(t, unix.Mprotect(r.Bytes(), unix.PROT_READ|unix.PROT_WRITE))
}

func TestTableIsPopulated(t *testing.T) {
	var st unix.Stat_t
	require.NoError(t, unix.Fstat(int(newSegment(t, true).File().Fd()), &st))
	require.EqualValues(t, testBytes, st.Blocks*512)
	s := newSegment(t, false)
	require.NoError(t, unix.Fstat(int(s.File().Fd()), &st))
	require.Zero(t, st.Blocks)
	require.NoError(t, s.Populate(4096, 1<<20))
	require.NoError(t, unix.Fstat(int(s.File().Fd()), &st))
	require.EqualValues(t, 1<<20, st.Blocks*512)
	for _, r := range [][2]int64{{-1, 1}, {0, -1}, {0, testBytes + 1}, {testBytes, 1}, {1 << 62, 1 << 62}} {
		require.ErrorIs(t, s.Populate(r[0], r[1]), ErrSegmentSize, r)
	}
}

func TestReceiverChecksSealsAndSize(t *testing.T) {
	seg := newSegment(t, false)
	for _, size := range []int64{0, -1, testBytes - 4096, testBytes + 4096, 1 << 62} {
		_, err := OpenSegment(passed(t, seg), size, true)
		require.ErrorIs(t, err, ErrSegmentSize, size)
	}
	_, err := OpenSegment(passed(t, seg), testBytes, false)
	require.ErrorIs(t, err, ErrNotSealed, "a table that others can write")

	for _, seals := range []int{0, unix.F_SEAL_SHRINK, unix.F_SEAL_SHRINK | unix.F_SEAL_GROW, unix.F_SEAL_SHRINK | unix.F_SEAL_SEAL} {
		fd, err := unix.MemfdCreate("loose", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		require.NoError(t, err)
		require.NoError(t, unix.Ftruncate(fd, testBytes))
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
		require.NoError(t, err)
		_, err = OpenSegment(os.NewFile(uintptr(fd), "loose"), testBytes, true)
		require.ErrorIs(t, err, ErrNotSealed, "seals %#x", seals)
		require.ErrorIs(t, unix.Close(fd), unix.EBADF, "the descriptor is closed on errors too")
	}
	f, err := os.Create(t.TempDir() + "/file")
	require.NoError(t, err)
	require.NoError(t, f.Truncate(testBytes))
	_, err = OpenSegment(f, testBytes, true)
	require.ErrorIs(t, err, ErrNotSealed, "a plain file has no seals")
}

func TestSegmentRefusesSizes(t *testing.T) {
	for _, size := range []int64{0, -1} {
		_, err := NewSegment("test", size)
		require.ErrorIs(t, err, ErrSegmentSize)
	}
}

// The mapping must be neither in forked children nor in core dumps.
func TestMappingIsPrivateToTheProcess(t *testing.T) {
	s := newSegment(t, false)
	r, err := OpenSegment(passed(t, s), testBytes, true)
	require.NoError(t, err)
	defer r.Close()
	for _, mem := range [][]byte{s.Bytes(), r.Bytes()} {
		flags := vmFlags(t, mem)
		require.Contains(t, flags, " dc", "DONTFORK")
		require.Contains(t, flags, " dd", "DONTDUMP")
	}
}

func vmFlags(t *testing.T, mem []byte) string {
	t.Helper()
	f, err := os.Open("/proc/self/smaps")
	require.NoError(t, err)
	defer f.Close()
	start := fmt.Sprintf("%x-", uintptr(unsafe.Pointer(unsafe.SliceData(mem))))
	inside := false
	for lines := bufio.NewScanner(f); lines.Scan(); {
		inside = inside || strings.HasPrefix(lines.Text(), start)
		if inside && strings.HasPrefix(lines.Text(), "VmFlags:") {
			return lines.Text()
		}
	}
	t.Fatal("mapping not found")
	return ""
}
