package soak

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"time"

	"github.com/kvtier/kvtier"
)

// workerArgument makes the test binary one of the processes that use the root.
const workerArgument = "-soak-worker="

const (
	opTimeout   = 5 * time.Second
	reportEvery = 200 * time.Millisecond
	chainLength = 4
)

// shape is one namespace of whole chunks.
type shape struct {
	Model string
	Bytes int // of a chunk
}

// order is what a worker has to do.
type order struct {
	Root   string
	Cap    int64
	DRAM   int64
	Seed   uint64
	Chains int     // keys are drawn from so many chains of chainLength chunks
	Writes float64 // share of puts; of the rest most are gets
	Shapes []shape
}

// report is a worker's line on stdout: what it has done so far.
type report struct {
	State  string
	Puts   uint64 // that were stored, or there
	Hits   uint64
	Misses uint64
	Looks  uint64
	Drops  uint64            // removals
	Failed map[string]uint64 // other outcomes that are allowed
	Disk   *diskReport       // while it leads
	Wrong  string            // what must never be
}

// diskReport is what the soak looks at of a leader's statistics.
type diskReport struct {
	State   string            `json:"state"`
	Used    int64             `json:"used_bytes"`
	Adopted uint64            `json:"adopted"`
	Corrupt map[string]uint64 `json:"corrupt"`
	Errors  map[string]uint64 `json:"errors"`
	Self    uint64            `json:"evicted_self"`
	Other   uint64            `json:"evicted_other"`
}

func chainKey(model, chain, at int) kvtier.Key {
	var b [24]byte
	binary.LittleEndian.PutUint64(b[:], uint64(model))
	binary.LittleEndian.PutUint64(b[8:], uint64(chain))
	binary.LittleEndian.PutUint64(b[16:], uint64(at))
	return sha256.Sum256(b[:])
}

// fill writes what the chunk of a key holds: it depends on the whole key.
func fill(dst []byte, k kvtier.Key) {
	g := rand.NewPCG(binary.LittleEndian.Uint64(k[:]), binary.LittleEndian.Uint64(k[8:]))
	n := copy(dst, k[:])
	for ; n+8 <= len(dst); n += 8 {
		binary.LittleEndian.PutUint64(dst[n:], g.Uint64())
	}
	for i := n; i < len(dst); i++ {
		dst[i] = k[i%32]
	}
}

// worker is one process at work.
type worker struct {
	o     order
	cache *kvtier.Cache
	blobs []*kvtier.Blob
	rng   *rand.Rand
	said  report
	got   [][]byte
	want  [][]byte
}

// work is the whole life of a worker: until its input ends, or something is wrong.
func work(text string) {
	w := &worker{said: report{Failed: map[string]uint64{}}}
	if err := json.Unmarshal([]byte(text), &w.o); err != nil {
		panic(err)
	}
	w.rng = rand.New(rand.NewPCG(w.o.Seed, 1))
	ended := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(ended)
	}()
	if err := w.open(); err != nil {
		w.wrong("open: %v", err)
	}
	for last := time.Now(); ; {
		select {
		case <-ended:
			w.close()
			return
		default:
		}
		w.step()
		if time.Since(last) >= reportEvery {
			w.report()
			last = time.Now()
		}
	}
}

func (w *worker) open() (err error) {
	w.cache, err = kvtier.Open(&kvtier.Config{
		DiskPath: w.o.Root, DiskBytes: w.o.Cap, FreeFloorBytes: -1, DRAMBytes: w.o.DRAM, Touch: time.Second,
	})
	if err != nil {
		return err
	}
	for _, s := range w.o.Shapes {
		b, err := w.cache.Blob(s.Model, s.Bytes, 16, kvtier.Identity{})
		if err != nil {
			return err
		}
		w.blobs = append(w.blobs, b)
		w.got, w.want = append(w.got, make([]byte, s.Bytes)), append(w.want, make([]byte, s.Bytes))
	}
	return nil
}

