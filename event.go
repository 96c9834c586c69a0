package kvtier

import (
	"sync"

	"github.com/kvtier/kvtier/internal/sys"
)

// EventKind says what an Event reports.
type EventKind uint32

// EventLoad is the end of a Rank.Load.
const EventLoad EventKind = 1

// EventStatus is the outcome of an operation.
type EventStatus int32

const (
	EventOK        EventStatus = 0
	EventStale     EventStatus = -2 // granted by a leader that is gone, or unknown to the present one
	EventTimeout   EventStatus = -4 // a window did not come in time
	EventCancelled EventStatus = -5 // by CancelLoad or Close
	EventMiss      EventStatus = -6 // a chunk could not be read
)

// Event is the one report about an operation of a Rank. When it can be taken the
// rank's own copy has stopped: the pages are not written by it any more.
type Event struct {
	Kind   EventKind
	Op     uint64
	Rank   uint64 // Rank.ID
	Status EventStatus
	// FirstFailed is the index in the operation of the first chunk that is not
	// in the pages; the number of chunks when all are. Pages of this and later
	// chunks hold anything.
	FirstFailed uint32
	// Tokens that are in the pages, counted from the first token of the load.
	Tokens uint32
}

// maxEvents bounds events that wait and those that running operations will
// bring. An operation beyond it is not begun: an event is never lost.
const maxEvents = 1 << 16

// eventQueue keeps events until the host takes them.
type eventQueue struct {
	bell *bell

	mu       sync.Mutex
	waiting  []Event
	reserved int
}

// reserve makes room for the event of an operation that is about to begin.
func (q *eventQueue) reserve() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting)+q.reserved >= maxEvents {
		return false
	}
	q.reserved++
	return true
}

// put uses a reservation.
func (q *eventQueue) put(e Event) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.reserved--
	q.waiting = append(q.waiting, e)
	q.bell.set(bellEvents, true)
}

func (q *eventQueue) len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.waiting)
}

func (q *eventQueue) take(max int) []Event {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := min(max, len(q.waiting))
	if n <= 0 {
		return nil
	}
	out := append([]Event(nil), q.waiting[:n]...)
	q.waiting = q.waiting[n:]
	if len(q.waiting) == 0 {
		q.waiting = nil
		q.bell.set(bellEvents, false)
	}
	return out
}

// Sources of a bell.
const (
	bellEvents = 1 << iota
	bellRecords
)

// bell is an eventfd that is readable exactly while one of its sources has
// something waiting. The host only polls it; a host that reads it nevertheless
// gets a new edge with the next thing that comes.
type bell struct {
	fd *sys.Event

	mu     sync.Mutex
	on     int // sources with something waiting
	closed bool
}

func newBell() (*bell, error) {
	fd, err := sys.NewEvent()
	if err != nil {
		return nil, err
	}
	return &bell{fd: fd}, nil
}

func (b *bell) set(source int, waiting bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return
	}
	if waiting {
		// Rung also when the source was on already: the host may have read it.
		b.on |= source
		_ = b.fd.Signal() // fails only after close
		return
	}
	b.on &^= source
	_ = b.fd.Drain()
	if b.on != 0 {
		_ = b.fd.Signal()
	}
}

func (b *bell) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.closed {
		b.closed = true
		_ = b.fd.Close()
	}
}
