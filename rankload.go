package kvtier

import (
	"fmt"
	"math"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/internal/wire"
)

// LoadOp is one load operation as it came from the coordinator.
type LoadOp struct {
	Session uint64 // 0: the coordinator got no answer; the load fails
	Op      uint64

	// The load is clipped to [FirstToken, FirstToken+Tokens): pages outside are
	// not touched, also inside a chunk.
	FirstToken uint32
	Tokens     uint32
	// Blocks are the virtual blocks of exactly that range, the first one being
	// floor(FirstToken/V).
	Blocks []uint32
	// Verdicts of the first window, from the chunk of FirstToken on; what is
	// missing counts as Later.
	Verdicts []Verdict
}

// Load brings chunks into the pages. It returns at once; when this rank's copy has
// stopped there is exactly one Event, whatever happens. With an error, which is
// about the arguments, there is no event; ErrBusy and ErrClosed likewise. Then this
// rank has ended the operation as by EndLoad, and cannot begin it another time.
func (r *Rank) Load(o LoadOp) error {
	err := r.load(o)
	if err != nil {
		r.EndLoad(o.Session, o.Op)
	}
	return err
}

// EndLoad tells the leader that this rank takes no part in a load that it has not
// begun: its pins end, and the other ranks need not wait for it. A load that runs here
// is left alone.
func (r *Rank) EndLoad(session, op uint64) {
	l, present, err := r.m.attached()
	if err != nil || present != session || r.loader.runs(op) {
		return
	}
	l.sure(&wire.Request{Type: wire.LoadDone, Op: op, Flags: wire.LoadDoneEnd})
}

func (r *Rank) load(o LoadOp) error {
	g := &r.geometry
	if o.Tokens == 0 || uint64(o.FirstToken)+uint64(o.Tokens) > math.MaxUint32 {
		return fmt.Errorf("%w: a load of %d tokens from %d on", ErrArgument, o.Tokens, o.FirstToken)
	}
	first, end := int(o.FirstToken), int(o.FirstToken)+int(o.Tokens)
	virtual := g.B * g.D
	if want := ceil(end, virtual) - first/virtual; len(o.Blocks) != want {
		return fmt.Errorf("%w: %d blocks for tokens %d to %d, which lie in %d", ErrArgument, len(o.Blocks), first, end, want)
	}
	if err := r.checkBlocks(o.Blocks); err != nil {
		return err
	}
	l := &load{op: o, chunks: ceil(end, g.C) - first/g.C, verdicts: append([]Verdict(nil), o.Verdicts...)}
	if l.chunks > MaxKeys || len(o.Verdicts) > l.chunks {
		return fmt.Errorf("%w: %d verdicts for %d chunks, at most %d", ErrArgument, len(o.Verdicts), l.chunks, MaxKeys)
	}
	l.op.Blocks = append([]uint32(nil), o.Blocks...)
	l.op.Verdicts = nil
	for i, v := range l.verdicts {
		if v.Code == wire.Later {
			l.verdicts = l.verdicts[:i]
			break
		}
	}
	return r.loader.add(l)
}

// CancelLoad stops a load soon. It still brings its event.
func (r *Rank) CancelLoad(op uint64) { r.loader.cancel(op) }

func ceil(n, d int) int { return (n + d - 1) / d }

// load is one load operation. Its fields belong to the worker, but those that the
// loader's lock guards: state, verdicts and failed while it waits for an answer.
type load struct {
	op     LoadOp
	chunks int
	next   int         // the first chunk that is not in the pages
	stop   atomic.Bool // read by the copy at every piece

	state    loadState
	verdicts []Verdict // of the chunks from next on
	failed   EventStatus
	deadline time.Time // of the answer, while waiting
	turn     uint32    // counts LOAD_WAITs: a late answer is of an earlier turn
}

type loadState uint8

const (
	loadReady   loadState = iota // in the queue of the worker
	loadRunning                  // the worker has it
	loadWaiting                  // for verdicts
)
