package crash

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/disktest"
	"github.com/kvtier/kvtier/internal/sys"
	"github.com/kvtier/kvtier/tier"
)

// What an earlier run has left for a later one, whose cap is smaller: it counts what
// lies there, sweeps, judges, and shrinks, before and while it works.
const (
	earlier  = 16 // chunks, the oldest first
	removed  = earlier - 2
	wrong    = 22 // has a file of a wrong size, and is younger
	damaged  = 23 // the same with a file in which a bit is wrong
	newOnes  = 4  // chunks that a later run puts: newChunk
	laterCap = 12 * disktest.CostBytes
	// laterFiles is for how many there is room in any case, beside the directories, what
	// eviction keeps free, and one write.
	laterFiles = 8
)

// newChunk is the i-th that a later run puts. The last one is what went first, and comes
// again.
func newChunk(i int) int {
	if i == newOnes-1 {
		return 0
	}
	return 30 + i
}

// wrongSize is what a file of a wrong size holds; deadTemp what a temp file does.
var wrongSize, deadTemp = make([]byte, 3*4096+100), make([]byte, 9000)

// namesOf gives the paths of what lies in a root beside the chunks. The temp files are not
// where most chunks are: what cannot be listed counts as the fullest subdirectory that can.
func namesOf(t require.TestingT, root string) (sidecar string, temps []string) {
	ns := disktest.Namespace("crash/model")
	fp, err := ns.Fingerprint()
	require.NoError(t, err)
	dir := filepath.Join(root, chunk.DirName(ns.Model, fp))
	temp := func(n int, number uint64) string {
		return filepath.Join(dir, chunk.SubDir(key(n)), chunk.TempName(key(n), 7, number))
	}
	return filepath.Join(dir, "layout.json"), []string{temp(1, 1), temp(4, 2), filepath.Join(dir, "layout.json.tmp")}
}

// usedRoot fills a real directory.
func usedRoot(t *testing.T, dir string) {
	t.Helper()
	b := open(t, dir, tier.StoreOptions{}).scanned()
	for n := range earlier {
		require.NoError(t, b.put(n))
	}
	require.NoError(t, b.put(wrong))
	require.NoError(t, b.put(damaged))
	path := func(n int) string { return b.path(dir, n) }
	b.close()
	require.NoError(t, os.WriteFile(path(wrong), wrongSize, 0o600))
	spoil(t, path(damaged))
	sidecar, temps := namesOf(t, dir)
	require.NoError(t, os.Truncate(sidecar, 50))
	for _, temp := range temps {
		require.NoError(t, os.WriteFile(temp, deadTemp, 0o600))
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "kvtier.json.0123456789abcdef.new"), nil, 0o600))
	began := time.Now().Add(-time.Hour)
	for n := range earlier {
		require.NoError(t, sys.SetModified(path(n), began.Add(time.Duration(n)*time.Minute).UnixNano()))
	}
}

// spoil turns a bit of a file, and leaves its times as they are.
func spoil(t *testing.T, path string) {
	t.Helper()
	st, err := sys.Lstat(path)
	require.NoError(t, err)
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	b[100] ^= 1
	require.NoError(t, os.WriteFile(path, b, 0o600))
	require.NoError(t, sys.SetModified(path, st.ModifiedNS))
}

// openLater opens the tier. On a busy machine counting takes longer than a namespace
// waits for it.
func openLater(t rapid.TB, dir string, o tier.StoreOptions) *box {
	t.Helper()
	for end := time.Now().Add(patience); ; {
		b, err := tryOpen(t, dir, o)
		if !errors.Is(err, tier.ErrNoRoom) || time.Now().After(end) {
			require.NoError(t, err)
			return b
		}
	}
}

// laterWork is what the process does that is killed.
func laterWork(b *box, say func(format string, args ...any)) {
	for i := range newOnes { // the first one is put before it is known what lies there
		require.NoError(b.t, b.put(newChunk(i)))
		say("put %d", newChunk(i))
	}
	say("removing")
	b.disk.Remove(key(removed))
	b.idle()
	say("removed")
	require.NoError(b.t, b.get(earlier-1))
	b.disk.Touch(key(earlier-1), 0)
	require.ErrorIs(b.t, b.get(damaged), tier.ErrCorrupt)
}

