// Package disktest is what tests of the disk share: a look at what lies below a
// directory, from outside of the code under test, and the chunk that they store. Only
// tests import it. It does not know the disk tier, whose own tests use it.
package disktest

import (
	"errors"
	"io/fs"
	"path/filepath"
	"strings"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/sys"
)

// TB is what is needed of a test: a *testing.T, a *rapid.T.
type TB interface {
	require.TestingT
	Helper()
}

// Stats is what lstat says of dir and of each name below it, by path. Names may come
// and go meanwhile: the names are not those of one moment, and one that goes before it
// was looked at is not among them. dir must be there to the end.
func Stats(t TB, dir string) map[string]sys.Stat {
	t.Helper()
	found := map[string]sys.Stat{}
	walk(t, dir, func(path string, _ fs.DirEntry) error {
		st, err := sys.Lstat(path)
		if err == nil {
			found[path] = st
		}
		return err
	})
	return found
}

// Allocated gives the bytes that dir and all below it take on the disk: the sum of
// st_blocks * 512, the directories among them, and each hard link anew. While names
// come and go it may be more, or less, than there was at any moment: one that is
// renamed may count twice or not at all.
func Allocated(t TB, dir string) (bytes int64) {
	t.Helper()
	for _, st := range Stats(t, dir) {
		bytes += st.Allocated
	}
	return bytes
}

// Files gives the paths below dir that end so and are no directories, in lexical
// order. Names may come and go as with Stats.
func Files(t TB, dir, suffix string) (paths []string) {
	t.Helper()
	walk(t, dir, func(path string, e fs.DirEntry) error {
		if !e.IsDir() && strings.HasSuffix(path, suffix) {
			paths = append(paths, path)
		}
		return nil
	})
	return paths
}

// walk passes over what goes meanwhile; that dir itself is not there is an error, so
// that nothing is ever found to be empty because its name is wrong.
func walk(t TB, dir string, each func(path string, e fs.DirEntry) error) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil {
			err = each(path, e)
		}
		if path != dir && errors.Is(err, fs.ErrNotExist) {
			return nil // renamed or unlinked meanwhile
		}
		return err
	}))
}
