package tier

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/disktest"
)

// filled is a payload that differs from that of every other namespace.
func filled(d *Disk, seed byte) []byte {
	b := disktest.Aligned(int(d.layout.PaddedBytes))
	for i := range b[:d.layout.PayloadBytes] {
		b[i] = seed + byte(i>>3)
	}
	return b
}

func storeIn(t *testing.T, d *Disk, n int, seed byte) {
	t.Helper()
	p := filled(d, seed)
	done := make(chan error, 1)
	require.True(t, d.Write(WriteJob{Key: shelfKey(n), Payload: p, Hash: chunk.HashPayload(p), Done: func(err error) { done <- err }}))
	require.NoError(t, <-done)
}

func fetchFrom(t *testing.T, d *Disk, n int, seed byte) error {
	t.Helper()
	dst := disktest.Used(int(d.layout.PaddedBytes))
	done := make(chan ReadResult, 1)
	d.Read(shelfKey(n), dst, func(r ReadResult) { done <- r })
	r := <-done
	want := make([]byte, len(dst))
	if r.Err == nil {
		want = filled(d, seed)
	}
	require.True(t, bytes.Equal(want, dst), "wrong bytes")
	return r.Err
}

func waitScanned(t *testing.T, s *Store, disks ...*Disk) {
	t.Helper()
	require.Eventually(t, func() bool {
		for _, d := range disks {
			if !d.Scanned() {
				return false
			}
		}
		return s.Stats().Known
	}, shelfPatience, shelfPoll)
}

// Under one root lie other models, other chunk sizes and other layouts, with the same
// keys: each run sees its own, and a file that came over from another one is a miss.
func TestOtherNamespacesAreNotAdopted(t *testing.T) {
	spaces := map[string]*chunk.Namespace{}
	for name, change := range map[string]func(n *chunk.Namespace){
		"first":       func(*chunk.Namespace) {},
		"model":       func(n *chunk.Namespace) { n.Model = "another" },
		"chunk size":  func(n *chunk.Namespace) { n.ChunkTokens, n.Groups[0].TokensPerRow = 32, 32 },
		"layout":      func(n *chunk.Namespace) { n.Groups[0].Regions[0].Name = "other" },
		"quantised":   func(n *chunk.Namespace) { n.Quantisation = "fp8" },
		"larger rows": func(n *chunk.Namespace) { n.Groups[0].Regions[0].Bytes = 20000 },
	} {
		n := disktest.Namespace("one")
		change(n)
		spaces[name] = n
	}
	dir := t.TempDir()
	seeds := map[string]byte{}
	open := func() (*Root, *Store, map[string]*Disk) {
		r, s := openStoreAt(t, dir, StoreOptions{})
		disks := map[string]*Disk{}
		for name, n := range spaces {
			d, err := s.Namespace(n)
			require.NoError(t, err)
			waitScanned(t, s, d)
			disks[name] = d
		}
		return r, s, disks
	}
	r, s, disks := open()
	for name, d := range disks {
		seeds[name] = byte(10 * (len(seeds) + 1))
		require.False(t, d.Has(shelfKey(1)), name)
		storeIn(t, d, 1, seeds[name])
	}
	storeIn(t, disks["first"], 2, seeds["first"])
	require.NoError(t, s.Close(shelfPatience))
	require.NoError(t, r.Close())

	// The chunk that only the first namespace has comes over into all others.
	file, err := os.ReadFile(disks["first"].dir.filePath(shelfKey(2)))
	require.NoError(t, err)
	for name, d := range disks {
		require.NoError(t, os.MkdirAll(d.dir.subPath(shelfKey(2)), 0o700), name)
		require.NoError(t, os.WriteFile(d.dir.filePath(shelfKey(2)), file, 0o600))
	}
	r, s, disks = open()
	for name, d := range disks {
		require.NoError(t, fetchFrom(t, d, 1, seeds[name]), name)
		err := fetchFrom(t, d, 2, seeds[name])
		if name == "first" {
			require.NoError(t, err)
			continue
		}
		require.Error(t, err, name)
		require.Eventually(t, func() bool { // a wrong size is looked at in the background
			_, err := os.Lstat(d.dir.filePath(shelfKey(2)))
			return absent(err)
		}, shelfPatience, shelfPoll, name)
	}
	st := s.Stats()
	require.Equal(t, map[string]uint64{"fingerprint": 4}, st.Corrupt)
	require.Equal(t, map[string]uint64{"size": 1}, st.Rejected)
	require.Equal(t, uint64(len(spaces)+5), st.Adopted)
	disks["model"].Remove(shelfKey(1))
	require.Eventually(t, func() bool { return s.Stats().Removed == 1 }, shelfPatience, shelfPoll)
	require.NoError(t, fetchFrom(t, disks["first"], 1, seeds["first"]), "one removes only its own")
	require.NoError(t, s.Close(shelfPatience))
	require.NoError(t, r.Close())
}

