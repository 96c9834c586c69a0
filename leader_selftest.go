package kvtier

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"strings"
	"time"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/tier"
)

// selfTest is one run of the self-test of a group: all ranks bring a pattern into
// slots, it goes to disk, out of DRAM and back, and all ranks compare it. Its chunks
// have random keys and are gone at the end. It uses a store and a load operation of
// its own, so that slots, deadlines and deaths are handled as they always are.
// Guarded by the leader's lock.
type selfTest struct {
	g      *group
	sp     *space
	crew   *crew
	chunks uint32 // the most that all ranks that have joined can take
	op     uint64
	seed   uint64
	keys   []chunkKey
	joined uint64 // ranks

	step      testStep
	until     time.Time // the earliest limit of a rank
	diskUntil time.Time // then it goes on without the disk
	dropped   int       // leading chunks that left DRAM
	readErr   error     // why a chunk did not come back
	waits     []selfTestWait

	status wire.Status // with text: the verdict, once ended
	text   string
}

type testStep uint8

const (
	testJoining testStep = iota // until all ranks are there and slots are granted
	testStoring                 // until all chunks are READY
	testLeaving                 // until all of them are on disk and have left DRAM
	testLoading                 // until all ranks have reported
	testEnded
)

// selfTestWait is a SELFTEST that is not answered.
type selfTestWait struct {
	rank    int
	step    wire.SelfTestStep
	reply   func(*wire.Reply)
	message *wire.Reply
}

const (
	// maxTestChunks bounds what a self-test moves.
	maxTestChunks = wire.MaxWindow
	// leastTestChunks: the second chunk of a prefix often begins inside a page.
	leastTestChunks = 2
)

// selfTest is one step of one rank.
func (a *attachment) selfTest(req *wire.Request, reply func(*wire.Reply)) *wire.Reply {
	l, g := a.l, a.group
	if g == nil || a.rank < 0 || g.space == nil {
		return refusal(req, wire.StatusRefused)
	}
	if req.Test.Step == wire.SelfTestJoin {
		return a.joinSelfTest(req, reply)
	}
	t := g.selfTestOf(a, req.Op)
	if t == nil {
		return refusal(req, wire.StatusStale)
	}
	w := selfTestWait{rank: a.rank, step: req.Test.Step, reply: reply, message: answer(req)}
	switch {
	case req.Test.Step == wire.SelfTestLeave:
		t.leave(a)
		return w.message
	case t.step == testEnded:
		t.verdict(w.message)
		return w.message
	case req.Test.Step == wire.SelfTestReport && req.Test.Report != wire.ReportOK:
		t.blame(a.rank, req.Test)
		t.verdict(w.message)
		return w.message
	}
	for _, other := range t.waits {
		if other.rank == a.rank {
			return refusal(req, wire.StatusRefused)
		}
	}
	t.waits = append(t.waits, w)
	l.hurry()
	t.advance()
	return nil
}

// joinSelfTest: a run begins with the first rank that comes.
func (a *attachment) joinSelfTest(req *wire.Request, reply func(*wire.Reply)) *wire.Reply {
	l, g := a.l, a.group
	t := g.test
	if t == nil || t.step == testEnded {
		t = &selfTest{g: g, sp: g.space, chunks: maxTestChunks, until: l.now().Add(longestDeferral)}
		g.test = t
	}
	if t.step != testJoining || t.joined>>a.rank&1 != 0 || req.Test.Chunks == 0 {
		return refusal(req, wire.StatusBusy)
	}
	t.joined |= 1 << a.rank
	t.chunks = min(t.chunks, req.Test.Chunks)
	if until := l.now().Add(req.Timeout); until.Before(t.until) {
		t.until = until
	}
	t.waits = append(t.waits, selfTestWait{rank: a.rank, step: wire.SelfTestJoin, reply: reply, message: answer(req)})
	l.hurry()
	t.advance()
	return nil
}

// selfTestOf gives the run that a rank means: by its operation, or the one that it
// has joined and knows no operation of. The verdict of the last run that was under
// way stays for ranks that have not heard it.
func (g *group) selfTestOf(a *attachment, op uint64) *selfTest {
	for _, t := range []*selfTest{g.test, g.lastTest} {
		switch {
		case t == nil || t.joined>>a.rank&1 == 0 || t.crew != nil && t.crew.members[a.rank] != a:
		case op == t.op, op == 0:
			return t
		}
	}
	return nil
}

// advance goes on as far as it can.
func (t *selfTest) advance() {
	switch t.step {
	case testJoining:
		if t.joined == lowBits(t.g.ranks) && t.g.whole() {
			t.begin()
		}
	case testStoring:
		t.sealed()
	case testLeaving:
		t.leaveDRAM()
	case testLoading:
		t.answer(wire.SelfTestLoad)
		if t.waiting(wire.SelfTestReport) == lowBits(t.g.ranks) {
			t.end(wire.StatusOK, "")
		}
	}
}

