package tier

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/disktest"
)

func TestBreakerTimes(t *testing.T) {
	b := newBreaker(BreakerOptions{})
	now := time.Unix(1000, 0)
	for range 7 {
		require.Empty(t, b.fail(now, "x"))
	}
	now = now.Add(61 * time.Second) // those are forgotten
	for range 7 {
		require.Empty(t, b.fail(now, "x"))
	}
	require.NotEmpty(t, b.fail(now, "x"))
	require.True(t, b.off.Load())
	require.Empty(t, b.fail(now, "x"), "said once")
	// Off for 1, 2, 4, 8, 10, 10 minutes when one error follows each return.
	for _, minutes := range []int{1, 2, 4, 8, 10, 10} {
		now = now.Add(time.Duration(minutes)*time.Minute - time.Second)
		require.False(t, b.tick(now), minutes)
		now = now.Add(time.Second)
		require.True(t, b.tick(now), minutes)
		require.NotEmpty(t, b.fail(now, "x"))
	}
	// After a success it takes eight again, after a good minute it begins at one.
	now = now.Add(10 * time.Minute)
	require.True(t, b.tick(now))
	b.succeed()
	now = now.Add(2 * time.Minute)
	for i := range 8 {
		require.Equal(t, i == 7, b.fail(now, "x") != "")
	}
	require.True(t, b.tick(now.Add(time.Minute)))
	b.kill()
	require.False(t, b.tick(now.Add(time.Hour)))
}

func TestBreakerCountsSlowReadsByP99(t *testing.T) {
	b := newBreaker(BreakerOptions{})
	require.True(t, b.took(2*time.Second), "of few reads the slowest is the p99")
	for range latencies {
		require.False(t, b.took(time.Millisecond))
	}
	require.False(t, b.took(2*time.Second), "one in 128")
	require.True(t, b.took(2*time.Second), "two in 128")
}

func TestDiskErrorsSwitchTheTierOffAndItComesBack(t *testing.T) {
	for _, errno := range []syscall.Errno{syscall.EIO, syscall.EMFILE, syscall.EACCES} {
		for _, call := range []string{"open", "read", "write", "rename"} {
			if errno != syscall.EIO && call != "open" {
				continue
			}
			t.Run(fmt.Sprint(call, errnoName(errno)), func(t *testing.T) {
				dir := t.TempDir()
				fs := &faultFS{}
				var clock atomic.Int64
				clock.Store(time.Now().UnixNano())
				h := openShelf(t, dir, "m", StoreOptions{FS: fs, Now: func() time.Time { return time.Unix(0, clock.Load()) }}).scanned()
				for n := range 10 {
					require.NoError(t, h.put(n))
				}
				fs.set(failing(call, errno))
				for i := range 8 {
					require.Equal(t, "on", h.store.Stats().State)
					var err error
					if call == "write" || call == "rename" {
						err = h.put(100 + i)
					} else {
						err = h.get(i)
					}
					require.ErrorIs(t, err, ErrIO)
				}
				st := h.store.Stats()
				require.Equal(t, "off", st.State)
				require.Equal(t, uint64(1), st.BreakerTrips)
				require.Equal(t, map[string]uint64{errnoName(errno): 8}, st.Errors)
				require.Empty(t, st.Corrupt)
				require.False(t, h.disk.Has(shelfKey(0)))
				require.ErrorIs(t, h.get(0), ErrOff)
				require.Error(t, h.put(200))
				require.Len(t, disktest.Files(t, dir, ".kvc"), 10, "an error deletes nothing")

				fs.set(nil)
				clock.Add(int64(59 * time.Second))
				require.Equal(t, "off", h.store.Stats().State)
				clock.Add(int64(time.Second))
				h.wait("return", func() bool { return h.store.Stats().State == "trial" })
				require.True(t, h.disk.Has(shelfKey(0)))
				require.NoError(t, h.get(0))
				require.NoError(t, h.put(200))
				require.Equal(t, "on", h.store.Stats().State)
				require.Empty(t, disktest.Files(t, dir, ".tmp"))
			})
		}
	}
}

