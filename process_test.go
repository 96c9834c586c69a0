package kvtier

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/tier"
)

func (p *process) signal(s os.Signal) {
	p.t.Helper()
	require.NoError(p.t, p.cmd.Process.Signal(s))
}

// stop stops the process, and returns when it does not run any more.
func (p *process) stop() {
	p.t.Helper()
	p.signal(syscall.SIGSTOP)
	require.Eventually(p.t, func() bool {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
		require.NoError(p.t, err)
		return strings.Contains(string(b), ") T ")
	}, testWait, time.Millisecond)
}

func leadingProcess(t *testing.T, dir string) *process {
	t.Helper()
	// Room for the arenas of two namespaces, whichever is accepted first.
	p := startProcess(t, testConfigOf(dir, RoleLeader, 8*suiteDRAM))
	require.Equal(t, StateLeader, p.state())
	return p
}

func TestLeaderIsKilledAndAnotherComes(t *testing.T) {
	dir := t.TempDir()
	first := leadingProcess(t, dir)
	c := openTest(t, dir, RoleMember)
	e := newEngine(t, c, smallEngine)
	b := newBlob(t, c)
	p := e.newPrefix(1, 4, 0)
	e.fill(p, 0, 4*e.geo.C)
	e.store(p, 0, 4)
	e.held(p, 4)
	require.NoError(t, b.Put(blobKey(0), Key{}, 0, payload(0, suiteBlob), testWait))
	require.NoError(t, c.Flush(testWait))
	old := e.begin(p, 0, 4*e.geo.C)
	session := e.k.Session()
	require.NotZero(t, session)

	first.kill()
	require.Eventually(t, func() bool { return e.k.Session() == 0 }, testWait, time.Millisecond)
	// Everything is a miss now, and says so at once.
	requireState(t, c, StateOpening)
	_, err := e.k.Lookup(p.root, 0, p.keys, testWait)
	require.ErrorIs(t, err, ErrNoLeader)
	require.ErrorIs(t, e.k.Lease(1, p.root, 0, p.keys, 0), ErrNoLeader)
	require.ErrorIs(t, e.k.StoreBegin([]StoreBegin{{Op: 1, Keys: p.keys}}, testWait)[0].Err, ErrNoLeader)
	// Each attachment sees the end by itself.
	require.Eventually(t, func() bool {
		return errors.Is(e.ranks[0].Store(StoreOp{Session: session}), ErrStale) &&
			errors.Is(b.Get(blobKey(0), make([]byte, suiteBlob), testWait), ErrNoLeader)
	}, testWait, time.Millisecond)
	_, err = c.Stats()
	require.NoError(t, err)
	e.wipe(0xCD)
	require.Equal(t, EventStale, e.load(old)[0].Status)

	leadingProcess(t, dir)
	e.ready()
	require.NoError(t, b.Ready(testWait))
	require.NotEqual(t, session, e.k.Session())
	// What the old one granted is gone, what is on disk is there.
	require.Equal(t, EventStale, e.load(old)[0].Status)
	e.requireOnly(p, 0, 0, 0xCD)
	e.held(p, 4)
	op := e.begin(p, 3, 4*e.geo.C)
	e.requireLoaded(e.load(op), op)
	e.requireOnly(p, 3, 4*e.geo.C, 0xCD)
	got := make([]byte, suiteBlob)
	require.NoError(t, b.Get(blobKey(0), got, testWait))
	require.Equal(t, payload(0, suiteBlob), got)
}

