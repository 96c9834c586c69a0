package disktest

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAllocatedCountsBlocksOfAllNames(t *testing.T) {
	dir := t.TempDir()
	sub := filepath.Join(dir, "sub.x")
	require.NoError(t, os.Mkdir(sub, 0o700))
	file, hole, link := filepath.Join(sub, "a.x"), filepath.Join(dir, "b.x"), filepath.Join(dir, "c")
	require.NoError(t, os.WriteFile(file, make([]byte, 5000), 0o600))
	require.NoError(t, os.WriteFile(hole, nil, 0o600))
	require.NoError(t, os.Truncate(hole, 1<<30))
	require.NoError(t, os.Link(file, link))
	var want int64
	for _, path := range []string{dir, sub, file, hole, link} {
		var st syscall.Stat_t
		require.NoError(t, syscall.Lstat(path, &st))
		want += st.Blocks * 512
	}
	require.Equal(t, want, Allocated(t, dir))
	require.GreaterOrEqual(t, want, int64(2*5000), "a hard link counts anew")
	require.Less(t, want, int64(1<<30), "a hole takes nothing")
	require.Len(t, Stats(t, dir), 5)
	require.Equal(t, []string{hole, file}, Files(t, dir, ".x"))
}

func TestNamesMayComeAndGo(t *testing.T) {
	dir := t.TempDir()
	keep := filepath.Join(dir, "keep.x")
	require.NoError(t, os.WriteFile(keep, nil, 0o600))
	stop, ended := make(chan struct{}), make(chan error)
	go func() {
		for n := 0; ; n++ {
			select {
			case <-stop:
				ended <- nil
				return
			default:
			}
			sub := filepath.Join(dir, fmt.Sprint(n%7))
			for i := range 20 {
				if err := os.MkdirAll(filepath.Join(sub, fmt.Sprint(i)), 0o700); err != nil {
					ended <- err
					return
				}
			}
			if err := os.RemoveAll(sub); err != nil {
				ended <- err
				return
			}
		}
	}()
	for range 300 {
		require.Contains(t, Stats(t, dir), keep)
		require.Equal(t, []string{keep}, Files(t, dir, ".x"))
		runtime.Gosched()
	}
	close(stop)
	require.NoError(t, <-ended)
}

// A name that goes between the walk and the look at it.
func TestNamesThatGoAreNotThere(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(dir, "sub"), 0o700))
	var seen int
	walk(t, dir, func(path string, e fs.DirEntry) error {
		if seen++; path == dir {
			return nil
		}
		return os.Remove(path + "/none")
	})
	require.Equal(t, 2, seen)
}

// failed is a test that has been told of a failure.
type failed struct{ is bool }

func (f *failed) Helper()               {}
func (f *failed) Errorf(string, ...any) { f.is = true }
func (f *failed) FailNow()              {}

func TestTheDirectoryItselfMustBeThere(t *testing.T) {
	none := filepath.Join(t.TempDir(), "none")
	for _, look := range []func(TB){
		func(t TB) { Stats(t, none) }, func(t TB) { Allocated(t, none) }, func(t TB) { Files(t, none, "") },
	} {
		var f failed
		look(&f)
		require.True(t, f.is)
	}
}

func TestChunkHasTheSizesItSays(t *testing.T) {
	n := Namespace("m")
	require.NoError(t, n.Normalize())
	layout, err := n.Layout()
	require.NoError(t, err)
	require.EqualValues(t, PaddedBytes, layout.PaddedBytes)
	require.EqualValues(t, FileBytes, layout.FileBytes)
	b := Payload([32]byte{1, 2, 3})
	require.Len(t, b, PaddedBytes)
	require.Equal(t, make([]byte, PaddedBytes-PayloadBytes), b[PayloadBytes:])
	require.NotContains(t, string(Used(PaddedBytes)), "\x00")
}
