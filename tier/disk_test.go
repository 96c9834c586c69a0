package tier

import (
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/disktest"
	"github.com/kvtier/kvtier/internal/sys"
)

func TestDiskKeepsChunksOverARestart(t *testing.T) {
	dir := t.TempDir()
	h := openShelf(t, dir, "m", StoreOptions{}).scanned()
	for n := range 20 {
		require.NoError(t, h.put(n))
		require.True(t, h.disk.Has(shelfKey(n)))
	}
	before := h.store.Stats()
	h.close()

	h = openShelf(t, dir, "m", StoreOptions{}).scanned()
	h.wait("adoption", func() bool { return h.store.Stats().Adopted == 20 })
	require.Equal(t, before.UsedBytes, h.store.Stats().UsedBytes)
	require.Equal(t, 20, h.disk.Count())
	for n := range 20 {
		require.True(t, h.disk.Has(shelfKey(n)))
		require.NoError(t, h.get(n))
	}
	require.ErrorIs(t, h.get(99), ErrAbsent)
	require.Equal(t, map[string]uint64{"absent": 1}, h.store.Stats().Misses)
	require.Empty(t, disktest.Files(t, dir, ".tmp"))
}

func TestDiskPutOfPresentChunkCostsNothing(t *testing.T) {
	h := openShelf(t, t.TempDir(), "m", StoreOptions{}).scanned()
	require.NoError(t, h.put(1))
	h.quiet()
	before := h.store.Stats()
	for range 1000 {
		require.NoError(t, h.put(1))
	}
	after := h.store.Stats()
	require.Equal(t, before.UsedBytes, after.UsedBytes)
	require.Zero(t, after.ReservedBytes)
	require.Equal(t, uint64(1), after.Writes)
	require.Equal(t, uint64(1000), after.Present)
	require.Zero(t, after.EvictedSelf+after.EvictedOther)
}

func TestDiskPutsOfOneKeyAtOnceWriteOnce(t *testing.T) {
	fs := &faultFS{}
	h := openShelf(t, t.TempDir(), "m", StoreOptions{FS: fs}).scanned()
	gate := make(chan struct{})
	fs.set(func(call, path string) error {
		if call == "rename" && filepath.Ext(path) == ".kvc" {
			<-gate
		}
		return nil
	})
	done := make(chan error, 3)
	for range 3 {
		require.True(t, h.disk.Write(shelfJob(shelfKey(1), 0, chunk.Key{}, func(err error) { done <- err })))
	}
	close(gate)
	for range 3 {
		require.NoError(t, h.answer(done))
	}
	require.Equal(t, uint64(1), h.store.Stats().Writes)
}

