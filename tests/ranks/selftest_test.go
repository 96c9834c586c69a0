//go:build ranksteps

package ranks

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier"
	"github.com/kvtier/kvtier/internal/steps"
)

// A rank that ends or stops in the middle of a self-test, or does not come to it: the
// others hear in bounded time that nothing is proven, pages are what they were, no slot
// is lost, and another rank can take its place.
func TestRankAtEachStepOfASelfTest(t *testing.T) {
	for _, step := range steps.SelfTest {
		for _, action := range []string{killed, frozen} {
			rankInASelfTest(t, step+"/"+action, pair, step, action)
		}
	}
	for _, step := range []string{steps.StoreChunk, steps.TestLoaded} {
		for _, action := range []string{late, inTime} {
			rankInASelfTest(t, step+"/"+action, pair, step, action)
		}
	}
	for _, step := range []string{steps.TestStored, steps.TestLoaded, steps.TestCompared} {
		rankInASelfTest(t, "replicas/"+step+"/"+killed, replicas, step, killed)
	}
	rankInASelfTest(t, "no writer/"+steps.TestLoaded+"/"+frozen, reader, steps.TestLoaded, frozen)
	for _, action := range actions {
		rankBeforeASelfTest(t, "none/"+action, action)
	}
}

// keptSlots are those that a rank which stops at a step keeps after the end of the test:
// both chunks' until it has reported their copies, and again until it has read them.
var keptSlots = map[string]int{
	steps.TestGranted: 2, steps.TestWritten: 2, steps.StoreChunk: 2, steps.TestStored: 2, steps.TestLoading: 2, steps.TestLoaded: 2,
}

func rankInASelfTest(t *testing.T, name string, crew crew, step, action string) {
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		s := newStage(t, crew)
		before, mineBefore := s.fillOtherwise()
		answers, mine := s.holdInSelfTest(step, action)
		s.act(action)
		for i, l := range s.answered(answers) {
			switch action {
			case inTime:
				require.Empty(t, l.Err)
			case killed:
				// Its death is what they hear of: they do not wait for their limit.
				require.Contains(t, l.Err, kvtier.ErrTimeout.Error())
				require.Contains(t, l.Err, fmt.Sprintf("rank %d ended during the self-test", s.at))
			default:
				require.Contains(t, l.Err, kvtier.ErrTimeout.Error())
			}
			require.Equal(t, before[i], s.others[i].call(request{Cmd: "sum"}).Sum, "pages are not what they were")
		}
		// Nothing that a stopped rank may still read or write is used for something else.
		kept := 0
		if action == frozen || action == late {
			kept = keptSlots[step]
		}
		require.Eventually(t, func() bool { return s.slots("draining") == kept }, wait, time.Millisecond, "%d slots are to be kept", kept)
		s.flood()
		require.Equal(t, kept, s.slots("draining"), "slots were given away that a rank may use")
		s.release(action)
		if action == killed {
			s.replace()
		} else {
			l := s.answered([]<-chan line{mine})[0]
			if action == inTime {
				require.Empty(t, l.Err)
			} else {
				require.Contains(t, l.Err, kvtier.ErrTimeout.Error())
			}
			require.Equal(t, mineBefore, s.victim.call(request{Cmd: "sum"}).Sum, "pages are not what they were")
		}
		require.Equal(t, before, s.sums(), "pages were written after the engine was told")
		s.requireTested()
	})
}

func rankBeforeASelfTest(t *testing.T, name, action string) {
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		s := newStage(t, pair)
		before, mineBefore := s.fillOtherwise()
		test := request{Cmd: "selftest", Pages: true, Timeout: 2 * time.Second}
		if action == inTime {
			test.Timeout = wait
		}
		answers := s.send(s.others, test)
		s.act(action)
		if action == inTime {
			answers = append(answers, s.victim.send(test))
		}
		for _, l := range s.answered(answers) {
			if action == inTime {
				require.Empty(t, l.Err)
			} else {
				require.Contains(t, l.Err, kvtier.ErrTimeout.Error())
			}
		}
		s.flood()
		s.release(action)
		require.Equal(t, before, s.sums())
		if action == killed {
			s.replace()
		} else {
			require.Equal(t, mineBefore, s.victim.call(request{Cmd: "sum"}).Sum)
		}
		s.requireTested()
	})
}

