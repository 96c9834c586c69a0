package crash

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvtier/kvtier/internal/disktest"
	"github.com/kvtier/kvtier/internal/sys"
	"github.com/kvtier/kvtier/tier"
)

// childArgument makes the test binary the process that is killed.
const childArgument = "-crash-child="

// childWork is what it has to do.
type childWork struct {
	Dir     string
	Durable bool
	Cap     int64
	Puts    int
	KillAt  int  // the call at which it dies; 0: none
	Half    bool // a write is half done then
	Later   bool // what a later run does: laterWork
}

// killFS counts the system calls of the tier and ends the process at one of them.
type killFS struct {
	tier.LocalFilesystem
	calls atomic.Int64
	work  *childWork
}

// dies counts a call, and reports whether it is the last one.
func (f *killFS) dies() bool { return f.calls.Add(1) == int64(f.work.KillAt) }

func kill() {
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {} // the signal may take a moment
}

func (f *killFS) call() {
	if f.dies() {
		kill()
	}
}

func (f *killFS) Open(path string, flags sys.OpenFlag) (tier.OpenFile, error) {
	f.call()
	file, err := f.LocalFilesystem.Open(path, flags)
	if err != nil {
		return nil, err
	}
	return &killFile{file, f}, nil
}
func (f *killFS) Lstat(path string) (sys.Stat, error) { f.call(); return f.LocalFilesystem.Lstat(path) }
func (f *killFS) ReadNames(path string) ([]string, error) {
	f.call()
	return f.LocalFilesystem.ReadNames(path)
}
func (f *killFS) Mkdir(path string) error      { f.call(); return f.LocalFilesystem.Mkdir(path) }
func (f *killFS) Rmdir(path string) error      { f.call(); return f.LocalFilesystem.Rmdir(path) }
func (f *killFS) Rename(from, to string) error { f.call(); return f.LocalFilesystem.Rename(from, to) }
func (f *killFS) Unlink(path string) error     { f.call(); return f.LocalFilesystem.Unlink(path) }
func (f *killFS) SetModified(path string, ns int64) error {
	f.call()
	return f.LocalFilesystem.SetModified(path, ns)
}

type killFile struct {
	tier.OpenFile
	fs *killFS
}

func (f *killFile) WriteV(bufs [][]byte, off int64) (int, error) {
	if f.fs.dies() {
		if f.fs.work.Half {
			_, _ = f.OpenFile.WriteV([][]byte{bufs[0][:len(bufs[0])/8192*4096]}, off)
		}
		kill()
	}
	return f.OpenFile.WriteV(bufs, off)
}
func (f *killFile) ReadV(bufs [][]byte, off int64) (int, error) {
	f.fs.call()
	return f.OpenFile.ReadV(bufs, off)
}
func (f *killFile) Stat() (sys.Stat, error)    { f.fs.call(); return f.OpenFile.Stat() }
func (f *killFile) SetModified(ns int64) error { f.fs.call(); return f.OpenFile.SetModified(ns) }
func (f *killFile) Sync() error                { f.fs.call(); return f.OpenFile.Sync() }
func (f *killFile) SyncAll() error             { f.fs.call(); return f.OpenFile.SyncAll() }
func (f *killFile) Close() error               { f.fs.call(); return f.OpenFile.Close() }

// child stores, removes and reads chunks, and says on stdout what it was told.
func child(work string) {
	w := &childWork{}
	if err := json.Unmarshal([]byte(work), w); err != nil {
		panic(err)
	}
	f := &killFS{work: w}
	t := &panicTB{}
	o := tier.StoreOptions{FS: f, CapBytes: w.Cap, Durable: w.Durable, Tick: time.Hour}
	say := func(format string, args ...any) { fmt.Fprintf(os.Stdout, format+"\n", args...) }
	var b *box
	if w.Later {
		b = openLater(t, w.Dir, o)
		laterWork(b, say)
	} else {
		b = open(t, w.Dir, o).scanned()
		firstWork(b, w.Puts, say)
	}
	b.close()
	say("calls %d", f.calls.Load())
}

func firstWork(b *box, puts int, say func(format string, args ...any)) {
	for n := range puts {
		if err := b.put(n); err != nil {
			panic(err)
		}
		say("put %d", n)
		if n == 2 {
			say("removing 1")
			b.disk.Remove(key(1))
			b.idle()
			say("removed 1")
			if err := b.get(2); err != nil {
				panic(err)
			}
			b.disk.Touch(key(0), 0)
		}
	}
}

// panicTB is for helpers that run outside a test. What is not here is not called.
type panicTB struct{ rapid.TB }

func (*panicTB) Helper()                           {}
func (*panicTB) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }
func (*panicTB) Errorf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }
func (*panicTB) FailNow()                          { panic("failed") }

