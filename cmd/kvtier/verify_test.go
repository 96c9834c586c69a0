package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/disktest"
)

// harmed is a root with a file for every kind of damage, and what is no damage:
// 8 damaged, 2 of a later version, 3 good.
func harmed(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	write(t, root, "m", 12)
	change(t, file(t, root, "m", 0), flip(5000))
	change(t, file(t, root, "m", 1), flip(disktest.PaddedBytes+20))
	require.NoError(t, os.Truncate(file(t, root, "m", 2), disktest.FileBytes-1))
	a, b := file(t, root, "m", 3), file(t, root, "m", 4)
	require.NoError(t, os.Rename(a, a+".swap"))
	require.NoError(t, os.Rename(b, a))
	require.NoError(t, os.Rename(a+".swap", b))
	change(t, file(t, root, "m", 5), func(b []byte) []byte { clear(b); return b })
	require.NoError(t, os.Truncate(file(t, root, "m", 6), 0))
	change(t, file(t, root, "m", 7), newer)
	change(t, file(t, root, "m", 8), func(b []byte) []byte { // a later version with larger payloads
		footer := bytes.Clone(b[disktest.PaddedBytes:])
		return newer(append(b, footer...))
	})
	write(t, root, "other", 2)
	// A file of another namespace and key: the key is checked first.
	require.NoError(t, os.Rename(file(t, root, "other", 1), file(t, root, "m", 10)))
	return root
}

func TestVerifyCountsDamageByReason(t *testing.T) {
	root := harmed(t)
	before := names(t, root)
	r := parsed[verifyReport](t, exitProblem, "verify", root)
	require.Equal(t, map[string]int{"payload": 1, "footer": 2, "size": 2, "key": 3}, r.Damaged)
	require.Equal(t, 2, r.Newer)
	require.Equal(t, 13, r.Checked)
	require.Equal(t, 3, r.Good) // 9 and 11; 0 of the other
	require.Len(t, r.Files, 8)
	for _, f := range r.Files {
		require.Equal(t, "damaged", f.State)
		require.False(t, f.Removed)
	}
	require.Equal(t, before, names(t, root), "verify must not change anything")

	s := command(t, "verify", root)
	require.Equal(t, exitProblem, s.code)
	require.Contains(t, s.out, file(t, root, "m", 0)+": damaged, payload\n")
	require.Contains(t, s.out, "8 damaged (footer 2, key 3, payload 1, size 2), 2 of a later version")
	require.Contains(t, s.err, "8 chunks damaged")
}

func TestVerifyTellsAnotherNamespacesFile(t *testing.T) {
	root := t.TempDir()
	write(t, root, "m", 2)
	write(t, root, "other", 2)
	require.NoError(t, os.Rename(file(t, root, "other", 1), file(t, root, "m", 1)))
	require.Equal(t, map[string]int{"fingerprint": 1}, parsed[verifyReport](t, exitProblem, "verify", root).Damaged)
	require.Empty(t, parsed[verifyReport](t, exitFine, "verify", root, "--namespace", "other").Damaged)
}

func TestRepairRemovesWhatIsProvedAndNothingElse(t *testing.T) {
	root := harmed(t)
	temp := tempOf(t, root, "m", 11)
	notes := put(t, filepath.Join(directory(t, root, "m"), "00", "notes.txt"), "x")
	r := parsed[verifyReport](t, exitProblem, "verify", root, "--repair", "--jobs", "3")
	require.Equal(t, 8, r.Removed)
	require.Equal(t, 1, r.TempsRemoved)
	require.NoFileExists(t, temp)
	require.FileExists(t, notes)
	for _, n := range []int{0, 1, 2, 3, 4, 5, 6, 10} {
		require.NoFileExists(t, file(t, root, "m", n))
	}
	for _, n := range []int{7, 8, 9, 11} {
		require.FileExists(t, file(t, root, "m", n))
	}
	r = parsed[verifyReport](t, exitFine, "verify", root)
	require.Equal(t, 3, r.Good)
	require.Equal(t, 2, r.Newer)
}