// The leader ends in the middle of a self-test: no rank waits for a verdict of it, and
// pages are what they were.
func TestLeaderDiesAtEachStepOfASelfTest(t *testing.T) {
	for _, step := range []string{steps.TestGranted, steps.TestWritten, steps.TestLoaded, steps.TestCompared} {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			s, leader, lead := newLedStage(t)
			before, mineBefore := s.fillOtherwise()
			others, mine := s.holdInSelfTest(step, killed)
			leader.kill()
			for _, l := range s.answered(others) {
				require.Contains(t, l.Err, kvtier.ErrNoLeader.Error())
			}
			require.Equal(t, before, s.sums(), "pages are not what they were")
			lead()
			s.victim.call(request{Cmd: "go"})
			require.Contains(t, s.answered([]<-chan line{mine})[0].Err, kvtier.ErrNoLeader.Error())
			require.Equal(t, mineBefore, s.victim.call(request{Cmd: "sum"}).Sum, "pages are not what they were")
			s.g.ready()
			s.witness.ready()
			s.g.held(s.base, 10)
			s.requireTested()
		})
	}
}

// fillOtherwise puts something into all pages that a self-test goes through, and gives
// the checksums of the others' and of the victim's.
func (s *stage) fillOtherwise() (others []uint64, victim uint64) {
	s.t.Helper()
	table := make([]uint32, s.g.shape.Blocks)
	for i := range table {
		table[i] = uint32(i)
	}
	for _, r := range s.g.ranks {
		r.call(request{Cmd: "fill", Seed: 77, Table: table, To: len(table) * s.g.shape.B * s.g.shape.D})
	}
	return s.sums(), s.victim.call(request{Cmd: "sum"}).Sum
}

// holdInSelfTest has all ranks begin a self-test, and the victim stop at a step of it.
// Where it is the limit that is to end the test, a machine on which the victim does not
// come so far within it gets another try with twice the time.
func (s *stage) holdInSelfTest(step, action string) (others []<-chan line, victim <-chan line) {
	s.t.Helper()
	test := request{Cmd: "selftest", Pages: true, Timeout: time.Second}
	if action == killed || action == inTime {
		test.Timeout = wait
	}
	nth := 1
	if step == steps.StoreChunk {
		nth = 2
	}
	for {
		s.hold(step, nth)
		others, victim = s.send(s.others, test), s.victim.send(test)
		select {
		case at := <-s.victim.held:
			require.Equal(s.t, step, at)
			return others, victim
		case l := <-victim:
			for _, l := range append(s.answered(others), l) {
				require.Contains(s.t, l.Err, kvtier.ErrTimeout.Error())
			}
			test.Timeout *= 2
			require.LessOrEqual(s.t, test.Timeout, wait, "the victim does not come to its step")
		case <-time.After(2 * wait):
			require.FailNow(s.t, "the victim does not come to its step", step)
		}
	}
}

func (s *stage) send(to []*process, r request) (answers []<-chan line) {
	for _, p := range to {
		answers = append(answers, p.send(r))
	}
	return answers
}

// answered waits for all of these.
func (s *stage) answered(answers []<-chan line) (lines []line) {
	s.t.Helper()
	for _, c := range answers {
		select {
		case l, ok := <-c:
			require.True(s.t, ok, "a rank has ended")
			lines = append(lines, l)
		case <-time.After(2 * wait):
			require.FailNow(s.t, "a self-test does not end")
		}
	}
	return lines
}

// requireTested: nothing is left of the test, the group works, and passes another one.
func (s *stage) requireTested() {
	s.t.Helper()
	requireQuiet(s.t, s.c)
	s.requireSound()
	for _, l := range s.answered(s.send(s.g.ranks, request{Cmd: "selftest", Pages: true, Timeout: wait})) {
		require.Empty(s.t, l.Err)
	}
	requireQuiet(s.t, s.c)
}