// What a write meets when the system refuses it: no partial file, right books, and
// the same chunk can be stored later.
func TestFailedWritesLeaveNothing(t *testing.T) {
	for _, errno := range []syscall.Errno{syscall.EIO, syscall.EMFILE, syscall.EACCES, syscall.ENOMEM, syscall.ENOSPC, syscall.EDQUOT} {
		for _, call := range []string{"open", "write", "half a write", "sync", "rename"} {
			t.Run(fmt.Sprint(call, " ", errno), func(t *testing.T) {
				fs := &faultFS{}
				now := time.Now()
				var shift atomic.Int64
				clock := func() time.Time { return now.Add(time.Duration(shift.Load())) }
				h := openShelf(t, t.TempDir(), "m", StoreOptions{FS: fs, Durable: true, Now: clock}).scanned()
				full := noSpace(errno)
				if !full { // else room is made, and they go
					require.NoError(t, h.put(1))
				}
				h.quiet()
				failing := failing(strings.TrimPrefix(call, "half a "), errno)
				if call == "half a write" {
					fs.short = true
					whole := failing
					n := 0
					failing = func(c, path string) error {
						if err := whole(c, path); err != nil {
							if n++; n%2 == 0 { // the first part has arrived
								return err
							}
						}
						return nil
					}
				}
				fs.set(failing)
				err := h.put(2)
				want := ErrIO
				if full {
					want = ErrNoRoom
				}
				require.ErrorIs(t, err, want)
				require.ErrorIs(t, err, errno)
				fs.set(nil)
				h.quiet()
				st := h.store.Stats()
				tries := uint64(1)
				if full {
					tries = 2 // after room was made
				}
				require.Equal(t, map[string]uint64{errnoName(errno): tries}, st.Errors)
				require.Equal(t, "on", st.State)
				require.Zero(t, st.DirtyBytes)
				require.Zero(t, st.ReservedBytes)
				require.False(t, h.disk.Has(shelfKey(2)))
				require.Empty(t, disktest.Files(t, h.root.Path(), ".tmp"))
				require.Equal(t, disktest.Allocated(t, h.root.Path()), st.UsedBytes)
				shift.Store(int64(2 * fullPause))
				require.NoError(t, h.put(2), "the same chunk, later")
				require.NoError(t, h.get(2))
				if !full {
					require.NoError(t, h.get(1))
				}
			})
		}
	}
}

// A temp file that cannot be removed takes its room until it can, in this session.
func TestTempFileThatCannotBeRemovedGoesLater(t *testing.T) {
	fs := &faultFS{}
	h := openShelf(t, t.TempDir(), "m", StoreOptions{FS: fs}).scanned()
	require.NoError(t, h.put(1))
	unlink := failing("unlink", syscall.EIO)
	rename := failing("rename", syscall.EIO)
	fs.set(func(call, path string) error {
		if err := unlink(call, path); err != nil {
			return err
		}
		return rename(call, path)
	})
	require.ErrorIs(t, h.put(2), ErrIO)
	require.Len(t, disktest.Files(t, h.root.Path(), ".tmp"), 1)
	require.Equal(t, disktest.Allocated(t, h.root.Path()), h.store.Stats().UsedBytes)
	fs.set(nil)
	h.wait("its end", func() bool { return len(disktest.Files(t, h.root.Path(), ".tmp")) == 0 })
	h.wait("the books", func() bool { return disktest.Allocated(t, h.root.Path()) == h.store.Stats().UsedBytes })
	require.NoError(t, h.put(2))
}

