package tier

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/disktest"
)

// A subdirectory in which nothing is left goes with its last chunk: else a small cap
// is soon full of empty directories.
func TestSubdirectoriesGoWithTheirLastChunk(t *testing.T) {
	dir := t.TempDir()
	h := openShelf(t, dir, "m", StoreOptions{CapBytes: 40 * disktest.CostBytes}).scanned()
	before := h.store.Stats().UsedBytes
	require.NoError(t, h.put(0))
	require.DirExists(t, filepath.Dir(h.file(0)))
	h.disk.Remove(shelfKey(0))
	h.wait("removal", func() bool { return h.store.Stats().Removed == 1 })
	require.NoDirExists(t, filepath.Dir(h.file(0)))
	require.Equal(t, before, h.store.Stats().UsedBytes)

	for n := 1; n < 600; n++ { // in more directories than there is room for
		require.NoError(t, h.put(n))
	}
	h.quiet()
	kept := map[string]bool{}
	for _, path := range disktest.Files(t, dir, ".kvc") {
		kept[filepath.Dir(path)] = true
	}
	for n := range 600 {
		if sub := filepath.Dir(h.file(n)); !kept[sub] {
			require.NoDirExists(t, sub)
		}
	}
	st := h.store.Stats()
	require.Positive(t, st.EvictedSelf)
	require.Equal(t, disktest.Allocated(t, dir), st.UsedBytes)
}

// Floors that are together as large as the cap keep namespaces from each other, and
// none from its own chunks.
func TestFloorsThatTakeUpTheCap(t *testing.T) {
	const files = 25
	floor := int64(files * disktest.FileBytes)
	a := openShelf(t, t.TempDir(), "a", StoreOptions{CapBytes: 2 * floor, NamespaceFloor: floor}).scanned()
	d, err := a.store.Namespace(disktest.Namespace("b"))
	require.NoError(t, err)
	b := &shelf{t: t, root: a.root, store: a.store, disk: d}
	for n := range files + 5 {
		require.NoError(t, a.put(n))
	}
	for n := range 4 * files {
		require.NoError(t, b.put(1000+n), n)
		require.NoError(t, b.get(1000+n), n)
	}
	b.quiet()
	require.Equal(t, files, a.disk.Count(), "as many as its floor is")
	require.Positive(t, a.store.Stats().EvictedSelf)
	for n := range 4 * files { // and the other way round
		require.NoError(t, a.put(2000+n), n)
		require.NoError(t, a.get(2000+n), n)
	}
	require.LessOrEqual(t, a.store.Stats().UsedBytes, 2*floor)
}
