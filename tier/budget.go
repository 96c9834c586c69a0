package tier

const (
	headroomFiles = 2 // at least; eviction is faster than writing, so little is enough
	maxHeadroom   = 256 << 20
)

// budget says whether bytes may be written below the root. used is what lies
// there, reserved what writes in progress will add. Guarded by Store.mu.
type budget struct {
	limit    int64 // the cap
	floor    int64 // what must stay free on the file system
	used     int64
	reserved int64
	avail    int64 // free on the file system, as last seen and corrected since
	known    bool  // used is complete: nothing may be written before
	headroom int64 // eviction keeps so much of the cap free ahead of need
	largest  int64 // a few files of the largest kind: so much it keeps above the floor
	wanted   int64 // what waiting writes ask for
	owed     int64 // to be freed because the file system said it is full
}

// setLargest fits what is kept free to the largest file there will be.
func (b *budget) setLargest(fileBytes int64) {
	b.largest = max(b.largest, min(headroomFiles*fileBytes, b.limit/4))
	b.headroom = max(b.largest, min(b.limit/64, maxHeadroom))
}

// reserve takes n bytes, if they fit.
func (b *budget) reserve(n int64) bool {
	if !b.known || b.used+b.reserved+n > b.limit {
		return false
	}
	if b.floor > 0 && b.avail-b.reserved-n < b.floor {
		return false
	}
	b.reserved += n
	return true
}

// settle turns a reservation of n bytes into what the write really took.
func (b *budget) settle(n, took int64) {
	b.reserved -= n
	b.add(took)
}

// add counts bytes that have come (or, negative, gone).
func (b *budget) add(n int64) {
	b.used += n
	b.avail -= n
}

// excess is how much eviction has to free now; 0 or less: nothing.
func (b *budget) excess() int64 {
	if !b.known {
		return 0
	}
	over := b.used + b.reserved + max(b.headroom, b.wanted) - b.limit
	if b.floor > 0 {
		over = max(over, b.floor+max(b.largest, b.wanted)-(b.avail-b.reserved))
	}
	return max(over, b.owed)
}

// freed notes what an eviction has brought.
func (b *budget) freed(n int64) {
	b.add(-n)
	b.owed = max(b.owed-n, 0)
}