// The log says once that the tier goes off and once that it is back, whatever else
// happens meanwhile.
func TestBreakerSaysSoOnce(t *testing.T) {
	var mu sync.Mutex
	var log bytes.Buffer
	lines := func() []string {
		mu.Lock()
		defer mu.Unlock()
		return strings.Split(strings.TrimSpace(log.String()), "\n")
	}
	fs := &faultFS{}
	var shift atomic.Int64
	began := time.Now()
	h := openShelf(t, t.TempDir(), "m", StoreOptions{
		FS: fs, Now: func() time.Time { return began.Add(time.Duration(shift.Load())) },
		Log: slog.New(slog.NewTextHandler(&lockedWriter{&mu, &log}, nil)),
	}).scanned()
	for n := range 4 {
		require.NoError(t, h.put(n))
	}
	fs.set(failing("", syscall.EIO))
	for i := range 200 {
		require.Error(t, h.get(i%4))
		require.Error(t, h.put(100+i))
		h.disk.Touch(shelfKey(0), 0)
		h.disk.Remove(shelfKey(500 + i))
	}
	fs.set(nil)
	require.Len(t, lines(), 1)
	require.Contains(t, lines()[0], "disk tier is off")
	require.Contains(t, lines()[0], "input/output error")
	shift.Store(int64(2 * time.Minute))
	h.wait("return", func() bool { return h.disk.Has(shelfKey(0)) })
	for n := range 4 {
		require.NoError(t, h.get(n))
	}
	h.close()
	require.Len(t, lines(), 2)
	require.Contains(t, lines()[1], "on again")
}

type lockedWriter struct {
	mu *sync.Mutex
	w  *bytes.Buffer
}

func (l *lockedWriter) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(b)
}

func TestDiskReadWrongOnceIsReadAgain(t *testing.T) {
	fs := &corruptingFS{}
	h := openShelf(t, t.TempDir(), "m", StoreOptions{FS: fs}).scanned()
	require.NoError(t, h.put(1))
	fs.times.Store(1)
	require.NoError(t, h.get(1))
	require.Equal(t, uint64(1), h.store.Stats().Reread)
	require.Empty(t, h.store.Stats().Corrupt)
	fs.times.Store(2)
	require.ErrorIs(t, h.get(1), ErrCorrupt)
	require.ErrorIs(t, h.get(1), ErrAbsent)
}

func TestDiskThatHangs(t *testing.T) {
	fs := &faultFS{}
	h := openShelf(t, t.TempDir(), "m", StoreOptions{FS: fs, ReadLanes: 2, Breaker: BreakerOptions{Stuck: 50 * time.Millisecond}}).scanned()
	for n := range 5 {
		require.NoError(t, h.put(n))
	}
	gate := make(chan struct{})
	fs.set(func(call, path string) error {
		if call == "read direct" {
			<-gate
		}
		return nil
	})
	// All lanes hang, the tier goes off, and who waits behind them is told.
	var mu sync.Mutex
	answers := map[int]error{}
	for n := range 5 {
		h.disk.Read(shelfKey(n), disktest.Aligned(disktest.PaddedBytes), func(r ReadResult) {
			mu.Lock()
			answers[n] = r.Err
			mu.Unlock()
		})
	}
	h.wait("answers", func() bool { mu.Lock(); defer mu.Unlock(); return len(answers) == 3 })
	mu.Lock()
	for _, err := range answers {
		require.ErrorIs(t, err, ErrOff)
	}
	mu.Unlock()
	require.Equal(t, "off", h.store.Stats().State)
	began := time.Now()
	require.Error(t, h.store.Close(200*time.Millisecond), "two reads are still out")
	require.Less(t, time.Since(began), 5*time.Second)
	late := make(chan error, 1)
	h.disk.Read(shelfKey(1), disktest.Aligned(disktest.PaddedBytes), func(r ReadResult) { late <- r.Err })
	require.ErrorIs(t, h.answer(late), ErrOff)
	close(gate)
	h.wait("late answers", func() bool { mu.Lock(); defer mu.Unlock(); return len(answers) == 5 })
	require.NoError(t, h.root.Close())
	h.store = nil
}

func TestDiskCloseWritesWhatIsQueued(t *testing.T) {
	dir := t.TempDir()
	h := openShelf(t, dir, "m", StoreOptions{}).scanned()
	var failed atomic.Int32
	for n := range 50 {
		require.True(t, h.disk.Write(shelfJob(shelfKey(n), 0, chunk.Key{}, func(err error) {
			if err != nil {
				failed.Add(1)
			}
		})))
	}
	h.close()
	require.Zero(t, failed.Load())
	require.Len(t, disktest.Files(t, dir, ".kvc"), 50)
	require.False(t, h.disk.Write(shelfJob(shelfKey(99), 0, chunk.Key{}, func(error) {})))
	late := make(chan error, 1)
	h.disk.Read(shelfKey(1), disktest.Aligned(disktest.PaddedBytes), func(r ReadResult) { late <- r.Err })
	require.ErrorIs(t, h.answer(late), ErrClosed)
}

