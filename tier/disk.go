package tier

import (
	"sync"
	"time"

	"github.com/kvtier/kvtier/internal/chunk"
)

// Disk is one namespace of a Store. Has, Read, Write, Touch, Hold, Unhold and
// Remove never wait for the disk and may be called under the caller's lock; what
// they start calls back from a goroutine of the Store that holds no lock of it.
type Disk struct {
	s           *Store
	dir         *namespaceDir
	layout      *chunk.Layout
	fingerprint chunk.Fingerprint
	canonical   []byte
	remaking    sync.Mutex // one check of the sidecar at a time

	// Guarded by Store.mu.
	pending    map[chunk.Key]*writeJob
	provenance []byte
}

// Layout is that of the namespace; not to be changed.
func (d *Disk) Layout() *chunk.Layout { return d.layout }

// Fingerprint is that of the namespace.
func (d *Disk) Fingerprint() chunk.Fingerprint { return d.fingerprint }

// SetProvenance gives the JSON that is written into later footers for people to
// read, at most chunk.MaxProvenance bytes; what is longer is left out.
func (d *Disk) SetProvenance(json []byte) {
	if len(json) > chunk.MaxProvenance {
		return
	}
	d.s.mu.Lock()
	d.provenance = append([]byte(nil), json...)
	d.s.mu.Unlock()
}

// good reports whether an entry is a chunk of this namespace that can be read.
// Needs Store.mu.
func (d *Disk) good(e *diskEntry) bool {
	return e != nil && e.size == d.layout.FileBytes && !e.has(entryUnlinking|entryNewer|entryLinked)
}

// Has reports whether the chunk is known to be on disk. To rely on it, Hold the
// chunk first.
func (d *Disk) Has(k chunk.Key) bool {
	if !d.s.ok() {
		return false
	}
	d.s.mu.Lock()
	ok := d.good(d.dir.index.find(k)) && !d.s.closed
	d.s.mu.Unlock()
	return ok
}

// Newer reports whether a file of a newer version stands in the place of a chunk: it
// stays, so that this chunk is never written.
func (d *Disk) Newer(k chunk.Key) bool {
	d.s.mu.Lock()
	defer d.s.mu.Unlock()
	e := d.dir.index.find(k)
	return e != nil && e.has(entryNewer)
}

// Scanned reports whether every file of the directory is known, so that what Has
// does not know is not there.
func (d *Disk) Scanned() bool {
	d.s.mu.Lock()
	defer d.s.mu.Unlock()
	return d.dir.scanned()
}

// Probe gives the number of leading keys that are on disk. While the scan runs it
// looks for files it does not know yet by their names, until the first that is
// not there or until the budget is used up. It blocks on the disk.
func (d *Disk) Probe(keys []chunk.Key, budget time.Duration) int {
	end := time.Now().Add(budget)
	for i, k := range keys {
		if d.Has(k) {
			continue
		}
		if !d.s.ok() || d.Scanned() || !time.Now().Before(end) {
			return i
		}
		if err := d.s.lookUp(d.dir, k); err != nil && !absent(err) {
			d.s.diskError("probe", err)
		}
		if !d.Has(k) {
			return i
		}
	}
	return len(keys)
}

// Hold keeps a chunk from being evicted until the same number of Unhold, also
// one that is yet to be written.
func (d *Disk) Hold(k chunk.Key) {
	d.s.mu.Lock()
	d.dir.index.hold(k)
	d.s.mu.Unlock()
}

// Unhold takes one Hold back.
func (d *Disk) Unhold(k chunk.Key) {
	d.s.mu.Lock()
	d.dir.index.unhold(k)
	d.s.starved = false
	d.s.changed.Broadcast()
	d.s.mu.Unlock()
}

// Remove makes a chunk unknown at once and unlinks its file in the background. A
// write of it that is under way does not become visible.
func (d *Disk) Remove(k chunk.Key) {
	s := d.s
	s.mu.Lock()
	defer s.mu.Unlock()
	if w := d.pending[k]; w != nil {
		w.removed = true
	}
	e := d.dir.index.find(k)
	if e == nil && d.dir.scanned() || e != nil && e.has(entryUnlinking) {
		return
	}
	if e == nil {
		// The scan has not come to it: this entry keeps it from being adopted.
		e = d.dir.index.add(k, 0, 0, 0)
	}
	e.flags |= entryUnlinking
	d.dir.index.settle(e)
	s.removals = append(s.removals, removal{d.dir, k})
	s.changed.Broadcast()
}

// Count gives the number of chunks that can be read; those that come or go while
// it counts may be in it or not.
func (d *Disk) Count() int {
	n := 0
	for page := 0; ; page++ {
		d.s.mu.Lock()
		if page >= len(d.dir.index.pages) {
			d.s.mu.Unlock()
			return n
		}
		for i := range d.dir.index.pages[page] {
			if d.good(&d.dir.index.pages[page][i]) {
				n++
			}
		}
		d.s.mu.Unlock()
	}
}
