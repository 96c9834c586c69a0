package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/sys"
)

// Lanes of the tier by default: so many transfers are under way at once, there and in
// plain I/O.
const (
	readLanes  = 4
	writeLanes = 2

	primerBytes = 64 << 20
)

var chunkSizes = []struct {
	name  string
	bytes int
}{{"1 MiB", 1 << 20}, {"9.5 MiB", 19 << 19}, {"32 MiB", 32 << 20}}

// plain is the same files without kvtier: opened past the page cache, moved with one
// call, closed.
type plain struct{ dir string }

func (p plain) path(n int) string { return filepath.Join(p.dir, fmt.Sprintf("%06d", n)) }

// each does every buffer, several at once.
func (p plain) each(buffers [][]byte, lanes int, do func(path string, b []byte) error) error {
	var next atomic.Int64
	var workers sync.WaitGroup
	errs := make([]error, lanes)
	for lane := range lanes {
		workers.Go(func() {
			for {
				n := int(next.Add(1)) - 1
				if n >= len(buffers) || errs[lane] != nil {
					return
				}
				errs[lane] = do(p.path(n), buffers[n])
			}
		})
	}
	workers.Wait()
	return errors.Join(errs...)
}

func (p plain) write(buffers [][]byte) error {
	return p.each(buffers, writeLanes, func(path string, b []byte) error {
		f, err := sys.Open(path, sys.OpenWrite|sys.OpenCreate|sys.OpenExclusive|sys.OpenDirect, 0o600)
		if err != nil {
			return err
		}
		n, err := f.WriteV([][]byte{b}, 0)
		if err == nil && n != len(b) {
			err = fmt.Errorf("%d of %d bytes written", n, len(b))
		}
		return errors.Join(err, f.Close())
	})
}

