package crash

import (
	"math/rand/v2"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/disktest"
	"github.com/kvtier/kvtier/tier"
)

// What the oracle knows of a chunk.
type belief int

const (
	gone  belief = iota // must not be found
	maybe               // evicted, or in the air when the lights went out
	there               // must be found
)

// machine is a disk tier, the disk below it, and what must be true of them.
type machine struct {
	*box
	dir     string
	disk    *memDisk
	clock   *clock
	options tier.StoreOptions
	roomy   bool // nothing is ever evicted
	faulty  bool // errors are being injected
	// wobbly: an error was injected since the store was opened. What failed
	// half-way is in the books as it was, or is found again by the next scan.
	wobbly bool
	knows  map[int]belief
	ever   map[int]bool // had a file once: a power cut can bring it back
	solid  map[int]bool // was written with all that durable adds
	pulled map[int]bool // removed since the store was opened, perhaps not yet on disk
	// torn: a power cut may have left a file of the right size with holes in it. It is
	// found out by the first read; until then a put of this chunk is one of what is there.
	torn map[int]bool
}

const modelKeys = 12

func (m *machine) reopen(t *rapid.T, capBytes int64, durable bool) {
	m.options = tier.StoreOptions{
		CapBytes: capBytes, Durable: durable, FS: m.disk, Now: m.clock.now,
		Breaker: tier.BreakerOptions{Errors: rapid.SampledFrom([]int{1, 5, 1 << 30}).Draw(t, "breaker")},
	}
	m.roomy = capBytes >= 60*disktest.CostBytes
	m.disk.mu.Lock()
	m.disk.limit = 0
	if m.disk.usedLocked() <= capBytes {
		m.disk.limit = capBytes
	}
	m.disk.mu.Unlock()
	m.box = open(t, m.dir, m.options)
	if !m.roomy {
		m.blur()
	}
	m.pulled, m.wobbly = map[int]bool{}, false
}

// blur is for when any chunk may be evicted.
func (m *machine) blur() {
	for n, b := range m.knows {
		if b == there {
			m.knows[n] = maybe
		}
	}
}

func (m *machine) cap(t *rapid.T) int64 {
	return rapid.SampledFrom([]int64{100 * disktest.CostBytes, 100 * disktest.CostBytes, 10 * disktest.CostBytes, 7 * disktest.CostBytes}).Draw(t, "cap")
}

func (m *machine) healthy() {
	m.disk.set(nil)
	m.faulty = false
	m.clock.jump(11 * time.Second) // what failed to be scanned is tried again
	m.wait("the tier to be on", func() bool {
		off := m.store.Stats().State == "off"
		if off {
			m.clock.jump(time.Minute)
		}
		return !off
	})
	m.scanned()
}

