package kvtier

import (
	"github.com/kvtier/kvtier/internal/spawn"
	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/tier"
)

// lookup says where the leading chunks of a run are, and changes nothing.
func (sp *space) lookup(keys []chunkKey) wire.Hits {
	var h wire.Hits
	leading := true
	for _, k := range keys {
		p := sp.Look(k)
		ready := p.State == tier.Ready
		if !ready && p.State != tier.Filling && !(p.OnDisk && p.State == tier.Free) {
			break
		}
		h.Held++
		if !ready {
			h.Bytes += uint64(sp.layout.FileBytes)
		}
		if leading = leading && ready; leading {
			h.Resident++
		}
	}
	return h
}

// prefetch starts the disk reads of a run within what the member's caps leave.
// Nothing keeps what they bring.
func (a *attachment) prefetch(sp *space, first uint32, keys []chunkKey) wire.Hits {
	room := sp.room(a)
	var pending uint32
	for i, k := range keys {
		p := sp.Look(k)
		if p.State == tier.Filling {
			pending++
			room--
			continue
		}
		if p.State == tier.Ready {
			continue
		}
		if p.State != tier.Free || !p.OnDisk || room <= 0 {
			break
		}
		if _, err := sp.read(k, first+uint32(i)); err != nil {
			break
		}
		pending++
		room--
	}
	h := sp.lookup(keys)
	h.Pending = pending
	return h
}

// probe looks names up that the disk tier's scan has not come to yet. It says
// whether it has taken the request: a goroutine asks the file system, for at most
// probeBudget, and answers then. The caller holds mu.
func (l *leader) probe(a *attachment, sp *space, req *wire.Request, reply func(*wire.Reply)) bool {
	if sp.disk == nil || len(req.Run.Keys) == 0 || l.probes >= maxProbes || sp.disk.Scanned() {
		return false
	}
	known := int(sp.lookup(req.Run.Keys).Held)
	if known == len(req.Run.Keys) {
		return false
	}
	l.probes++
	l.count.Probes++
	// The request is the caller's again when serve returns.
	run := *req.Run
	run.Keys = append([]chunkKey(nil), run.Keys...)
	mine := *req
	mine.Run = &run
	id := run.Lease
	if req.Type == wire.Lease {
		a.probing[id] = req.Seq
	}
	finish := func(err error) {
		l.lock()
		defer l.unlock()
		l.probes--
		if r := a.probed(sp, &mine, reply, err); r != nil {
			l.send(reply, r)
		}
	}
	spawn.Go("name probe", finish, func() {
		sp.disk.Probe(run.Keys[known:], probeBudget)
		finish(nil)
	})
	return true
}

// probed goes on with a request after its probe; nil when the reply is deferred.
func (a *attachment) probed(sp *space, req *wire.Request, reply func(*wire.Reply), err error) (r *wire.Reply) {
	defer a.l.contain(req, &r)
	if err != nil || a.l.closed || a.isGone {
		return refusal(req, wire.StatusAborted)
	}
	if req.Type == wire.Lease {
		id := req.Run.Lease
		if seq, waits := a.probing[id]; !waits || seq != req.Seq {
			return refusal(req, wire.StatusAborted) // released or asked again meanwhile
		}
		delete(a.probing, id)
	}
	return a.found(sp, req, req.Run.Keys, reply)
}