func TestDiskWrongFilesAreMissesAndGo(t *testing.T) {
	flip := func(off int64) func(t *testing.T, path string) {
		return func(t *testing.T, path string) {
			b, err := os.ReadFile(path)
			require.NoError(t, err)
			b[off] ^= 0x10
			require.NoError(t, os.WriteFile(path, b, 0o600))
		}
	}
	const footer = disktest.PaddedBytes
	// refooter changes a field and makes the footer's own hash right again.
	refooter := func(change func(f *chunk.Footer)) func(t *testing.T, path string) {
		return func(t *testing.T, path string) {
			b, err := os.ReadFile(path)
			require.NoError(t, err)
			f, err := chunk.DecodeFooter(b[footer:])
			require.NoError(t, err)
			change(f)
			require.NoError(t, f.Encode(b[footer:]))
			require.NoError(t, os.WriteFile(path, b, 0o600))
		}
	}
	rehash := func(off int, to byte) func(t *testing.T, path string) {
		return func(t *testing.T, path string) {
			b, err := os.ReadFile(path)
			require.NoError(t, err)
			b[footer+off] = to
			h := chunk.HashPayload(b[footer : footer+4080])
			copy(b[footer+4080:], h[:])
			require.NoError(t, os.WriteFile(path, b, 0o600))
		}
	}
	cases := []struct {
		name, reason string
		harm         func(t *testing.T, path string)
	}{
		{"payload first bit", "payload", flip(0)},
		{"payload last byte", "payload", flip(disktest.PayloadBytes - 1)},
		{"padding", "payload", flip(footer - 1)},
		{"magic bit", "footer", flip(footer)},
		{"major bit", "footer", flip(footer + 8)},
		{"key bit", "footer", flip(footer + 16)},
		{"fingerprint bit", "footer", flip(footer + 48)},
		{"payload length bit", "footer", flip(footer + 80)},
		{"padded length bit", "footer", flip(footer + 88)},
		{"tokens bit", "footer", flip(footer + 96)},
		{"ordinal bit", "footer", flip(footer + 100)},
		{"hash kind bit", "footer", flip(footer + 108)},
		{"payload hash bit", "footer", flip(footer + 112)},
		{"parent bit", "footer", flip(footer + 128)},
		{"created bit", "footer", flip(footer + 160)},
		{"session bit", "footer", flip(footer + 168)},
		{"groups bit", "footer", flip(footer + 184)},
		{"group table bit", "footer", flip(footer + 256)},
		{"provenance bit", "footer", flip(footer + 1280)},
		{"reserved bit", "footer", flip(footer + 4000)},
		{"footer hash bit", "footer", flip(footer + 4095)},
		{"true magic of another", "magic", rehash(0, 'X')},
		{"older major", "field", rehash(8, 0)},
		{"hash kind", "field", rehash(108, 9)},
		{"key of another", "key", refooter(func(f *chunk.Footer) { f.Key[3]++ })},
		{"namespace of another", "fingerprint", refooter(func(f *chunk.Footer) { f.Fingerprint[3]++ })},
		{"other lengths", "lengths", refooter(func(f *chunk.Footer) { f.PayloadBytes-- })},
		{"other tokens", "lengths", refooter(func(f *chunk.Footer) { f.ChunkTokens++ })},
		{"other groups", "groups", refooter(func(f *chunk.Footer) { f.Groups[0].RowStride += 64 })},
		{"another hash", "payload", refooter(func(f *chunk.Footer) { f.Hash[0]++ })},
		{"zeros of the right size", "footer", func(t *testing.T, path string) {
			require.NoError(t, os.WriteFile(path, make([]byte, disktest.FileBytes), 0o600))
		}},
		{"zeros below the true footer", "payload", func(t *testing.T, path string) {
			b, err := os.ReadFile(path)
			require.NoError(t, err)
			clear(b[:footer])
			require.NoError(t, os.WriteFile(path, b, 0o600))
		}},
		{"sparse", "footer", func(t *testing.T, path string) {
			require.NoError(t, os.Truncate(path, 0))
			require.NoError(t, os.Truncate(path, disktest.FileBytes))
		}},
		{"a hole", "payload", func(t *testing.T, path string) {
			f, err := os.OpenFile(path, os.O_WRONLY, 0)
			require.NoError(t, err)
			require.NoError(t, unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 4096, 4096))
			require.NoError(t, f.Close())
		}},
		{"one page short", "size", func(t *testing.T, path string) { require.NoError(t, os.Truncate(path, disktest.FileBytes-4096)) }},
		{"one byte long", "size", func(t *testing.T, path string) { require.NoError(t, os.Truncate(path, disktest.FileBytes+1)) }},
		{"truncated", "size", func(t *testing.T, path string) { require.NoError(t, os.Truncate(path, 5000)) }},
		{"one byte short", "size", func(t *testing.T, path string) { require.NoError(t, os.Truncate(path, disktest.FileBytes-1)) }},
		{"empty", "size", func(t *testing.T, path string) { require.NoError(t, os.Truncate(path, 0)) }},
		{"extended", "size", func(t *testing.T, path string) { require.NoError(t, os.Truncate(path, disktest.FileBytes+4096)) }},
	}
	for _, restart := range []bool{false, true} {
		dir := t.TempDir()
		h := openShelf(t, dir, "m", StoreOptions{}).scanned()
		h.disk.SetProvenance([]byte(`{"D":1}`))
		want := map[string]uint64{}
		for n, c := range cases {
			require.NoError(t, h.put(n))
			c.harm(t, h.file(n))
			want[c.reason]++
		}
		require.NoError(t, h.put(1000))
		if restart {
			h.close()
			h = openShelf(t, dir, "m", StoreOptions{}).scanned()
			// A wrong size is seen without reading.
			h.wait("files of a wrong size", func() bool { return h.store.Stats().Rejected["size"] == want["size"] })
			h.wait("their end", func() bool { return h.disk.Count() == len(cases)+1-int(want["size"]) })
			delete(want, "size")
		}
		for n, c := range cases {
			err := h.get(n)
			require.Error(t, err, c.name)
			if !restart || c.reason != "size" {
				require.ErrorIs(t, err, ErrCorrupt, c.name)
			}
			require.False(t, h.disk.Has(shelfKey(n)), c.name)
			_, err = os.Lstat(h.file(n))
			require.ErrorIs(t, err, os.ErrNotExist, c.name)
		}
		require.NoError(t, h.get(1000))
		st := h.store.Stats()
		require.Equal(t, want, st.Corrupt)
		require.Empty(t, st.Errors)
		require.Equal(t, "on", st.State)
		for n := range cases { // and the place can be used again
			require.NoError(t, h.put(n))
			require.NoError(t, h.get(n))
		}
		h.quiet()
		require.GreaterOrEqual(t, h.store.Stats().UsedBytes, disktest.Allocated(t, dir))
		h.close()
	}
}

