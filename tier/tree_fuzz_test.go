package tier

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/disktest"
	"github.com/kvtier/kvtier/internal/sys"
)

// treeMemory is far more than looking at any tree takes, and far less than the files
// of one may pretend to have.
const treeMemory = 64 << 20

const treeKeys = 4

// treeFiles are the bytes of chunk files as the tier writes them.
var treeFiles = sync.OnceValue(func() (files [treeKeys][]byte) {
	for i := range files {
		k := shelfKey(i)
		ns := disktest.Namespace("m")
		l, err := ns.Layout()
		fp, ferr := ns.Fingerprint()
		page := make([]byte, chunk.FooterBytes)
		payload := disktest.Payload(k)
		f := l.Footer()
		f.Key, f.Fingerprint, f.Hash = k, fp, chunk.HashPayload(payload)
		if err = errors.Join(err, ferr, f.Encode(page)); err != nil {
			panic(err)
		}
		files[i] = append(bytes.Clone(payload), page...)
	}
	return files
})

// draw takes decisions from bytes, so that a fuzzer can vary them.
type draw struct{ b []byte }

func (d *draw) n(limit int) int {
	if len(d.b) == 0 {
		return 0
	}
	v := int(d.b[0])
	d.b = d.b[1:]
	return v % limit
}

// text is at most n bytes that can be a name.
func (d *draw) text(n int) string {
	n = min(n, len(d.b))
	s := strings.Map(func(r rune) rune {
		if r == '/' || r == 0 {
			return '_'
		}
		return r
	}, string(d.b[:n]))
	d.b = d.b[n:]
	if s == "" || s == "." || s == ".." {
		return "x"
	}
	return s
}

// tree is a root that somebody has filled without kvtier.
type tree struct {
	t       rapid.TB
	root    string
	ns      string // directory of the namespace of the shelf
	outside string // a file that links lead to
	away    string // a directory that links lead to, with files that look like chunks
}

func (x *tree) must(err error) {
	x.t.Helper()
	if err != nil && !errors.Is(err, fs.ErrExist) && !errors.Is(err, syscall.ENAMETOOLONG) && !errors.Is(err, syscall.ENOTDIR) && !errors.Is(err, syscall.EISDIR) {
		require.NoError(x.t, err)
	}
}

// content of a file: right, or wrong in one of many ways.
func (x *tree) content(d *draw, key int) []byte {
	b := bytes.Clone(treeFiles()[key%treeKeys])
	switch d.n(10) {
	case 0:
		return treeFiles()[d.n(treeKeys)]
	case 1:
		b[d.n(256)*len(b)/256] ^= 1 << d.n(8)
	case 2: // a field that has to be right, in a footer whose own hash is
		page := b[disktest.FileBytes-chunk.FooterBytes:]
		at := d.n(114)
		for _, free := range [][2]int{{10, 2}, {100, 12}} { // minor version; ordinal to reserved
			if at >= free[0] {
				at += free[1]
			}
		}
		page[at] ^= 1 << d.n(8)
		sum := chunk.HashPayload(page[:4080])
		copy(page[4080:], sum[:])
	case 3:
		return b[:d.n(256)*len(b)/256]
	case 4:
		return append(b, make([]byte, 1+d.n(256))...)
	case 5:
		return []byte(d.text(d.n(40)))
	}
	return b
}

// add puts one thing somewhere into the tree.
func (x *tree) add(d *draw) {
	i := d.n(treeKeys + 2)
	k := shelfKey(i)
	sub := filepath.Join(x.ns, chunk.SubDir(k))
	other := filepath.Join(x.root, "m@00112233445566778899aabbccddeeff")
	dir := []string{sub, sub, sub, sub, filepath.Join(x.ns, chunk.SubDir(shelfKey(i+1))), x.ns, x.root,
		filepath.Join(x.ns, "zz"), filepath.Join(x.ns, strings.ToUpper(chunk.SubDir(k))), filepath.Join(other, chunk.SubDir(k)), other}[d.n(11)]
	name := []string{chunk.FileName(k), chunk.FileName(k), chunk.FileName(k), strings.ToUpper(chunk.FileName(k)), chunk.FileName(k) + "x",
		chunk.TempName(k, 7, uint64(d.n(256))), k.String() + ".07.1.tmp", sidecarName, sidecarTemp}[d.n(9)]
	if d.n(8) == 0 {
		name = d.text(1 + d.n(20))
	}
	path := filepath.Join(dir, name)
	if dir == x.root && (name == rootFileName || name == lockFileName || name == runDirName) {
		return // a damaged kvtier.json is told about when the root is opened
	}
	x.must(os.MkdirAll(dir, 0o700))
	switch d.n(12) {
	case 0:
		_ = os.Remove(path)
		x.must(os.Symlink(x.outside, path))
	case 1:
		x.must(os.MkdirAll(path, 0o700))
	case 2:
		x.must(syscall.Mkfifo(path, 0o600))
	case 3:
		x.write(path, x.content(d, i))
		if st, err := os.Lstat(path); err == nil && st.Mode().IsRegular() {
			x.must(os.Link(path, filepath.Join(x.root, fmt.Sprintf("link%d", len(d.b)))))
		}
	case 4: // a whole subdirectory somewhere else
		if os.RemoveAll(sub) == nil {
			x.must(os.Symlink(x.away, sub))
		}
	case 5: // as long as the largest file there can be, without taking any room
		x.write(path, []byte("sparse"))
		if st, err := os.Lstat(path); err == nil && st.Mode().IsRegular() {
			x.must(os.Truncate(path, 1<<40))
		}
	default:
		x.write(path, x.content(d, i))
	}
}

