package main

import (
	"bufio"
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/sys"
	"github.com/kvtier/kvtier/tier"
)

// sickDisk has places that cannot be read.
type sickDisk struct {
	tier.LocalFilesystem
	names, directories map[string]bool
}

func (d *sickDisk) Lstat(path string) (sys.Stat, error) {
	if d.names[path] {
		return sys.Stat{}, &os.PathError{Op: "lstat", Path: path, Err: syscall.EIO}
	}
	return d.LocalFilesystem.Lstat(path)
}

func (d *sickDisk) ReadNames(path string) ([]string, error) {
	if d.directories[path] {
		return nil, &os.PathError{Op: "readdir", Path: path, Err: syscall.EIO}
	}
	return d.LocalFilesystem.ReadNames(path)
}

func (d *sickDisk) Open(path string, flags sys.OpenFlag) (tier.OpenFile, error) {
	if d.names[path] {
		return nil, &os.PathError{Op: "open", Path: path, Err: syscall.EIO}
	}
	return d.LocalFilesystem.Open(path, flags)
}

// sick is a root with six chunks, of which the file system hides one, and the
// directory of another.
func sick(t *testing.T) (*target, *sickDisk) {
	t.Helper()
	root := t.TempDir()
	write(t, root, "m", 6)
	d := &sickDisk{
		names:       map[string]bool{file(t, root, "m", 1): true},
		directories: map[string]bool{filepath.Dir(file(t, root, "m", 2)): true},
	}
	i, err := tier.InspectOn(d, root)
	require.NoError(t, err)
	all, err := i.Namespaces()
	require.NoError(t, err)
	return &target{Inspection: i, namespaces: all}, d
}

func quiet() *progress { return newProgress(console{}, false) }

// What can be read of a sick disk is told, checked and removed, and what cannot is
// named and stays.
func TestCommandsOnASickDisk(t *testing.T) {
	t.Run("info", func(t *testing.T) {
		target, _ := sick(t)
		r, err := describe(target, time.Second, quiet())
		require.NoError(t, err)
		require.Equal(t, 4, r.Namespaces[0].Chunks.Files)
		require.Equal(t, 2, r.Namespaces[0].Unreadable)
		require.Len(t, r.Problems, 1)
		require.Contains(t, r.Problems[0], "2 names cannot be read")
		require.Contains(t, r.Problems[0], "input/output error")
	})
	t.Run("ls", func(t *testing.T) {
		target, _ := sick(t)
		var out bytes.Buffer
		w := bufio.NewWriter(&out)
		unreadable, err := list(w, target, true)
		require.NoError(t, err)
		require.NoError(t, w.Flush())
		require.Equal(t, 2, unreadable)
		require.Equal(t, 4, strings.Count(out.String(), `"footer":"good"`))
	})
	t.Run("verify", func(t *testing.T) {
		target, d := sick(t)
		v := newVerification(target, true, quiet())
		require.NoError(t, v.run(2))
		require.Equal(t, 4, v.report.Good)
		require.Equal(t, map[string]int{"EIO": 2}, v.report.Unreadable)
		require.ErrorIs(t, v.report.verdict(), errProblem)
		for path := range d.names {
			require.FileExists(t, path)
		}
	})
	t.Run("purge", func(t *testing.T) {
		target, d := sick(t)
		r, err := purge(target, &purgePlan{whole: true}, false, quiet())
		require.NoError(t, err)
		require.Equal(t, 4, r.Chunks.Files)
		require.Len(t, r.Failed, 2)
		for path := range d.names {
			require.FileExists(t, path)
		}
	})
	t.Run("gc", func(t *testing.T) {
		target, _ := sick(t)
		s, err := sweep(target, false, quiet())
		require.NoError(t, err)
		require.Len(t, s.Failed, 2)
	})
	t.Run("directory of a namespace", func(t *testing.T) {
		target, d := sick(t)
		d.directories[filepath.Dir(filepath.Dir(file(t, target.Path(), "m", 0)))] = true
		r, err := describe(target, time.Second, quiet())
		require.NoError(t, err)
		require.Equal(t, 1, r.Namespaces[0].Unreadable)
	})
}

// A file that stands under another chunk's name is not told to be good.
func TestListSeesSwappedFiles(t *testing.T) {
	root := t.TempDir()
	write(t, root, "m", 2)
	require.NoError(t, os.Rename(file(t, root, "m", 0), file(t, root, "m", 1)))
	c := parsed[listedChunk](t, exitFine, "ls", root)
	require.Equal(t, "damaged", c.Footer)
	require.Nil(t, c.Ordinal)
}

// A purge tells that it deletes only while it does.
func TestPurgeTellsWhatItDoes(t *testing.T) {
	root := t.TempDir()
	write(t, root, "m", 2)
	var out, errs strings.Builder
	code := run([]string{"purge", root, "--all"}, console{in: strings.NewReader("no\n"), out: &out, err: &errs, asks: true, watched: true})
	require.Equal(t, exitFailed, code)
	require.Contains(t, errs.String(), "found 2 chunks")
	require.NotContains(t, errs.String(), "deleted 2")
	require.FileExists(t, file(t, root, "m", 0))
	errs.Reset()
	code = run([]string{"purge", root, "--all"}, console{in: strings.NewReader("yes\n"), out: &out, err: &errs, asks: true, watched: true})
	require.Zero(t, code)
	require.Contains(t, errs.String(), "\rdeleted 2 chunks, 32.0 KiB\x1b[K\n")
	for _, name := range []string{"info", "gc"} {
		require.NotEmpty(t, command(t, name, root, "--progress").err)
	}
}