func TestDiskSwappedAndRenamedFiles(t *testing.T) {
	dir := t.TempDir()
	h := openShelf(t, dir, "m", StoreOptions{}).scanned()
	for n := range 4 {
		require.NoError(t, h.put(n))
	}
	swap := filepath.Join(dir, "swap")
	require.NoError(t, os.Rename(h.file(0), swap))
	require.NoError(t, os.Rename(h.file(1), h.file(0)))
	require.NoError(t, os.Rename(swap, h.file(1)))
	// A chunk under a name that nobody has stored, in its right place.
	require.NoError(t, os.MkdirAll(filepath.Dir(h.file(50)), 0o700))
	require.NoError(t, os.Rename(h.file(2), h.file(50)))
	h.close()

	h = openShelf(t, dir, "m", StoreOptions{}).scanned()
	h.wait("adoption", func() bool { return h.store.Stats().Adopted == 4 })
	require.ErrorIs(t, h.get(0), ErrCorrupt)
	require.ErrorIs(t, h.get(1), ErrCorrupt)
	require.ErrorIs(t, h.get(50), ErrCorrupt)
	require.ErrorIs(t, h.get(2), ErrAbsent)
	require.NoError(t, h.get(3))
	require.Equal(t, map[string]uint64{"key": 3}, h.store.Stats().Corrupt)
}

func TestDiskAdoptsOnlyWhatFits(t *testing.T) {
	dir := t.TempDir()
	h := openShelf(t, dir, "m", StoreOptions{}).scanned()
	for n := range 6 {
		require.NoError(t, h.put(n))
	}
	ns := h.disk.dir.path
	h.close()
	require.NoError(t, os.Link(h.file(0), filepath.Join(dir, "backup")))
	outside := filepath.Join(dir, "outside")
	require.NoError(t, os.Rename(h.file(1), outside))
	require.NoError(t, os.Symlink(outside, h.file(1)))
	wrongPlace := filepath.Join(ns, "zz")
	require.NoError(t, os.Mkdir(wrongPlace, 0o700))
	require.NoError(t, os.Rename(h.file(2), filepath.Join(wrongPlace, filepath.Base(h.file(2)))))
	otherSub := filepath.Dir(h.file(4))
	require.NotEqual(t, filepath.Dir(h.file(3)), otherSub)
	require.NoError(t, os.Rename(h.file(3), filepath.Join(otherSub, filepath.Base(h.file(3)))))
	require.NoError(t, os.WriteFile(filepath.Join(otherSub, "notes.txt"), []byte("x"), 0o600))

	h = openShelf(t, dir, "m", StoreOptions{}).scanned()
	h.wait("adoption", func() bool { return h.store.Stats().Adopted == 2 && h.store.Stats().Rejected["links"] == 1 })
	for n := range 4 {
		require.ErrorIs(t, h.get(n), ErrAbsent)
	}
	require.NoError(t, h.get(4))
	require.NoError(t, h.get(5))
	require.Equal(t, map[string]uint64{"links": 1, "type": 1, "name": 2, "path": 1}, h.store.Stats().Rejected)
	// A put replaces what was rejected, and nothing else; its bytes count once.
	used := h.store.Stats().UsedBytes
	require.NoError(t, h.put(0))
	require.NoError(t, h.get(0))
	require.Equal(t, used, h.store.Stats().UsedBytes)
	require.NoError(t, h.put(1))
	require.NoError(t, h.get(1))
	b, err := os.ReadFile(outside)
	require.NoError(t, err)
	require.Len(t, b, disktest.FileBytes)
}