// again writes and reads, as often as one likes.
func (p plain) again(buffers [][]byte) error {
	for n := range buffers {
		if err := os.Remove(p.path(n)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return errors.Join(p.write(buffers), p.read(buffers))
}

func (p plain) read(buffers [][]byte) error {
	return p.each(buffers, readLanes, func(path string, b []byte) error {
		f, err := sys.Open(path, sys.OpenRead|sys.OpenDirect, 0)
		if err != nil {
			return err
		}
		n, err := f.ReadV([][]byte{b}, 0)
		if err == nil && n != len(b) {
			err = fmt.Errorf("%d of %d bytes read", n, len(b))
		}
		return errors.Join(err, f.Close())
	})
}

// transfers compares rates with those of plain I/O, turn by turn, each side first in
// every other turn, on fresh files.
func transfers(dir string, o options) (all []series, err error) {
	for _, size := range chunkSizes {
		count := max(2*readLanes, int(o.bytes)/size.bytes)
		// The plain files are as long as those of the tier, footer and all.
		long, free, err := pages(count, size.bytes+chunk.FooterBytes)
		if err != nil {
			return nil, err
		}
		short := make([][]byte, count)
		for i := range long {
			short[i] = long[i][:size.bytes]
		}
		limit := fmt.Sprintf("plain direct I/O, %d at once", writeLanes)
		w := series{Name: "direct writes, chunks of " + size.name, Unit: "GB/s", LimitName: limit, Paired: true, Want: 0.9}
		limit = fmt.Sprintf("plain direct I/O, %d at once", readLanes)
		r := series{Name: "verified direct reads, chunks of " + size.name, Unit: "GB/s", LimitName: limit, Paired: true, Want: 0.9}
		for turn := range o.runs + 1 {
			t, err := oneTurn(filepath.Join(dir, "transfer"), size.bytes, long, short, turn%2 == 1)
			if err != nil {
				free()
				return nil, fmt.Errorf("chunks of %s: %w", size.name, err)
			}
			if turn == 0 {
				continue // memory, file system and device wake up
			}
			w.Value, w.Limit = append(w.Value, t.write), append(w.Limit, t.plainWrite)
			r.Value, r.Limit = append(r.Value, t.read), append(r.Limit, t.plainRead)
		}
		free()
		all = append(all, w, r)
	}
	return all, nil
}

// usedShelf is one like that of a cache that was used for a while: each of its 256
// directories is there and holds a chunk.
func usedShelf(dir string, bytes int) (*shelf, error) {
	h, err := openShelf(dir, bytes)
	if err != nil {
		return nil, err
	}
	var keys []chunk.Key
	for first := range 256 {
		keys = append(keys, chunk.Key{byte(first), 0xff})
	}
	file := h.disk.Layout().FileBytes
	if err := h.close(); err != nil {
		return nil, err
	}
	if err := makeFiles(dir, keys, file); err != nil {
		return nil, err
	}
	if h, err = openShelf(dir, bytes); err != nil {
		return nil, err
	}
	for !h.store.Stats().Known {
		time.Sleep(time.Millisecond)
	}
	return h, nil
}

// rates of one turn, in GB/s.
type rates struct{ write, plainWrite, read, plainRead float64 }

func oneTurn(dir string, bytes int, long, short [][]byte, plainFirst bool) (t rates, err error) {
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	p := plain{filepath.Join(dir, "plain")}
	if err := os.MkdirAll(p.dir, 0o700); err != nil {
		return t, err
	}
	h, err := usedShelf(filepath.Join(dir, "tier"), bytes)
	if err != nil {
		return t, err
	}
	defer func() { err = errors.Join(err, h.close()) }()
	primer := plain{filepath.Join(dir, "primer")}
	if err := os.MkdirAll(primer.dir, 0o700); err != nil {
		return t, err
	}
	rate := func(to *float64, do func([][]byte) error, buffers [][]byte) func() error {
		return func() error {
			// Whoever comes first finds the device asleep, or at what was there before.
			if err := primer.again(long[:max(1, primerBytes/len(long[0]))]); err != nil {
				return err
			}
			began := time.Now()
			err := do(buffers)
			*to = float64(len(buffers)*bytes) / time.Since(began).Seconds() / 1e9
			return err
		}
	}
	syscall.Sync() // of what the turn before has deleted
	steps := []func() error{
		rate(&t.write, h.write, short), rate(&t.plainWrite, p.write, long),
		rate(&t.read, h.read, short), rate(&t.plainRead, p.read, long),
	}
	if plainFirst {
		steps[0], steps[1], steps[2], steps[3] = steps[1], steps[0], steps[3], steps[2]
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return t, err
		}
	}
	return t, nil
}

// burst is what a reader feels while many writes are queued.
func burst(dir string, o options) ([]series, error) {
	const bytes = 1 << 20
	stored, queued := 64, int(o.bytes)/bytes
	dir = filepath.Join(dir, "burst")
	defer os.RemoveAll(dir)
	h, err := openShelf(dir, bytes)
	if err != nil {
		return nil, err
	}
	buffers, free, err := pages(stored+queued+1, bytes)
	if err != nil {
		return nil, errors.Join(err, h.close())
	}
	defer free()
	if err := h.write(buffers[:stored]); err != nil {
		return nil, errors.Join(err, h.close())
	}
	out := series{
		Name: "read of 1 MiB during a burst of writes, p50", Unit: "ms", LimitName: "without the burst", Less: true, Paired: true,
	}
	worst := out
	worst.Name = "read of 1 MiB during a burst of writes, p99"
	reads := func(writing func() bool) (times []float64, err error) {
		one := buffers[stored+queued:]
		for n := 0; writing() && err == nil; n++ {
			began := time.Now()
			done := make(chan error, 1)
			h.disk.Read(key(n%stored), one[0], func(r tierResult) { done <- r.Err })
			err = <-done
			times = append(times, time.Since(began).Seconds()*1e3)
		}
		slices.Sort(times)
		return times, err
	}
	for turn := range o.runs {
		n := 0
		quiet, err := reads(func() bool { n++; return n <= stored })
		if err != nil {
			return nil, errors.Join(err, h.close())
		}
		ended := make(chan error, 1)
		var over atomic.Bool
		go func() {
			err := h.writeAs(1000*(turn+1), buffers[stored:stored+queued])
			over.Store(true)
			ended <- err
		}()
		busy, err := reads(func() bool { return !over.Load() })
		if err = errors.Join(err, <-ended); err != nil {
			return nil, errors.Join(err, h.close())
		}
		out.Value, out.Limit = append(out.Value, quantile(busy, 0.5)), append(out.Limit, quantile(quiet, 0.5))
		worst.Value, worst.Limit = append(worst.Value, quantile(busy, 0.99)), append(worst.Limit, quantile(quiet, 0.99))
	}
	return []series{out, worst}, h.close()
}

// quantile of sorted samples: the smallest that so many do not exceed.
func quantile(sorted []float64, share float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(len(sorted)-1, int(share*float64(len(sorted))))]
}