// expire ends a run that is over its time. It says whether there is one to watch.
func (t *selfTest) expire(now time.Time) bool {
	if t.step == testEnded {
		return false
	}
	t.advance()
	if t.step != testEnded && !now.Before(t.until) {
		t.end(wire.StatusTimeout, t.late())
	}
	return t.step != testEnded
}

// late says who or what a run waits for.
func (t *selfTest) late() string {
	switch t.step {
	case testJoining:
		if missing := lowBits(t.g.ranks) &^ t.joined; missing != 0 {
			return fmt.Sprintf("ranks %v did not come to the self-test", ranksOf(missing))
		}
		return "the self-test got no slots"
	case testStoring:
		if late := lowBits(t.g.ranks) &^ t.waiting(wire.SelfTestLoad); late != 0 {
			return fmt.Sprintf("the self-test was not stored in time by ranks %v", ranksOf(late))
		}
		return "the chunks of the self-test were not sealed in time"
	case testLeaving:
		return "the self-test was not written to disk in time"
	default:
		return fmt.Sprintf("ranks %v did not report in time", ranksOf(lowBits(t.g.ranks)&^t.waiting(wire.SelfTestReport)))
	}
}

func ranksOf(mask uint64) (ranks []int) {
	for ; mask != 0; mask &= mask - 1 {
		ranks = append(ranks, bits.TrailingZeros64(mask))
	}
	return ranks
}

// begin grants slots for as many chunks as it takes that every rank has rows. When
// there are not enough it is tried again.
func (t *selfTest) begin() {
	g, sp, l := t.g, t.sp, t.g.l
	geo := g.agreement.geometry
	n := min(max(leastTestChunks, ceil(geo.D*geo.I, geo.C)), int(t.chunks), maxTestChunks, max(1, sp.Slots()/8))
	var random [24]byte
	for t.op == 0 || g.knows(t.op) {
		rand.Read(random[:]) // never fails
		t.op = binary.LittleEndian.Uint64(random[:])
	}
	t.seed = binary.LittleEndian.Uint64(random[8:])
	t.keys = t.keys[:0]
	for i := range n {
		// No prefix of tokens has this key, and nobody can ask for it.
		t.keys = append(t.keys, chunkKey(chunk.Digest(fmt.Sprintf("self-test %x %d", random, i))))
	}
	o := &storeOp{g: g, sp: sp, op: t.op, crew: g.crew, count: &l.testCount}
	verdicts := make([]wire.Verdict, n)
	var parent chunkKey
	for i, k := range t.keys {
		ref, err := sp.Grant(k, parent, uint32(i), false)
		if err != nil {
			o.finish()
			return
		}
		o.parts = append(o.parts, storePart{
			ref: ref, parent: parent, ordinal: uint32(i), first: true,
			expected: g.agreement.expected(uint32(i)), until: t.until,
		})
		o.open++
		verdicts[i] = wire.Verdict{Code: wire.Granted, Slot: ref.Slot, Generation: ref.Generation}
		parent = k
	}
	g.stores[t.op] = o
	for _, k := range t.keys {
		sp.tests[k] = t
		sp.Hold(k) // an arena that is short of slots must not end the test
	}
	t.crew, t.step = g.crew, testStoring
	g.lastTest = t
	l.count.SelfTests.Begun++
	for i := range t.waits {
		t.waits[i].message.Verdicts = verdicts
	}
	t.answer(wire.SelfTestJoin)
}

// sealed goes on when all chunks are hashed.
func (t *selfTest) sealed() {
	for _, k := range t.keys {
		if t.sp.Look(k).State != tier.Ready {
			return
		}
	}
	t.step = testLeaving
	now := t.g.l.now()
	t.diskUntil = now.Add(t.until.Sub(now) / 2)
	t.leaveDRAM()
}

// leaveDRAM gives up the slots when the chunks are on disk, so that the load reads
// them from there. A disk that takes nothing now does not hold the test up.
func (t *selfTest) leaveDRAM() {
	for t.sp.disk != nil && t.dropped < len(t.keys) {
		p := t.sp.Look(t.keys[t.dropped])
		if !(p.State == tier.Free && p.OnDisk) && !t.sp.Evict(p.Ref) {
			if t.g.l.now().Before(t.diskUntil) {
				return
			}
			t.g.l.log.Info("the self-test goes on without the disk, which has not taken its chunks in time", "group", t.g.id)
			break
		}
		t.dropped++
	}
	t.load()
}

