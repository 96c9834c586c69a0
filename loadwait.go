package kvtier

import "github.com/kvtier/kvtier/internal/wire"

// loadWait is a LOAD_WAIT that is not answered.
type loadWait struct {
	rank  int
	first int
	deferral
}

// loadWait is answered when the verdict over the index it names is decided.
func (a *attachment) loadWait(req *wire.Request, reply func(*wire.Reply)) *wire.Reply {
	g := a.group
	if g == nil || a.rank < 0 {
		return refusal(req, wire.StatusRefused)
	}
	o := g.loads[req.Op]
	if o == nil || o.crew.members[a.rank] != a {
		return refusal(req, wire.StatusStale)
	}
	if int64(req.First) >= int64(o.total) || o.ended>>a.rank&1 != 0 {
		return refusal(req, wire.StatusRefused)
	}
	r := answer(req)
	w := loadWait{rank: a.rank, first: int(req.First), deferral: deferral{reply: reply, message: r}}
	if o.fillIn(&w) {
		return r
	}
	if req.Timeout > 0 {
		w.until = a.l.now().Add(min(req.Timeout, longestDeferral))
	}
	o.waits = append(o.waits, w)
	a.l.hurry()
	return nil
}

// fillIn puts the verdicts that are decided into the reply.
func (o *loadOp) fillIn(w *loadWait) bool {
	if w.first >= o.decided {
		return false
	}
	to := min(o.decided, w.first+len(o.busy))
	w.message.Verdicts = o.verdictsOf(w.first, to)
	return true
}

func (o *loadOp) answerWaits() {
	kept := o.waits[:0]
	for _, w := range o.waits {
		if o.fillIn(&w) {
			o.sp.l.send(w.reply, w.message)
		} else {
			kept = append(kept, w)
		}
	}
	clear(o.waits[len(kept):])
	o.waits = kept
}

// dismiss answers a rank's waits with a status.
func (o *loadOp) dismiss(which func(*loadWait) bool, status wire.Status) {
	kept := o.waits[:0]
	for _, w := range o.waits {
		if which(&w) {
			w.message.Status = status
			o.sp.l.send(w.reply, w.message)
		} else {
			kept = append(kept, w)
		}
	}
	clear(o.waits[len(kept):])
	o.waits = kept
}
