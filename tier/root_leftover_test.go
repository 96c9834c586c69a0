package tier

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/disktest"
)

// Every state in which a process can leave a root that is killed while it makes it or
// takes its lock: the next one opens it, with the id that it has, and nothing of it is
// left over or not accounted.
func TestRootLeftHalfMade(t *testing.T) {
	made := filepath.Join(t.TempDir(), "made")
	r, err := OpenRoot(made, RootOptions{})
	require.NoError(t, err)
	whole, err := os.ReadFile(filepath.Join(made, rootFileName))
	require.NoError(t, err)
	ok, _, err := r.TryLock()
	require.NoError(t, err)
	require.True(t, ok)
	holder, err := os.ReadFile(filepath.Join(made, lockFileName))
	require.NoError(t, err)
	id := r.file.Root
	require.NoError(t, r.Close())

	const temp = rootFileName + ".0123456789abcdef" + rootTempTail
	for _, left := range []struct {
		name   string
		files  map[string][]byte
		linked bool // the temp file has both names
		run    bool // there is a directory for sockets
		named  bool // the root has its id
	}{
		{name: "directory"},
		{name: "temp file, empty", files: map[string][]byte{temp: nil}},
		{name: "temp file, half", files: map[string][]byte{temp: whole[:len(whole)/2]}},
		{name: "temp file", files: map[string][]byte{temp: whole}},
		{name: "two names", files: map[string][]byte{temp: whole}, linked: true, named: true},
		{name: "root file", files: map[string][]byte{rootFileName: whole}, named: true},
		{name: "run", files: map[string][]byte{rootFileName: whole}, run: true, named: true},
		{name: "lock, empty", files: map[string][]byte{rootFileName: whole, lockFileName: nil}, run: true, named: true},
		{name: "lock, half", files: map[string][]byte{rootFileName: whole, lockFileName: holder[:len(holder)/2]}, run: true, named: true},
		{name: "lock of one that is dead", files: map[string][]byte{rootFileName: whole, lockFileName: holder}, run: true, named: true},
	} {
		t.Run(left.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "root")
			require.NoError(t, os.Mkdir(dir, 0o700))
			for name, content := range left.files {
				require.NoError(t, os.WriteFile(filepath.Join(dir, name), content, 0o600))
			}
			if left.linked {
				require.NoError(t, os.Link(filepath.Join(dir, temp), filepath.Join(dir, rootFileName)))
			}
			if left.run {
				require.NoError(t, os.Mkdir(filepath.Join(dir, runDirName), 0o700))
			}
			h := openShelf(t, dir, "m", StoreOptions{}).scanned()
			require.Len(t, h.root.file.Root, 32)
			require.Equal(t, left.named, h.root.file.Root == id)
			require.NoError(t, h.put(1))
			require.NoError(t, h.get(1))
			require.Empty(t, disktest.Files(t, dir, rootTempTail))
			require.Equal(t, disktest.Allocated(t, dir), h.store.Stats().UsedBytes)
			now, err := os.ReadFile(filepath.Join(dir, lockFileName))
			require.NoError(t, err)
			require.Contains(t, string(now), "\"pid\"")
			h.close()
			// And once more: it is a root like any other now.
			id := h.root.file.Root
			h = openShelf(t, dir, "m", StoreOptions{}).scanned()
			require.Equal(t, id, h.root.file.Root)
			require.NoError(t, h.get(1))
		})
	}
}
