package ranks

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"time"

	"github.com/kvtier/kvtier"
	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/wire"
)

// commanded are the kinds that a test leads step by step.
var commanded = map[string]func(a *attackSpec, c *child) error{"rank": (*attackSpec).rank, "fill": (*attackSpec).fill}

// between is the shape of the engine that works on, and of the group of two ranks whose
// rank 1 is hostile: they have the same chunks.
var between = shape{D: 2, I: 2, B: 8, C: 24, Blocks: 32, Widths: []int{48, 17}}

func rankHello(group string) *wire.Hello {
	return &wire.Hello{Protocol: wire.Protocol, Features: []string{}, Group: group, Ranks: between.D, Rank: 1, PID: os.Getpid()}
}

func rankDeclare() *wire.Declare {
	d := validDeclare()
	d.Identity.Weights, d.Identity.Encoding = "", "" // rank 0 knows the first; the other is by default that of rows
	d.DCP, d.DCPRank, d.Interleave, d.BlockTokens = between.D, 1, between.I, between.B
	return d
}

// rankMessages are those of a rank about a store and a load of its group, as they are
// meant or as only its coordinator, or the other rank, may send them.
func (t *attacker) rankMessages(s *kvtier.StoreOp, l *kvtier.LoadOp) []*wire.Request {
	const soon = 20 * time.Millisecond
	stored := func(part uint32) wire.Done {
		return wire.Done{Slot: s.Grants[0].Slot, Generation: s.Grants[0].Generation, Part: part}
	}
	loaded := func(part uint32) wire.Done {
		return wire.Done{Slot: l.Verdicts[0].Slot, Generation: l.Verdicts[0].Generation, Part: part}
	}
	run := func() *wire.Run { return &wire.Run{Keys: t.keys} }
	t.keys = []chunk.Key{t.key()}
	return []*wire.Request{
		{Type: wire.StoreDone, Op: s.Op, Done: []wire.Done{stored(1)}},
		{Type: wire.StoreDone, Op: s.Op, Done: []wire.Done{stored(0), stored(1)}},
		{Type: wire.LoadWait, Op: l.Op, Timeout: soon},
		{Type: wire.LoadDone, Op: l.Op, Done: []wire.Done{loaded(1)}},
		{Type: wire.LoadDone, Op: l.Op, Done: []wire.Done{loaded(0), loaded(1)}},
		{Type: wire.LoadDone, Op: l.Op, Flags: wire.LoadDoneEnd},
		{Type: wire.Cancel, Op: s.Op},
		{Type: wire.Cancel, Op: s.Op, Flags: wire.CancelUnsent},
		{Type: wire.Cancel, Op: l.Op, Flags: wire.CancelUnsent},
		{Type: wire.Cancel, Op: l.Op},
		{Type: wire.SelfTest, Timeout: soon, Test: &wire.SelfTestBody{Step: wire.SelfTestJoin, Chunks: 1}},
		{Type: wire.SelfTest, Timeout: soon, Test: &wire.SelfTestBody{Step: wire.SelfTestLoad}},
		{Type: wire.SelfTest, Timeout: soon, Test: &wire.SelfTestBody{Step: wire.SelfTestReport, Report: wire.ReportWrong, Text: "no"}},
		{Type: wire.SelfTest, Test: &wire.SelfTestBody{Step: wire.SelfTestLeave}},
		{Type: wire.StoreBegin, Op: s.Op + 1<<40, Run: run()},
		{Type: wire.LoadBegin, Op: l.Op + 1<<40, Run: run()},
	}
}

// rankAttacks is how many attacks of a rank there are.
func rankAttacks() int {
	s := &kvtier.StoreOp{Grants: make([]kvtier.Grant, 1)}
	return mutated((&attacker{}).rankMessages(s, &kvtier.LoadOp{Verdicts: make([]kvtier.Verdict, 1)}))
}

// rank is one rank of a group of two, whose other one keeps the rules. It attaches as often
// as it was dropped.
func (a *attackSpec) rank(c *child) error {
	r := rand.New(rand.NewPCG(a.Seed, uint64(os.Getpid())))
	var t *attacker
	return obey(c, func(q *request, out *line) (err error) {
		for end := time.Now().Add(wait); t == nil; {
			// The ring of one that is dropped says so a moment before its place is free.
			if t, err = a.join(); err != nil && !(errors.Is(err, errNotYet) && time.Now().Before(end)) {
				return err
			}
		}
		switch q.Cmd {
		case "ready":
		case "store": // as if it had
			done := &wire.Request{Type: wire.StoreDone, Op: q.Store.Op}
			for _, g := range q.Store.Grants {
				done.Done = append(done.Done, wire.Done{Slot: g.Slot, Generation: g.Generation, Part: 1})
			}
			_, err = t.ask(done)
		case "end": // as a rank that has copied nothing
			if _, err = t.ask(&wire.Request{Type: wire.Cancel, Op: q.Load.Op}); err == nil {
				g := q.Store.Grants[0]
				done := wire.Done{Slot: g.Slot, Generation: g.Generation, Part: 1, Status: wire.StatusAborted}
				_, err = t.ask(&wire.Request{Type: wire.StoreDone, Op: q.Store.Op, Done: []wire.Done{done}})
			}
		case "attack":
			for n := q.From; n < q.To; n++ {
				out.Sum = uint64(n + 1)
				err := t.ring(t.rankMessages(q.Store, q.Load), n, r)
				if errors.Is(err, errDropped) {
					t.close()
					t = nil
					return nil
				}
				if err != nil {
					return fmt.Errorf("attack %d: %w", n, err)
				}
			}
			out.State = "attached"
		default:
			err = fmt.Errorf("no command %q", q.Cmd)
		}
		return err
	})
}

// obey does what the parent asks for, one after the other, until it is gone.
func obey(c *child, do func(q *request, out *line) error) error {
	in := json.NewDecoder(os.Stdin)
	for {
		var q request
		if err := in.Decode(&q); err != nil {
			return nil
		}
		out := line{ID: q.ID}
		if err := do(&q, &out); err != nil {
			out.Err = err.Error()
		}
		c.say(out)
	}
}
