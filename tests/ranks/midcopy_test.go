//go:build ranksteps

package ranks

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/steps"
)

// Chunks of 3 MiB, of which each of two ranks copies 1.5: what is stopped at its second
// look at the stop flag has copied two thirds of its rows.
const (
	wideRow = 128 << 10
	inside  = 2
)

var (
	wide  = crew{shape{D: 2, I: 2, B: 8, C: 24, Blocks: 6, Widths: []int{wideRow}}, 1, false}
	alone = shape{D: 1, I: 16, B: 16, C: 24, Blocks: 6, Widths: []int{wideRow}}
)

func newWideStage(t *testing.T) *stage {
	r := root{dir: t.TempDir(), slots: 12, slot: 24 * wideRow, disk: 0.15, extra: shortLimits}
	s := &stage{t: t, c: open(t, r.config("leader"))}
	s.enter(wide, alone, r, 2)
	require.NoError(t, s.c.Flush(wait))
	return s
}

// fillArena gives every slot that is free, or may be, other bytes, for longer than the
// leader takes between two looks at what is late.
func (s *stage) fillArena() {
	s.t.Helper()
	end := time.Now().Add(1500 * time.Millisecond)
	for range 8 {
		s.seed++
		s.witness.store(s.witness.newPrefix(s.seed, 2, 0))
		require.NoError(s.t, s.c.Flush(wait))
	}
	for first := true; first || time.Now().Before(end); first = false {
		s.witness.load(s.witness.newPrefix(s.seed, 2, 1))
	}
}

// A rank that is killed, stopped or late inside the copy of a chunk into its slot.
func TestRankInsideACopyOfAStore(t *testing.T) {
	for _, action := range []string{killed, frozen, late} {
		t.Run(action, func(t *testing.T) {
			s := newWideStage(t)
			p := s.g.newPrefix(2, 2, 0)
			s.g.fill(p)
			op, _ := s.g.begin(p, 0)
			require.Len(t, op.Grants, 2)
			s.hold(steps.CopyPiece, inside)
			answer := s.victim.send(request{Cmd: "store", Store: &op})
			s.atStep(steps.CopyPiece)
			s.others[0].call(request{Cmd: "store", Store: &op})
			s.act(action)
			if action == killed {
				requireQuietBut(t, s, "draining")
			} else {
				require.Eventually(t, func() bool { return s.slots("draining") == 2 }, wait, time.Millisecond)
			}
			require.Zero(t, s.witness.lookup(p), "a part of a chunk is visible")
			s.fillArena()
			s.witness.store(s.witness.newPrefix(2, 2, 0))
			if action == killed {
				s.replace()
			} else {
				require.Equal(t, 2, s.slots("draining"), "slots were given away under a copy")
				s.release(action)
				<-answer
			}
			requireQuiet(t, s.c)
			s.fillArena()
			s.witness.load(s.witness.newPrefix(2, 2, 1))
			s.g.load(s.base)
			requireQuiet(t, s.c)
		})
	}
}

// A rank that is killed, stopped or late inside the copy of a chunk into its pages.
func TestRankInsideACopyOfALoad(t *testing.T) {
	for _, action := range []string{killed, frozen, late} {
		t.Run(action, func(t *testing.T) {
			s := newWideStage(t)
			op := s.holdInLoad(steps.CopyPiece, inside)
			s.act(action)
			s.requirePages(s.others[0], s.others[0].event(op.Op))
			after := s.sums()
			s.fillArena()
			s.release(action)
			if action == killed {
				s.replace()
			} else {
				// Its slots were kept for it all the time, so what it reads at last is right.
				s.requirePages(s.victim, s.victim.event(op.Op))
				sum := s.victim.call(request{Cmd: "sum"}).Sum
				s.fillArena()
				require.Equal(t, sum, s.victim.call(request{Cmd: "sum"}).Sum, "pages were written after the engine was told")
			}
			require.Equal(t, after, s.sums(), "pages were written after the engine was told")
			requireQuiet(t, s.c)
			s.g.load(s.base)
			s.witness.load(s.witness.newPrefix(1, 2, 1))
			requireQuiet(t, s.c)
		})
	}
}

// A rank that is killed or stopped anywhere inside a store of two large chunks.
func TestRankAtEachStepOrBetween(t *testing.T) {
	random := rand.New(rand.NewPCG(seed(t), 3))
	s := newWideStage(t)
	middle := 0
	for round := range uint32(8) {
		p := s.g.newPrefix(10+round, 2, 0)
		s.g.fill(p)
		op, _ := s.g.begin(p, 0)
		s.hold(steps.StoreChunk, 1)
		answer := s.victim.send(request{Cmd: "store", Store: &op})
		s.atStep(steps.StoreChunk)
		s.others[0].call(request{Cmd: "store", Store: &op})
		s.victim.send(request{Cmd: "go"})
		time.Sleep(time.Duration(random.IntN(3000)) * time.Microsecond)
		action := []string{killed, frozen}[round%2]
		s.act(action)
		require.Eventually(t, func() bool { return s.slots("assembling") == 0 && s.slots("sealing") == 0 }, wait, time.Millisecond)
		held := s.witness.lookup(p)
		require.Contains(t, []int{0, 2}, held, "half of an operation was reported")
		if held == 0 {
			middle++
			// Others may bring the same chunks while it is still in the middle of its own.
			s.witness.store(s.witness.newPrefix(10+round, 2, 0))
		}
		if action == killed {
			s.replace()
		} else {
			s.victim.thaw()
			<-answer
		}
		requireQuiet(t, s.c)
		s.witness.load(s.witness.newPrefix(10+round, 2, 1))
		s.g.load(p)
	}
	t.Logf("%d of 8 were met before they had reported", middle)
}
