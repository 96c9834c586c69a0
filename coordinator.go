package kvtier

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/wire"
)

// Key names one chunk.
type Key = chunk.Key

// Verdict is the leader's decision over one chunk.
type Verdict = wire.Verdict

// Codes of a Verdict.
const (
	Granted  = wire.Granted
	Have     = wire.Have
	Pending  = wire.Pending
	Declined = wire.Declined
	Ready    = wire.Ready
	Failed   = wire.Failed
	Later    = wire.Later
)

// Flags of a lease.
const (
	LeasePrefetch = wire.LeasePrefetch // start disk reads
	LeasePin      = wire.LeasePin      // hold the slots of what is resident
)

// MaxKeys is the most chunks of one operation or lease; what is longer is cut.
const MaxKeys = wire.MaxKeys

// Hits says how much of a run is there. The first three count its leading chunks.
type Hits struct {
	Held     uint32 // in DRAM or on disk
	Resident uint32 // verified in DRAM; with LeasePin: pinned
	Leased   uint32
	Pending  uint32 // disk reads inside the pin budget that have not ended
	Bytes    uint64 // still to be read from disk

	// Seq is the number of the Lease call of that id that this answers, Sent the
	// number of the last one; both count from 1.
	Seq, Sent uint32
}

func hitsOf(h wire.Hits) Hits {
	return Hits{Held: h.Held, Resident: h.Resident, Leased: h.Leased, Pending: h.Pending, Bytes: h.Bytes}
}

// Coordinator speaks for a group: it leases, begins stores and loads, and hands
// what it gets to the ranks by the engine's own ways. It stays valid over the loss
// of a leader. Its methods may be called from any goroutine; calls about one lease
// id are in the order in which they are made.
type Coordinator struct {
	m *member

	mu     sync.Mutex
	leases map[uint64]*leaseAnswer
}

// leaseAnswer is what is known of a lease of the present session.
type leaseAnswer struct {
	sent, answered uint32
	hits           Hits
	have           bool
	err            error         // of the last answer, nil when it brought hits
	changed        chan struct{} // closed and replaced with each answer
}

// Coordinate attaches a coordinator for a group of that many ranks. It returns at
// once; see Ready.
func (c *Cache) Coordinate(group string, ranks int) (*Coordinator, error) {
	if err := checkGroup(group, ranks); err != nil {
		return nil, err
	}
	k := &Coordinator{leases: make(map[uint64]*leaseAnswer)}
	k.m = newMember(c, wire.Hello{Group: group, Ranks: ranks, Rank: -1, Coordinator: true}, nil)
	k.m.ended = k.forgetLeases
	if err := k.m.start(); err != nil {
		return nil, err
	}
	return k, nil
}

func checkGroup(group string, ranks int) error {
	if group == "" || len(group) > 256 {
		return fmt.Errorf("%w: group %.32q: give it a name of at most 256 bytes", ErrArgument, group)
	}
	if ranks < 1 || ranks > 64 {
		return fmt.Errorf("%w: %d ranks: a group has 1 to 64", ErrArgument, ranks)
	}
	return nil
}

// Ready waits until the group is accepted. It fails with ErrTimeout, ErrClosed or
// a *RefusedError; after the first two the coordinator goes on trying.
func (k *Coordinator) Ready(timeout time.Duration) (*Accepted, error) { return k.m.ready(timeout) }

// Session is the leader's session, 0 without a leader. What was granted under
// another session is gone.
func (k *Coordinator) Session() uint64 {
	_, session, err := k.m.attached()
	if err != nil {
		return 0
	}
	return session
}

// Lookup counts what is held of a run, without any effect on it.
func (k *Coordinator) Lookup(parent Key, first uint32, keys []Key, timeout time.Duration) (Hits, error) {
	r, _, err := k.m.ask(&wire.Request{Type: wire.Lookup, Timeout: timeout,
		Run: &wire.Run{Parent: parent, First: first, Keys: cutKeys(keys)}}, timeout)
	if err != nil {
		return Hits{}, err
	}
	return hitsOf(r.Hits), nil
}