func TestDiskNewerFilesAreMissesAndStay(t *testing.T) {
	dir := t.TempDir()
	h := openShelf(t, dir, "m", StoreOptions{}).scanned()
	newer := func(n int, grow bool) {
		b, err := os.ReadFile(h.file(n))
		require.NoError(t, err)
		f := b[len(b)-4096:]
		f[8] = 2
		sum := chunk.HashPayload(f[:4080])
		copy(f[4080:], sum[:])
		if grow {
			b = append(make([]byte, 4096), b...)
		}
		require.NoError(t, os.WriteFile(h.file(n), b, 0o600))
	}
	for n := range 4 {
		require.NoError(t, h.put(n))
	}
	newer(0, false)
	require.ErrorIs(t, h.get(0), ErrNewer)
	newer(1, true)
	require.ErrorIs(t, h.get(1), ErrNewer)
	require.False(t, h.disk.Has(shelfKey(0)))
	require.Error(t, h.put(0), "a newer file must not be replaced")
	newer(2, true)
	h.close()
	h = openShelf(t, dir, "m", StoreOptions{}).scanned()
	h.wait("a look at sizes", func() bool { return h.store.Stats().Rejected["newer"] == 2 })
	require.ErrorIs(t, h.get(0), ErrNewer)
	require.ErrorIs(t, h.get(1), ErrNewer)
	require.ErrorIs(t, h.get(2), ErrNewer)
	require.NoError(t, h.get(3))
	require.Empty(t, h.store.Stats().Corrupt)
	for n := range 4 {
		require.FileExists(t, h.file(n))
	}
}

func TestDiskVanishedFileIsAMiss(t *testing.T) {
	h := openShelf(t, t.TempDir(), "m", StoreOptions{}).scanned()
	require.NoError(t, h.put(1))
	used := h.store.Stats().UsedBytes
	require.NoError(t, os.Remove(h.file(1)))
	require.ErrorIs(t, h.get(1), ErrAbsent)
	st := h.store.Stats()
	require.Equal(t, uint64(1), st.Vanished)
	require.Equal(t, used-disktest.FileBytes, st.UsedBytes)
	require.False(t, h.disk.Has(shelfKey(1)))
	require.Empty(t, st.Errors)

	require.NoError(t, h.put(1))
	require.NoError(t, os.Remove(h.file(1)))
	h.disk.Remove(shelfKey(1)) // of a file that is gone already
	h.quiet()
	require.Empty(t, h.store.Stats().Errors)

	// The whole directory goes, sidecar and all, under a running leader.
	require.NoError(t, h.put(2))
	require.NoError(t, os.RemoveAll(h.disk.dir.path))
	require.ErrorIs(t, h.get(2), ErrAbsent)
	require.NoError(t, h.put(2))
	require.NoError(t, h.get(2))
	require.FileExists(t, filepath.Join(h.disk.dir.path, sidecarName))
}