func (w *worker) close() {
	for _, b := range w.blobs {
		if err := b.Close(); err != nil {
			w.wrong("close of a blob: %v", err)
		}
	}
	if err := w.cache.Close(time.Minute); err != nil {
		w.wrong("close: %v", err)
	}
	w.report()
}

// step does one thing. Chains near the beginning are used most.
func (w *worker) step() {
	m := w.rng.IntN(len(w.blobs))
	chain := int(float64(w.o.Chains) * math.Pow(w.rng.Float64(), 3))
	at := w.rng.IntN(chainLength)
	b, k := w.blobs[m], chainKey(m, chain, at)
	switch p := w.rng.Float64(); {
	case p < w.o.Writes:
		for i := range chainLength { // a continuation is of use only behind its beginning
			k, parent := chainKey(m, chain, i), kvtier.Key{}
			if i > 0 {
				parent = chainKey(m, chain, i-1)
			}
			fill(w.want[m], k)
			if !w.count(b.Put(k, parent, uint32(i), w.want[m], opTimeout), &w.said.Puts) {
				return
			}
		}
	case p < 0.90:
		err := b.Get(k, w.got[m], opTimeout)
		if err == nil {
			if fill(w.want[m], k); !bytes.Equal(w.want[m], w.got[m]) {
				w.wrong("wrong bytes for chunk %d of chain %d of model %d", at, chain, m)
			}
		}
		w.count(err, &w.said.Hits)
	case p < 0.97:
		var keys []kvtier.Key
		for i := range chainLength {
			keys = append(keys, chainKey(m, chain, i))
		}
		held, resident, err := b.Lookup(keys)
		if err == nil && (held < resident || held > chainLength) {
			w.wrong("lookup of %d keys: %d held, %d of them resident", chainLength, held, resident)
		}
		w.count(err, &w.said.Looks)
	case p < 0.98: // nobody ever stores this one
		err := b.Get(chainKey(m, -1-chain, at), w.got[m], opTimeout)
		if err == nil {
			w.wrong("a hit for a chunk that was never stored")
		}
		w.count(err, nil)
	default:
		w.count(b.Remove([]kvtier.Key{k}), &w.said.Drops)
	}
}

// count sorts outcomes. Every error that is not one of an absent or changing leader,
// of a full arena or of a miss is wrong.
func (w *worker) count(err error, good *uint64) bool {
	if err == nil {
		*good++
		return true
	}
	if errors.Is(err, kvtier.ErrMiss) {
		w.said.Misses++
		return false
	}
	for _, allowed := range []error{
		kvtier.ErrNoLeader, kvtier.ErrNotAccepted, kvtier.ErrStale, kvtier.ErrDeclined, kvtier.ErrTimeout, kvtier.ErrBusy,
	} {
		if errors.Is(err, allowed) {
			w.said.Failed[allowed.Error()]++
			time.Sleep(time.Millisecond) // till there is a leader again
			return false
		}
	}
	w.wrong("an operation ended with: %v", err)
	return false
}

func (w *worker) report() {
	w.said.State, _ = w.cache.State()
	w.said.Disk = nil
	if w.said.State == kvtier.StateLeader {
		text, err := w.cache.Stats()
		var s struct {
			Leader struct {
				Disk *diskReport `json:"disk"`
			} `json:"leader"`
		}
		if err != nil || json.Unmarshal(text, &s) != nil {
			w.wrong("statistics: %v %s", err, text)
		}
		w.said.Disk = s.Leader.Disk
	}
	w.say()
}

func (w *worker) say() {
	b, err := json.Marshal(&w.said)
	if err != nil {
		panic(err)
	}
	fmt.Fprintf(os.Stdout, "%s\n", b)
}

// wrong ends the worker, and with it the soak.
func (w *worker) wrong(format string, args ...any) {
	w.said.Wrong = fmt.Sprintf(format, args...)
	w.say()
	os.Exit(3)
}