func (x *tree) write(path string, b []byte) {
	if st, err := os.Lstat(path); err == nil && !st.Mode().IsRegular() {
		return
	}
	x.must(os.WriteFile(path, b, 0o600))
}

// snapshot gives what may not change: all that is not the cache's by its place, its
// name and its type.
func (x *tree) snapshot() map[string]string {
	found := map[string]string{}
	require.NoError(x.t, filepath.WalkDir(x.root, func(path string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) || err != nil && e != nil && e.Type()&fs.ModeSymlink != 0 {
			return nil
		}
		require.NoError(x.t, err)
		name, dir := filepath.Base(path), filepath.Dir(path)
		_, inNamespace := chunk.ParseDirName(filepath.Base(filepath.Dir(dir)))
		k, isChunk := chunk.ParseFileName(name)
		temp, _, _, isTemp := chunk.ParseTempName(name)
		_, isSub := parseSubName(filepath.Base(dir))
		regular := e.Type().IsRegular()
		switch {
		case e.IsDir(),
			dir == x.root && (name == rootFileName || name == lockFileName || isRootTemp(name) && regular),
			filepath.Dir(dir) == x.root && (name == sidecarName || name == sidecarTemp && regular),
			inNamespace && isSub && isChunk && chunk.SubDir(k) == filepath.Base(dir),
			inNamespace && isSub && isTemp && regular && chunk.SubDir(temp) == filepath.Base(dir):
			return nil
		case regular:
			if st, err := os.Stat(path); err == nil && st.Size() < 1<<20 {
				b, err := os.ReadFile(path)
				require.NoError(x.t, err)
				found[path] = string(b)
				return nil
			}
		}
		found[path] = e.Type().String()
		return nil
	}))
	return found
}

// right says whether the file of a chunk is exactly what the tier would have written.
func (x *tree) right(i int) bool {
	k := shelfKey(i)
	sub := filepath.Join(x.ns, chunk.SubDir(k))
	if st, err := os.Lstat(sub); err != nil || !st.IsDir() {
		return false
	}
	st, err := sys.Lstat(filepath.Join(sub, chunk.FileName(k)))
	if err != nil || !st.Regular() || st.Links != 1 || st.Size != disktest.FileBytes || i >= treeKeys {
		return false
	}
	b, err := os.ReadFile(filepath.Join(sub, chunk.FileName(k)))
	require.NoError(x.t, err)
	return bytes.Equal(b, treeFiles()[i])
}

// checkTree makes a tree from bytes and lets the tools and the tier loose on it.
func checkTree(t rapid.TB, data []byte) {
	base, err := os.MkdirTemp("", "kvtier-tree")
	require.NoError(t, err)
	defer os.RemoveAll(base)
	fp, err := disktest.Namespace("m").Fingerprint()
	require.NoError(t, err)
	x := &tree{t: t, root: filepath.Join(base, "root"), outside: filepath.Join(base, "else", chunk.FileName(shelfKey(0)))}
	x.ns = filepath.Join(x.root, chunk.DirName("m", fp))
	require.NoError(t, os.MkdirAll(x.ns, 0o700))
	require.NoError(t, os.MkdirAll(filepath.Dir(x.outside), 0o700))
	require.NoError(t, os.WriteFile(x.outside, treeFiles()[0], 0o600))
	x.away = filepath.Join(base, "away")
	require.NoError(t, os.MkdirAll(x.away, 0o700))
	for i, b := range treeFiles() {
		require.NoError(t, os.WriteFile(filepath.Join(x.away, chunk.FileName(shelfKey(i))), b, 0o600))
	}
	canonical, err := disktest.Namespace("m").Canonical()
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(x.ns, sidecarName), canonical, 0o600))
	d := &draw{data}
	for range d.n(16) + 1 {
		x.add(d)
	}
	var want [treeKeys + 2]bool
	for i := range want {
		want[i] = x.right(i)
	}
	foreigners, away := x.snapshot(), names(t, x.away)

	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	x.inspect(want[:])
	x.open(want[:])
	runtime.ReadMemStats(&after)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(treeMemory), "bytes of memory for a tree of a few files")
	require.Equal(t, foreigners, x.snapshot(), "something was changed that is not the cache's")
	require.Equal(t, away, names(t, x.away), "something was changed behind a link")
	b, err := os.ReadFile(x.outside)
	require.NoError(t, err)
	require.Equal(t, treeFiles()[0], b)
}