func TestMemberTakesOverFromAKilledLeader(t *testing.T) {
	dir := t.TempDir()
	first := leadingProcess(t, dir)
	c := openTest(t, dir, RoleAuto)
	requireState(t, c, StateMember)
	e := newEngine(t, c, smallEngine)
	p := e.newPrefix(1, 2, 0)
	e.fill(p, 0, 2*e.geo.C)
	e.store(p, 0, 2)
	e.held(p, 2)
	require.NoError(t, c.Flush(testWait))
	first.kill()
	// Its socket still lies there and must not be in the way of anybody.
	_, err := os.Lstat(filepath.Join(dir, "run", socketName))
	require.NoError(t, err)
	requireState(t, c, StateLeader)
	e.ready()
	e.held(p, 2)
	e.wipe(1)
	op := e.begin(p, 0, 2*e.geo.C)
	e.requireLoaded(e.load(op), op)
	e.requireOnly(p, 0, 2*e.geo.C, 1)

	other := startProcess(t, testConfig(dir, RoleMember))
	require.Equal(t, StateMember, other.state())
	other.end()
}

// A leader that does not answer costs bounded time, and nothing of what it was
// asked is carried out later.
func TestStoppedLeader(t *testing.T) {
	dir := t.TempDir()
	leader := leadingProcess(t, dir)
	c := openTest(t, dir, RoleMember)
	e := newEngine(t, c, smallEngine)
	p := e.newPrefix(1, 4, 0)
	e.fill(p, 0, 4*e.geo.C)
	e.store(p, 0, 4)
	e.held(p, 4)

	leader.stop()
	start := time.Now()
	q := e.newPrefix(2, 2, 32)
	out := e.k.StoreBegin([]StoreBegin{{Op: 500, Parent: q.root, Keys: q.keys[:1]}, {Op: 501, Parent: q.root, Keys: q.keys[:1]}}, 20*time.Millisecond)
	require.ErrorIs(t, out[0].Err, ErrTimeout)
	require.ErrorIs(t, out[1].Err, ErrTimeout)
	require.NoError(t, e.k.Lease(7, p.root, 0, p.keys, LeasePin))
	_, err := e.k.LeaseResult(7, 0)
	require.ErrorIs(t, err, ErrPending)
	_, err = e.k.LeaseResult(7, 5*time.Millisecond)
	require.ErrorIs(t, err, ErrPending)
	_, _, err = e.k.LoadBegin(502, 7, p.root, 0, p.keys, 5*time.Millisecond)
	require.ErrorIs(t, err, ErrTimeout)
	// The ring is full some day, and never waited for.
	busy := false
	for i := range 100 {
		busy = busy || e.k.Lease(uint64(100+i), p.root, 0, p.keys, 0) != nil
	}
	require.True(t, busy)
	require.ErrorIs(t, e.k.Lease(99, p.root, 0, p.keys, 0), ErrBusy)
	require.Less(t, time.Since(start), 5*time.Second)

	leader.signal(syscall.SIGCONT)
	require.Eventually(t, func() bool {
		h, err := e.k.LeaseResult(7, time.Second)
		return err == nil && h.Leased == 4
	}, testWait, time.Millisecond)
	// The cancelled stores left nothing half done: the chunk can be stored.
	require.Eventually(t, func() bool {
		out := e.k.StoreBegin([]StoreBegin{{Op: 600, Parent: q.root, Keys: q.keys[:1]}}, testWait)
		return out[0].Err == nil && out[0].Verdicts[0].Code == Granted
	}, testWait, time.Millisecond)
}

// The same for whole chunks: what was given up is no obstacle for a second try.
func TestWholeChunksOfAStoppedLeader(t *testing.T) {
	dir := t.TempDir()
	leader := leadingProcess(t, dir)
	c := openTest(t, dir, RoleMember)
	b := newBlob(t, c)
	require.NoError(t, b.Put(blobKey(0), Key{}, 0, payload(0, suiteBlob), testWait))

	leader.stop()
	require.ErrorIs(t, b.Put(blobKey(1), blobKey(0), 1, payload(1, suiteBlob), 20*time.Millisecond), ErrTimeout)
	require.ErrorIs(t, b.Get(blobKey(0), make([]byte, suiteBlob), 20*time.Millisecond), ErrTimeout)
	leader.signal(syscall.SIGCONT)
	for i := range 2 {
		require.NoError(t, b.Put(blobKey(i), blobKey(0), uint32(i), payload(uint64(i), suiteBlob), testWait))
		got := make([]byte, suiteBlob)
		require.NoError(t, b.Get(blobKey(i), got, testWait))
		require.Equal(t, payload(uint64(i), suiteBlob), got)
	}
	requireIdle(t, c)
}