// A temp file of this very session is being written: looking through its directory
// again leaves it alone, whatever else is swept there.
func TestTempFileOfTheLiveSessionStays(t *testing.T) {
	fs := &faultFS{}
	h := openShelf(t, t.TempDir(), "m", StoreOptions{FS: fs, Durable: true}).scanned()
	require.NoError(t, h.put(1)) // the directory is there
	k := shelfKey(1)
	k[31]++ // beside it
	gate, reached := make(chan struct{}), make(chan struct{})
	open := sync.OnceFunc(func() { close(gate) })
	t.Cleanup(open)
	fs.set(func(call, path string) error {
		if call == "sync" && filepath.Ext(path) == ".tmp" { // written, and not yet published
			close(reached)
			<-gate
		}
		return nil
	})
	done := make(chan error, 1)
	require.True(t, h.disk.Write(shelfJob(k, 0, chunk.Key{}, func(err error) { done <- err })))
	<-reached
	dead := filepath.Join(filepath.Dir(h.file(1)), chunk.TempName(k, h.store.session+1, 1))
	require.NoError(t, os.WriteFile(dead, make([]byte, 100), 0o600))
	require.NoError(t, h.store.scanUnit(h.disk.dir, int(k[0])).cause)
	require.NoFileExists(t, dead)
	require.Len(t, disktest.Files(t, h.root.Path(), ".tmp"), 1)
	open()
	require.NoError(t, h.answer(done))
	require.True(t, h.disk.Has(k))
	require.Equal(t, uint64(1), h.store.Stats().Swept)
	require.Equal(t, disktest.Allocated(t, h.root.Path()), h.store.Stats().UsedBytes)
}

func TestModelNamesNeverCollide(t *testing.T) {
	long := strings.Repeat("x", 299)
	names := []string{
		"a/b", "a-b", "a@b", "a%b", "a b", "a_b", "a.b", "a%2Fb", "a%2fb", "a%252Fb", "a//b", "/a/b", "a/b/", "A/B",
		"a\\b", "a\nb", "a\x00b", ".", "..", "%", "@", "run", "LOCK", "kvtier.json", "layout.json", "zai-org/GLM-5.2",
		"modèle/é", "mode\u0300le/e\u0301", "模型/七", "модель", "🦙", long + "1", long + "2", long + "/" + long,
		strings.Repeat("é", 150), strings.Repeat("é", 149) + "e",
	}
	dir := t.TempDir()
	for round := range 2 {
		r, s := openStoreAt(t, dir, StoreOptions{})
		seen := map[string]string{}
		for i, name := range names {
			d, err := s.Namespace(disktest.Namespace(name))
			require.NoError(t, err, "%q", name)
			require.NotContains(t, seen, d.dir.name, "%q", name)
			seen[d.dir.name] = name
			require.Equal(t, dir, filepath.Dir(d.dir.path))
			waitScanned(t, s, d)
			require.Equal(t, round == 1, d.Has(shelfKey(1)), "%q", name)
			if round == 0 {
				storeIn(t, d, 1, byte(i))
			}
			require.NoError(t, fetchFrom(t, d, 1, byte(i)), "%q", name)
		}
		require.Empty(t, s.Stats().Rejected)
		require.NoError(t, s.Close(shelfPatience))
		require.NoError(t, r.Close())
	}
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	found := 0
	for _, e := range entries {
		require.LessOrEqual(t, len(e.Name()), 255)
		if _, ours := chunk.ParseDirName(e.Name()); ours {
			found++
		}
	}
	require.Equal(t, len(names), found)
}

