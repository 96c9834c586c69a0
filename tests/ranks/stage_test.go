//go:build ranksteps

package ranks

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier"
)

// What happens to a rank at a step.
const (
	killed = "killed"  // SIGKILL
	frozen = "frozen"  // SIGSTOP beyond all deadlines, then it goes on
	late   = "late"    // it is slower than all deadlines
	inTime = "in time" // it is slow, and not too slow
)

var actions = []string{killed, frozen, late, inTime}

// crew is a group, and which of its ranks has the accident.
type crew struct {
	shape
	victim int
	idle   bool // the victim writes nothing
}

var (
	// Two ranks have rows in every chunk.
	pair = crew{shape{D: 2, I: 2, B: 8, C: 24, Blocks: 32, Widths: []int{48, 17}}, 1, false}
	// Two replicas of each DCP rank take turns in writing. The victim writes the second
	// region and the last one of its rows.
	replicas = crew{shape{
		D: 2, TP: 4, I: 2, B: 8, C: 24, Blocks: 32,
		Widths: []int{48, 17, 9, 33}, Kinds: []kind{replicated, replicated, allRows, split},
	}, 3, false}
	// The victim is the one that writes the rows of its DCP rank.
	owner = crew{shape{D: 2, TP: 4, I: 2, B: 8, C: 24, Blocks: 32, Widths: []int{65}, Kinds: []kind{allRows}}, 1, false}
	// The victim writes nothing: its replica does.
	reader = crew{shape{D: 2, TP: 4, I: 2, B: 8, C: 24, Blocks: 32, Widths: []int{65}, Kinds: []kind{replicated}}, 3, true}
	// The victim has no rows of its own in every third chunk, but in its pages all rows.
	sparse = crew{shape{D: 2, I: 32, B: 32, C: 24, Blocks: 16, Widths: []int{48, 17}, Kinds: []kind{split, allRows}}, 1, false}
)

// witness has the same chunks on one rank, as another engine on the same root.
func (c crew) witness() shape {
	return shape{D: 1, I: 16, B: 16, C: c.C, Blocks: 32, Widths: c.Widths}
}

const (
	deathSlots  = 24
	deathWindow = deathSlots / 8
	shortLimits = `,"part_deadline_s":1,"part_first_done_deadline_s":1,"load_window_deadline_s":1`
)

// stage is where a rank is to be stopped.
type stage struct {
	t          *testing.T
	c          *kvtier.Cache
	g, witness *group
	base       *prefix // stored before
	at         int     // the victim's rank
	victim     *process
	others     []*process
	seed       uint32
}

func newStage(t *testing.T, crew crew) *stage {
	r := root{dir: t.TempDir(), slots: deathSlots, extra: shortLimits}
	s := &stage{t: t, c: open(t, r.config("leader"))}
	s.enter(crew, crew.witness(), r, 10)
	return s
}

// newLedStage has its leader in a process, and lead to start another one.
func newLedStage(t *testing.T) (s *stage, leader *process, lead func() *process) {
	r := root{dir: t.TempDir(), slots: deathSlots, extra: shortLimits}
	lead = func() *process {
		p := start(t, childSpec{Config: r.config("leader"), Rank: -1})
		require.Equal(t, kvtier.StateLeader, p.call(request{Cmd: "state"}).State)
		return p
	}
	leader = lead()
	s = &stage{t: t, c: open(t, r.config("member"))}
	s.enter(pair, pair.witness(), r, 10)
	require.NoError(t, s.c.Flush(wait))
	return s, leader, lead
}

// enter starts the group and the witness, and stores a base of so many chunks.
func (s *stage) enter(crew crew, witness shape, r root, chunks int) {
	s.t.Helper()
	s.seed = 100
	s.g = newGroup(s.t, s.c, "crew", crew.shape, r.config)
	s.witness = newGroup(s.t, s.c, "witness", witness, r.config)
	s.base = s.g.newPrefix(1, chunks, 0)
	s.g.store(s.base)
	s.at, s.victim = crew.victim, s.g.ranks[crew.victim]
	for i, r := range s.g.ranks {
		if i != s.at {
			s.others = append(s.others, r)
		}
	}
}

