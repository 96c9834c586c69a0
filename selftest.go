package kvtier

import (
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/kvtier/kvtier/dcp"
	"github.com/kvtier/kvtier/internal/steps"
	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/tier"
)

// ErrSelfTest means that a self-test brought other bytes back than went in. Nothing
// that this group stores or loads can be trusted.
var ErrSelfTest = errors.New("self-test failed")

// replyMargin is what a rank waits longer for the leader's verdict than the leader
// is given: all ranks are to hear the same.
const replyMargin = time.Second

// SelfTest sends a pattern from the pages of all ranks of the group through the arena
// and, where there is one, the disk, back into the pages, and compares every byte of
// it. All ranks of an accepted group call it, each for itself, and all get the same
// verdict: nil; ErrSelfTest, which says what came back wrong; ErrTimeout when not
// all ranks came to the end within timeout (at most a minute), or one of them ended:
// then nothing is proven. ErrBusy: a self-test of this rank runs already. Other
// errors say that there is no leader or no accepted group.
//
// With pages the pattern goes through this rank's own pages, which hold afterwards
// what they held before, whatever happens; block 0 is not touched. Nobody else may
// use them meanwhile. Without, or when there are fewer pages than a chunk needs,
// private memory stands for them. What the test stores has no key that anybody
// could ask for, and is gone afterwards.
func (r *Rank) SelfTest(pages bool, timeout time.Duration) (err error) {
	if !r.testing.TryLock() {
		return fmt.Errorf("%w: a self-test of this rank", ErrBusy)
	}
	defer r.testing.Unlock()
	v, l, _, release, err := r.m.use()
	if err != nil {
		return err
	}
	defer release()
	s := &selfTestRun{r: r, v: v, link: l, end: time.Now().Add(timeout)}
	// Whatever happens, the leader may have the slots back.
	defer func() { s.link.sure(s.request(wire.SelfTestBody{Step: wire.SelfTestLeave})) }()
	return s.run(pages)
}

// selfTestRun is one rank's half of a self-test.
type selfTestRun struct {
	r     *Rank
	v     *view
	link  link
	end   time.Time
	op    uint64
	pages *testPages

	report uint32 // what is wrong, wire.ReportOK: nothing so far
	text   string
}

func (s *selfTestRun) run(pages bool) error {
	reply, err := s.ask(wire.SelfTestBody{Step: wire.SelfTestJoin, Chunks: testChunksOf(s.r, pages)})
	if err != nil {
		return err
	}
	s.op = reply.Test.Op
	grants := reply.Verdicts
	steps.At(steps.TestGranted)
	defer s.restore()
	s.guarded(func() error {
		var err error
		if s.pages, err = newTestPages(s.r, s.v, pages, len(grants), reply.Test.Seed); err != nil {
			return err
		}
		s.pages.write(false)
		steps.At(steps.TestWritten)
		return s.store(grants)
	})
	if s.report == wire.ReportOK {
		steps.At(steps.TestStored)
		if _, err := s.ask(wire.SelfTestBody{Step: wire.SelfTestLoad}); err != nil {
			return err
		}
		s.guarded(func() error {
			s.pages.write(true) // so that what is there afterwards was loaded
			steps.At(steps.TestLoading)
			if err := s.load(len(grants)); err != nil {
				return err
			}
			steps.At(steps.TestComparing)
			return s.pages.compare(len(grants))
		})
		s.link.sure(&wire.Request{Type: wire.LoadDone, Op: s.op, Flags: wire.LoadDoneEnd})
	}
	steps.At(steps.TestCompared)
	s.restore()
	steps.At(steps.TestRestored)
	_, err = s.ask(wire.SelfTestBody{Step: wire.SelfTestReport, Report: s.report, Text: s.text[:min(len(s.text), wire.SelfTestText)]})
	return err
}

// store copies the pattern into the slots, as every store does. Grants that it does
// not come to answer end when the rank leaves.
func (s *selfTestRun) store(grants []Verdict) error {
	op := StoreOp{Op: s.op, Blocks: s.pages.blocks}
	for i, g := range grants {
		op.Grants = append(op.Grants, Grant{Index: uint32(i), Slot: g.Slot, Generation: g.Generation})
	}
	done := s.r.aborted(op.Grants)
	if err := s.pages.rank.fill(s.v, &op, done); err != nil && !errors.Is(err, ErrStale) && !errors.Is(err, dcp.ErrStopped) {
		return err
	}
	for _, g := range grants {
		s.r.testStep("stored", s.v.slot(tier.Ref{Slot: g.Slot, Generation: g.Generation}))
	}
	report(s.link, s.op, done)
	return nil
}

