//go:build ranksteps

package ranks

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier"
	"github.com/kvtier/kvtier/internal/steps"
)

func TestRankAtEachStepOfAStore(t *testing.T) {
	for _, step := range steps.Store {
		for _, action := range actions {
			rankInAStore(t, step+"/"+action, pair, step, action)
		}
	}
}

// Some bytes are on several ranks, and one of those writes them.
func TestReplicaAtEachStepOfAStore(t *testing.T) {
	for _, step := range steps.Store {
		rankInAStore(t, "one of the writers/"+step+"/"+killed, replicas, step, killed)
		rankInAStore(t, "one of the writers/"+step+"/"+frozen, replicas, step, frozen)
		rankInAStore(t, "the writer/"+step+"/"+killed, owner, step, killed)
	}
	for _, step := range []string{steps.StoreBegun, steps.StoreCopied} {
		rankInAStore(t, "no writer/"+step+"/"+killed, reader, step, killed)
		rankInAStore(t, "no writer/"+step+"/"+frozen, reader, step, frozen)
	}
}

func rankInAStore(t *testing.T, name string, crew crew, step, action string) {
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		s := newStage(t, crew)
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
		for _, r := range s.others {
			r.call(request{Cmd: "store", Store: &op}) // waits for nobody
		}
		s.act(action)

		switch {
		case action == inTime || step == steps.StoreDone && action != killed || crew.idle:
			s.witness.held(p, 3)
		case action == killed:
			// What it reported last may have been on its way.
			requireQuietBut(t, s, "draining")
			possible := []int{0}
			if step == steps.StoreDone {
				possible = []int{0, 3}
			}
			require.Contains(t, possible, s.witness.lookup(p), "a part is missing in what is visible")
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
				s := newStage(t, pair)
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
				if _, err := s.others[0].try(request{Cmd: "store", Store: &op}); err != nil {
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
			rankInALoad(t, step+"/"+action, pair, step, action)
		}
	}
}

// Some bytes are on several ranks, and all of those read them.
func TestReplicaAtEachStepOfALoad(t *testing.T) {
	for _, step := range steps.Load {
		rankInALoad(t, "replicas/"+step+"/"+killed, replicas, step, killed)
	}
	for _, step := range []string{steps.LoadChunk, steps.LoadCopied} {
		rankInALoad(t, "replicas/"+step+"/"+frozen, replicas, step, frozen)
		rankInALoad(t, "all rows/"+step+"/"+frozen, sparse, step, frozen)
	}
}

func rankInALoad(t *testing.T, name string, crew crew, step, action string) {
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		s := newStage(t, crew)
		require.NoError(t, s.c.Flush(wait))
		nth := map[string]int{steps.LoadChunk: deathWindow + 2, steps.LoadCopied: 2, steps.LoadWindow: 2, steps.LoadAsked: 2}[step]
		op := s.holdInLoad(step, max(nth, 1))
		s.act(action)

		// The other ranks hear in bounded time; what they say is in their pages.
		for _, r := range s.others {
			e := r.event(op.Op)
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
			s.requirePages(r, e)
		}
		after := s.sums()

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
		require.Equal(t, after, s.sums(), "pages were written after the engine was told")
		for _, r := range s.others {
			require.Empty(t, r.events)
		}
		requireQuiet(t, s.c)
		s.requireSound()
	})
}

// The leader ends while a rank is at a step: everybody says miss, and works again with
// the next leader.
func TestLeaderDiesAtEachStep(t *testing.T) {
	for _, step := range append(append([]string{}, steps.Store...), steps.Load...) {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			s, leader, lead := newLedStage(t)
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
			s := newStage(t, pair)
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
			k, err := s.c.Coordinate("crew", 2)
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
	s := newStage(t, pair)
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
