package tier

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/disktest"
)

// notOurs puts things into a root that only look like what dead sessions leave over.
func notOurs(t *testing.T, h *shelf) (paths []string) {
	t.Helper()
	dir, ns, sub := h.root.Path(), h.disk.dir.path, filepath.Dir(h.file(1))
	outside := filepath.Join(t.TempDir(), "outside")
	require.NoError(t, os.WriteFile(outside, []byte("x"), 0o600))
	file := func(path string) {
		require.NoError(t, os.WriteFile(path, []byte("x"), 0o600))
		paths = append(paths, path)
	}
	odd := func(path string) {
		require.NoError(t, os.Symlink(outside, path))
		require.NoError(t, os.Mkdir(strings.Replace(path, ".", "2.", 1), 0o700))
		paths = append(paths, path)
	}
	file(filepath.Join(dir, "kvtier.json.my notes.new"))
	file(filepath.Join(dir, "kvtier.json.new"))
	file(filepath.Join(dir, "kvtier.json..new"))
	file(filepath.Join(dir, "kvtier.json.0123456789ABCDEF.new"))
	file(filepath.Join(dir, "kvtier.json.0123456789abcde.new"))
	file(filepath.Join(dir, "kvtier.json.0123456789abcdef0.new"))
	file(filepath.Join(dir, "kvtier.json."+strings.Repeat("0", 100)+".new"))
	file(filepath.Join(sub, chunk.TempName(shelfKey(2), 7, 1))) // in the directory of another key
	odd(filepath.Join(dir, "kvtier.json.0123456789abcdef.new"))
	odd(filepath.Join(sub, chunk.TempName(shelfKey(1), 7, 2)))
	odd(filepath.Join(ns, sidecarTemp))
	fifo := filepath.Join(sub, chunk.TempName(shelfKey(1), 7, 3))
	require.NoError(t, syscall.Mkfifo(fifo, 0o600))
	return append(paths, fifo)
}

// A leader deletes no more than what it would have written itself, at that very place.
func TestLeaderLeavesWhatLooksLikeItsTemps(t *testing.T) {
	dir := t.TempDir()
	h := openShelf(t, dir, "m", StoreOptions{}).scanned()
	require.NotEqual(t, chunk.SubDir(shelfKey(1)), chunk.SubDir(shelfKey(2)))
	require.NoError(t, h.put(1))
	h.close()
	paths := notOurs(t, h)
	ours := []string{
		filepath.Join(dir, "kvtier.json.00112233445566ff.new"), filepath.Join(filepath.Dir(h.file(1)), chunk.TempName(shelfKey(1), 7, 9)),
	}
	for _, path := range ours {
		require.NoError(t, os.WriteFile(path, []byte("x"), 0o600))
	}
	h = openShelf(t, dir, "m", StoreOptions{}).scanned()
	for _, path := range paths {
		_, err := os.Lstat(path)
		require.NoError(t, err)
	}
	for _, path := range ours {
		require.NoFileExists(t, path)
	}
	st := h.store.Stats()
	require.EqualValues(t, len(ours), st.Swept)
	require.Equal(t, map[string]uint64{"path": 1, "type": 2, "name": 2}, st.Rejected)
	require.NoError(t, h.get(1))

	// Without a sidecar there is no place to write it; the link stays all the same.
	h.close()
	require.NoError(t, os.Remove(filepath.Join(h.disk.dir.path, sidecarName)))
	r, s := openStoreAt(t, dir, StoreOptions{})
	t.Cleanup(func() { require.NoError(t, r.Close()) })
	t.Cleanup(func() { require.NoError(t, s.Close(shelfPatience)) })
	_, err := s.Namespace(disktest.Namespace("m"))
	require.ErrorContains(t, err, "move it away")
	_, err = os.Lstat(filepath.Join(h.disk.dir.path, sidecarTemp))
	require.NoError(t, err)
}

// Nor do the tools, and they say why.
func TestToolsLeaveWhatLooksLikeTemps(t *testing.T) {
	h, n, _ := inspected(t, 2)
	paths := notOurs(t, h)
	why := map[string]string{}
	note := func(e Entry) error {
		if e.Kind != EntryForeign {
			return nil
		}
		why[e.Path] = e.Why
		return nil
	}
	require.NoError(t, n.i.WalkBeside(note))
	require.NoError(t, n.Walk(note))
	for _, path := range paths {
		require.Contains(t, []string{"name", "path", "type"}, why[path], path)
	}
	require.Equal(t, "path", why[filepath.Join(filepath.Dir(h.file(1)), chunk.TempName(shelfKey(2), 7, 1))])
	c := Clearing{Temps: true, Each: func(e Entry, err error) { t.Error(fmt.Sprint("chosen: ", e.Path, err)) }}
	require.NoError(t, n.i.ClearBeside(c))
	n.Clear(c)
	for _, path := range paths {
		_, err := os.Lstat(path)
		require.NoError(t, err)
	}
}

// Somebody cuts a file between its last byte and its name.
func TestFileCutWhileItIsWritten(t *testing.T) {
	fs := &faultFS{}
	h := openShelf(t, t.TempDir(), "m", StoreOptions{FS: fs, Durable: true}).scanned()
	fs.set(func(call, path string) error {
		if call == "sync" && strings.HasSuffix(path, ".tmp") && strings.Contains(path, chunk.SubDir(shelfKey(1))) {
			require.NoError(t, os.Truncate(path, 100))
		}
		return nil
	})
	require.ErrorIs(t, h.put(1), ErrIO)
	require.Equal(t, map[string]uint64{"short": 1}, h.store.Stats().Errors)
	require.NoFileExists(t, h.file(1))
	fs.set(nil)
	require.NoError(t, h.put(1))
	require.NoError(t, h.get(1))
}