func TestDiskCloseIsBoundedWithWritesQueued(t *testing.T) {
	fs := &faultFS{}
	h := openShelf(t, t.TempDir(), "m", StoreOptions{FS: fs, WriteLanes: 1}).scanned()
	gate := make(chan struct{})
	fs.set(func(call, path string) error {
		if call == "write direct" {
			<-gate
		}
		return nil
	})
	answers := make(chan error, 4)
	for n := range 4 {
		require.True(t, h.disk.Write(shelfJob(shelfKey(n), 0, chunk.Key{}, func(err error) { answers <- err })))
	}
	require.Error(t, h.store.Close(100*time.Millisecond))
	for range 3 {
		require.ErrorIs(t, h.answer(answers), ErrClosed)
	}
	close(gate)
	require.ErrorIs(t, h.answer(answers), ErrClosed, "somebody else may lead by now")
	require.NoError(t, h.root.Close())
	h.store = nil
}

func TestDiskDirtyBound(t *testing.T) {
	fs := &faultFS{}
	h := openShelf(t, t.TempDir(), "m", StoreOptions{FS: fs, DirtyBytes: 3 * disktest.PaddedBytes}).scanned()
	gate := make(chan struct{})
	fs.set(func(call, path string) error {
		if call == "write direct" {
			<-gate
		}
		return nil
	})
	answers := make(chan error, 5)
	for n := range 5 {
		require.Equal(t, n < 3, h.disk.Write(shelfJob(shelfKey(n), 0, chunk.Key{}, func(err error) { answers <- err })))
	}
	require.Equal(t, map[string]uint64{"dirty": 2}, h.store.Stats().Postponed)
	require.Empty(t, h.store.Stats().Dropped, "what is offered again is not lost")
	// A read passes the writes that hang.
	close(gate)
	for range 3 {
		require.NoError(t, h.answer(answers))
	}
	require.Zero(t, h.store.Stats().DirtyBytes)
}

func TestDiskPanicInACallback(t *testing.T) {
	h := openShelf(t, t.TempDir(), "m", StoreOptions{}).scanned()
	require.NoError(t, h.put(1))
	h.disk.Read(shelfKey(9), disktest.Aligned(disktest.PaddedBytes), func(ReadResult) { panic("from a test") })
	h.wait("off", func() bool { return h.store.Stats().State == "dead" })
	require.ErrorIs(t, h.get(1), ErrOff)
	require.Error(t, h.put(2))
}

func TestLanesLetReadsGoFirst(t *testing.T) {
	l := newLanes(1, 1, 100, 100)
	l.open()
	read, write := &fakeLaneJob{60}, &fakeLaneJob{60}
	require.True(t, l.push(&l.reads, read))
	require.True(t, l.push(&l.writes, write))
	got := make(chan laneJob)
	var done sync.WaitGroup
	done.Go(func() { got <- l.next(&l.writes, 0) })
	began := time.Now()
	require.Same(t, write, <-got, "not for ever")
	require.GreaterOrEqual(t, time.Since(began), maxYield/2)
	l.finish(&l.writes, 0, write)
	// The bound of bytes: a second one waits, a single one that is larger does not.
	require.Same(t, read, l.next(&l.reads, 0))
	require.True(t, l.push(&l.reads, read))
	done.Go(func() { got <- l.next(&l.reads, 0) })
	select {
	case <-got:
		t.Fatal("over the bound")
	case <-time.After(10 * time.Millisecond):
	}
	l.finish(&l.reads, 0, read)
	require.Same(t, read, <-got)
	l.finish(&l.reads, 0, read)
	big := &fakeLaneJob{1000}
	require.True(t, l.push(&l.reads, big))
	require.Same(t, big, l.next(&l.reads, 0))
	done.Wait()
	l.stop()
	require.Nil(t, l.next(&l.reads, 0))
	require.False(t, l.push(&l.reads, big))
}

type fakeLaneJob struct{ n int64 }

func (j *fakeLaneJob) size() int64  { return j.n }
func (j *fakeLaneJob) refuse(error) {}