// TestLaterRunKilledAtEachSystemCall kills a process that takes over what an earlier
// one has left, at the n-th system call for every n.
func TestLaterRunKilledAtEachSystemCall(t *testing.T) {
	used := filepath.Join(t.TempDir(), "used")
	usedRoot(t, used)
	for _, durable := range []bool{false, true} {
		t.Run(fmt.Sprintf("durable %v", durable), func(t *testing.T) {
			killedAtEach(t, childWork{Cap: laterCap, Later: true, Durable: durable}, func(w childWork) (look func(said string)) {
				copyTree(t, used, w.Dir)
				first := disktest.Allocated(t, w.Dir)
				return func(said string) { afterLaterKill(t, w, said, first) }
			})
		})
	}
}

// afterLaterKill looks at what a killed run has left; first: so much lay there before it.
func afterLaterKill(t *testing.T, w childWork, said string, first int64) {
	t.Helper()
	at := fmt.Sprintf("call %d after %q", w.KillAt, said)
	require.Greater(t, first, int64(laterCap))
	acked := strings.Count(said, "put ")
	if acked > 0 {
		first = laterCap
	}
	require.LessOrEqual(t, disktest.Allocated(t, w.Dir), first, at)

	b := openLater(t, w.Dir, tier.StoreOptions{CapBytes: laterCap}).scanned()
	defer b.close()
	b.wait("shrinking", func() bool { return b.store.Stats().UsedBytes <= laterCap })
	b.wait("judgement", func() bool { _, err := os.Lstat(b.path(w.Dir, wrong)); return errors.Is(err, os.ErrNotExist) })
	b.idle()
	require.Empty(t, disktest.Files(t, w.Dir, ".tmp"), at)
	require.Empty(t, disktest.Files(t, w.Dir, ".new"), at)
	sidecar, _ := namesOf(t, w.Dir)
	want, err := disktest.Namespace("crash/model").Canonical()
	require.NoError(t, err)
	have, err := os.ReadFile(sidecar)
	require.NoError(t, err, at)
	require.Equal(t, want, have, at)

	for i := range acked {
		require.NoError(t, b.get(newChunk(i)), "%s: chunk %d", at, newChunk(i))
	}
	for i := min(acked+1, newOnes); i < newOnes-1; i++ {
		require.False(t, b.disk.Has(key(newChunk(i))), "%s: chunk %d", at, newChunk(i))
	}
	// Of the old ones the oldest have made room, and no more than had to.
	oldest := earlier                                 // that is there
	certain := laterFiles - min(acked+1, newOnes) - 2 // wrong and damaged take room as well
	for n := range earlier {
		err := b.get(n)
		if err != nil {
			require.ErrorIs(t, err, tier.ErrAbsent, "%s: chunk %d", at, n)
		}
		switch {
		case n == removed && strings.Contains(said, "removed"):
			require.Error(t, err, "%s: a chunk came back", at)
		case n == removed && strings.Contains(said, "removing"), n == 0 && acked >= newOnes-1:
		case err != nil:
			require.Less(t, n, earlier-certain, "%s: chunk %d is lost without need", at, n)
			require.Less(t, n, oldest, "%s: chunk %d is lost, and %d, which is older, is not", at, n, oldest)
		default:
			oldest = min(oldest, n)
		}
	}
	if err := b.get(damaged); !errors.Is(err, tier.ErrAbsent) {
		require.ErrorIs(t, err, tier.ErrCorrupt, at)
		require.ErrorIs(t, b.get(damaged), tier.ErrAbsent, at)
	}
	require.Empty(t, b.store.Stats().Errors, at)
	require.NoError(t, b.put(99), at)
	require.NoError(t, b.get(99), at)
	b.wait("books", func() bool {
		b.idle()
		real, used := disktest.Allocated(t, w.Dir), b.store.Stats().UsedBytes
		return real == used && used <= laterCap
	})
}
