//go:build ranksteps

package ranks

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier"
	"github.com/kvtier/kvtier/internal/steps"
)

// What happens to a rank at a step.
const (
	killed = "killed"  // SIGKILL
	frozen = "frozen"  // SIGSTOP beyond all deadlines, then it goes on
	late   = "late"    // it is slower than all deadlines
	inTime = "in time" // it is slow, and not too slow
)

var actions = []string{killed, frozen, late, inTime}

// Two ranks have rows in every chunk; the witness has the same chunks on one rank, as
// another engine on the same root.
var (
	pair = shape{D: 2, I: 2, B: 8, C: 24, Blocks: 32, Widths: []int{48, 17}}
	solo = shape{D: 1, I: 16, B: 16, C: 24, Blocks: 32, Widths: []int{48, 17}}
)

const (
	deathSlots  = 24
	deathWindow = deathSlots / 8
	shortLimits = `,"part_deadline_s":1,"part_first_done_deadline_s":1,"load_window_deadline_s":1`
)

// stage is where a rank is to be stopped.
type stage struct {
	t              *testing.T
	c              *kvtier.Cache
	g, witness     *group
	base           *prefix // stored before
	other, victim  *process
	seed           uint32
	dirty, watched uint64
}

func newStage(t *testing.T) *stage {
	r := root{dir: t.TempDir(), slots: deathSlots, extra: shortLimits}
	s := &stage{t: t, c: open(t, r.config("leader")), seed: 100}
	s.g = newGroup(t, s.c, "pair", pair, r.config)
	s.witness = newGroup(t, s.c, "solo", solo, r.config)
	s.base = s.g.newPrefix(1, 10, 0)
	s.g.store(s.base)
	s.other, s.victim = s.g.ranks[0], s.g.ranks[1]
	return s
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
	s.g.startRank(1)
	s.victim = s.g.ranks[1]
	s.g.ready()
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

func TestRankAtEachStepOfAStore(t *testing.T) {
	for _, step := range steps.Store {
		for _, action := range actions {
			t.Run(step+"/"+action, func(t *testing.T) {
				t.Parallel()
				s := newStage(t)
				p := s.g.newPrefix(2, 3, 0)
				s.g.fill(p)
				op, _ := s.g.begin(p, 0)
				require.Len(t, op.Grants, 3)
				nth := 1
				if step == steps.StoreChunk {
					nth = 2 // one chunk is copied, the others are not
				}
				s.hold(step, nth)
				answer := s.victim.send(request{Cmd: "store", Store: &op})
				s.atStep(step)
				s.other.call(request{Cmd: "store", Store: &op}) // waits for nobody
				s.act(action)

				complete := action == inTime || step == steps.StoreDone
				switch {
				case action == killed:
					// What it reported last may have been on its way.
					requireQuietBut(t, s, "draining")
					require.Contains(t, []int{0, 3}, s.witness.lookup(p))
				case complete:
					s.g.held(p, 3)
				default:
					// Given up, and kept from everybody until the victim has answered.
					require.Eventually(t, func() bool { return s.slots("draining") == 3 }, wait, time.Millisecond)
					require.Zero(t, s.witness.lookup(p))
					s.flood()
					// Another engine may bring the same chunks meanwhile.
					s.witness.store(s.witness.newPrefix(2, 3, 0))
					require.Equal(t, 3, s.slots("draining"))
				}
				s.release(action)
				if action == killed {
					s.replace()
				} else {
					<-answer
				}
				requireQuiet(t, s.c)
				s.flood()
				if n := s.witness.lookup(p); n > 0 {
					require.Equal(t, 3, n)
					s.witness.load(s.witness.newPrefix(2, 3, 7))
				}
				s.requireSound()
			})
		}
	}
}

// requireQuietBut waits until no slot is in a state.
func requireQuietBut(t *testing.T, s *stage, state string) {
	t.Helper()
	require.Eventually(t, func() bool {
		return s.slots(state) == 0 && s.slots("assembling") == 0 && s.slots("sealing") == 0
	}, wait, time.Millisecond)
}

// Where a rank that is killed or stopped before its grants, or between the grants and
// their metadata, leaves the chunk.
func TestRankBeforeItsGrants(t *testing.T) {
	for _, before := range []bool{true, false} {
		for _, action := range []string{killed, frozen} {
			name := "after the grant/" + action
			if before {
				name = "before the grant/" + action
			}
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				s := newStage(t)
				p := s.g.newPrefix(2, 3, 0)
				s.g.fill(p)
				var op kvtier.StoreOp
				if before {
					s.act(action)
					if action == killed {
						// Soon everything is declined, and nothing is lost.
						require.Eventually(t, func() bool {
							a := s.g.k.StoreBegin([]kvtier.StoreBegin{{Op: opNumbers.Add(1), Parent: p.root, Keys: p.keys}}, wait)[0]
							return a.Err != nil || a.Verdicts[0].Code == kvtier.Declined
						}, wait, time.Millisecond)
						s.replace()
						requireQuiet(t, s.c)
						s.requireSound()
						return
					}
					op, _ = s.g.begin(p, 0)
				} else {
					op, _ = s.g.begin(p, 0)
					s.act(action)
				}
				if _, err := s.other.try(request{Cmd: "store", Store: &op}); err != nil {
					// The chunks are given up already: the victim is known to be dead, or late.
					require.ErrorContains(t, err, "operation that is gone")
				}
				// It was not copying, so nobody needs to wait for its answer.
				requireQuiet(t, s.c)
				require.Zero(t, s.witness.lookup(p))
				s.flood()
				if action == killed {
					s.replace()
				} else {
					s.victim.thaw()
					// The metadata comes at last: to slots that are somebody else's by now.
					_, err := s.victim.try(request{Cmd: "store", Store: &op})
					require.Error(t, err)
				}
				requireQuiet(t, s.c)
				s.requireSound()
			})
		}
	}
}

