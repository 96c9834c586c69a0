package crash

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/internal/disktest"
	"github.com/kvtier/kvtier/internal/sys"
	"github.com/kvtier/kvtier/tier"
)

// bufferedFS takes no direct I/O.
type bufferedFS struct{ tier.LocalFilesystem }

func (f bufferedFS) Open(path string, flags sys.OpenFlag) (tier.OpenFile, error) {
	if flags&sys.OpenDirect != 0 {
		return nil, &os.PathError{Op: "open", Path: path, Err: syscall.EINVAL}
	}
	return f.LocalFilesystem.Open(path, flags)
}

// findInImage gives where in a sparse file the bytes of one page lie.
func findInImage(t *testing.T, image *os.File, page []byte) int64 {
	t.Helper()
	have := make([]byte, len(page))
	for end := int64(0); ; {
		begin, err := image.Seek(end, unix.SEEK_DATA)
		if errors.Is(err, syscall.ENXIO) {
			t.Fatal("the page is not in the image")
		}
		require.NoError(t, err)
		end, err = image.Seek(begin, unix.SEEK_HOLE)
		require.NoError(t, err)
		for off := begin; off < end; off += int64(len(page)) {
			_, err := image.ReadAt(have, off)
			if err != nil {
				require.ErrorIs(t, err, io.EOF)
			}
			if bytes.Equal(page, have) {
				return off
			}
		}
	}
}

// A bit turned on its way from the device into the kernel's page cache: everybody reads it
// wrong from there, the file is right, and the tier finds that out.
func TestWrongInThePageCacheOnly(t *testing.T) {
	dir, path := loopDisk(t, "ext4", "-q", "-F", "-b", "4096")
	root := filepath.Join(dir, "root")
	b := open(t, root, tier.StoreOptions{FS: bufferedFS{}}).scanned()
	require.NoError(t, b.put(0))
	require.False(t, b.store.Stats().Direct)
	syncDisk(t, dir)
	image, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer image.Close()
	payload := disktest.Payload(key(0))
	at := findInImage(t, image, payload[:block])

	file, err := os.Open(b.path(root, 0))
	require.NoError(t, err)
	defer file.Close()
	_, err = image.WriteAt([]byte{payload[0] ^ 1}, at)
	require.NoError(t, err)
	require.NoError(t, unix.Fadvise(int(file.Fd()), 0, 0, unix.FADV_DONTNEED))
	seen := make([]byte, block)
	_, err = file.ReadAt(seen, 0)
	require.NoError(t, err)
	require.Equal(t, payload[0]^1, seen[0])
	_, err = image.WriteAt(payload[:1], at)
	require.NoError(t, err)
	_, err = file.ReadAt(seen, 0)
	require.NoError(t, err)
	require.Equal(t, payload[0]^1, seen[0], "the page cache has it still")

	require.NoError(t, b.get(0))
	require.Equal(t, uint64(1), b.store.Stats().Reread)
	require.NoError(t, b.get(0))
	require.Equal(t, uint64(1), b.store.Stats().Reread)
	require.Empty(t, b.store.Stats().Corrupt)
	b.close()
}
