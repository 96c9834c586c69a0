package kvtier

import (
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/spawn"
	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/tier"
)

// Bounds of the leader's own waits.
const (
	fillTimeout      = 30 * time.Second // then a read counts as lost and its key may be stored anew
	groupTimeout     = 60 * time.Second // then an incomplete group is named in the log
	probeBudget      = 2 * time.Millisecond
	longestDeferral  = 60 * time.Second
	maxProbes        = 4       // probing goroutines at once
	maxLeasedOnDisk  = 65536   // chunks of a member
	maxLeases        = 65536   // of a member
	maxLeasedChunks  = 1 << 20 // of a member, however they are held: 44 bytes each
	leasesOfAll      = 4       // times what a member may have
	cancelledPerCrew = 1024    // remembered operations that were cancelled as unsent
)

// leader owns index, slots and operations of all namespaces of one root.
//
// One lock, mu, guards everything here and in every tier.Space; it is held for
// microseconds and never over I/O. Replies are decided under mu and sent after it
// is released: immediate ones by serve, later ones through outbox by unlock or by
// the leader's own goroutine.
type leader struct {
	log   *slog.Logger
	root  *tier.Root
	opts  leaderOptions
	store *tier.Store // nil: memory only
	pool  *tier.Pool
	now   func() time.Time
	wake  chan struct{} // capacity 1: the loop has replies to send or deadlines to watch
	stop  chan struct{}
	ended chan struct{}

	opening sync.Mutex // one space is opened at a time; never taken under mu

	mu         sync.Mutex
	closed     bool
	watching   bool // the loop looks at deadlines now and then
	hurrying   bool // and does so often
	started    time.Time
	spaces     map[chunk.Fingerprint]*space
	groups     map[string]*group
	members    map[uint32]*attachment
	lastMember uint32
	probes     int
	starved    []*loadOp // loads that wait for a slot or for room, the longest first
	round      uint64    // counts how often these were fed
	hungry     []*lease  // leases whose reads wait for the arena to grow
	loads      int       // that run, of all groups
	loadChunks int       // of which these loads keep a verdict
	leases     int       // of all members
	leased     int       // chunks in them
	freed      bool      // a slot may have become free since these were last tried
	outbox     []func()
	retiring   map[*space]chan struct{} // vacant namespaces whose memory is given back; closed when it is
	count      counters
	testCount  counters // of self-tests, told to nobody
}

// leaderOptions is what the leader takes from a Config.
type leaderOptions struct {
	dramBytes int64
	disk      *tier.StoreOptions // nil: memory only
	workers   int                // goroutines that hash, per namespace
	now       func() time.Time   // nil: time.Now

	partTimeout     time.Duration // from a grant to the last part of the chunk
	straggleTimeout time.Duration // from its first part to its last
	windowTimeout   time.Duration // for the reads of a load's window, and again for its copies
	leaseTTL        time.Duration
}

var errLeaderClosed = errors.New("the leader is closing")

// startLeader opens the store under root, whose lock the caller holds, and gives a
// leader that is ready for attach. The leader does not close root.
func startLeader(o leaderOptions, root *tier.Root, log *slog.Logger) (*leader, error) {
	if o.now == nil {
		o.now = time.Now
	}
	l := &leader{
		log: log, root: root, opts: o, now: o.now,
		pool:    tier.NewPool(o.dramBytes, log),
		wake:    make(chan struct{}, 1),
		stop:    make(chan struct{}),
		ended:   make(chan struct{}),
		started: o.now(),
		spaces:  make(map[chunk.Fingerprint]*space),
		groups:  make(map[string]*group),
		members: make(map[uint32]*attachment),

		retiring: make(map[*space]chan struct{}),
	}
	if o.disk != nil {
		so := *o.disk
		so.Log = log
		s, err := tier.OpenStore(root, so)
		if err != nil {
			return nil, err
		}
		l.store = s
	}
	spawn.Go("leader clock", l.fail, l.loop)
	return l, nil
}

func (l *leader) session() uint64 { return l.root.Session() }

// fail is called when one of the leader's goroutines panicked: what it served is
// not known any more, so the leader answers only misses from here on.
func (l *leader) fail(err error) {
	l.log.Error("the leader stops serving after an internal error", "error", err)
	l.mu.Lock()
	l.closed = true
	l.abandonAll()
	l.unlock()
}

// lock and unlock bracket every change. unlock first gives slots that became free
// to loads that wait for one, and then sends the replies that were decided.
func (l *leader) lock() { l.mu.Lock() }

func (l *leader) unlock() {
	if l.freed {
		l.feed()
	}
	out := l.outbox
	l.outbox = nil
	l.mu.Unlock()
	for _, send := range out {
		send()
	}
}