func TestRankAtEachStepOfALoad(t *testing.T) {
	for _, step := range steps.Load {
		for _, action := range actions {
			t.Run(step+"/"+action, func(t *testing.T) {
				t.Parallel()
				s := newStage(t)
				require.NoError(t, s.c.Flush(wait))
				nth := map[string]int{steps.LoadChunk: deathWindow + 2, steps.LoadCopied: 2, steps.LoadWindow: 2, steps.LoadAsked: 2}[step]
				op := s.holdInLoad(step, max(nth, 1))
				s.act(action)

				// The other rank hears in bounded time; what it says is in its pages.
				e := s.other.event(op.Op)
				switch {
				case action == inTime:
					require.Equal(t, kvtier.EventOK, e.Status)
				case step == steps.LoadAllDone || step == steps.LoadEnded:
					require.Equal(t, kvtier.EventOK, e.Status, "the victim had finished its chunks")
				case action != late && step == steps.LoadAsked:
					// The last answer may have come before.
				default:
					require.NotEqual(t, kvtier.EventOK, e.Status)
				}
				s.requirePages(s.other, e)
				after := s.other.call(request{Cmd: "sum"}).Sum

				// Nothing that a stopped rank may still read is used for something else.
				s.flood()
				s.release(action)
				if action == killed {
					s.replace()
				} else {
					mine := s.victim.event(op.Op)
					s.requirePages(s.victim, mine)
					sum := s.victim.call(request{Cmd: "sum"}).Sum
					s.flood()
					require.Equal(t, sum, s.victim.call(request{Cmd: "sum"}).Sum, "pages were written after the engine was told")
					require.Empty(t, s.victim.events)
				}
				require.Equal(t, after, s.other.call(request{Cmd: "sum"}).Sum, "pages were written after the engine was told")
				require.Empty(t, s.other.events)
				requireQuiet(t, s.c)
				s.requireSound()
			})
		}
	}
}

// requirePages wants what an event says to be in the pages, and no foreign byte.
func (s *stage) requirePages(r *process, e kvtier.Event) {
	s.t.Helper()
	r.call(request{Cmd: "check", Seed: s.base.seed, Table: s.base.table, Loaded: int(e.Tokens), To: len(s.base.keys) * pair.C})
}

// The leader ends while a rank is at a step: everybody says miss, and works again with
// the next leader.
func TestLeaderDiesAtEachStep(t *testing.T) {
	for _, step := range append(append([]string{}, steps.Store...), steps.Load...) {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			r := root{dir: t.TempDir(), slots: deathSlots, extra: shortLimits}
			lead := func() *process {
				p := start(t, childSpec{Config: r.config("leader"), Rank: -1})
				require.Equal(t, kvtier.StateLeader, p.call(request{Cmd: "state"}).State)
				return p
			}
			leader := lead()
			s := &stage{t: t, c: open(t, r.config("member")), seed: 100}
			s.g = newGroup(t, s.c, "pair", pair, r.config)
			s.witness = newGroup(t, s.c, "solo", solo, r.config)
			s.base = s.g.newPrefix(1, 10, 0)
			s.g.store(s.base)
			require.NoError(t, s.c.Flush(wait))
			s.other, s.victim = s.g.ranks[0], s.g.ranks[1]

			store := step[:5] == "store"
			var answer <-chan line
			var op kvtier.LoadOp
			if store {
				p := s.g.newPrefix(2, 3, 0)
				s.g.fill(p)
				plan, _ := s.g.begin(p, 0)
				s.hold(step, 1)
				answer = s.victim.send(request{Cmd: "store", Store: &plan})
				s.atStep(step)
			} else {
				op = s.holdInLoad(step, 1)
			}
			leader.kill()
			require.Eventually(t, func() bool { return s.g.k.Session() == 0 }, wait, time.Millisecond)
			require.Equal(t, -1, s.g.lookup(s.base), "without a leader there are only misses")
			// The next leader is there before the victim goes on: what it still does is
			// about the old one.
			lead()
			s.victim.call(request{Cmd: "go"})
			if store {
				<-answer
			} else {
				for _, r := range s.g.ranks {
					s.requirePages(r, r.event(op.Op))
					require.Empty(t, r.events)
				}
			}
			s.g.ready()
			s.witness.ready()
			s.g.held(s.base, 10)
			s.flood()
			s.requireSound()
		})
	}
}

