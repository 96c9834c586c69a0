//go:build ranksteps

package ranks

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier"
	"github.com/kvtier/kvtier/internal/steps"
)

// A rank that ends, stops or is slow in the middle of a self-test: the others hear in
// bounded time that nothing is proven, pages are what they were, no slot is lost.
func TestRankAtEachStepOfASelfTest(t *testing.T) {
	for _, step := range []string{steps.StoreChunk, "none"} {
		for _, action := range actions {
			t.Run(step+"/"+action, func(t *testing.T) {
				t.Parallel()
				s := newStage(t, pair)
				for _, r := range s.g.ranks {
					r.call(request{Cmd: "fill", Seed: 77, Table: s.base.table, To: len(s.base.keys) * s.g.shape.C})
				}
				sums := []uint64{s.others[0].call(request{Cmd: "sum"}).Sum, s.victim.call(request{Cmd: "sum"}).Sum}
				test := request{Cmd: "selftest", Pages: true, Timeout: 2 * time.Second}
				if action == inTime {
					test.Timeout = wait
				}
				var mine <-chan line
				if step != "none" {
					s.hold(step, 2)
					mine = s.victim.send(test)
				}
				others := s.others[0].send(test)
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
				require.Equal(t, sums[0], s.others[0].call(request{Cmd: "sum"}).Sum)
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
				both := s.others[0].send(request{Cmd: "selftest", Pages: true, Timeout: wait})
				require.NoError(t, func() error { _, err := s.victim.try(request{Cmd: "selftest", Pages: true, Timeout: wait}); return err }())
				require.Empty(t, (<-both).Err)
				requireQuiet(t, s.c)
			})
		}
	}
}
