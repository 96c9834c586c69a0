package tier

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/disktest"
)

// checkSidecarText puts any bytes in the place of a sidecar, beside one good chunk.
// Whatever they are, the chunk is served in the end or the directory is refused and
// left as it is; and nobody takes them for the description of another namespace.
func checkSidecarText(t rapid.TB, text []byte) {
	root, err := os.MkdirTemp("", "kvtier-sidecar")
	require.NoError(t, err)
	defer os.RemoveAll(root)
	n := disktest.Namespace("m")
	fp, err := n.Fingerprint()
	require.NoError(t, err)
	canonical, err := n.Canonical()
	require.NoError(t, err)
	k := shelfKey(0)
	dir := filepath.Join(root, chunk.DirName("m", fp))
	file := filepath.Join(dir, chunk.SubDir(k), chunk.FileName(k))
	sidecar := filepath.Join(dir, sidecarName)
	require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o700))
	require.NoError(t, os.WriteFile(file, treeFiles()[0], 0o600))
	require.NoError(t, os.WriteFile(sidecar, text, 0o600))

	i, err := Inspect(root)
	require.NoError(t, err)
	all, err := i.Namespaces()
	require.NoError(t, err)
	require.Len(t, all, 1)
	require.Equal(t, string(text) == string(canonical), all[0].Sidecar == SidecarGood)

	r, s := openStoreAt(t, root, StoreOptions{Log: slog.New(slog.DiscardHandler)})
	defer func() {
		require.NoError(t, s.Close(shelfPatience))
		require.NoError(t, r.Close())
	}()
	d, err := s.Namespace(n)
	left, rerr := os.ReadFile(sidecar)
	require.NoError(t, rerr)
	if err != nil {
		require.True(t, errors.Is(err, ErrSidecarForeign) || errors.Is(err, ErrSidecarNewer), "%v", err)
		require.Equal(t, text, left)
		require.FileExists(t, file)
		return
	}
	require.Equal(t, canonical, left)
	h := &shelf{t: t, root: r, store: s, disk: d}
	h.scanned()
	require.NoError(t, h.get(0))
}

func FuzzSidecar(f *testing.F) {
	canonical, err := disktest.Namespace("m").Canonical()
	require.NoError(f, err)
	other, err := disktest.Namespace("other").Canonical()
	require.NoError(f, err)
	for _, text := range []string{
		"", "{", "{}", "null", "[]", "\x00", `{"format":2}`, `{"format":1,"key_scheme":9}`, `{"format":-1}`, `{"format":1e99}`,
		string(canonical), string(other), string(canonical) + "\n", string(canonical[:100]), strings.ToUpper(string(canonical)),
		strings.Replace(string(canonical), `"format":1`, `"format":1,"format":2`, 1),
		strings.Replace(string(canonical), `"bytes":10000`, `"bytes":1000000000000`, 1),
		strings.Repeat("[", 20000), `{"groups":` + strings.Repeat(`[{"regions":`, 2000),
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) { checkSidecarText(t, text) })
}

// A good sidecar with a few bytes changed, as a disk may do it.
func TestRandomSidecars(t *testing.T) {
	canonical, err := disktest.Namespace("m").Canonical()
	require.NoError(t, err)
	rapid.Check(t, func(t *rapid.T) {
		b := append([]byte(nil), canonical...)
		for range rapid.IntRange(1, 3).Draw(t, "changes") {
			at := rapid.IntRange(0, len(b)-1).Draw(t, "at")
			switch rapid.IntRange(0, 3).Draw(t, "how") {
			case 0:
				b[at] = rapid.Byte().Draw(t, "byte")
			case 1:
				b = b[:at+1]
			case 2:
				b = append(b[:at+1], b[at:]...)
			default:
				b[at] ^= 1 << rapid.IntRange(0, 7).Draw(t, "bit")
			}
		}
		checkSidecarText(t, b)
	})
}

// Files that pretend to be huge, and things that are no files, in the places of the
// root's own: nobody reads them whole, waits for them, or needs memory for them.
func TestHugeAndOddFilesOfTheRoot(t *testing.T) {
	dir := t.TempDir()
	h := newShelf(t, dir, "m", StoreOptions{}).scanned()
	require.NoError(t, h.put(1))
	h.close()
	rootFile, sidecar := filepath.Join(dir, rootFileName), filepath.Join(h.disk.dir.path, sidecarName)
	good, err := os.ReadFile(rootFile)
	require.NoError(t, err)

	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	require.NoError(t, os.Truncate(rootFile, 1<<40))
	_, err = OpenRoot(dir, RootOptions{})
	require.ErrorIs(t, err, ErrDamagedRoot)
	_, err = Inspect(dir)
	require.ErrorIs(t, err, ErrDamagedRoot)

	require.NoError(t, os.Remove(rootFile))
	require.NoError(t, syscall.Mkfifo(rootFile, 0o600))
	opened := make(chan error, 1)
	go func() {
		_, err := OpenRoot(dir, RootOptions{})
		opened <- err
	}()
	select {
	case err = <-opened:
		require.ErrorIs(t, err, ErrDamagedRoot)
	case <-time.After(shelfPatience):
		f, err := os.OpenFile(rootFile, os.O_WRONLY, 0) // lets it go on
		require.NoError(t, err)
		require.NoError(t, f.Close())
		t.Error("opening a root waits for who writes a pipe")
	}
	require.NoError(t, os.Remove(rootFile))
	require.NoError(t, os.WriteFile(rootFile, good, 0o600))

	require.NoError(t, os.Truncate(sidecar, 1<<40))
	require.NoError(t, os.Truncate(filepath.Join(dir, lockFileName), 1<<40))
	h = newShelf(t, dir, "m", StoreOptions{}).scanned()
	require.NoError(t, h.get(1))
	h.close()
	st, err := os.Stat(sidecar)
	require.NoError(t, err)
	require.Less(t, st.Size(), int64(1000), "it was made good again")
	runtime.ReadMemStats(&after)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(treeMemory))
}