func TestDiskRemove(t *testing.T) {
	dir := t.TempDir()
	fs := &faultFS{}
	h := openShelf(t, dir, "m", StoreOptions{FS: fs}).scanned()
	require.NoError(t, h.put(1))
	h.disk.Remove(shelfKey(1))
	require.False(t, h.disk.Has(shelfKey(1)))
	h.wait("unlink", func() bool { return h.store.Stats().Removed == 1 })
	require.Empty(t, disktest.Files(t, dir, ".kvc"))

	// While it is written, at each step: it never becomes visible.
	for _, step := range []string{"open direct", "write direct", "rename"} {
		fs.set(func(call, path string) error {
			if call == step && filepath.Base(filepath.Dir(path)) == chunk.SubDir(shelfKey(2)) {
				h.disk.Remove(shelfKey(2))
			}
			return nil
		})
		require.ErrorIs(t, h.put(2), ErrRemoved, step)
		fs.set(nil)
		require.False(t, h.disk.Has(shelfKey(2)))
		h.quiet()
		h.wait(step, func() bool { return len(disktest.Files(t, dir, ".kvc")) == 0 })
	}
	require.NoError(t, h.put(2))
	h.disk.Remove(shelfKey(2))
	h.close()
	h = openShelf(t, dir, "m", StoreOptions{}).scanned()
	require.False(t, h.disk.Has(shelfKey(2)), "what was removed came back")
}

func TestDiskSidecar(t *testing.T) {
	dir := t.TempDir()
	h := openShelf(t, dir, "m", StoreOptions{}).scanned()
	require.NoError(t, h.put(1))
	sidecar := filepath.Join(h.disk.dir.path, sidecarName)
	canonical, err := disktest.Namespace("m").Canonical()
	require.NoError(t, err)
	b, err := os.ReadFile(sidecar)
	require.NoError(t, err)
	require.Equal(t, canonical, b)
	h.close()

	for name, text := range map[string][]byte{"damaged": []byte("{"), "empty": {}, "cut": canonical[:len(canonical)-1], "reordered": append([]byte(" "), canonical...)} {
		require.NoError(t, os.WriteFile(sidecar, text, 0o600))
		h = openShelf(t, dir, "m", StoreOptions{}).scanned()
		require.NoError(t, h.get(1), name)
		b, err = os.ReadFile(sidecar)
		require.NoError(t, err)
		require.Equal(t, canonical, b, name)
		require.Equal(t, uint64(1), h.store.Stats().Sidecars)
		h.close()
	}
	require.NoError(t, os.Remove(sidecar))
	h = openShelf(t, dir, "m", StoreOptions{}).scanned()
	require.NoError(t, h.get(1))
	h.close()

	// What describes another namespace stays, and so does what is newer.
	other, err := disktest.Namespace("other").Canonical()
	require.NoError(t, err)
	newer := []byte(`{"format":9}`)
	for want, text := range map[error][]byte{ErrSidecarForeign: other, ErrSidecarNewer: newer} {
		require.NoError(t, os.WriteFile(sidecar, text, 0o600))
		r, s := openStoreAt(t, dir, StoreOptions{})
		_, err = s.Namespace(disktest.Namespace("m"))
		require.ErrorIs(t, err, want)
		require.NoError(t, s.Close(shelfPatience))
		require.NoError(t, r.Close())
		b, err = os.ReadFile(sidecar)
		require.NoError(t, err)
		require.Equal(t, text, b)
		require.FileExists(t, h.file(1))
	}
}

func TestDiskSidecarIsThereBeforeTheFirstChunk(t *testing.T) {
	fs := &faultFS{}
	var synced, early atomic.Bool
	fs.set(func(call, path string) error {
		switch {
		case call == "sync" && filepath.Base(path) == sidecarTemp:
			synced.Store(true)
		case call == "rename" && filepath.Base(path) == sidecarName && !synced.Load():
			early.Store(true)
		case filepath.Ext(path) == ".tmp" && filepath.Base(path) != sidecarTemp:
			if _, err := os.Lstat(filepath.Join(filepath.Dir(filepath.Dir(path)), sidecarName)); err != nil {
				early.Store(true)
			}
		}
		return nil
	})
	h := openShelf(t, t.TempDir(), "m", StoreOptions{FS: fs}).scanned()
	require.NoError(t, h.put(1))
	require.True(t, synced.Load())
	require.False(t, early.Load())
}