// send queues a reply for after the lock. The caller holds mu.
func (l *leader) send(reply func(*wire.Reply), message *wire.Reply) {
	l.outbox = append(l.outbox, func() { reply(message) })
}

// poke wakes the loop. It never blocks and may be called under mu.
func (l *leader) poke() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// watch makes sure that the loop looks at deadlines, hurry that it does so often.
// The caller holds mu.
func (l *leader) watch() {
	if !l.watching {
		l.watching = true
		l.poke()
	}
}

func (l *leader) hurry() {
	if !l.hurrying {
		l.hurrying = true
		l.poke()
	}
}

// close ends all operations, then hashes and writes what is dirty, all within
// timeout. No attachment may be served any more. It does not close the root.
func (l *leader) close(timeout time.Duration) error {
	began := time.Now()
	limit, drained := began.Add(timeout), began.Add(timeout/5*3)
	l.lock()
	if l.closed && l.spaces == nil {
		l.unlock()
		return nil
	}
	l.closed = true
	l.abandonAll()
	spaces := l.spaces
	l.spaces = nil
	var reopened []chan struct{}
	for _, sp := range spaces {
		if sp.reopening != nil && sp.reopening.running != nil {
			reopened = append(reopened, sp.reopening.running)
		}
	}
	l.unlock()

	close(l.stop)
	<-l.ended
	// Taken once: a space that is being opened now is closed by its opener.
	l.opening.Lock()
	l.opening.Unlock() //nolint:staticcheck // a barrier, not a section

	awaitReopened(reopened, timeout/4)

	// Chunks that are being hashed, or wait for room in the queue, still go to disk; but
	// the disk tier needs time of its own, should a write hang.
	for _, sp := range spaces {
		for l.draining(sp) && time.Now().Before(drained) {
			time.Sleep(time.Millisecond)
		}
	}
	var errs []error
	if l.store != nil {
		errs = append(errs, l.store.Close(max(time.Until(limit), 0)))
	}
	for _, sp := range spaces {
		errs = append(errs, sp.Close(max(time.Until(limit), 0)))
	}
	l.awaitRetired()
	return errors.Join(errs...)
}

func (l *leader) draining(sp *space) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return sp.Draining()
}

// abandonAll ends every lease, load, assembly and deferred reply. The caller holds mu.
func (l *leader) abandonAll() {
	for _, a := range l.members {
		for _, le := range a.leases {
			le.end(wire.StatusAborted)
		}
	}
	for _, g := range l.groups {
		for _, o := range g.loads {
			o.finish()
		}
		for _, o := range g.stores {
			o.finish()
		}
		if g.test != nil {
			g.test.end(wire.StatusAborted, errLeaderClosed.Error())
		}
		g.refuseWaiting(&wire.Refuse{Reason: errLeaderClosed.Error()})
	}
}

// newLeader makes the leader of a root whose lock the caller holds. cfg is filled.
func newLeader(cfg *Config, root *tier.Root, log *slog.Logger) (*leader, error) {
	free, limit, err := tier.FreeMemory()
	if err != nil {
		return nil, err
	}
	if cfg.DRAMBytes > free {
		log.Warn("dram_gib is more than what is free now: the cache will stay smaller until others give memory back, or lower it",
			"budget", cfg.DRAMBytes, "free", free, "limit", limit)
	}
	o := leaderOptions{
		dramBytes:       cfg.DRAMBudget(free),
		workers:         cfg.WorkerCount(),
		partTimeout:     cfg.PartDeadline,
		straggleTimeout: cfg.PartFirstDoneDeadline,
		windowTimeout:   cfg.LoadWindowDeadline,
		leaseTTL:        cfg.LeaseTTL,
	}
	if cfg.DiskPath != "" {
		capBytes, floor, err := root.DiskDefaults()
		if err != nil {
			return nil, err
		}
		if cfg.DiskBytes > 0 {
			capBytes = cfg.DiskBytes
		}
		if cfg.FreeFloorBytes != 0 {
			floor = max(cfg.FreeFloorBytes, 0)
		}
		o.disk = &tier.StoreOptions{
			CapBytes: capBytes, FreeFloorBytes: floor, NamespaceFloor: cfg.NamespaceFloorBytes, Durable: cfg.Durable,
			DirtyBytes: cfg.DirtyBound(o.dramBytes), ReadLanes: cfg.ReadLanes, WriteLanes: cfg.WriteLanes,
			Touch:   cfg.Touch,
			Breaker: tier.BreakerOptions{Errors: cfg.BreakerErrors, Window: cfg.BreakerWindow, Off: cfg.BreakerOff},
		}
	}
	return startLeader(o, root, log)
}
