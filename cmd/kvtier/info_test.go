package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/disktest"
)

func TestInfoTellsWhatLiesBelowARoot(t *testing.T) {
	root := t.TempDir()
	write(t, root, "org/one", 5)
	write(t, root, "two", 2)
	old := time.Now().Add(-50 * time.Hour)
	require.NoError(t, os.Chtimes(file(t, root, "org/one", 3), old, old))
	tempOf(t, root, "org/one", 1)
	put(t, filepath.Join(directory(t, root, "org/one"), "00", "notes.txt"), "x")
	put(t, filepath.Join(directory(t, root, "org/one"), "zz"), "x")
	require.NoError(t, os.Link(file(t, root, "org/one", 0), filepath.Join(root, "elsewhere")))
	before := names(t, root)

	r := parsed[rootReport](t, exitFine, "info", root)
	require.Equal(t, root, r.Root)
	require.Equal(t, 1, r.Format)
	require.Len(t, r.ID, 32)
	require.Equal(t, leaderReport{}, r.Leader)
	require.Nil(t, r.Disk)
	require.Equal(t, 1, r.Foreign.Files)
	require.Len(t, r.Namespaces, 2)
	one, two := r.Namespaces[0], r.Namespaces[1]
	require.Equal(t, "org/one", one.Model)
	require.Equal(t, "bf16", one.KVDtype)
	require.Equal(t, 16, one.ChunkTokens)
	require.EqualValues(t, disktest.FileBytes, one.FileBytes)
	require.Equal(t, fileCount{4, 4 * disktest.FileBytes}, one.Chunks)
	require.Equal(t, 1, one.Temps.Files)
	require.Equal(t, map[string]int{"name": 2, "links": 1}, one.ForeignWhy)
	require.WithinDuration(t, old, *one.Oldest, time.Second)
	require.WithinDuration(t, time.Now(), *one.Newest, time.Minute)
	require.Equal(t, fileCount{2, 2 * disktest.FileBytes}, two.Chunks)
	require.Equal(t, one.Allocated, 5*disktest.FileBytes+one.Temps.Bytes+directoryBytes(t, directory(t, root, "org/one")))

	text := fine(t, "info", root)
	for _, part := range []string{"leader        nobody", "model       org/one (bf16)", "chunks      4, 64.0 KiB", "and 2d2h ago",
		"3, ", "(links 1, name 2)", "16 tokens a chunk, 16.0 KiB a file", "1, 4.0 KiB, left over"} {
		require.Contains(t, text, part)
	}
	require.Equal(t, before, names(t, root), "info must not change anything")
}

// directoryBytes is what directories of ours and the sidecar take.
func directoryBytes(t *testing.T, dir string) (n int64) {
	t.Helper()
	for path, st := range disktest.Stats(t, dir) {
		if st.Directory() || filepath.Base(path) == "layout.json" {
			n += st.Allocated
		}
	}
	return n
}

func TestInfoTellsWhoLeadsAndWhatItsCapIs(t *testing.T) {
	root := t.TempDir()
	write(t, root, "m", 1)
	pid := serving(t, root)
	r := parsed[rootReport](t, exitFine, "info", root)
	require.True(t, r.Leader.Held)
	require.Equal(t, pid, r.Leader.PID)
	require.WithinDuration(t, time.Now(), *r.Leader.Since, time.Minute)
	require.NotNil(t, r.Disk)
	require.EqualValues(t, 64<<20, r.Disk.CapBytes)
	require.Contains(t, fine(t, "info", root), "64.0 MiB; disk tier on")
	stats := fine(t, "stats", root)
	require.True(t, json.Valid([]byte(stats)))
}

func TestInfoNamesProblems(t *testing.T) {
	for name, broken := range map[string]struct {
		harm func(t *testing.T, root string)
		says string
	}{
		"sidecar missing": {func(t *testing.T, root string) {
			require.NoError(t, os.Remove(filepath.Join(directory(t, root, "m"), "layout.json")))
		}, "layout.json is missing"},
		"sidecar damaged": {func(t *testing.T, root string) {
			put(t, filepath.Join(directory(t, root, "m"), "layout.json"), "{")
		}, "layout.json is damaged"},
		"sidecar of another namespace": {func(t *testing.T, root string) {
			b, err := rigNamespace("other").Canonical()
			require.NoError(t, err)
			put(t, filepath.Join(directory(t, root, "m"), "layout.json"), string(b))
		}, "layout.json is foreign"},
		"wrong size": {func(t *testing.T, root string) {
			require.NoError(t, os.Truncate(file(t, root, "m", 0), 100))
		}, "1 file has no chunk's size"},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			write(t, root, "m", 2)
			broken.harm(t, root)
			s := command(t, "info", root)
			require.Equal(t, exitProblem, s.code, s.out+s.err)
			require.Contains(t, s.out, broken.says)
			require.Len(t, parsed[rootReport](t, exitProblem, "info", root).Problems, 1)
		})
	}
}

func TestNewerSidecarIsNoProblem(t *testing.T) {
	root := t.TempDir()
	write(t, root, "m", 2)
	change(t, filepath.Join(directory(t, root, "m"), "layout.json"), func(b []byte) []byte {
		return []byte(strings.Replace(string(b), `"format":1`, `"format":2`, 1))
	})
	require.EqualValues(t, "newer", parsed[rootReport](t, exitFine, "info", root).Namespaces[0].Sidecar)
	require.Equal(t, 2, parsed[verifyReport](t, exitFine, "verify", root, "--repair").Newer)
	require.NoError(t, os.Remove(file(t, root, "m", 0)))
	require.NoError(t, os.Remove(file(t, root, "m", 1)))
	fine(t, "gc", root)
	require.FileExists(t, filepath.Join(directory(t, root, "m"), "layout.json"), "a later version may need it")
}