// A sidecar in whatever state: nothing wrong is adopted, nothing is lost that a run
// of that namespace can adopt, the bytes count all the time, and one line says it.
func TestSidecarInEveryState(t *testing.T) {
	canonical, err := disktest.Namespace("m").Canonical()
	require.NoError(t, err)
	other, err := disktest.Namespace("other").Canonical()
	require.NoError(t, err)
	for name, c := range map[string]struct {
		text    []byte // nil: none
		errno   syscall.Errno
		refused error // nil: written anew
		says    string
	}{
		"missing":     {},
		"empty":       {text: []byte{}},
		"truncated":   {text: canonical[:len(canonical)/2]},
		"of a friend": {text: other, refused: ErrSidecarForeign, says: "move the directory away"},
		"newer":       {text: bytes.Replace(canonical, []byte(`"format":1`), []byte(`"format":2`), 1), refused: ErrSidecarNewer, says: "update kvtier"},
		"unreadable":  {text: canonical, errno: syscall.EACCES, refused: syscall.EACCES, says: "permission denied"},
		"sick":        {text: canonical, errno: syscall.EIO, refused: syscall.EIO, says: "input/output error"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			h := newShelf(t, dir, "m", StoreOptions{}).scanned()
			for n := range 10 {
				require.NoError(t, h.put(n))
			}
			ns := h.disk.dir.path
			h.close()
			sidecar := filepath.Join(ns, sidecarName)
			require.NoError(t, os.Remove(sidecar))
			if c.text != nil {
				require.NoError(t, os.WriteFile(sidecar, c.text, 0o600))
			}

			var log bytes.Buffer
			fs := &faultFS{}
			if c.errno != 0 {
				fs.set(func(call, path string) error {
					if path == sidecar && strings.HasPrefix(call, "open") {
						return &os.PathError{Op: call, Path: path, Err: c.errno}
					}
					return nil
				})
			}
			r, s := openStoreAt(t, dir, StoreOptions{FS: fs, CapBytes: 40 * disktest.CostBytes, Log: slog.New(slog.NewTextHandler(&log, nil))})
			counted := func() bool {
				used, real := s.Stats().UsedBytes, disktest.Allocated(t, dir)
				return s.Stats().Known && used >= real && used <= real+8192
			}
			require.Eventually(t, counted, shelfPatience, shelfPoll, "bytes count before anybody asks for them")
			d, err := s.Namespace(disktest.Namespace("m"))
			if c.refused != nil {
				require.ErrorIs(t, err, c.refused)
				require.ErrorContains(t, err, c.says)
				require.ErrorContains(t, err, filepath.Base(ns))
				require.NotContains(t, err.Error(), "\n", "one line")
				have, rerr := os.ReadFile(sidecar)
				require.NoError(t, rerr)
				require.Equal(t, c.text, have, "it is left alone")
				// Another namespace works beside it, and below the cap.
				b, err := s.Namespace(disktest.Namespace("b"))
				require.NoError(t, err)
				waitScanned(t, s, b)
				storeIn(t, b, 1, 9)
				require.NoError(t, fetchFrom(t, b, 1, 9))
				require.Zero(t, s.Stats().Adopted)
				require.Len(t, disktest.Files(t, ns, ".kvc"), 10)
				// Once the cause is gone, so is the matter.
				fs.set(nil)
				require.NoError(t, os.WriteFile(sidecar, canonical, 0o600))
				d, err = s.Namespace(disktest.Namespace("m"))
				require.NoError(t, err)
			}
			require.NotNil(t, d, "%v", err)
			waitScanned(t, s, d)
			require.Eventually(t, func() bool { return s.Stats().Adopted == 10 }, shelfPatience, shelfPoll)
			h = &shelf{t: t, root: r, store: s, disk: d}
			for n := range 10 {
				require.NoError(t, h.get(n))
			}
			have, err := os.ReadFile(sidecar)
			require.NoError(t, err)
			require.Equal(t, canonical, have)
			require.Eventually(t, counted, shelfPatience, shelfPoll)
			require.Empty(t, s.Stats().Corrupt)
			h.close()
			wantLines := 0
			if c.refused == nil {
				wantLines = 1
			}
			require.Equal(t, wantLines, strings.Count(log.String(), "\n"), log.String())
			if wantLines > 0 {
				require.Contains(t, log.String(), filepath.Base(ns))
			}
		})
	}
}

// A namespace that could not be opened because of the disk is counted all the same.
func TestNamespaceThatFailsToOpenIsCounted(t *testing.T) {
	fs := &faultFS{}
	var failing atomic.Bool
	fs.set(func(call, path string) error {
		if failing.Load() && filepath.Base(path) == sidecarTemp && call != "lstat" {
			return &os.PathError{Op: call, Path: path, Err: syscall.EIO}
		}
		return nil
	})
	h := openShelf(t, t.TempDir(), "m", StoreOptions{FS: fs}).scanned()
	failing.Store(true)
	for range 3 {
		_, err := h.store.Namespace(disktest.Namespace("second"))
		require.ErrorIs(t, err, syscall.EIO)
		require.Equal(t, disktest.Allocated(t, h.root.Path()), h.store.Stats().UsedBytes)
	}
	failing.Store(false)
	d, err := h.store.Namespace(disktest.Namespace("second"))
	require.NoError(t, err)
	waitScanned(t, h.store, d)
	storeIn(t, d, 1, 1)
	require.NoError(t, fetchFrom(t, d, 1, 1))
	require.Equal(t, disktest.Allocated(t, h.root.Path()), h.store.Stats().UsedBytes)
}

// Chunks that a run shares with people who look at them: hard links, made before or
// during a run.
func TestHardLinksAreForeign(t *testing.T) {
	dir := t.TempDir()
	h := openShelf(t, dir, "m", StoreOptions{}).scanned()
	for n := range 4 {
		require.NoError(t, h.put(n))
	}
	h.close()
	require.NoError(t, os.Link(h.file(0), filepath.Join(dir, "backup")))
	h = openShelf(t, dir, "m", StoreOptions{CapBytes: 12 * disktest.CostBytes}).scanned()
	h.wait("adoption", func() bool { return h.store.Stats().Adopted == 3 })
	require.Equal(t, map[string]uint64{"links": 1}, h.store.Stats().Rejected)
	require.ErrorIs(t, h.get(0), ErrAbsent)
	require.GreaterOrEqual(t, h.store.Stats().UsedBytes, int64(4*disktest.FileBytes), "its bytes count")
	// It goes by age as the others do, and the other name keeps its bytes.
	for n := 10; n < 30; n++ {
		require.NoError(t, h.put(n))
	}
	require.NoFileExists(t, h.file(0))
	b, err := os.ReadFile(filepath.Join(dir, "backup"))
	require.NoError(t, err)
	require.Len(t, b, disktest.FileBytes)
	require.NoError(t, errors.Join(h.put(0), h.get(0)))
}
