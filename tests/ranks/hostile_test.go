package ranks

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier"
)

var seedFlag = flag.Uint64("seed", 0, "of random tests; 0: drawn")

func seed(t *testing.T) uint64 {
	s := *seedFlag
	if s == 0 {
		s = uint64(time.Now().UnixNano())
	}
	t.Logf("seed %d (-seed %d)", s, s)
	return s
}

// besieged is a live leader process with an engine that goes on working.
type besieged struct {
	t      *testing.T
	r      root
	leader *process
	c      *kvtier.Cache
	g      *group
	base   *prefix
	seed   uint32

	most int // bytes of the leader's memory, while a hoarder was there
}

func newBesieged(t *testing.T) *besieged {
	b := &besieged{t: t, r: root{dir: t.TempDir(), slots: 256, extra: shortParts}, seed: 100}
	b.leader = start(t, childSpec{Config: b.r.config("leader"), Rank: -1})
	require.Equal(t, kvtier.StateLeader, b.leader.call(request{Cmd: "state"}).State)
	b.c = open(t, b.r.config("member"))
	b.g = newGroup(t, b.c, "good", between, b.r.config)
	b.base = b.g.newPrefix(1, 6, 0)
	b.g.store(b.base)
	return b
}

const shortParts = `,"part_deadline_s":2,"part_first_done_deadline_s":2,"load_window_deadline_s":2`

// works: the engine stores and loads, with right bytes.
func (b *besieged) works() {
	b.t.Helper()
	b.seed++
	p := b.g.newPrefix(b.seed, 3, 10)
	b.g.store(p)
	b.g.load(p)
	b.g.load(b.base)
}

// attack runs one hostile process to its end.
func (b *besieged) attack(a attackSpec) uint64 {
	b.t.Helper()
	return b.launch(a)()
}

// launch starts a hostile process, and gives what waits for its end.
func (b *besieged) launch(a attackSpec) (end func() uint64) {
	b.t.Helper()
	a.Dir, a.Keys = b.r.dir, b.base.keys
	p := start(b.t, childSpec{Attack: &a})
	c := make(chan line, 1)
	p.mu.Lock()
	p.waiting[1] = c
	p.mu.Unlock()
	return func() uint64 {
		b.t.Helper()
		select {
		case l, ok := <-c:
			require.True(b.t, ok, "%+v ended early", a)
			require.Empty(b.t, l.Err, "%+v", a)
			if a.Kind == "hoard" {
				b.works()
				_, resident, _ := b.holds()
				b.most = max(b.most, resident)
			}
			p.kill() // it has ended, or is about to
			return l.Sum
		case <-time.After(2 * wait):
			require.FailNow(b.t, "an attack does not end", "%+v", a)
		}
		return 0
	}
}

// holds is what the leader's process has: descriptors, bytes of memory, members.
func (b *besieged) holds() (files, resident, members int) {
	b.t.Helper()
	names, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", b.leader.cmd.Process.Pid))
	require.NoError(b.t, err)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", b.leader.cmd.Process.Pid))
	require.NoError(b.t, err)
	for _, l := range strings.Split(string(status), "\n") {
		if rest, ok := strings.CutPrefix(l, "RssAnon:"); ok {
			_, err = fmt.Sscan(rest, &resident)
			require.NoError(b.t, err)
		}
	}
	st, _, _ := statsOf(b.t, b.c)
	return len(names), resident << 10, st.Members
}

// descriptors names what the leader's process has open.
func (b *besieged) descriptors() (open []string) {
	dir := fmt.Sprintf("/proc/%d/fd", b.leader.cmd.Process.Pid)
	names, err := os.ReadDir(dir)
	require.NoError(b.t, err)
	for _, n := range names {
		if to, err := os.Readlink(dir + "/" + n.Name()); err == nil {
			open = append(open, n.Name()+" "+to)
		}
	}
	return open
}

// attacks are of one kind: how many there are, and how many one process does.
type attacks struct {
	kind    string
	n, each int
}

// allAttacks begin with those that want a namespace of their own, for which there is room
// as long as the engine's has not grown.
var allAttacks = []attacks{
	{"elsewhere", 1, 1},
	{"declare", handshakeAttacks("declare"), 100},
	{"hello", handshakeAttacks("hello"), 100},
	{"reset", lifeAttacks("reset"), 100},
	{"remove", lifeAttacks("remove"), 100},
	{"lengths", len(framings()), 100},
	{"descriptors", len(descriptorAttacks()), 120},
	{"frames", 100, 50},
	{"ring", ringAttacks(), 64},
	{"soup", 200, 50},
	{"hoard", 4, 2},
}

// Every field of every message and frame takes values that it must not have. The
// leader neither ends, hangs, nor keeps anything, and others go on.
func TestLeaderOutlivesHostilePeers(t *testing.T) {
	s := seed(t)
	b := newBesieged(t)
	b.works()
	files, resident, members := b.holds()
	slow := b.launch(attackSpec{Kind: "slow", To: 1})
	for _, a := range allAttacks {
		began := time.Now()
		done, dropped := 0, uint64(0)
		processes := (a.n + a.each - 1) / a.each
		first := int(s%uint64(min(thinned, processes))) * a.each
		for from := first; from < a.n; from += a.each * thinned {
			to := min(from+a.each, a.n)
			dropped += b.attack(attackSpec{Kind: a.kind, From: from, To: to, Seed: s})
			done += to - from
			b.works()
		}
		t.Logf("%s: %d of %d attacks, %d connections dropped, %v", a.kind, done, a.n, dropped, time.Since(began).Round(time.Millisecond))
	}
	slow()
	requireQuiet(t, b.c)
	var f, m int
	if !assert.Eventually(t, func() bool {
		f, _, m = b.holds()
		return f <= files && m == members
	}, wait, 100*time.Millisecond) {
		require.FailNow(t, "the leader keeps what hostile peers had", "%d descriptors instead of %d, %d members instead of %d:\n%s",
			f, files, m, members, strings.Join(b.descriptors(), "\n"))
	}
	_, after, _ := b.holds()
	require.Less(t, after, resident+(256<<20), "the leader keeps memory")
	require.Less(t, b.most, resident+(256<<20), "hoarders fill the leader's memory")
	t.Logf("memory of the leader: %d MiB, with hoarders %d MiB, afterwards %d MiB", resident>>20, b.most>>20, after>>20)
	require.Zero(t, panics(t, b))
}

// panics are those that the leader has contained.
func panics(t *testing.T, b *besieged) int {
	t.Helper()
	var s struct {
		Process struct {
			Panics int `json:"panics"`
		} `json:"process"`
	}
	require.NoError(t, json.Unmarshal(b.leader.call(request{Cmd: "stats"}).Text, &s))
	return s.Process.Panics
}