func TestDiskDirectoryRenamedByPeople(t *testing.T) {
	dir := t.TempDir()
	h := openShelf(t, dir, "m", StoreOptions{}).scanned()
	require.NoError(t, h.put(1))
	old := h.disk.dir.path
	h.close()
	require.NoError(t, os.Rename(old, filepath.Join(dir, "llama-test@"+h.disk.dir.prefix)))
	h = openShelf(t, dir, "m", StoreOptions{}).scanned()
	require.NoError(t, h.get(1))
	require.NoDirExists(t, old)
}

func TestDiskProbeFindsByNameDuringTheScan(t *testing.T) {
	dir := t.TempDir()
	h := openShelf(t, dir, "m", StoreOptions{}).scanned()
	var keys []chunk.Key
	for n := range 10 {
		require.NoError(t, h.put(n))
		keys = append(keys, shelfKey(n))
	}
	keys = append(keys, shelfKey(77), shelfKey(78))
	h.close()

	fs := &faultFS{}
	gate := make(chan struct{})
	ns := h.disk.dir.path
	fs.set(func(call, path string) error {
		if call == "readdir" && path == ns {
			<-gate
		}
		return nil
	})
	h = openShelf(t, dir, "m", StoreOptions{FS: fs})
	require.False(t, h.disk.Scanned())
	require.False(t, h.disk.Has(keys[0]))
	require.Zero(t, h.disk.Probe(keys, 0))
	require.Equal(t, 10, h.disk.Probe(keys, shelfPatience))
	require.True(t, h.disk.Has(keys[9]))
	require.NoError(t, h.get(3))
	// Bytes are not known: a write waits, a removal counts at once.
	done := make(chan error, 1)
	require.True(t, h.disk.Write(shelfJob(shelfKey(20), 0, chunk.Key{}, func(err error) { done <- err })))
	h.disk.Remove(shelfKey(4))
	h.wait("removal", func() bool { return h.store.Stats().Removed == 1 })
	require.Equal(t, 4, h.disk.Probe(keys, shelfPatience))
	require.Empty(t, done)
	require.Equal(t, "scanning", h.store.Stats().State)
	close(gate)
	require.NoError(t, h.answer(done))
	h.scanned()
	require.Equal(t, 10, h.disk.Count(), "10 - 1 removed + 1 written, each once")
	require.Equal(t, uint64(9+1), h.store.Stats().Adopted)
}

func TestDiskSweepsTempsOfDeadSessions(t *testing.T) {
	dir := t.TempDir()
	h := openShelf(t, dir, "m", StoreOptions{}).scanned()
	require.NoError(t, h.put(1))
	sub := filepath.Dir(h.file(1))
	ns := h.disk.dir.path
	h.close()
	for n := range uint64(3) {
		require.NoError(t, os.WriteFile(filepath.Join(sub, chunk.TempName(shelfKey(1), 7, n)), make([]byte, 100), 0o600))
	}
	require.NoError(t, os.WriteFile(filepath.Join(ns, sidecarTemp), []byte("x"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, rootFileName+".0123456789abcdef"+rootTempTail), []byte("x"), 0o600))
	keep := filepath.Join(sub, "mine.tmp")
	require.NoError(t, os.WriteFile(keep, []byte("x"), 0o600))
	h = openShelf(t, dir, "m", StoreOptions{}).scanned()
	require.Equal(t, []string{keep}, disktest.Files(t, dir, ".tmp"))
	require.Empty(t, disktest.Files(t, dir, rootTempTail))
	require.Equal(t, uint64(5), h.store.Stats().Swept)
	require.NoError(t, h.get(1))
}

func TestDiskDirectIOFallsBack(t *testing.T) {
	for _, call := range []string{"open direct", "write direct", "read direct"} {
		fs := &faultFS{}
		fs.set(failing(call, syscall.EINVAL))
		h := openShelf(t, t.TempDir(), "m", StoreOptions{FS: fs}).scanned()
		require.NoError(t, h.put(1), call)
		require.NoError(t, h.get(1), call)
		require.False(t, h.store.Stats().Direct, call)
		require.Empty(t, h.store.Stats().Errors, call)
		fs.set(func(c, path string) error {
			if c == "open direct" {
				return errors.New("tried again")
			}
			return nil
		})
		require.NoError(t, h.put(2), call)
		require.NoError(t, h.get(2), call)
		require.Empty(t, disktest.Files(t, h.root.Path(), ".tmp"))
		h.close()
	}
}