// runChild gives what the child has said, and whether it lived.
func runChild(t *testing.T, w childWork) (said string, lived bool) {
	t.Helper()
	b, err := json.Marshal(w)
	require.NoError(t, err)
	cmd := exec.Command(os.Args[0], childArgument+string(b))
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	if err == nil {
		return out.String(), true
	}
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	require.Equal(t, syscall.SIGKILL, exit.Sys().(syscall.WaitStatus).Signal(), "%s%s", out.String(), errs.String())
	return out.String(), false
}

// TestKilledAtEachSystemCall kills the process at the n-th system call of its work
// for every n, and looks at what the next process finds.
func TestKilledAtEachSystemCall(t *testing.T) {
	for _, v := range []struct {
		name string
		work childWork
	}{
		{"plain", childWork{Cap: 64 << 20, Puts: 4}},
		{"durable", childWork{Cap: 64 << 20, Puts: 3, Durable: true}},
		{"half a write", childWork{Cap: 64 << 20, Puts: 4, Half: true}},
		{"evicting", childWork{Cap: 10 * disktest.CostBytes, Puts: 14}},
	} {
		t.Run(v.name, func(t *testing.T) {
			killedAtEach(t, v.work, func(w childWork) func(string) {
				return func(said string) { afterKill(t, w, said) }
			})
		})
	}
}

// killedAtEach lets a child do its work once for each system call at which it is killed.
// prepare makes the root of one of them, and gives what looks at it afterwards.
func killedAtEach(t *testing.T, work childWork, prepare func(w childWork) (look func(said string))) {
	w := work
	w.Dir = filepath.Join(t.TempDir(), "root")
	prepare(w)
	said, lived := runChild(t, w)
	require.True(t, lived, said)
	var calls int
	_, err := fmt.Sscanf(said[strings.LastIndex(said, "calls"):], "calls %d", &calls)
	require.NoError(t, err)
	require.Greater(t, calls, 40)
	step := 1
	if work.Half || work.Later && work.Durable || testing.Short() { // much of it is the same
		step = 3
	}
	var next atomic.Int64
	var killed atomic.Int64
	var all sync.WaitGroup
	for range runtime.NumCPU() + 1 {
		all.Go(func() {
			for {
				n := int(next.Add(int64(step)))
				if n > calls || t.Failed() {
					return
				}
				w := work
				w.KillAt, w.Dir = n, filepath.Join(t.TempDir(), "root")
				look := prepare(w)
				said, lived := runChild(t, w)
				if !lived {
					killed.Add(1)
				}
				look(said)
				require.NoError(t, os.RemoveAll(w.Dir))
			}
		})
	}
	all.Wait()
	t.Logf("killed at %d of %d calls", killed.Load(), calls)
	require.Greater(t, int(killed.Load()), calls/step*3/4)
}

func afterKill(t *testing.T, w childWork, said string) {
	t.Helper()
	if w.Cap < 64<<20 {
		require.LessOrEqual(t, disktest.Allocated(t, w.Dir), w.Cap, "call %d", w.KillAt)
	}
	b := open(t, w.Dir, tier.StoreOptions{CapBytes: w.Cap}).scanned()
	defer b.close()
	b.idle()
	require.Empty(t, disktest.Files(t, w.Dir, ".tmp"), "call %d", w.KillAt)
	for n := range w.Puts {
		has := b.disk.Has(key(n))
		acked := strings.Contains(said, fmt.Sprintf("put %d\n", n))
		switch {
		case n == 1 && strings.Contains(said, "removed 1"):
			require.False(t, has, "call %d: chunk 1 came back", w.KillAt)
		case n == 1 && strings.Contains(said, "removing 1"):
		case acked && w.Cap == 64<<20:
			require.True(t, has, "call %d: chunk %d is lost\n%s", w.KillAt, n, said)
		}
		err := b.get(n)
		if has && w.Cap < 64<<20 && errors.Is(err, tier.ErrAbsent) {
			// The evictor makes room ahead of need, also between the two questions.
			has = b.disk.Has(key(n))
		}
		if has {
			require.NoError(t, err, "call %d: chunk %d", w.KillAt, n)
		} else {
			require.ErrorIs(t, err, tier.ErrAbsent, "call %d: chunk %d", w.KillAt, n)
		}
	}
	st := b.store.Stats()
	require.Empty(t, st.Errors, "call %d", w.KillAt)
	require.Empty(t, st.Corrupt, "call %d", w.KillAt)
	require.NoError(t, b.put(99), "call %d", w.KillAt)
	require.NoError(t, b.get(99), "call %d", w.KillAt)
	b.wait("books", func() bool {
		b.idle()
		real, used := disktest.Allocated(t, w.Dir), b.store.Stats().UsedBytes
		return real <= used && used-real <= 8192 && used <= w.Cap
	})
}
