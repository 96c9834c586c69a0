package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/sys"
)

const (
	adoptionRuns  = 5
	adoptionBound = 1000.0 // ms for 100,000 files
	memoryBound   = 200.0  // bytes of memory for a chunk
	lookupKeys    = 64
)

// adoptions opens roots with many chunk files that the system has in its cache.
func adoptions(dir string, o options) (all []series, err error) {
	for _, count := range o.files {
		s, err := adoption(filepath.Join(dir, "adopt"), count)
		if err != nil {
			return nil, err
		}
		all = append(all, s...)
	}
	return all, nil
}

func adoption(dir string, count int) (all []series, err error) {
	const bytes = 4096
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	h, err := openShelf(dir, bytes)
	if err != nil {
		return nil, err
	}
	file := h.disk.Layout().FileBytes
	if err := h.close(); err != nil {
		return nil, err
	}
	keys := make([]chunk.Key, count)
	for n := range keys {
		keys[n] = key(n)
	}
	if err := makeFiles(dir, keys, file); err != nil {
		return nil, err
	}
	name := fmt.Sprintf("adoption of %d files", count)
	times := series{Name: name, Unit: "ms", LimitName: "bound", Less: true, Limit: []float64{adoptionBound * float64(count) / 100_000}, Want: 1}
	walked := series{Name: name, Unit: "ms", LimitName: "listing and lstat of them", Less: true, Paired: true}
	cpu := series{Name: name + ", CPU time", Unit: "ms", LimitName: "listing and lstat of them", Less: true, Paired: true}
	answer := series{Name: fmt.Sprintf("first lookup of %d keys after the opening, %d files", lookupKeys, count), Unit: "ms", LimitName: "the whole scan", Less: true, Paired: true}
	during := series{Name: fmt.Sprintf("lookup of %d keys while %d files are scanned, p99", lookupKeys, count), Unit: "ms", LimitName: "the whole scan", Less: true, Paired: true}
	memory := series{Name: fmt.Sprintf("index memory of a chunk, %d files", count), Unit: "B", LimitName: "bound", Less: true, Limit: []float64{memoryBound}, Want: 1}
	for turn := range adoptionRuns + 1 {
		spent := cpuTime()
		walk, err := walk(dir)
		if err != nil {
			return nil, err
		}
		walkCPU := cpuTime() - spent
		a, err := adopt(dir, bytes, count)
		if err != nil {
			return nil, err
		}
		if turn == 0 {
			continue // the system's own cache fills
		}
		times.Value = append(times.Value, a.scan)
		walked.Value, walked.Limit = append(walked.Value, a.scan), append(walked.Limit, walk)
		cpu.Value, cpu.Limit = append(cpu.Value, a.cpu), append(cpu.Limit, walkCPU)
		answer.Value, answer.Limit = append(answer.Value, a.first), append(answer.Limit, a.scan)
		during.Value, during.Limit = append(during.Value, a.lookup), append(during.Limit, a.scan)
		memory.Value = append(memory.Value, a.memory)
	}
	return []series{times, walked, cpu, answer, during, memory}, nil
}

// makeFiles makes files that are chunks by their names and sizes. Adoption looks at
// nothing else, so they need no content.
func makeFiles(root string, keys []chunk.Key, bytes int64) error {
	ns, err := namespaceDir(root)
	if err != nil {
		return err
	}
	for first := range 256 {
		if err := os.Mkdir(filepath.Join(ns, chunk.SubDir(chunk.Key{byte(first)})), 0o700); err != nil {
			return err
		}
	}
	for _, k := range keys {
		f, err := sys.Open(filepath.Join(ns, chunk.SubDir(k), chunk.FileName(k)), sys.OpenWrite|sys.OpenCreate, 0o600)
		if err != nil {
			return err
		}
		if err := errors.Join(f.Truncate(bytes), f.Close()); err != nil {
			return err
		}
	}
	return nil
}

// namespaceDir finds the directory of the one namespace of a root.
func namespaceDir(root string) (string, error) {
	dirs, err := filepath.Glob(filepath.Join(root, "*@*"))
	if err == nil && len(dirs) != 1 {
		err = fmt.Errorf("%d namespaces below %s", len(dirs), root)
	}
	if err != nil {
		return "", err
	}
	return dirs[0], nil
}

// adopted is one opening: ms until everything is known, and of all CPUs until then; ms
// until the first lookup was answered, p99 of lookups until the end, and bytes of
// memory for each chunk.
type adopted struct{ scan, cpu, first, lookup, memory float64 }

func adopt(dir string, bytes, count int) (a adopted, err error) {
	before := heap()
	spent := cpuTime()
	began := time.Now()
	h, err := openShelf(dir, bytes)
	if err != nil {
		return a, err
	}
	var lookups []float64
	for n := 0; ; n++ {
		scanned := h.disk.Scanned() && h.store.Stats().Known
		if scanned && n > 0 {
			break
		}
		keys := make([]chunk.Key, lookupKeys)
		for i := range keys {
			keys[i] = key((n*lookupKeys + i) * 7919 % count)
		}
		asked := time.Now()
		if got := h.disk.Probe(keys, time.Second); got != lookupKeys {
			return a, errors.Join(fmt.Errorf("a lookup during the scan finds %d of %d chunks", got, lookupKeys), h.close())
		}
		if n == 0 {
			a.first = ms(began)
		}
		lookups = append(lookups, ms(asked))
		time.Sleep(time.Millisecond)
	}
	a.scan, a.cpu = ms(began), cpuTime()-spent
	slices.Sort(lookups)
	a.lookup = quantile(lookups, 0.99)
	for h.store.Stats().Adopted < uint64(count) {
		time.Sleep(time.Millisecond)
	}
	a.memory = (heap() - before) / float64(count)
	return a, h.close()
}

func ms(since time.Time) float64 { return time.Since(since).Seconds() * 1e3 }

// cpuTime gives the ms that all threads of this process have run. A busy machine makes
// a run longer, but not this.
func cpuTime() float64 {
	var r syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &r) // fails for wrong arguments only
	return float64(r.Utime.Nano()+r.Stime.Nano()) / 1e6
}

// heap gives the bytes in use.
func heap() float64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc)
}

// walk lists every directory and looks at every file, eight at once, and gives ms.
func walk(root string) (float64, error) {
	began := time.Now()
	subs, err := filepath.Glob(filepath.Join(root, "*@*", "??"))
	if err != nil {
		return 0, err
	}
	var next atomic.Int64
	var workers sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		workers.Go(func() {
			for errs[i] == nil {
				n := int(next.Add(1)) - 1
				if n >= len(subs) {
					return
				}
				names, err := sys.ReadNames(subs[n])
				for _, name := range names {
					if _, serr := sys.Lstat(filepath.Join(subs[n], name)); err == nil {
						err = serr
					}
				}
				errs[i] = err
			}
		})
	}
	workers.Wait()
	return ms(began), errors.Join(errs...)
}