// The coordinator ends after it got grants or pins and before any rank has heard of
// them: they come back although every rank lives and answers nothing.
func TestCoordinatorEndsBeforeTheMetadata(t *testing.T) {
	for _, what := range []string{"store", "load", "load of a longer prefix"} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s := newStage(t)
			switch what {
			case "store":
				p := s.g.newPrefix(2, 3, 0)
				s.g.begin(p, 0)
			case "load":
				short := *s.base
				short.keys = short.keys[:deathWindow]
				s.g.plan(&short)
			default:
				s.g.plan(s.base)
			}
			require.NoError(t, s.g.k.Close())
			requireQuiet(t, s.c)
			k, err := s.c.Coordinate("pair", 2)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, k.Close()) })
			s.g.k = k
			s.g.ready()
			s.requireSound()
		})
	}
}

// Running loads finish when their coordinator has ended.
func TestLoadOutlivesItsCoordinator(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	for _, r := range s.g.ranks {
		r.call(request{Cmd: "wipe"})
	}
	s.hold(steps.LoadChunk, 2)
	op := s.g.plan(s.base)
	for _, r := range s.g.ranks {
		r.call(request{Cmd: "load", Load: &op})
	}
	s.atStep(steps.LoadChunk)
	require.NoError(t, s.g.k.Close())
	s.victim.call(request{Cmd: "go"})
	for _, r := range s.g.ranks {
		e := r.event(op.Op)
		require.Equal(t, kvtier.EventOK, e.Status)
		s.requirePages(r, e)
	}
	requireQuiet(t, s.c)
}

// A rank that ends, stops or is slow in the middle of a self-test: the others hear in
// bounded time that nothing is proven, pages are what they were, no slot is lost.
func TestRankAtEachStepOfASelfTest(t *testing.T) {
	for _, step := range []string{steps.StoreChunk, "none"} {
		for _, action := range actions {
			t.Run(step+"/"+action, func(t *testing.T) {
				t.Parallel()
				s := newStage(t)
				for _, r := range s.g.ranks {
					r.call(request{Cmd: "fill", Seed: 77, Table: s.base.table, To: len(s.base.keys) * pair.C})
				}
				sums := []uint64{s.other.call(request{Cmd: "sum"}).Sum, s.victim.call(request{Cmd: "sum"}).Sum}
				test := request{Cmd: "selftest", Pages: true, Timeout: 2 * time.Second}
				if action == inTime {
					test.Timeout = wait
				}
				var mine <-chan line
				if step != "none" {
					s.hold(step, 2)
					mine = s.victim.send(test)
				}
				others := s.other.send(test)
				if step != "none" {
					s.atStep(step)
				}
				s.act(action)
				if step == "none" && action == inTime {
					mine = s.victim.send(test)
				}
				l := <-others
				if action == inTime {
					require.Empty(t, l.Err)
				} else {
					require.Contains(t, l.Err, kvtier.ErrTimeout.Error())
				}
				s.flood()
				s.release(action)
				require.Equal(t, sums[0], s.other.call(request{Cmd: "sum"}).Sum)
				if action == killed {
					s.replace()
				} else {
					if mine != nil {
						require.Equal(t, action == inTime, (<-mine).Err == "")
					}
					require.Equal(t, sums[1], s.victim.call(request{Cmd: "sum"}).Sum)
				}
				requireQuiet(t, s.c)
				s.requireSound()
				both := s.other.send(request{Cmd: "selftest", Pages: true, Timeout: wait})
				require.NoError(t, func() error { _, err := s.victim.try(request{Cmd: "selftest", Pages: true, Timeout: wait}); return err }())
				require.Empty(t, (<-both).Err)
				requireQuiet(t, s.c)
			})
		}
	}
}
