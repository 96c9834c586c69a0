package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestPurgeAllLeavesNothingOfTheCache(t *testing.T) {
	root := t.TempDir()
	write(t, root, "one", 5)
	write(t, root, "two", 3)
	tempOf(t, root, "one", 1)
	require.NoError(t, os.Link(file(t, root, "one", 0), filepath.Join(root, "elsewhere")))
	put(t, filepath.Join(directory(t, root, "two"), "layout.json"), "damaged")
	before := names(t, root)

	r := parsed[purgeReport](t, exitFine, "purge", root, "--all", "--dry-run")
	require.True(t, r.DryRun)
	require.Equal(t, 8, r.Chunks.Files)
	require.Equal(t, before, names(t, root))

	dry := r
	r = parsed[purgeReport](t, exitFine, "purge", root, "--all", "--yes")
	require.Equal(t, dry.Chunks, r.Chunks)
	require.Equal(t, dry.Others, r.Others, "a dry run must tell what will happen")
	require.Equal(t, []string{"elsewhere"}, names(t, root))
	write(t, root, "one", 1) // it can be used again
}

func TestPurgeOfOneNamespaceSparesOthers(t *testing.T) {
	root := t.TempDir()
	write(t, root, "one", 2)
	write(t, root, "two", 2)
	notes := put(t, filepath.Join(directory(t, root, "one"), "00", "notes"), "x")
	r := parsed[purgeReport](t, exitFine, "purge", root, "--namespace", "one", "--yes")
	require.Equal(t, 2, r.Chunks.Files)
	require.Equal(t, []string{notes}, r.Foreign)
	require.FileExists(t, notes)
	require.FileExists(t, filepath.Join(directory(t, root, "one"), "layout.json"), "what stays keeps its description")
	require.NoFileExists(t, file(t, root, "one", 0))
	require.Equal(t, 2, parsed[verifyReport](t, exitFine, "verify", root).Good)
}

func TestPurgeByAge(t *testing.T) {
	root := t.TempDir()
	write(t, root, "one", 3)
	write(t, root, "two", 3)
	for _, model := range []string{"one", "two"} {
		for i, age := range []time.Duration{time.Hour, 29 * 24 * time.Hour, 31 * 24 * time.Hour} {
			used := time.Now().Add(-age)
			require.NoError(t, os.Chtimes(file(t, root, model, i), used, used))
		}
	}
	require.Equal(t, 1, parsed[purgeReport](t, exitFine, "purge", root, "--older-than", "30d", "--namespace", "one", "--yes").Chunks.Files)
	require.NoFileExists(t, file(t, root, "one", 2))
	require.FileExists(t, file(t, root, "two", 2))
	require.Equal(t, 3, parsed[purgeReport](t, exitFine, "purge", root, "--older-than", "4w", "--yes").Chunks.Files)
	require.FileExists(t, file(t, root, "one", 0))
	require.FileExists(t, file(t, root, "two", 0))
	require.FileExists(t, filepath.Join(directory(t, root, "one"), "layout.json"))
}

func TestPurgeOfARootInUseDeletesChunksOnly(t *testing.T) {
	root := t.TempDir()
	write(t, root, "m", 3)
	pid := serving(t, root)
	temp := tempOf(t, root, "m", 0)
	s := command(t, "purge", root, "--all", "--yes")
	require.Equal(t, exitFine, s.code)
	require.Contains(t, s.out, "3 chunks")
	require.Contains(t, s.out, "what it holds in DRAM is not deleted")
	require.NoFileExists(t, file(t, root, "m", 0))
	require.FileExists(t, temp)
	require.FileExists(t, filepath.Join(directory(t, root, "m"), "layout.json"))
	require.Equal(t, pid, parsed[rootReport](t, exitFine, "info", root).Leader.PID)
}

func TestPurgeAsksFirst(t *testing.T) {
	root := t.TempDir()
	write(t, root, "m", 2)
	s := command(t, "purge", root, "--all")
	require.Equal(t, exitFailed, s.code)
	require.Contains(t, s.err, "add --yes")
	for _, no := range []string{"", "\n", "no\n", "y\n", "yesterday\n"} {
		s = answering(t, no, true, "purge", root, "--all")
		require.Equal(t, exitFailed, s.code)
		require.Contains(t, s.err, "Delete 2 chunks (32.0 KiB) of 1 namespace below "+root+"?")
		require.Contains(t, s.err, "nothing was deleted")
		require.FileExists(t, file(t, root, "m", 0))
	}
	require.Equal(t, exitFine, answering(t, "yes\n", true, "purge", root, "--all").code)
	require.Empty(t, names(t, root))
}

