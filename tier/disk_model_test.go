package tier

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/disktest"
)

// With room for everything, the tier holds exactly what was put and not removed,
// whatever happens in between.
func TestDiskAgainstAModel(t *testing.T) {
	const keys = 9
	base := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		dir, err := os.MkdirTemp(base, "")
		require.NoError(t, err)
		h := newShelf(t, dir, "m", StoreOptions{}).scanned()
		defer func() { h.close() }()
		on := map[int]bool{}
		key := rapid.IntRange(0, keys-1)
		t.Repeat(map[string]func(*rapid.T){
			"put": func(t *rapid.T) {
				n := key.Draw(t, "key")
				require.NoError(t, h.put(n))
				on[n] = true
			},
			"get": func(t *rapid.T) {
				n := key.Draw(t, "key")
				if err := h.get(n); on[n] {
					require.NoError(t, err)
				} else {
					require.ErrorIs(t, err, ErrAbsent)
				}
			},
			"remove": func(t *rapid.T) {
				n := key.Draw(t, "key")
				h.disk.Remove(shelfKey(n))
				delete(on, n)
			},
			"touch": func(t *rapid.T) { h.disk.Touch(shelfKey(key.Draw(t, "key")), 3) },
			"hold":  func(t *rapid.T) { h.disk.Hold(shelfKey(key.Draw(t, "key"))) },
			"lose": func(t *rapid.T) { // somebody deletes a file
				n := key.Draw(t, "key")
				if on[n] {
					require.NoError(t, os.Remove(h.file(n)))
					require.ErrorIs(t, h.get(n), ErrAbsent)
					delete(on, n)
				}
			},
			"harm": func(t *rapid.T) {
				n := key.Draw(t, "key")
				if !on[n] {
					return
				}
				b, err := os.ReadFile(h.file(n))
				require.NoError(t, err)
				b[rapid.IntRange(0, len(b)-1).Draw(t, "byte")] ^= 1 << rapid.IntRange(0, 7).Draw(t, "bit")
				require.NoError(t, os.WriteFile(h.file(n), b, 0o600))
				require.ErrorIs(t, h.get(n), ErrCorrupt)
				delete(on, n)
			},
			"reopen": func(t *rapid.T) {
				h.close()
				h = newShelf(t, dir, "m", StoreOptions{})
				if rapid.Bool().Draw(t, "wait") {
					h.scanned()
				}
			},
			"": func(t *rapid.T) {
				h.scanned() // Has knows what it is asked for only after that
				count := 0
				for n := range keys {
					require.Equal(t, on[n], h.disk.Has(shelfKey(n)), n)
					if on[n] {
						count++
					}
				}
				require.Equal(t, count, h.disk.Count())
				h.quiet()
				require.LessOrEqual(t, disktest.Allocated(t, dir), h.store.Stats().UsedBytes)
			},
		})
	})
}

// Under pressure and from many sides at once: never a wrong byte, never over the
// cap, every answer exactly once, and the books are right in the end.
func TestDiskUnderPressure(t *testing.T) {
	disk, mounted := ownDisk(t, "64m")
	dir := filepath.Join(disk, "root")
	limit := int64(60 * disktest.CostBytes)
	for round := range 3 {
		stop := sample(t, disk, mounted)
		h := openShelf(t, dir, "m", StoreOptions{CapBytes: limit, DirtyBytes: 20 * disktest.PaddedBytes})
		d, err := h.store.Namespace(disktest.Namespace("second"))
		require.NoError(t, err)
		other := &shelf{t: t, root: h.root, store: h.store, disk: d}
		var all sync.WaitGroup
		for w := range 4 {
			all.Go(func() {
				for i := range 150 {
					n := (i*7 + w*31 + round) % 120
					s := h
					if w == 3 {
						s = other
					}
					switch {
					case i%11 == 0:
						s.disk.Remove(shelfKey(n))
					case i%3 == 0:
						if err := s.get(n); err != nil && !errors.Is(err, ErrAbsent) {
							t.Error(err)
						}
					default:
						answers := make(chan error, 2)
						if s.disk.Write(shelfJob(shelfKey(n), uint32(n), chunk.Key{}, func(err error) { answers <- err })) {
							if err := s.answer(answers); err != nil && !errors.Is(err, ErrRemoved) && !errors.Is(err, ErrNoRoom) {
								t.Error(err)
							}
						}
						s.disk.Touch(shelfKey(n), uint32(n))
					}
				}
			})
		}
		all.Wait()
		h.scanned().quiet()
		st := h.store.Stats()
		require.Empty(t, st.Errors)
		require.Empty(t, st.Corrupt)
		require.Zero(t, st.ReservedBytes)
		require.Zero(t, st.DirtyBytes)
		require.Positive(t, st.EvictedSelf+st.EvictedOther)
		require.Len(t, disktest.Files(t, dir, ".kvc"), h.disk.Count()+other.disk.Count())
		real := disktest.Allocated(t, dir)
		require.LessOrEqual(t, real, st.UsedBytes)
		require.LessOrEqual(t, st.UsedBytes-real, int64(64<<10))
		h.close()
		require.LessOrEqual(t, stop(), limit)
	}
}
