//go:build ranksteps

package ranks

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/steps"
)

// A rank that is killed or stopped anywhere inside the copy of one chunk, which is large
// enough to be met there.
func TestRankAtEachStepInTheMiddleOfACopy(t *testing.T) {
	const width = 128 << 10
	wide := shape{D: 2, I: 2, B: 8, C: 24, Blocks: 5, Widths: []int{width}}
	alone := shape{D: 1, I: 16, B: 16, C: 24, Blocks: 5, Widths: []int{width}}
	random := rand.New(rand.NewPCG(seed(t), 3))
	r := root{dir: t.TempDir(), slots: 12, slot: 24 * width, disk: 0.15, extra: shortLimits}
	c := open(t, r.config("leader"))
	s := &stage{t: t, c: c}
	s.g = newGroup(t, c, "wide", wide, r.config)
	s.witness = newGroup(t, c, "alone", alone, r.config)
	s.other, s.victim = s.g.ranks[0], s.g.ranks[1]
	middle := 0
	for round := range uint32(8) {
		p := s.g.newPrefix(10+round, 2, 0)
		s.g.fill(p)
		op, _ := s.g.begin(p, 0)
		s.hold(steps.StoreChunk, 1)
		answer := s.victim.send(request{Cmd: "store", Store: &op})
		s.atStep(steps.StoreChunk)
		s.other.call(request{Cmd: "store", Store: &op})
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
		requireQuiet(t, c)
		s.witness.load(s.witness.newPrefix(10+round, 2, 1))
		s.g.load(p)
	}
	t.Logf("%d of 8 were met before they had reported", middle)
}
