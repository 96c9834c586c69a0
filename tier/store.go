package tier

import (
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/spawn"
	"github.com/kvtier/kvtier/internal/sys"
)

const (
	// directorySlack is reserved beside a file for its directory: a new one, or one
	// more block of entries.
	directorySlack = 8192
)

// StoreOptions of a disk tier. Zero values mean the defaults of the comments.
type StoreOptions struct {
	CapBytes       int64         // of all that is ours below the root; required
	FreeFloorBytes int64         // to be left free on the file system; 0: none
	NamespaceFloor int64         // bytes that each namespace in use keeps when others need room; 0: none
	Durable        bool          // fdatasync before a chunk becomes visible
	DirtyBytes     int64         // payload waiting to be written, at most: 1 GiB
	ReadLanes      int           // 4
	WriteLanes     int           // 2
	ReadBytes      int64         // in flight: 64 MiB
	WriteBytes     int64         // in flight: 64 MiB
	Touch          time.Duration // an mtime is written at most so often: 10 s
	Breaker        BreakerOptions
	Log            *slog.Logger
	FS             Filesystem       // LocalFilesystem
	Now            func() time.Time // time.Now
	Tick           time.Duration    // of the housekeeping: 1 s
}

func (o *StoreOptions) fill() {
	setDefault(&o.DirtyBytes, 1<<30)
	setDefault(&o.ReadLanes, 4)
	setDefault(&o.WriteLanes, 2)
	setDefault(&o.ReadBytes, 64<<20)
	setDefault(&o.WriteBytes, 64<<20)
	setDefault(&o.Touch, 10*time.Second)
	setDefault(&o.Tick, time.Second)
	o.Breaker.fill()
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.FS == nil {
		o.FS = LocalFilesystem{}
	}
	if o.Now == nil {
		o.Now = time.Now
	}
}

func setDefault[T int | int64 | time.Duration](v *T, to T) {
	if *v == 0 {
		*v = to
	}
}

// Store is the disk below one locked root, all its namespaces together: they
// share the byte budget, the lanes and the breaker. Safe for concurrent use.
//
// Locks: a stripe of a namespaceDir (held over the system calls that publish or
// unlink one file) comes before mu; mu comes before those of lanes, breaker and
// counters, and is never held over a system call.
type Store struct {
	root    *Root
	session uint64
	o       StoreOptions
	fs      Filesystem
	log     *slog.Logger
	now     func() time.Time
	direct  atomic.Bool   // files are opened past the page cache; false sticks
	temps   atomic.Uint64 // numbers temp files
	lanes   *lanes
	breaker *breaker
	count   *diskCounters

	opening   sync.Mutex    // one Namespace call at a time
	presence  sync.Mutex    // over the going and the return of the root; after opening and stripes, before mu
	deadTemps atomic.Uint64 // temp files of this session up to that number belong to no write

	mu        sync.Mutex
	changed   *sync.Cond // budget, queues, scan or closing have changed
	budget    budget
	beside    int64 // of budget.used: what lies in the root beside the namespaces
	dirs      []*namespaceDir
	writing   *namespaceDir // the last one that was written: its evictions are its own
	dirty     int64         // payload bytes queued or being written
	removals  []removal
	failed    []removal // to be tried again at the next tick
	unlinking bool      // eviction is at a file
	touches   []removal // keys whose mtime is to be written
	answers   []func()
	room      room
	starved   bool // eviction found nothing to take
	uses      useRun
	opened    int64       // Unix ns
	lastUse   int64       // of useTime
	ahead     []aheadFile // adopted with an mtime in the future, and not yet placed
	placing   bool        // that is being done
	late      []lateTouch // mtimes to be written when their time has come, oldest first
	leftovers []leftover
	closed    bool // no new work
	ending    bool // background work ends
	abandoned bool // closed before the work has ended: nothing may change on disk any more
	answering bool // the answers goroutine has to stay for more

	background sync.WaitGroup
	answerer   sync.WaitGroup
	stopTick   chan struct{}
}