// TestDiskAgainstAStrictOracle mixes everything that can happen to the tier, and
// asks after each step: no wrong byte, no chunk that nobody has put, none missing
// without a reason, never over the cap, and books that equal the disk.
func TestDiskAgainstAStrictOracle(t *testing.T) {
	base := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		dir, err := os.MkdirTemp(base, "")
		require.NoError(t, err)
		m := &machine{dir: dir, disk: newMemDisk(dir), clock: &clock{}, knows: map[int]belief{}, ever: map[int]bool{}, solid: map[int]bool{}, torn: map[int]bool{}}
		m.reopen(t, m.cap(t), rapid.Bool().Draw(t, "durable"))
		defer func() {
			m.disk.set(nil) // what is removed has to go before the end
			m.close()
		}()
		number := rapid.IntRange(0, modelKeys-1)
		t.Repeat(map[string]func(*rapid.T){
			"put": func(t *rapid.T) { m.stored(number.Draw(t, "n")) },
			"get": func(t *rapid.T) { m.fetched(t, number.Draw(t, "n")) },
			"remove": func(t *rapid.T) {
				n := number.Draw(t, "n")
				m.box.disk.Remove(key(n))
				m.knows[n], m.pulled[n] = gone, true
				if rapid.Bool().Draw(t, "settle") && !m.faulty {
					m.idle()
					delete(m.pulled, n)
				}
			},
			"touch": func(t *rapid.T) { m.box.disk.Touch(key(number.Draw(t, "n")), 1) },
			"lose": func(t *rapid.T) {
				n := number.Draw(t, "n")
				if !m.faulty && m.disk.lose(m.path(n)) {
					require.ErrorIs(t, m.get(n), tier.ErrAbsent)
					m.knows[n] = gone
				}
			},
			"harm": func(t *rapid.T) {
				n := number.Draw(t, "n")
				if m.faulty || m.knows[n] == gone {
					return
				}
				at, bit := rapid.IntRange(0, disktest.FileBytes-1).Draw(t, "byte"), byte(1)<<rapid.IntRange(0, 7).Draw(t, "bit")
				if m.disk.edit(m.path(n), func(b []byte) []byte {
					if at < len(b) {
						b[at] ^= bit
					}
					return b
				}) {
					require.Error(t, m.get(n))
					m.knows[n], m.solid[n] = gone, false // a power cut may bring it back, harmed
				}
			},
			"clock": func(t *rapid.T) {
				m.clock.jump(time.Duration(rapid.Int64Range(-7200, 7200).Draw(t, "seconds")) * time.Second)
			},
			"faults": func(t *rapid.T) {
				if m.faulty {
					m.healthy()
					return
				}
				errno := rapid.SampledFrom([]syscall.Errno{syscall.EIO, syscall.EMFILE, syscall.EACCES, syscall.ENOMEM, syscall.ENOSPC}).Draw(t, "errno")
				one := rapid.IntRange(1, 6).Draw(t, "one in")
				r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
				m.faulty, m.wobbly = true, true
				if errno == syscall.ENOSPC { // room is made by eviction, perhaps a while later
					m.roomy = false
					m.blur()
				}
				m.disk.set(func(call, path string) error {
					if r.IntN(one) == 0 {
						return &os.PathError{Op: call, Path: path, Err: errno}
					}
					return nil
				})
			},
			"restart": func(t *rapid.T) {
				if m.faulty && rapid.Bool().Draw(t, "heals first") {
					m.healthy()
				}
				m.disk.set(nil) // the tier may be off all the same
				m.faulty = false
				failed := m.wobbly
				m.close()
				m.reopen(t, m.cap(t), rapid.Bool().Draw(t, "durable"))
				if !failed {
					m.books(t)
				}
			},
			"kill": func(t *rapid.T) { m.crash(t, false) },
			"cut":  func(t *rapid.T) { m.crash(t, true) },
			"": func(t *rapid.T) {
				m.disk.mu.Lock()
				worst := m.disk.worst
				m.disk.mu.Unlock()
				require.Empty(t, worst)
				if m.faulty {
					return
				}
				m.scanned()
				m.idle()
				for n := range modelKeys {
					if has := m.box.disk.Has(key(n)); has {
						require.NotEqual(t, gone, m.knows[n], "chunk %d is a phantom", n)
					} else {
						require.NotEqual(t, there, m.knows[n], "chunk %d is missing", n)
					}
				}
				if !m.wobbly {
					m.books(t)
				}
			},
		})
	})
}

// books compares what the tier has accounted with what lies on the disk.
func (m *machine) books(t rapid.TB) {
	t.Helper()
	m.scanned()
	for end := time.Now().Add(patience); ; time.Sleep(200 * time.Microsecond) {
		m.idle()
		st := m.store.Stats()
		used := m.disk.used()
		if st.UsedBytes == used && used <= m.options.CapBytes && m.store.Stats().UsedBytes == used {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%d bytes on disk, cap %d: %+v", used, m.options.CapBytes, st)
		}
	}
}

func (m *machine) path(n int) string {
	fp, _ := disktest.Namespace("crash/model").Fingerprint()
	return m.dir + "/" + chunk.DirName("crash/model", fp) + "/" + chunk.SubDir(key(n)) + "/" + chunk.FileName(key(n))
}