// Whatever was deleted by hand, a root is a root.
func TestRootWithoutItsOwnFilesIsRead(t *testing.T) {
	root := t.TempDir()
	write(t, root, "m", 2)
	for _, name := range []string{"kvtier.json", "LOCK", "run"} {
		require.NoError(t, os.RemoveAll(filepath.Join(root, name)))
	}
	r := parsed[rootReport](t, exitFine, "info", root)
	require.Zero(t, r.Format)
	require.Equal(t, 2, r.Namespaces[0].Chunks.Files)
	fine(t, "verify", root)
	for _, name := range []string{"kvtier.json", "LOCK", "run"} {
		require.NoFileExists(t, filepath.Join(root, name), "reading must make nothing")
	}
}

func TestWhatCannotBeReadIsExitTwo(t *testing.T) {
	root := t.TempDir()
	empty := t.TempDir()
	plain := put(t, filepath.Join(t.TempDir(), "file"), "x")
	damaged, later := t.TempDir(), t.TempDir()
	put(t, filepath.Join(damaged, "kvtier.json"), "not json")
	put(t, filepath.Join(later, "kvtier.json"), `{"format": 2, "root": "x"}`)
	write(t, root, "a", 1)
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"info", filepath.Join(root, "absent")}, "no such file"},
		{[]string{"info", plain}, "is not a directory"},
		{[]string{"verify", empty}, "is not the root of a cache"},
		{[]string{"purge", empty, "--all", "--yes"}, "is not the root of a cache"},
		{[]string{"gc", damaged}, "does not hold what kvtier wrote there"},
		{[]string{"purge", later, "--all", "--yes"}, "newer version"},
		{[]string{"info"}, "accepts 1 arg"},
		{[]string{"nonsense"}, "unknown command"},
		{[]string{"ls", root, "--namespace", "zzz"}, `no namespace "zzz"`},
		{[]string{"verify", root, "--jobs", "0"}, "1 to 64"},
		{[]string{"stats", root, "--wait", "1ms"}, "no leader"},
	} {
		s := command(t, c.args...)
		require.Equal(t, exitFailed, s.code, "%v: %s%s", c.args, s.out, s.err)
		require.Contains(t, s.err, c.says)
		require.Empty(t, s.out)
	}
	entries, err := os.ReadDir(empty)
	require.NoError(t, err)
	require.Empty(t, entries, "nothing may be made in what is no root")
}

func TestNamespacesAreNamedWithoutDoubt(t *testing.T) {
	root := t.TempDir()
	write(t, root, "org/one", 1)
	write(t, root, "org/two", 1)
	fp, err := rigNamespace("org/two").Fingerprint()
	require.NoError(t, err)
	for _, name := range []string{"org/two", fp.String(), fp.String()[:6], filepath.Base(directory(t, root, "org/two"))} {
		out := fine(t, "ls", root, "--namespace", name)
		require.Equal(t, 2, strings.Count(out, "\n"), name)
		require.Contains(t, out, "org%2Ftwo@")
	}
	require.Equal(t, exitFailed, command(t, "ls", root, "--namespace", fp.String()[:5]).code)
	// A model with two layouts: which one is meant is not guessed.
	ns := rigNamespace("org/two")
	ns.KVDtype = "fp8"
	other, err := ns.Fingerprint()
	require.NoError(t, err)
	b, err := ns.Canonical()
	require.NoError(t, err)
	put(t, filepath.Join(root, "org%2Ftwo@"+other.String()[:32], "layout.json"), string(b))
	s := command(t, "purge", root, "--namespace", "org/two", "--yes")
	require.Equal(t, exitFailed, s.code)
	require.Contains(t, s.err, "means 2 namespaces")
	require.FileExists(t, file(t, root, "org/two", 0))
}

func TestListShowsEveryChunk(t *testing.T) {
	root := t.TempDir()
	write(t, root, "m", 3)
	old := time.Now().Add(-49*time.Hour - time.Minute)
	require.NoError(t, os.Chtimes(file(t, root, "m", 1), old, old))
	change(t, file(t, root, "m", 2), flip(disktest.PaddedBytes+20))
	put(t, filepath.Join(directory(t, root, "m"), "00", "notes.kvc"), "x")
	lines := strings.Split(strings.TrimSpace(fine(t, "ls", root)), "\n")
	require.Len(t, lines, 4)
	have := map[string][]string{}
	for _, line := range lines[1:] {
		fields := strings.Fields(line)
		have[fields[0]] = fields[1:]
	}
	name := filepath.Base(directory(t, root, "m"))
	require.Equal(t, []string{"1", "16384", "2d1h", name}, have[rigKey(1).String()])
	require.Equal(t, "0", have[rigKey(0).String()][0])
	require.Equal(t, "-", have[rigKey(2).String()][0])

	seen := map[string]listedChunk{}
	d := json.NewDecoder(strings.NewReader(fine(t, "ls", root, "--json")))
	for d.More() {
		var c listedChunk
		require.NoError(t, d.Decode(&c))
		seen[c.Key] = c
	}
	require.Len(t, seen, 3)
	require.EqualValues(t, 1, *seen[rigKey(1).String()].Ordinal)
	require.WithinDuration(t, old, seen[rigKey(1).String()].Used, time.Second)
	require.Equal(t, "damaged", seen[rigKey(2).String()].Footer)
	require.Nil(t, seen[rigKey(2).String()].Ordinal)
}