// namespaceDir is one namespace's directory, whether a Disk uses it or not: the
// budget needs every one of them.
type namespaceDir struct {
	name, path string
	prefix     string // of the fingerprint, from the name
	stripes    [256]sync.Mutex
	syncing    sync.Mutex  // over syncWay; after a stripe
	unsynced   atomic.Bool // a directory in it, or its own name, may be lost by a power cut
	counting   sync.Mutex  // over what looks at a directory and accounts it; after a stripe, before Store.mu

	// Guarded by Store.mu.
	index    diskIndex
	disk     *Disk         // nil until a run has shown the namespace
	floor    int64         // other namespaces' writes do not evict below it
	todo     []int         // subdirectories to be scanned; scanList: the directory itself
	left     int           // todo and in work
	listed   [256]bool     // subdirectories that have been among todo
	gaps     map[int]*gap  // what of these could not be read
	retryAt  time.Time     // when that is tried again
	retryIn  time.Duration // and how long after that the next time
	dirBytes [257]int64    // allocated by the directories themselves; [256]: path
	suspects []chunk.Key   // files of a wrong size, to be looked at
}

// removal names an entry that background work is about.
type removal struct {
	dir *namespaceDir
	key chunk.Key
}

func newNamespaceDir(root, name, prefix string) *namespaceDir {
	return &namespaceDir{name: name, path: filepath.Join(root, name), prefix: prefix, index: newDiskIndex(), gaps: map[int]*gap{}}
}

func (n *namespaceDir) scanned() bool { return n.left == 0 && len(n.gaps) == 0 }

func (n *namespaceDir) subPath(k chunk.Key) string { return filepath.Join(n.path, chunk.SubDir(k)) }

func (n *namespaceDir) filePath(k chunk.Key) string {
	return filepath.Join(n.path, chunk.SubDir(k), chunk.FileName(k))
}

// OpenStore begins to use the disk below a root that this process has locked. The
// bytes that lie there are counted in the background, and until that is done
// nothing is written.
func OpenStore(r *Root, o StoreOptions) (*Store, error) {
	session := r.Session()
	if session == 0 {
		return nil, fmt.Errorf("root %s: %w", r.path, ErrNotLocked)
	}
	if !r.chunks {
		return nil, fmt.Errorf("root %s is for sockets only: %w", r.path, ErrNotDirectory)
	}
	if o.CapBytes <= 0 {
		return nil, fmt.Errorf("disk cap of %d bytes: set disk_gib: %w", o.CapBytes, ErrTooBig)
	}
	o.fill()
	s := &Store{
		root: r, session: session, o: o, fs: o.FS, log: o.Log, now: o.Now,
		lanes:    newLanes(o.ReadLanes, o.WriteLanes, o.ReadBytes, o.WriteBytes),
		breaker:  newBreaker(o.Breaker),
		count:    newDiskCounters(),
		budget:   budget{limit: o.CapBytes, floor: o.FreeFloorBytes},
		stopTick: make(chan struct{}),
	}
	s.changed = sync.NewCond(&s.mu)
	s.opened = s.now().UnixNano()
	s.lastUse = s.opened // what is used from now on is newer than all that is adopted
	s.direct.Store(true)
	fs, err := s.fs.Statfs(r.path)
	if err != nil {
		return nil, fmt.Errorf("root %s: %w", r.path, err)
	}
	s.budget.avail = fs.AvailBytes
	if err := s.list(); err != nil {
		return nil, fmt.Errorf("root %s: %w", r.path, err)
	}
	s.start()
	return s, nil
}