func TestPurgeNeedsToBeToldWhat(t *testing.T) {
	root := t.TempDir()
	write(t, root, "m", 1)
	for _, args := range [][]string{
		{}, {"--all", "--namespace", "m"}, {"--all", "--older-than", "1d"}, {"--namespace", ""}, {"--all=false"},
		{"--older-than", "soon"}, {"--older-than", "-1h"}, {"--older-than", "0d"}, {"--older-than", ""}, {"--older-than", "999999999d"}, {"--older-than", "213504d"},
		{"--namespace", "", "--older-than", "1ns"},
	} {
		s := command(t, append([]string{"purge", root, "--yes"}, args...)...)
		require.Equal(t, exitFailed, s.code, "%v: %s", args, s.out)
	}
	require.FileExists(t, file(t, root, "m", 0))
}

func TestSweepRemovesLeftovers(t *testing.T) {
	root := t.TempDir()
	write(t, root, "kept", 1)
	write(t, root, "gone", 1)
	require.NoError(t, os.Remove(file(t, root, "gone", 0)))
	temps := []string{
		tempOf(t, root, "kept", 0), tempOf(t, root, "gone", 3),
		put(t, filepath.Join(directory(t, root, "kept"), "layout.json.tmp"), "half"),
		put(t, filepath.Join(root, "kvtier.json.0123456789abcdef.new"), "half"),
	}
	empty := filepath.Join(directory(t, root, "kept"), "fe")
	require.NoError(t, os.MkdirAll(empty, 0o700))
	notes := put(t, filepath.Join(root, "notes"), "x")

	before := names(t, root)
	dry := parsed[sweepReport](t, exitFine, "gc", root, "--dry-run")
	require.Equal(t, before, names(t, root))
	s := parsed[sweepReport](t, exitFine, "gc", root)
	require.True(t, s.Swept)
	require.Equal(t, 4, s.Temps.Files)
	require.Equal(t, dry.Temps, s.Temps)
	require.Equal(t, dry.Directories, s.Directories, "a dry run must tell what will happen")
	for _, path := range append(temps, empty, directory(t, root, "gone")) {
		require.NoFileExists(t, path)
		require.NoDirExists(t, path)
	}
	require.FileExists(t, notes)
	require.Equal(t, 1, parsed[verifyReport](t, exitFine, "verify", root).Good)
	require.Contains(t, fine(t, "gc", root), "0 temp files (0 B) and 0 directories without chunks (0 B) removed")
}

func TestSweepLeavesARootInUseAlone(t *testing.T) {
	root := t.TempDir()
	write(t, root, "m", 1)
	pid := serving(t, root)
	temp := tempOf(t, root, "m", 0)
	s := parsed[sweepReport](t, exitFine, "gc", root)
	require.False(t, s.Swept)
	require.Equal(t, 1, s.Temps.Files)
	require.Equal(t, pid, s.Leader.PID)
	require.FileExists(t, temp)
	require.Contains(t, fine(t, "gc", root), "nothing was removed")
}

// A tool that holds the root must let it go again.
func TestRootIsFreeAfterTools(t *testing.T) {
	root := t.TempDir()
	write(t, root, "m", 2)
	fine(t, "gc", root)
	fine(t, "verify", root, "--repair")
	fine(t, "purge", root, "--older-than", "1h", "--yes")
	write(t, root, "m", 3)
	require.Equal(t, 3, parsed[verifyReport](t, exitFine, "verify", root).Good)
}

func TestSpans(t *testing.T) {
	for text, want := range map[string]time.Duration{"7d": 168 * time.Hour, "2w": 336 * time.Hour, "90m": 90 * time.Minute, "1h30m": 90 * time.Minute} {
		d, err := parseSpan(text)
		require.NoError(t, err)
		require.Equal(t, want, d)
	}
	for d, want := range map[time.Duration]string{
		-time.Hour: "0s", 59 * time.Second: "59s", 61 * time.Second: "1m1s", 25 * time.Hour: "1d1h", 2 * time.Hour: "2h0m",
	} {
		require.Equal(t, want, span(d))
	}
	require.Equal(t, "1023 B", size(1023))
	require.Equal(t, "1.5 KiB", size(1536))
	require.Equal(t, "2.0 GiB", size(2<<30))
}