// Lease asks for a run to be kept retrievable, or asks again with the same id. It
// sends and does not wait; see LeaseResult. ErrBusy leaves an earlier lease of that
// id and its answer in force.
func (k *Coordinator) Lease(id uint64, parent Key, first uint32, keys []Key, flags uint32) error {
	if id == 0 || flags&^(LeasePrefetch|LeasePin) != 0 {
		return fmt.Errorf("%w: lease %d with flags 0x%x", ErrArgument, id, flags)
	}
	l, session, err := k.m.attached()
	if err != nil {
		return err
	}
	k.mu.Lock()
	a := k.leases[id]
	fresh := a == nil
	if fresh {
		a = &leaseAnswer{changed: make(chan struct{})}
		k.leases[id] = a
	}
	a.sent++
	seq := a.sent
	k.mu.Unlock()

	err = l.send(&wire.Request{Type: wire.Lease,
		Run: &wire.Run{Parent: parent, First: first, Flags: flags, Lease: id, Keys: cutKeys(keys)}},
		func(r *wire.Reply, err error) { k.answerLease(a, seq, r, err) })
	if err == nil && k.Session() == session {
		return nil
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if err == nil {
		// The session ended meanwhile, perhaps before the entry was made: then
		// nobody else forgets it.
		err = ErrNoLeader
		fresh = true
	}
	if a.sent == seq {
		a.sent--
	}
	if fresh && k.leases[id] == a {
		delete(k.leases, id)
		close(a.changed)
		a.changed = make(chan struct{})
	}
	return err
}

func (k *Coordinator) answerLease(a *leaseAnswer, seq uint32, r *wire.Reply, err error) {
	if err == nil {
		err = statusError(r.Status)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if seq <= a.answered {
		return // a deferred reply that was overtaken
	}
	a.answered, a.err = seq, err
	if err == nil {
		a.hits, a.have = hitsOf(r.Hits), true
		a.hits.Seq = seq
	}
	close(a.changed)
	a.changed = make(chan struct{})
}

// LeaseResult gives the latest answer of a lease. When a newer Lease of that id is
// not answered yet it waits for up to timeout, and then gives the older answer
// (Hits.Seq < Hits.Sent), or ErrPending when there is none. ErrStale: the id is not
// known in this session. ErrBusy: the leader never answered with more.
func (k *Coordinator) LeaseResult(id uint64, timeout time.Duration) (Hits, error) {
	var timer <-chan time.Time
	for {
		k.mu.Lock()
		a := k.leases[id]
		if a == nil {
			k.mu.Unlock()
			if _, _, err := k.m.attached(); err != nil {
				return Hits{}, err
			}
			return Hits{}, ErrStale
		}
		if timeout <= 0 || a.answered == a.sent {
			defer k.mu.Unlock()
			return a.result()
		}
		changed := a.changed
		k.mu.Unlock()
		if timer == nil {
			t := time.NewTimer(timeout)
			defer t.Stop()
			timer = t.C
		}
		select {
		case <-changed:
		case <-timer:
			timeout = 0
		case <-k.m.closing:
			return Hits{}, ErrClosed
		}
	}
}

func (a *leaseAnswer) result() (Hits, error) {
	switch {
	case a.have:
		h := a.hits
		h.Sent = a.sent
		return h, nil
	case a.err != nil && a.answered == a.sent:
		return Hits{}, a.err
	default:
		return Hits{}, ErrPending
	}
}

// Release ends a lease; one that is not known is no error.
func (k *Coordinator) Release(id uint64) {
	k.mu.Lock()
	a := k.leases[id]
	delete(k.leases, id)
	if a != nil {
		close(a.changed)
		a.changed = make(chan struct{})
	}
	k.mu.Unlock()
	if a == nil {
		return // of a session that is gone, or never answered: nothing to end
	}
	if l, _, err := k.m.attached(); err == nil {
		l.sure(&wire.Request{Type: wire.Release, Run: &wire.Run{Lease: id}})
	}
}

// Renew keeps leases from expiring. Ids that are not known are passed over.
func (k *Coordinator) Renew(ids []uint64) {
	l, _, err := k.m.attached()
	if err != nil {
		return
	}
	for len(ids) > 0 {
		n := min(len(ids), MaxKeys)
		l.sure(&wire.Request{Type: wire.Lease, Renew: ids[:n], Run: &wire.Run{Flags: wire.LeaseRenew}})
		ids = ids[n:]
	}
}

func (k *Coordinator) forgetLeases() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, a := range k.leases {
		close(a.changed)
		a.changed = make(chan struct{})
	}
	clear(k.leases)
}

// StoreBegin asks for slots for a run of chunks of one request.
type StoreBegin struct {
	Op     uint64 // unique within the group
	Parent Key
	First  uint32 // ordinal of Keys[0]
	Keys   []Key  // at most MaxKeys
	NoDisk bool   // the chunks stay in DRAM
}

// StoreAnswer holds one Verdict per key (Granted, Have, Pending, Declined), or an
// error; with an error no slot is granted.
type StoreAnswer struct {
	Op       uint64
	Session  uint64
	Verdicts []Verdict
	Err      error
}

// StoreBegin sends the whole batch and then waits once, up to timeout. What is not
// answered by then is cancelled and has Err = ErrTimeout: the operation does not
// exist.
func (k *Coordinator) StoreBegin(batch []StoreBegin, timeout time.Duration) []StoreAnswer {
	out := make([]StoreAnswer, len(batch))
	l, session, err := k.m.attached()
	if err != nil {
		for i := range out {
			out[i] = StoreAnswer{Op: batch[i].Op, Err: err}
		}
		return out
	}
	g := newGather()
	for i := range batch {
		b := &batch[i]
		out[i] = StoreAnswer{Op: b.Op, Session: session}
		if len(b.Keys) == 0 || len(b.Keys) > MaxKeys {
			out[i].Err = fmt.Errorf("%w: %d keys in a store, from 1 to %d are possible", ErrArgument, len(b.Keys), MaxKeys)
			continue
		}
		var flags uint32
		if b.NoDisk {
			flags = wire.StoreNoDisk
		}
		req := &wire.Request{Type: wire.StoreBegin, Op: b.Op, Timeout: timeout,
			Run: &wire.Run{Parent: b.Parent, First: b.First, Flags: flags, Keys: cutKeys(b.Keys)}}
		g.expect()
		if err := l.send(req, func(r *wire.Reply, err error) { g.answer(i, r, err) }); err != nil {
			g.withdraw()
			out[i].Err = err
		}
	}
	answers := g.wait(timeout, k.m.closing)
	for i := range out {
		a := &out[i]
		if a.Err != nil {
			continue
		}
		got, ok := answers[i]
		if !ok {
			takeBack(l, a.Op)
			a.Err = ErrTimeout
			continue
		}
		a.Verdicts, a.Err = got.verdicts(len(batch[i].Keys))
	}
	return out
}

// LoadBegin begins a load of a leased run. It takes the lease over. The verdicts
// are Ready for the leading chunks of the first window and Later for the rest. With
// an error the operation does not exist; let it travel to the ranks with session 0
// all the same, so that they report it.
func (k *Coordinator) LoadBegin(op, lease uint64, parent Key, first uint32, keys []Key, timeout time.Duration) ([]Verdict, uint64, error) {
	if len(keys) == 0 || len(keys) > MaxKeys {
		return nil, 0, fmt.Errorf("%w: %d keys in a load, from 1 to %d are possible", ErrArgument, len(keys), MaxKeys)
	}
	l, session, err := k.m.attached()
	if err != nil {
		return nil, 0, err
	}
	r, err := askOver(l, &wire.Request{Type: wire.LoadBegin, Op: op, Timeout: timeout,
		Run: &wire.Run{Parent: parent, First: first, Lease: lease, Keys: cutKeys(keys)}}, timeout, k.m.closing)
	if err != nil {
		if errors.Is(err, ErrTimeout) {
			takeBack(l, op)
		}
		return nil, 0, err
	}
	verdicts, err := (outcome{reply: r}).verdicts(len(keys))
	if err != nil {
		return nil, 0, err
	}
	return verdicts, session, nil
}

// Cancel ends an operation; unsent says that no rank has heard of it.
func (k *Coordinator) Cancel(op uint64, unsent bool) {
	l, _, err := k.m.attached()
	if err != nil {
		return
	}
	var flags uint16
	if unsent {
		flags = wire.CancelUnsent
	}
	l.sure(&wire.Request{Type: wire.Cancel, Op: op, Flags: flags})
}

// Close ends the coordinator: its leases end, running loads of the ranks finish.
func (k *Coordinator) Close() error { return k.m.close(k.m.cache.cfg.CloseTimeout) }

func cutKeys(keys []Key) []Key {
	return keys[:min(len(keys), MaxKeys)]
}