// More resets than the socket takes: none waits for a leader that reads nothing, and
// it hears of the newest when it goes on.
func TestResetsDoNotWaitForAStoppedLeader(t *testing.T) {
	dir := t.TempDir()
	leader := leadingProcess(t, dir)
	c := openTest(t, dir, RoleMember)
	e := newEngine(t, c, smallEngine)
	leader.stop()
	seen := map[[16]byte]bool{}
	for range 5000 {
		epoch, err := e.k.Reset()
		require.NoError(t, err)
		seen[epoch] = true
	}
	require.Len(t, seen, 5000)
	leader.signal(syscall.SIGCONT)
	p := e.newPrefix(1, 2, 0)
	e.fill(p, 0, 2*e.geo.C)
	e.store(p, 0, 2)
	e.held(p, 2)
}

// A rank reports a load whose window is never decided.
func TestLoadIsReportedWhenTheLeaderDies(t *testing.T) {
	dir := t.TempDir()
	leader := leadingProcess(t, dir)
	c := openTest(t, dir, RoleMember)
	e := newEngine(t, c, smallEngine)
	p := e.newPrefix(1, 4, 0)
	e.fill(p, 0, 4*e.geo.C)
	e.store(p, 0, 4)
	e.held(p, 4)
	e.wipe(3)
	op := e.begin(p, 0, 4*e.geo.C)
	leader.stop()
	op.Verdicts = op.Verdicts[:1] // the rest has to be asked for
	require.NoError(t, e.ranks[0].Load(op))
	second := op
	second.Op++
	require.NoError(t, e.ranks[0].Load(second))
	require.Eventually(t, func() bool {
		e.ranks[0].loader.mu.Lock()
		defer e.ranks[0].loader.mu.Unlock()
		waiting := 0
		for l := range e.ranks[0].loader.loads {
			if l.state == loadWaiting {
				waiting++
			}
		}
		return waiting == 2
	}, testWait, time.Millisecond)
	require.Empty(t, c.Events(10))
	leader.kill()
	for _, ev := range e.events(2) {
		require.Equal(t, EventStale, ev.Status)
		require.EqualValues(t, 1, ev.FirstFailed)
		require.EqualValues(t, e.geo.C, ev.Tokens)
	}
	e.requireOnly(p, 0, e.geo.C, 3)
}

// Copies of a session stop before anything of it goes, and before the next begins.
func TestEndOfASessionStopsRunningCopies(t *testing.T) {
	dir := t.TempDir()
	leader := openTest(t, dir, RoleLeader)
	c := openApart(t, dir, RoleMember)
	e := newEngine(t, c, smallEngine)
	r := e.ranks[0]
	// A copy as the worker and a store would have it.
	v, _, session, release, err := r.m.use()
	require.NoError(t, err)
	running := &load{state: loadRunning}
	r.loader.mu.Lock()
	r.loader.loads[running] = struct{}{}
	r.loader.mu.Unlock()
	require.True(t, c.events.reserve())

	require.NoError(t, leader.Close(testWait))
	require.Eventually(t, func() bool { return v.stop.Load() && running.stop.Load() }, testWait, time.Millisecond)
	again := openApart(t, dir, RoleLeader)
	requireState(t, again, StateLeader)
	requireState(t, c, StateMember)
	_, err = r.Ready(100 * time.Millisecond)
	require.ErrorIs(t, err, ErrTimeout, "the old copy still runs")
	slot := v.slot(tier.Ref{})
	slot[0]++ // it is still mapped
	release()
	e.ready()
	require.NotEqual(t, session, e.k.Session())
	r.loader.end(running, EventStale, nil)
	require.Len(t, c.Events(10), 1)
}