// names lists a directory, with sizes and times.
func names(t rapid.TB, dir string) (lines []string) {
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, e := range entries {
		info, err := e.Info()
		require.NoError(t, err)
		lines = append(lines, fmt.Sprint(e.Name(), info.Mode(), info.Size(), info.ModTime()))
	}
	return lines
}

// inspect does what the tools do that change nothing.
func (x *tree) inspect(want []bool) {
	i, err := Inspect(x.root)
	require.NoError(x.t, err)
	require.NoError(x.t, i.WalkBeside(func(Entry) error { return nil }))
	all, err := i.Namespaces()
	require.NoError(x.t, err)
	for _, n := range all {
		var v *Verifier
		if n.Sidecar == SidecarGood {
			v, err = n.Verifier()
			require.NoError(x.t, err)
		}
		good := map[chunk.Key]bool{}
		require.NoError(x.t, n.Walk(func(e Entry) error {
			if e.Kind == EntryChunk {
				require.Equal(x.t, filepath.Join(n.path, chunk.SubDir(e.Key), chunk.FileName(e.Key)), e.Path)
				_, _ = n.Footer(e)
			}
			if e.Good() && v != nil && v.Check(e.Key).State == CheckGood {
				good[e.Key] = true
			}
			return nil
		}))
		if v != nil {
			require.NoError(x.t, v.Close())
		}
		for k := range want {
			if n.path == x.ns && n.Sidecar == SidecarGood {
				require.Equal(x.t, want[k], good[shelfKey(k)], "verify of chunk %d", k)
			}
		}
	}
}

// open has the tier adopt the tree, and reads every chunk that might be there.
func (x *tree) open(want []bool) {
	r, err := OpenRoot(x.root, RootOptions{})
	require.NoError(x.t, err)
	ok, _, err := r.TryLock()
	require.NoError(x.t, err)
	require.True(x.t, ok)
	s, err := OpenStore(r, StoreOptions{CapBytes: 1 << 50, Log: slog.New(slog.DiscardHandler), Tick: 5 * time.Millisecond})
	require.NoError(x.t, err)
	defer func() {
		require.NoError(x.t, s.Close(shelfPatience))
		require.NoError(x.t, r.Close())
	}()
	disk, err := s.Namespace(disktest.Namespace("m"))
	if err != nil {
		return // something stands in the place of its sidecar
	}
	h := &shelf{t: x.t, root: r, store: s, disk: disk}
	h.scanned()
	for i := range want {
		err := h.get(i) // which compares every byte
		require.Equal(x.t, want[i], err == nil, "chunk %d: %v", i, err)
	}
	require.Zero(x.t, s.Stats().BreakerTrips)
}

func FuzzTree(f *testing.F) {
	f.Add([]byte{})
	for a := range byte(11) { // each place with each name, each kind, each content
		f.Add([]byte{15, 0, a, 0, 1, 5, 0, 0, 1, a, 1, 1, 5, a, 2, 2, 2, 2, 1, a, 3, 3, a, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, a, a, a})
		f.Add([]byte{3, 0, 0, 0, 1, 5, a, 9, 9, 9, 1, 0, 0, 1, 5, 0, a, 2, 0, a, 2, 1, a, 8, 7})
	}
	f.Fuzz(func(t *testing.T, data []byte) { checkTree(t, data) })
}

// Trees at random, so that every run sees new ones.
func TestRandomTrees(t *testing.T) {
	checks := 60
	if testing.Short() {
		checks = 10
	}
	for seed := range checks {
		data := rapid.SliceOfN(rapid.Byte(), 20, 300).Example(int(time.Now().UnixNano()>>8) + seed)
		if !t.Run(strconv.Itoa(seed), func(t *testing.T) { checkTree(t, data) }) {
			t.Logf("drawn from %x", data)
			return
		}
	}
}