// load compares the slots as they came back, all rows of all ranks, and copies this
// rank's into its pages.
func (s *selfTestRun) load(chunks int) error {
	cols, err := s.pages.rank.columns(s.v, false)
	if err != nil {
		return err
	}
	for next := 0; next < chunks; {
		reply, err := s.wait(&wire.Request{Type: wire.LoadWait, Op: s.op, First: uint32(next)})
		if err != nil {
			return missing(next)
		}
		for _, w := range reply.Verdicts {
			ref := tier.Ref{Slot: w.Slot, Generation: w.Generation}
			slot := s.v.slot(ref)
			if w.Code != wire.Ready || slot == nil || !s.v.table.Check(ref, tier.Ready) {
				return missing(next)
			}
			s.r.testStep("loaded", slot)
			if err := s.pages.compareSlot(slot, next); err != nil {
				return err
			}
			clip := dcp.Span{Tokens: chunks * s.r.geometry.C}
			if err := dcp.Scatter(slot, s.r.geometry, cols, next, clip, s.pages.blocks, 0, &s.v.stop); err != nil {
				return err
			}
			steps.At(steps.TestLoaded)
			s.link.sure(&wire.Request{Type: wire.LoadDone, Op: s.op, Done: []wire.Done{{Slot: w.Slot, Generation: w.Generation, Part: s.r.part}}})
			next++
		}
	}
	return nil
}

type missing int

func (m missing) Error() string { return fmt.Sprintf("chunk %d did not come back", int(m)) }

// guarded runs a half and notes what it finds. Memory that is not mapped is found,
// too: a description of pages that is wrong leads there.
func (s *selfTestRun) guarded(half func() error) {
	before := debug.SetPanicOnFault(true)
	defer debug.SetPanicOnFault(before)
	defer func() {
		v := recover()
		if v == nil {
			return
		}
		fault, ok := v.(interface{ Addr() uintptr })
		if !ok {
			panic(v)
		}
		s.blame(wire.ReportWrong, fmt.Sprintf("a region reaches memory that is not mapped, at %#x", fault.Addr()))
	}()
	err := half()
	var gone missing
	switch {
	case err == nil:
	case errors.As(err, &gone):
		s.blame(wire.ReportMissing, err.Error())
	default:
		s.blame(wire.ReportWrong, err.Error())
	}
}

func (s *selfTestRun) blame(report uint32, text string) {
	if s.report == wire.ReportOK {
		s.report, s.text = report, text
	}
}

// restore brings the pages back to what they were, once.
func (s *selfTestRun) restore() {
	if p := s.pages; p != nil {
		s.pages = nil
		s.guarded(p.restore)
	}
}

func (s *selfTestRun) request(b wire.SelfTestBody) *wire.Request {
	return &wire.Request{Type: wire.SelfTest, Op: s.op, Timeout: max(time.Until(s.end), 0), Test: &b}
}

// ask sends a step; an error is the verdict of the run.
func (s *selfTestRun) ask(b wire.SelfTestBody) (*wire.Reply, error) {
	return s.outcome(s.send(s.request(b)))
}

// wait sends a request that belongs to the run.
func (s *selfTestRun) wait(req *wire.Request) (*wire.Reply, error) {
	req.Timeout = max(time.Until(s.end), 0)
	reply, err := s.send(req)
	if err == nil {
		err = statusError(reply.Status)
	}
	return reply, err
}

// send waits for the reply, whatever its status. A ring without room has some soon.
func (s *selfTestRun) send(req *wire.Request) (*wire.Reply, error) {
	answered := make(chan outcome, 1)
	for {
		err := s.link.send(req, func(r *wire.Reply, err error) { answered <- outcome{r, err} })
		if err == nil {
			break
		}
		if !errors.Is(err, ErrBusy) || time.Now().After(s.end) || !pause(busyPause, s.r.m.closing) {
			return nil, err
		}
	}
	timer := time.NewTimer(max(time.Until(s.end.Add(replyMargin)), 0))
	defer timer.Stop()
	select {
	case a := <-answered:
		return a.reply, a.err
	case <-timer.C:
		return nil, fmt.Errorf("%w: the leader does not answer", ErrTimeout)
	case <-s.link.lost():
		return nil, ErrNoLeader
	case <-s.r.m.closing:
		return nil, ErrClosed
	}
}

// outcome makes an error of a verdict.
func (s *selfTestRun) outcome(r *wire.Reply, err error) (*wire.Reply, error) {
	if err != nil {
		return nil, err
	}
	switch r.Status {
	case wire.StatusOK:
		return r, nil
	case wire.StatusFailed:
		return nil, fmt.Errorf("%w: %s", ErrSelfTest, r.Test.Text)
	case wire.StatusTimeout, wire.StatusStale:
		return nil, fmt.Errorf("%w: %s", ErrTimeout, r.Test.Text)
	case wire.StatusAborted:
		return nil, ErrNoLeader
	}
	return nil, statusError(r.Status)
}