func (t *selfTest) load() {
	l := t.g.l
	o := t.g.newLoad(t.op, t.crew.members[0], 0, t.keys)
	o.crew, o.count = t.crew, &l.testCount
	t.step = testLoading
	o.openWindow(0)
	t.advance()
}

// blame ends the run for all when one rank has found something.
func (t *selfTest) blame(rank int, report *wire.SelfTestBody) {
	text := fmt.Sprintf("rank %d: %s", rank, printable(report.Text))
	if report.Report == wire.ReportMissing && t.readErr != nil && !errors.Is(t.readErr, tier.ErrCorrupt) {
		t.end(wire.StatusTimeout, fmt.Sprintf("%s (%v)", text, t.readErr))
		return
	}
	t.end(wire.StatusFailed, text)
}

// printable keeps a peer's text to one line.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return '.'
		}
		return r
	}, strings.ToValidUTF8(s, "."))
}

// end decides the run for all ranks, and forgets its chunks.
func (t *selfTest) end(status wire.Status, text string) {
	if t.step == testEnded {
		return
	}
	started := t.step != testJoining
	t.step, t.status, t.text = testEnded, status, strings.ToValidUTF8(text[:min(len(text), wire.SelfTestText)], "")
	l := t.g.l
	if started {
		l.count.SelfTests.add(status)
		for _, k := range t.keys {
			p := t.sp.Look(k)
			t.sp.Remove(k)
			if p.State == tier.Assembling {
				t.sp.assemblyRemoved(p.Ref)
			}
			t.sp.Unhold(k)
			delete(t.sp.tests, k)
		}
		if o := t.g.loads[t.op]; o != nil {
			o.failFrom(o.decided)
		}
	}
	l.freed = true
	switch status {
	case wire.StatusOK:
		l.log.Info("self-test passed", "group", t.g.id, "chunks", len(t.keys), "through_disk", t.sp.disk != nil && t.dropped == len(t.keys))
	case wire.StatusFailed:
		l.log.Error("self-test failed: bytes come back wrong", "group", t.g.id, "reason", t.text)
	default:
		l.log.Warn("self-test was not completed", "group", t.g.id, "reason", t.text)
	}
	waits := t.waits
	t.waits = nil
	for _, w := range waits {
		t.verdict(w.message)
		l.send(w.reply, w.message)
	}
}

// verdict writes the outcome of an ended run into a reply.
func (t *selfTest) verdict(r *wire.Reply) {
	r.Status = t.status
	r.Verdicts = nil
	r.Test = wire.SelfTestReply{Op: t.op, Seed: t.seed, Text: t.text}
}

// answer sends the replies to one step.
func (t *selfTest) answer(step wire.SelfTestStep) {
	kept := t.waits[:0]
	for _, w := range t.waits {
		if w.step != step {
			kept = append(kept, w)
			continue
		}
		w.message.Test = wire.SelfTestReply{Op: t.op, Seed: t.seed}
		t.g.l.send(w.reply, w.message)
	}
	clear(t.waits[len(kept):])
	t.waits = kept
}

// waiting gives the ranks whose question of this step is open.
func (t *selfTest) waiting(step wire.SelfTestStep) (ranks uint64) {
	for _, w := range t.waits {
		if w.step == step {
			ranks |= 1 << w.rank
		}
	}
	return ranks
}

// leave: a rank touches no slot of the run any more. Before the end that ends it.
func (t *selfTest) leave(a *attachment) {
	t.end(wire.StatusTimeout, fmt.Sprintf("rank %d gave the self-test up", a.rank))
	if o := t.g.stores[t.op]; o != nil && o.count == &t.g.l.testCount {
		o.memberDead(a)
	}
	if o := t.g.loads[t.op]; o != nil && o.count == &t.g.l.testCount {
		o.rankEnded(a)
	}
}

// memberGone: a rank reports nothing any more, though it may still touch slots.
func (g *group) testMemberGone(a *attachment) {
	if t := g.test; t != nil && t.step != testEnded && t.joined>>a.rank&1 != 0 {
		t.end(wire.StatusTimeout, fmt.Sprintf("rank %d ended during the self-test", a.rank))
	}
}

// counts gives where to count what belongs to an operation: self-tests are apart.
func (g *group) counts(op uint64) *counters {
	if g.lastTest != nil && g.lastTest.op == op {
		return &g.l.testCount
	}
	return &g.l.count
}

// selfTestCounters count runs.
type selfTestCounters struct {
	Begun    uint64 `json:"begun"`
	Passed   uint64 `json:"passed"`
	Failed   uint64 `json:"failed"`
	TimedOut uint64 `json:"timed_out"`
}

func (c *selfTestCounters) add(status wire.Status) {
	switch status {
	case wire.StatusOK:
		c.Passed++
	case wire.StatusFailed:
		c.Failed++
	default:
		c.TimedOut++
	}
}