// hold makes the victim stop at a step, the nth time it comes there.
func (s *stage) hold(step string, nth int) {
	s.t.Helper()
	s.victim.call(request{Cmd: "hold", Step: step, Nth: nth})
}

func (s *stage) atStep(step string) {
	s.t.Helper()
	select {
	case at := <-s.victim.held:
		require.Equal(s.t, step, at)
	case <-time.After(wait):
		require.FailNow(s.t, "the victim does not come to its step", step)
	}
}

// holdInLoad has all ranks load the base into pages without it, and the victim stop at
// a step, the nth time it comes there.
func (s *stage) holdInLoad(step string, nth int) kvtier.LoadOp {
	s.t.Helper()
	for _, r := range s.g.ranks {
		r.call(request{Cmd: "wipe"})
	}
	s.hold(step, nth)
	op := s.g.plan(s.base)
	for _, r := range s.g.ranks {
		r.call(request{Cmd: "load", Load: &op})
	}
	s.atStep(step)
	return op
}

// act does to the victim what it is about.
func (s *stage) act(action string) {
	s.t.Helper()
	switch action {
	case killed:
		s.victim.kill()
	case frozen:
		s.victim.freeze()
	case inTime:
		s.victim.call(request{Cmd: "go"})
	}
}

// release lets the victim go on. A dead one is replaced.
func (s *stage) release(action string) {
	s.t.Helper()
	switch action {
	case frozen:
		s.victim.thaw()
		fallthrough
	case late:
		s.victim.call(request{Cmd: "go"})
	}
}

func (s *stage) replace() {
	s.t.Helper()
	s.g.startRank(s.at)
	s.victim = s.g.ranks[s.at]
	s.g.ready()
}

// sums are checksums of the pages of the other ranks.
func (s *stage) sums() (sums []uint64) {
	s.t.Helper()
	for _, r := range s.others {
		sums = append(sums, r.call(request{Cmd: "sum"}).Sum)
	}
	return sums
}

// flood goes through more chunks than there are slots: every slot that is free, or
// may be, gets other bytes.
func (s *stage) flood() {
	s.t.Helper()
	for range 2 * deathSlots / 8 {
		s.seed++
		s.witness.store(s.witness.newPrefix(s.seed, 8, 0))
		require.NoError(s.t, s.c.Flush(wait)) // so that its chunks may be evicted
	}
	s.witness.load(s.witness.newPrefix(s.seed, 8, 4))
}

func (s *stage) slots(state string) int {
	st, _, ok := statsOf(s.t, s.c)
	require.True(s.t, ok)
	return st.Namespaces[0].Slots[state]
}

// requireSound: the group works, and all that is held is right.
func (s *stage) requireSound() {
	s.t.Helper()
	p := s.g.newPrefix(3, 4, 5)
	s.g.store(p)
	s.g.load(p)
	s.g.load(s.base)
	s.witness.load(s.witness.newPrefix(1, 10, 0))
	requireQuiet(s.t, s.c)
}

// requirePages wants what an event says to be in the pages, and no foreign byte.
func (s *stage) requirePages(r *process, e kvtier.Event) {
	s.t.Helper()
	r.call(request{Cmd: "check", Seed: s.base.seed, Table: s.base.table, Loaded: int(e.Tokens), To: len(s.base.keys) * s.g.shape.C})
}

// requireQuietBut waits until no slot is in a state.
func requireQuietBut(t *testing.T, s *stage, state string) {
	t.Helper()
	require.Eventually(t, func() bool {
		return s.slots(state) == 0 && s.slots("assembling") == 0 && s.slots("sealing") == 0
	}, wait, time.Millisecond)
}
