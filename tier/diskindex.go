package tier

import (
	"math"

	"github.com/kvtier/kvtier/internal/chunk"
)

const (
	entriesPerPage = 4096
	notQueued      = math.MaxUint32
)

// Flags of a diskEntry.
const (
	entryUnlinking uint8 = 1 << iota // chosen by eviction or removed: not there any more, bytes not yet free
	entryNewer                       // written by a newer major: not served, not replaced
	entryLinked                      // has further names: not adopted, unlinking may free nothing
	entryCounted                     // adoption or rejection is in the counters
	entryTouched                     // the mtime on disk is behind stamp
	entryInQueue                     // waits for its mtime to be written
)

// diskEntry is what is known of one chunk file. No pointers: a million of them
// cost the garbage collector nothing.
type diskEntry struct {
	key     chunk.Key
	stamp   int64  // recency, Unix ns: what the mtime is or will be
	size    int64  // of the file, exact
	blocks  uint32 // accounted, in units of 512 bytes
	queue   uint32 // place in the eviction queue, or notQueued
	touched uint32 // when the mtime was written last, Unix seconds
	flags   uint8
}

func (e *diskEntry) bytes() int64 { return int64(e.blocks) * 512 }

func (e *diskEntry) has(flag uint8) bool { return e.flags&flag != 0 }

// evictable is one place of the eviction queue. stamp may lag behind the entry's:
// a touch moves nothing, the queue catches up when the place comes to the top.
type evictable struct {
	stamp int64
	entry uint32
}

// diskIndex holds the files of one directory by key and by age. Entries live in
// pages that never move, so growth copies nothing large. Guarded by Store.mu.
type diskIndex struct {
	byKey map[chunk.Key]uint32
	pages [][]diskEntry
	spare []uint32 // entries that are free for use
	queue []evictable
	held  map[chunk.Key]uint32 // counted: leases and reads; also keys that have no file
	bytes int64                // accounted, of all entries
	open  map[chunk.Key]openFiles
}

// openFiles is what is being read under one name. A file that loses its name
// meanwhile still takes its bytes, until the last of them is closed.
type openFiles struct {
	readers  uint32
	nameless int64 // bytes
}

func newDiskIndex() diskIndex {
	return diskIndex{byKey: map[chunk.Key]uint32{}, held: map[chunk.Key]uint32{}, open: map[chunk.Key]openFiles{}}
}

func (x *diskIndex) beginRead(k chunk.Key) {
	o := x.open[k]
	o.readers++
	x.open[k] = o
}

// endRead gives the bytes that are free now.
func (x *diskIndex) endRead(k chunk.Key) (freed int64) {
	o := x.open[k]
	if o.readers--; o.readers > 0 {
		x.open[k] = o
		return 0
	}
	delete(x.open, k)
	return o.nameless
}

// unnamed notes that a file has lost its name, and gives the bytes that this has
// freed: none while it is read.
func (x *diskIndex) unnamed(k chunk.Key, bytes int64) (freed int64) {
	o, reading := x.open[k]
	if !reading {
		return bytes
	}
	o.nameless += bytes
	x.open[k] = o
	return 0
}

func (x *diskIndex) at(i uint32) *diskEntry {
	return &x.pages[i/entriesPerPage][i%entriesPerPage]
}

// find gives the entry of a key or nil. The pointer is good while the lock is held.
func (x *diskIndex) find(k chunk.Key) *diskEntry {
	i, ok := x.byKey[k]
	if !ok {
		return nil
	}
	return x.at(i)
}

// add makes the entry of a key that has none.
func (x *diskIndex) add(k chunk.Key, stamp, size, bytes int64) *diskEntry {
	if len(x.spare) == 0 {
		first := uint32(len(x.pages) * entriesPerPage)
		x.pages = append(x.pages, make([]diskEntry, entriesPerPage))
		for i := uint32(entriesPerPage); i > 0; i-- {
			x.spare = append(x.spare, first+i-1)
		}
	}
	i := x.spare[len(x.spare)-1]
	x.spare = x.spare[:len(x.spare)-1]
	e := x.at(i)
	*e = diskEntry{key: k, stamp: stamp, size: size, queue: notQueued}
	x.byKey[k] = i
	x.account(e, bytes)
	x.settle(e)
	return e
}

// account sets what the file costs and gives the difference to before.
func (x *diskIndex) account(e *diskEntry, bytes int64) (more int64) {
	more = -e.bytes()
	e.blocks = uint32(min((bytes+511)/512, math.MaxUint32))
	more += e.bytes()
	x.bytes += more
	return more
}

// remove forgets an entry.
func (x *diskIndex) remove(e *diskEntry) {
	i := x.byKey[e.key]
	x.unqueue(e)
	x.bytes -= e.bytes()
	delete(x.byKey, e.key)
	*e = diskEntry{queue: notQueued}
	x.spare = append(x.spare, i)
}

// touch makes an entry newer, never older: a clock that was set back must not
// make the hottest chunk the next victim.
func (x *diskIndex) touch(e *diskEntry, stamp int64) { e.stamp = max(e.stamp, stamp) }

// settle puts an entry into the eviction queue, or takes it out, as its state
// demands. To be called after every change of held or flags.
func (x *diskIndex) settle(e *diskEntry) {
	_, held := x.held[e.key]
	if held || e.has(entryUnlinking) {
		x.unqueue(e)
		return
	}
	if e.queue == notQueued {
		x.queue = append(x.queue, evictable{e.stamp, x.byKey[e.key]})
		e.queue = uint32(len(x.queue) - 1)
		x.up(len(x.queue) - 1)
	}
}

func (x *diskIndex) hold(k chunk.Key) {
	x.held[k]++
	if e := x.find(k); e != nil {
		x.settle(e)
	}
}

func (x *diskIndex) unhold(k chunk.Key) {
	switch n := x.held[k]; n {
	case 0:
		return
	case 1:
		delete(x.held, k)
	default:
		x.held[k] = n - 1
		return
	}
	if e := x.find(k); e != nil {
		x.settle(e)
	}
}

// oldest gives the entry that eviction takes next, or nil.
func (x *diskIndex) oldest() *diskEntry {
	for len(x.queue) > 0 {
		top := &x.queue[0]
		e := x.at(top.entry)
		if top.stamp == e.stamp {
			return e
		}
		top.stamp = e.stamp
		x.down(0)
	}
	return nil
}

func (x *diskIndex) unqueue(e *diskEntry) {
	if e.queue == notQueued {
		return
	}
	at, last := int(e.queue), len(x.queue)-1
	e.queue = notQueued
	moved := x.queue[last]
	x.queue = x.queue[:last]
	if at == last {
		return
	}
	x.place(at, moved)
	x.up(at)
	x.down(at)
}

func (x *diskIndex) place(at int, v evictable) {
	x.queue[at] = v
	x.at(v.entry).queue = uint32(at)
}

func (x *diskIndex) up(at int) {
	v := x.queue[at]
	for at > 0 {
		parent := (at - 1) / 2
		if x.queue[parent].stamp <= v.stamp {
			break
		}
		x.place(at, x.queue[parent])
		at = parent
	}
	x.place(at, v)
}

func (x *diskIndex) down(at int) {
	v := x.queue[at]
	for {
		child := 2*at + 1
		if child >= len(x.queue) {
			break
		}
		if child+1 < len(x.queue) && x.queue[child+1].stamp < x.queue[child].stamp {
			child++
		}
		if v.stamp <= x.queue[child].stamp {
			break
		}
		x.place(at, x.queue[child])
		at = child
	}
	x.place(at, v)
}