func (s *Store) start() {
	for i := range s.o.ReadLanes {
		s.spawn("disk read lane", func() { s.lane(&s.lanes.reads, i) })
	}
	for i := range s.o.WriteLanes {
		s.spawn("disk write lane", func() { s.lane(&s.lanes.writes, i) })
	}
	s.startScan()
	s.spawn("disk eviction", s.evict)
	s.spawn("disk watch", s.watch)
	s.spawn("disk housekeeping", s.keep)
	s.answering = true
	s.startAnswers()
}

// startAnswers begins anew when a callback has panicked: the others still have to
// be told.
func (s *Store) startAnswers() {
	s.answerer.Add(1)
	spawn.Go("disk answers", func(err error) {
		s.startAnswers()
		s.answerer.Done()
		s.broken(err)
	}, func() {
		s.answer()
		s.answerer.Done()
	})
}

// spawn starts background work that Close waits for.
func (s *Store) spawn(name string, fn func()) {
	s.background.Add(1)
	spawn.Go(name, s.broken, func() {
		defer s.background.Done()
		fn()
	})
}

// broken switches the tier off for good: a part of it has panicked, or its
// directory is no longer its own (see lost for one that may come back).
func (s *Store) broken(err error) {
	if s.breaker.kill() {
		s.log.Error("disk tier is off until restart", "root", s.root.path, "cause", err)
	}
	s.refuseQueued(ErrOff)
}

// lane does the jobs of one queue. Its page is where footers are written from and
// read to: direct I/O needs alignment, and it must not lie in shared memory.
func (s *Store) lane(q *laneQueue, n int) {
	page, err := sys.NewPages(chunk.FooterBytes)
	if err != nil {
		s.broken(err)
		return
	}
	defer sys.FreePages(page)
	for {
		j := s.lanes.next(q, n)
		if j == nil {
			return
		}
		s.run(q, n, j, page)
	}
}

func (s *Store) run(q *laneQueue, n int, j laneJob, page []byte) {
	defer s.lanes.finish(q, n, j)
	switch j := j.(type) {
	case *readJob:
		j.run(page)
	case *writeJob:
		j.run(page)
	}
}

// ok says whether chunks may be read and written now.
func (s *Store) ok() bool { return !s.breaker.off.Load() }

// diskError counts an error that is a miss and says nothing about a file.
func (s *Store) diskError(op string, err error) {
	s.count.inc(s.count.errors, errnoName(err))
	s.towardBreaker(op, err)
}

func (s *Store) towardBreaker(op string, err error) {
	if why := s.breaker.fail(s.now(), fmt.Sprintf("%s: %v", op, err)); why != "" {
		s.tripped(why)
	}
}

func (s *Store) tripped(why string) {
	s.log.Warn("disk tier is off, every lookup there is a miss", "root", s.root.path, "cause", why)
	s.refuseQueued(ErrOff)
}

// refuseQueued answers what waits for a lane; what is under way ends by itself.
func (s *Store) refuseQueued(err error) {
	for _, j := range s.lanes.take() {
		s.later(func() { j.refuse(err) })
	}
	s.mu.Lock()
	s.changed.Broadcast() // writes that wait for room
	s.mu.Unlock()
}

// left reports that Close has returned with work under way.
func (s *Store) left() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.abandoned
}

// later runs f soon on a goroutine of the Store that does no I/O: what may be
// called under somebody's lock must not call back at once.
func (s *Store) later(f func()) {
	s.mu.Lock()
	s.laterLocked(f)
	s.mu.Unlock()
}

func (s *Store) laterLocked(f func()) {
	if !s.answering { // after Close
		spawn.Go("disk answer", s.broken, f)
		return
	}
	s.answers = append(s.answers, f)
	s.changed.Broadcast()
}

func (s *Store) answer() {
	for {
		s.mu.Lock()
		for len(s.answers) == 0 && s.answering {
			s.changed.Wait()
		}
		if len(s.answers) == 0 {
			s.mu.Unlock()
			return
		}
		f := s.answers[0]
		s.answers[0] = nil
		s.answers = s.answers[1:]
		s.mu.Unlock()
		f()
	}
}