func (m *machine) stored(n int) {
	m.ever[n] = true
	err := m.put(n)
	m.afterPut(n, err)
}

func (m *machine) afterPut(n int, err error) {
	switch {
	case err == nil:
		delete(m.pulled, n)
		m.solid[n] = m.durable() && !m.torn[n] && (m.solid[n] || m.knows[n] == gone)
		if m.knows[n] = there; m.torn[n] {
			m.knows[n] = maybe
		}
		if !m.roomy {
			m.blur()
		}
	case !m.faulty && m.roomy && err.Error() != errDropped.Error():
		m.t.Fatalf("put of %d: %v", n, err)
	case !m.roomy:
		m.blur()
	}
}

// durable: a chunk that is written now survives a power cut.
func (m *machine) durable() bool { return m.options.Durable && !m.wobbly }

func (m *machine) fetched(t *rapid.T, n int) {
	switch err := m.get(n); {
	case err == nil:
		require.NotEqual(t, gone, m.knows[n], "chunk %d is a phantom", n)
		delete(m.torn, n)
		if m.roomy {
			m.knows[n] = there
		}
	case m.faulty && m.knows[n] == there:
		require.NotErrorIs(t, err, tier.ErrAbsent)
	case m.faulty:
	default:
		require.NotEqual(t, there, m.knows[n], "chunk %d is missing: %v", n, err)
		m.knows[n] = gone
		delete(m.torn, n)
	}
}

// crash ends the process after a few more calls, in the middle of whatever it does
// then, and starts a new one on what is left.
func (m *machine) crash(t *rapid.T, power bool) {
	if m.faulty {
		m.healthy()
	}
	durable := m.durable()
	m.disk.dieAfter(rapid.IntRange(0, 60).Draw(t, "calls"))
	var mu sync.Mutex
	var answers sync.WaitGroup
	acked, started := map[int]bool{}, map[int]bool{}
	for range rapid.IntRange(0, 5).Draw(t, "puts") {
		n := rapid.IntRange(0, modelKeys-1).Draw(t, "n")
		if rapid.IntRange(0, 4).Draw(t, "remove") == 0 {
			m.box.disk.Remove(key(n))
			mu.Lock()
			m.pulled[n] = true
			delete(acked, n)
			m.knows[n] = maybe
			mu.Unlock()
			continue
		}
		answers.Add(1)
		started[n] = true
		if !m.start(n, func(err error) {
			defer answers.Done()
			mu.Lock()
			defer mu.Unlock()
			if err == nil && m.disk.alive() && !m.pulled[n] {
				acked[n] = true
			}
		}) {
			answers.Done()
		}
		if m.knows[n] == gone {
			m.knows[n] = maybe
		}
	}
	answers.Wait()
	old := m.disk
	if power {
		m.disk = old.powerCut(rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 2)))
	} else {
		m.disk = old.killed()
	}
	_ = m.store.Close(patience) // of a process that can do nothing any more
	require.NoError(t, m.root.Close())
	for n := range acked {
		m.solid[n] = durable && !m.torn[n] && (m.solid[n] || !m.ever[n])
		if m.knows[n] = there; m.torn[n] {
			m.knows[n] = maybe
		}
	}
	for n := range started {
		if m.ever[n] = true; !durable && m.knows[n] != there {
			m.solid[n] = false // it may have got its name, and its bytes not be safe
		}
	}
	for n := range m.pulled {
		if m.ever[n] && !acked[n] {
			m.knows[n] = maybe
		}
	}
	for n := range m.ever {
		if power && (m.knows[n] == gone || m.knows[n] == there && !m.solid[n]) {
			m.knows[n] = maybe
		}
	}
	for n := range m.ever {
		m.torn[n] = m.torn[n] || power && !m.solid[n]
		m.solid[n] = true // what is on the disk now is there for good
	}
	if !m.roomy {
		m.blur()
	}
	m.reopen(t, m.cap(t), rapid.Bool().Draw(t, "durable"))
	require.Empty(t, m.scanned().store.Stats().Errors)
	require.Empty(t, m.disk.files(".tmp"))
}