// The files are repaired, the lock and the temp files are left to the leader.
func TestRepairOfARootInUse(t *testing.T) {
	root := t.TempDir()
	write(t, root, "m", 3)
	pid := serving(t, root)
	change(t, file(t, root, "m", 1), flip(1))
	temp := tempOf(t, root, "m", 2) // as if of the leader
	r := parsed[verifyReport](t, exitProblem, "verify", root, "--repair")
	require.Equal(t, pid, r.Leader.PID)
	require.Equal(t, 1, r.Removed)
	require.Zero(t, r.TempsRemoved)
	require.NoFileExists(t, file(t, root, "m", 1))
	require.FileExists(t, temp)
	require.Contains(t, fine(t, "verify", root, "--repair"), "temp files stay")
	require.True(t, parsed[rootReport](t, exitFine, "info", root).Leader.Held, "the leader still leads")
}

func TestChunksOfAnUnknownNamespaceAreNotChecked(t *testing.T) {
	root := t.TempDir()
	write(t, root, "m", 2)
	require.NoError(t, os.Remove(filepath.Join(directory(t, root, "m"), "layout.json")))
	r := parsed[verifyReport](t, exitProblem, "verify", root, "--repair")
	require.Equal(t, 2, r.Unchecked)
	require.EqualValues(t, "missing", r.Sidecars[0].State)
	require.FileExists(t, file(t, root, "m", 0))
	require.NoFileExists(t, filepath.Join(directory(t, root, "m"), "layout.json"), "nothing is rebuilt")
}

// An error of the system proves nothing.
func TestUnreadableFileStays(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("not run: root reads every file")
	}
	root := t.TempDir()
	write(t, root, "m", 2)
	require.NoError(t, os.Chmod(file(t, root, "m", 1), 0))
	r := parsed[verifyReport](t, exitProblem, "verify", root, "--repair")
	require.Equal(t, map[string]int{"EACCES": 1}, r.Unreadable)
	require.FileExists(t, file(t, root, "m", 1))
}

func TestForeignNamesAreNoDamage(t *testing.T) {
	root := t.TempDir()
	write(t, root, "m", 4)
	dir := directory(t, root, "m")
	wrong := filepath.Join(dir, "00", filepath.Base(file(t, root, "m", 0)))
	require.NoError(t, os.MkdirAll(filepath.Dir(wrong), 0o700))
	require.NoError(t, os.Rename(file(t, root, "m", 0), wrong))
	require.NoError(t, os.Rename(file(t, root, "m", 1), filepath.Join(root, "kept")))
	require.NoError(t, os.Symlink(filepath.Join(root, "kept"), file(t, root, "m", 1)))
	require.NoError(t, os.Link(file(t, root, "m", 2), filepath.Join(root, "second")))
	put(t, filepath.Join(dir, "notes\xff"), "x")
	r := parsed[verifyReport](t, exitFine, "verify", root, "--repair")
	require.Equal(t, map[string]int{"path": 1, "type": 1, "links": 1, "name": 1}, r.Foreign)
	require.Equal(t, 1, r.Checked)
	require.FileExists(t, wrong)
}

func TestProgressIsToldWhereItIsAskedFor(t *testing.T) {
	root := t.TempDir()
	write(t, root, "m", 3)
	require.Empty(t, command(t, "verify", root).err)
	require.Equal(t, "checked 3 of 3 chunks, 48.0 KiB, 0 not good\n", command(t, "verify", root, "--progress").err)
	var out, errs strings.Builder
	require.Zero(t, run([]string{"verify", root}, console{in: strings.NewReader(""), out: &out, err: &errs, watched: true}))
	require.Equal(t, "\rchecked 3 of 3 chunks, 48.0 KiB, 0 not good\x1b[K\n", errs.String())
}
