package tier

import (
	"os"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// What stands in the place of one chunk does not decide how all others are read.
func TestPipeInPlaceOfAChunkKeepsDirectIO(t *testing.T) {
	h := openShelf(t, t.TempDir(), "m", StoreOptions{}).scanned()
	for n := range 3 {
		require.NoError(t, h.put(n))
	}
	if !h.store.Stats().Direct {
		t.Skip("not run: the file system takes no direct I/O")
	}
	require.NoError(t, os.Remove(h.file(1)))
	require.NoError(t, syscall.Mkfifo(h.file(1), 0o600))
	require.ErrorIs(t, h.get(1), ErrAbsent)
	require.True(t, h.store.Stats().Direct)
	require.NoError(t, h.get(2))
	require.NoError(t, h.put(1), "it gives way")
	require.NoError(t, h.get(1))
	require.True(t, h.store.Stats().Direct)
}

// A file system that stops taking it, as after a remount, is noticed by a plain file.
func TestDirectIORefusedForAFile(t *testing.T) {
	fs := &faultFS{}
	h := openShelf(t, t.TempDir(), "m", StoreOptions{FS: fs}).scanned()
	require.NoError(t, h.put(1))
	fs.set(failing("open direct", syscall.EINVAL))
	require.NoError(t, h.get(1))
	require.False(t, h.store.Stats().Direct)
}