func TestDiskShortTransfers(t *testing.T) {
	fs := &faultFS{short: true}
	for _, direct := range []bool{true, false} {
		h := openShelf(t, t.TempDir(), "m", StoreOptions{FS: fs}).scanned()
		h.store.direct.Store(direct)
		require.NoError(t, h.put(1))
		require.NoError(t, h.get(1))
		require.Equal(t, direct, h.store.Stats().Direct)
		h.close()
	}
}

func TestDiskDurableSyncsBeforeTheName(t *testing.T) {
	fs := &faultFS{}
	var order []string
	h := openShelf(t, t.TempDir(), "m", StoreOptions{FS: fs, Durable: true}).scanned()
	fs.set(func(call, path string) error {
		if call == "sync" || call == "rename" {
			order = append(order, call)
		}
		return nil
	})
	require.NoError(t, h.put(1))
	fs.set(nil)
	require.Contains(t, [][]string{{"sync", "rename"}, {"sync", "rename", "sync", "rename"}}, order)
}

func TestDiskBuffersOfAWrongSize(t *testing.T) {
	h := openShelf(t, t.TempDir(), "m", StoreOptions{}).scanned()
	done := make(chan ReadResult, 1)
	h.disk.Read(shelfKey(1), make([]byte, 10), func(r ReadResult) { done <- r })
	require.ErrorIs(t, (<-done).Err, ErrIO)
	require.False(t, h.disk.Write(WriteJob{Key: shelfKey(1), Payload: make([]byte, 10), Done: func(error) {}}))
	require.Equal(t, map[string]uint64{"size": 1}, h.store.Stats().Dropped)
}

func TestDiskRecencyIsInTheMtime(t *testing.T) {
	dir := t.TempDir()
	var clock atomic.Int64
	clock.Store(time.Now().UnixNano())
	o := StoreOptions{Now: func() time.Time { return time.Unix(0, clock.Load()) }}
	h := openShelf(t, dir, "m", o).scanned()
	mtime := func(n int) int64 {
		st, err := sys.Lstat(h.file(n))
		require.NoError(t, err)
		return st.ModifiedNS
	}
	began := clock.Load()
	require.NoError(t, h.put(0))
	// Later in the prefix, and later by the clock: still older than its parent.
	clock.Add(int64(time.Second))
	require.NoError(t, h.putAfter(1, 1, shelfKey(0)))
	require.NoError(t, h.putAfter(5, 5, shelfKey(4)))
	require.Equal(t, began, mtime(0))
	require.Equal(t, began-1000, mtime(1))
	require.Equal(t, clock.Load()-5000, mtime(5))

	// Touches are coalesced ...
	for range 100 {
		h.disk.Touch(shelfKey(0), 0)
	}
	clock.Add(int64(10 * time.Second))
	first := clock.Load()
	h.disk.Touch(shelfKey(0), 0)
	h.wait("touch", func() bool { return mtime(0) == first })
	clock.Add(int64(time.Second))
	h.disk.Touch(shelfKey(0), 0)
	h.disk.Touch(shelfKey(1), 1)
	last := clock.Load()
	h.wait("touch", func() bool { return mtime(1) == last-1000 })
	require.Equal(t, first, mtime(0))
	h.wait("count", func() bool { return h.store.Stats().Touched >= 2 })
	require.Equal(t, uint64(2), h.store.Stats().Touched)
	h.close() // ... and all written at close.
	require.Equal(t, last, mtime(0))
	require.NoError(t, os.Chtimes(h.file(5), time.Time{}, time.Unix(0, last).Add(time.Hour)))

	// After a restart a time in the future is now.
	h = openShelf(t, dir, "m", o).scanned()
	h.store.mu.Lock()
	defer h.store.mu.Unlock()
	require.Equal(t, last, h.disk.dir.index.find(shelfKey(5)).stamp)
	require.Equal(t, last-1000, h.disk.dir.index.find(shelfKey(1)).stamp)
}