func TestLeaderOfARemovedRootStandsAside(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "root")
	cfg, err := parsed(t, testConfig(dir, RoleAuto)).filled()
	require.NoError(t, err)
	root, err := openRoot(cfg)
	require.NoError(t, err)
	c, err := newCache(cfg, root, nil)
	require.NoError(t, err)
	c.rootCheck = time.Millisecond
	c.start()
	watch(t, c)
	b := newBlob(t, c)
	require.NoError(t, os.Rename(filepath.Join(dir, "LOCK"), filepath.Join(dir, "LOCK.old")))
	require.Eventually(t, func() bool {
		return errors.Is(b.Get(blobKey(0), make([]byte, suiteBlob), testWait), ErrNoLeader)
	}, testWait, time.Millisecond)
	_, detail := c.State()
	require.Contains(t, detail, "removed or replaced")
}

func TestCloseIsBoundedWhenTheLeaderIsStopped(t *testing.T) {
	dir := t.TempDir()
	leader := leadingProcess(t, dir)
	c := openTest(t, dir, RoleMember)
	e := newEngine(t, c, smallEngine)
	leader.stop()
	start := time.Now()
	_, err := e.k.Lookup(Key{}, 0, make([]Key, 1), 10*time.Millisecond)
	require.ErrorIs(t, err, ErrTimeout)
	require.NoError(t, c.Close(5*time.Second))
	require.Less(t, time.Since(start), 5*time.Second)
	leader.signal(syscall.SIGCONT)
}

func TestMemberNeverLeads(t *testing.T) {
	c := openTest(t, t.TempDir(), RoleMember)
	b, err := c.Blob("m", 100, 1, Identity{})
	require.NoError(t, err)
	require.ErrorIs(t, b.Ready(200*time.Millisecond), ErrTimeout)
	state, detail := c.State()
	require.Equal(t, StateOpening, state)
	require.Contains(t, detail, "no leader")
	require.NoError(t, b.Close())
}

func TestOpenTwiceIsOneCache(t *testing.T) {
	dir := t.TempDir()
	a, err := Open(parsed(t, testConfig(dir, RoleMember)))
	require.NoError(t, err)
	link := filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.Symlink(dir, link))
	b, err := Open(parsed(t, testConfig(link, RoleAuto)))
	require.NoError(t, err)
	require.Same(t, a, b)
	requireState(t, a, StateLeader) // the stronger role counts
	blob := newBlob(t, a)
	require.NoError(t, a.Close(testWait))
	require.NoError(t, blob.Put(blobKey(0), Key{}, 0, payload(0, suiteBlob), testWait), "one opening is left")
	require.NoError(t, b.Close(testWait))
	requireState(t, b, StateClosed)
	require.ErrorIs(t, blob.Put(blobKey(1), Key{}, 0, payload(0, suiteBlob), testWait), ErrClosed)
	require.Empty(t, caches.caches)
}

// The next opening of a root does not wait, and leads when the one before is done.
func TestOpenWhileTheOneBeforeIsClosing(t *testing.T) {
	dir := t.TempDir()
	for i := range 5 {
		a, err := Open(parsed(t, testConfig(dir, RoleAuto)))
		require.NoError(t, err)
		b := newBlobUnready(t, a)
		require.NoError(t, b.Ready(testWait))
		require.NoError(t, b.Put(blobKey(i), Key{}, 0, payload(uint64(i), suiteBlob), testWait))
		closed := make(chan error, 1)
		go func() { closed <- a.Close(testWait) }()
		require.Eventually(t, a.isClosing, testWait, time.Millisecond)
		next := openTest(t, dir, RoleAuto)
		require.NotSame(t, a, next)
		b = newBlobUnready(t, next)
		require.NoError(t, b.Ready(testWait))
		require.NoError(t, <-closed)
		got := make([]byte, suiteBlob)
		require.NoError(t, b.Get(blobKey(i), got, testWait), "it was dirty when the one before was closed")
		require.Equal(t, payload(uint64(i), suiteBlob), got)
		require.NoError(t, next.Close(testWait))
	}
}

func newBlobUnready(t *testing.T, c *Cache) *Blob {
	t.Helper()
	b, err := c.Blob("test/blob", suiteBlob, 64, Identity{})
	require.NoError(t, err)
	return b
}

// An engine that is started again while the old one still tears down.
func TestQuickRestart(t *testing.T) {
	dir := t.TempDir()
	old := leadingProcess(t, dir)
	c := openTest(t, dir, RoleLeader)
	time.Sleep(100 * time.Millisecond) // several tries
	state, detail := c.State()
	require.Equal(t, StateOpening, state)
	require.Contains(t, detail, "process")
	b := newBlobUnready(t, c)
	require.ErrorIs(t, b.Ready(10*time.Millisecond), ErrTimeout)
	old.end()
	require.NoError(t, b.Ready(testWait))
	requireState(t, c, StateLeader)
}

func TestRestartFindsWhatWasStored(t *testing.T) {
	dir := t.TempDir()
	for run := range 3 {
		c, err := Open(parsed(t, testConfig(dir, RoleAuto)))
		require.NoError(t, err)
		b := newBlobUnready(t, c)
		require.NoError(t, b.Ready(testWait))
		got := make([]byte, suiteBlob)
		for i := range run * 10 {
			require.NoError(t, b.Get(blobKey(i), got, testWait), "run %d, chunk %d", run, i)
			require.Equal(t, payload(uint64(i), suiteBlob), got)
		}
		for i := run * 10; i < run*10+10; i++ {
			require.NoError(t, b.Put(blobKey(i), Key{}, 0, payload(uint64(i), suiteBlob), testWait))
		}
		require.NoError(t, c.Close(testWait))
	}
}

func TestRuntimeRootNeedsNoDisk(t *testing.T) {
	dir := t.TempDir()
	cfg := `{"runtime_dir":"` + dir + `/r","name":"n","dram_gib":0.01}`
	c, err := Open(parsed(t, cfg))
	require.NoError(t, err)
	watch(t, c)
	b := newBlob(t, c)
	require.NoError(t, b.Put(blobKey(0), Key{}, 0, payload(0, suiteBlob), testWait))
	got := make([]byte, suiteBlob)
	require.NoError(t, b.Get(blobKey(0), got, testWait))
	a, err := b.m.ready(testWait)
	require.NoError(t, err)
	require.False(t, a.DiskEnabled)
	other := startProcess(t, cfg)
	require.Equal(t, StateMember, other.state())
	other.end()
}

func TestOpenErrorsAreAboutTheDirectory(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	_, err := Open(&Config{DiskPath: file})
	require.ErrorContains(t, err, file)
	_, err = Open(&Config{Role: 77})
	require.ErrorIs(t, err, ErrConfig)
	_, err = Open(&Config{Name: "a/b"})
	require.ErrorIs(t, err, ErrConfig)
}

func TestOpenAndCloseLeaveNoDescriptors(t *testing.T) {
	count := func() int {
		names, err := os.ReadDir("/proc/self/fd")
		require.NoError(t, err)
		return len(names)
	}
	round := func() {
		dir := t.TempDir()
		leader, err := Open(parsed(t, testConfig(dir, RoleLeader)))
		require.NoError(t, err)
		member := openApart(t, dir, RoleMember)
		for _, c := range []*Cache{leader, member} {
			b := newBlobUnready(t, c)
			require.NoError(t, b.Ready(testWait))
			require.NoError(t, b.Put(blobKey(0), Key{}, 0, payload(0, suiteBlob), testWait))
		}
		require.NoError(t, member.Close(testWait))
		require.NoError(t, leader.Close(testWait))
	}
	round()
	before := count()
	for range 3 {
		round()
	}
	require.Eventually(t, func() bool { return count() <= before }, testWait, 10*time.Millisecond, "%d descriptors before", before)
}
