package tier

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/sys"
)

// WriteJob is one chunk to be kept on disk.
type WriteJob struct {
	Key, Parent chunk.Key
	Ordinal     uint32
	Payload     []byte   // P bytes, should be page aligned; unchanged and mapped until Done
	Hash        [16]byte // of Payload, taken when the chunk was published
	Done        func(error)
}

type writeJob struct {
	d     *Disk
	w     WriteJob
	dones []func(error) // of this and of equal jobs that came while it waited

	removed bool // guarded by Store.mu: must not become visible
}

// Write queues a chunk. True: Done will be called once, with nil when the chunk is
// on disk, also when it was there before (which costs nothing). False: it was
// not taken, which is counted as postponed, since the caller has it still and may come
// again, or as dropped when that is of no use (see Newer); Done is not called.
func (d *Disk) Write(w WriteJob) bool {
	s := d.s
	s.mu.Lock()
	defer s.mu.Unlock()
	why := ""
	e := d.dir.index.find(w.Key)
	pending := d.pending[w.Key]
	bytes := int64(len(w.Payload))
	switch {
	case bytes != d.layout.PaddedBytes:
		why = "size"
	case s.closed:
		why = "closed"
	case !s.ok():
		why = "off"
	case e != nil && e.has(entryNewer):
		why = "newer"
	case d.good(e) && pending == nil: // else it may yet be taken back
		s.touchEntry(d.dir, e, s.uses.at(s.useTime(), w.Ordinal), w.Ordinal)
		s.count.add(&s.count.present, 1)
		s.laterLocked(func() { w.Done(nil) })
		return true
	case pending != nil && pending.removed:
		why = "removed"
	case pending != nil:
		pending.dones = append(pending.dones, w.Done)
		s.count.add(&s.count.present, 1)
		return true
	case s.room.refuses(s.now(), s.dirty):
		why = "room"
	case s.dirty > 0 && s.dirty+bytes > s.o.DirtyBytes:
		why = "dirty"
	}
	j := &writeJob{d: d, w: w, dones: []func(error){w.Done}}
	if why == "" && !s.lanes.push(&s.lanes.writes, j) {
		why = "closed"
	}
	switch why {
	case "":
	case "dirty", "room", "off", "removed":
		s.count.inc(s.count.postponed, why)
		return false
	default:
		s.count.inc(s.count.dropped, why)
		return false
	}
	d.pending[w.Key] = j
	s.dirty += bytes
	return true
}

func (j *writeJob) size() int64 { return int64(len(j.w.Payload)) }

func (j *writeJob) refuse(err error) {
	j.d.s.notWritten(err)
	j.end(err)
}

// end takes the job out of the books and answers all who wait for it.
func (j *writeJob) end(err error) {
	s := j.d.s
	s.mu.Lock()
	delete(j.d.pending, j.w.Key)
	s.dirty -= j.size()
	dones := j.dones
	s.mu.Unlock()
	for _, done := range dones {
		done(err)
	}
}

func (j *writeJob) run(page []byte) {
	s := j.d.s
	err := ErrIO
	defer func() { j.end(err) }() // also when the write panics
	err = j.write(page)
	if err == nil {
		s.breaker.succeed()
		s.count.add(&s.count.writes, 1)
		s.count.add(&s.count.writeBytes, uint64(j.d.layout.FileBytes))
		return
	}
	s.notWritten(err)
}

// notWritten counts a write that did not bring its chunk to disk.
func (s *Store) notWritten(err error) {
	if name := dropName(err); postponed(err) {
		s.count.inc(s.count.postponed, name)
	} else {
		s.count.inc(s.count.dropped, name)
	}
}

// postponed reports that a write failed for what will pass, whatever the chunk: it is
// worth to be offered again.
func postponed(err error) bool { return errors.Is(err, ErrNoRoom) || errors.Is(err, ErrOff) }

func (j *writeJob) write(page []byte) error {
	d, s := j.d, j.d.s
	if !s.ok() {
		return ErrOff
	}
	if s.pausing() { // since it was queued
		return ErrNoRoom
	}
	need := d.layout.FileBytes + directorySlack
	s.mu.Lock()
	if d.dir.dirBytes[scanList] == 0 { // somebody has taken it away, and it is made again
		need += sidecarRoom(d.canonical)
	}
	s.mu.Unlock()
	s.lookAtFree()
	for again := false; ; again = true {
		if err := s.reserve(d.dir, need); err != nil {
			s.noRoom(err)
			return err
		}
		took, err := j.publish(page)
		s.mu.Lock()
		s.budget.settle(need, took)
		if err == nil {
			s.room = room{}
		}
		s.changed.Broadcast()
		s.mu.Unlock()
		switch {
		case err == nil, errors.Is(err, ErrRemoved), errors.Is(err, ErrOff), errors.Is(err, ErrClosed):
			return err
		case (foreign(err) || absent(err)) && !s.own():
			return ErrOff
		case foreign(err), absent(err): // somebody has cleared or replaced things meanwhile
			s.count.inc(s.count.errors, errnoName(err))
			return fmt.Errorf("%w: %w", ErrIO, err)
		case !noSpace(err):
			s.diskError("write "+chunk.FileName(j.w.Key), err)
			return fmt.Errorf("%w: %w", ErrIO, err)
		}
		s.count.inc(s.count.errors, errnoName(err))
		if again {
			s.full(need, err)
			return fmt.Errorf("%w: %w", ErrNoRoom, err)
		}
		s.makeRoom(need)
	}
}

// publish writes the file under a name of its own and then gives it the chunk's.
// took is what the budget has to know, also after an error.
func (j *writeJob) publish(page []byte) (took int64, err error) {
	d, s, k := j.d, j.d.s, j.w.Key
	s.mu.Lock()
	stamp := s.publishStamp(d.dir, j.w.Parent, j.w.Ordinal)
	provenance, removed := d.provenance, j.removed
	s.mu.Unlock()
	if removed {
		return 0, ErrRemoved
	}
	if !s.own() {
		return 0, ErrOff
	}
	footer := d.layout.Footer()
	footer.Key, footer.Fingerprint, footer.Parent = k, d.fingerprint, j.w.Parent
	footer.Ordinal, footer.Hash, footer.Provenance = j.w.Ordinal, j.w.Hash, provenance
	footer.Created, footer.Session = s.now().UnixNano(), s.session
	if err := footer.Encode(page); err != nil {
		return 0, err
	}
	temp := filepath.Join(d.dir.subPath(k), chunk.TempName(k, s.session, s.temps.Add(1)))
	st, made, err := j.writeTemp(temp, page, stamp)
	// The first chunk here, or somebody has cleared the directory. More than one
	// try: eviction removes a subdirectory that is empty.
	for tries := 0; absent(err) && tries < 3; tries++ {
		if err := d.makeDirs(k); err != nil {
			return 0, err
		}
		st, made, err = j.writeTemp(temp, page, stamp)
	}
	if err != nil && !made {
		return 0, err
	}
	if err != nil {
		return j.dropTemp(temp), err
	}
	return j.rename(temp, &st, stamp)
}

// makeDirs makes what is missing on the way to a chunk's file. The sidecar comes
// first: no chunk may lie in a directory that does not say what it holds.
func (d *Disk) makeDirs(k chunk.Key) error {
	s := d.s
	stripe := &d.dir.stripes[k[0]]
	stripe.Lock()
	defer stripe.Unlock()
	if !s.own() { // what is made here now is not on our disk
		return ErrOff
	}
	for _, dir := range []string{d.dir.path, d.dir.subPath(k)} {
		err := s.fs.Mkdir(dir)
		if err != nil && !exists(err) {
			return err
		}
		if err == nil && s.o.Durable && dir != d.dir.path { // the other one's name: with the sidecar
			if err := syncDir(s.fs, d.dir.path); err != nil {
				d.dir.unsynced.Store(true)
				return err
			}
		}
		if dir == d.dir.path {
			d.remaking.Lock()
			_, err := checkSidecar(s.fs, dir, d.canonical)
			d.remaking.Unlock()
			if err != nil {
				d.dir.unsynced.Store(true)
				return err
			}
		}
	}
	return errors.Join(s.countDir(d.dir, scanList), s.countDir(d.dir, int(k[0])))
}

// writeTemp writes the whole file. made says that there is one after an error.
func (j *writeJob) writeTemp(temp string, page []byte, stamp int64) (st sys.Stat, made bool, err error) {
	d, s := j.d, j.d.s
	if err := s.inPlace(d.dir, j.w.Key); err != nil {
		return st, false, err
	}
	f, direct, err := s.openChunk(temp, sys.OpenWrite|sys.OpenCreate|sys.OpenExclusive, j.w.Payload)
	if err != nil {
		return st, false, err
	}
	err = writeFull(f, j.w.Payload, page)
	if direct && invalid(err) {
		s.refuseDirect()
		if err := errors.Join(f.Close(), s.fs.Unlink(temp)); err != nil {
			return st, true, err
		}
		return j.writeTemp(temp, page, stamp)
	}
	if err == nil && s.o.Durable {
		err = f.Sync()
	}
	if err == nil {
		err = f.SetModified(stamp)
	}
	if err == nil {
		st, err = f.Stat()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil && st.Size != d.layout.FileBytes {
		err = fmt.Errorf("%d bytes of %d: %w", st.Size, d.layout.FileBytes, errShort)
	}
	return st, true, err
}

// writeFull writes payload and footer with as few calls as the kernel needs.
func writeFull(f OpenFile, payload, page []byte) error {
	total := int64(len(payload) + len(page))
	for n := int64(0); n < total; {
		got, err := f.WriteV(rest(payload, page, n), n)
		if err != nil {
			return err
		}
		if got == 0 {
			return errShort
		}
		n = advance(n, got, total)
	}
	return nil
}

func (j *writeJob) rename(temp string, st *sys.Stat, stamp int64) (took int64, err error) {
	d, s, k := j.d, j.d.s, j.w.Key
	stripe := &d.dir.stripes[k[0]]
	stripe.Lock()
	defer stripe.Unlock()
	s.mu.Lock()
	removed, abandoned := j.removed, s.abandoned
	s.mu.Unlock()
	switch {
	case removed:
		return j.dropTemp(temp), ErrRemoved
	case abandoned:
		return j.dropTemp(temp), ErrClosed
	}
	err = d.syncWay()
	if err == nil {
		err = s.fs.Rename(temp, d.dir.filePath(k))
	}
	if err != nil {
		return j.dropTemp(temp), err
	}
	cost := accounted(st)
	s.mu.Lock()
	e := d.dir.index.find(k)
	if e == nil {
		e = d.dir.index.add(k, stamp, st.Size, cost)
		took = cost
	} else { // a file that was rejected or was to be removed: now it is this one
		old := e.bytes()
		took = d.dir.index.account(e, cost) + old - d.dir.index.unnamed(k, old)
		e.size, e.stamp = st.Size, stamp
	}
	e.flags = entryCounted
	e.touched = uint32(s.now().Unix())
	d.dir.index.settle(e)
	if removed = j.removed; removed {
		s.unpublish(d.dir, e)
	}
	s.mu.Unlock()
	if removed {
		return took, ErrRemoved
	}
	if s.o.Durable {
		if err := syncDir(s.fs, d.dir.subPath(k)); err != nil && !absent(err) {
			s.mu.Lock()
			if e := d.dir.index.find(k); e != nil { // it could be gone after a power cut
				s.unpublish(d.dir, e)
			}
			s.mu.Unlock()
			return took, err
		}
	}
	if err := s.countDir(d.dir, int(k[0])); err != nil && !absent(err) {
		s.diskError("count "+d.dir.subPath(k), err)
	}
	return took, nil
}

// unpublish takes a chunk back that has its name already. Needs mu and the stripe.
func (s *Store) unpublish(n *namespaceDir, e *diskEntry) {
	if e.has(entryUnlinking) { // by Remove
		return
	}
	e.flags |= entryUnlinking
	n.index.settle(e)
	s.removals = append(s.removals, removal{n, e.key})
	s.changed.Broadcast()
}

// syncWay makes up for a sync of the directories above a chunk that failed: what is made
// in them afterwards would be lost with them, and there is nothing more to make there
// that would sync them. Needs the stripe, under which those of the chunk were made.
func (d *Disk) syncWay() error {
	n, s := d.dir, d.s
	if !s.o.Durable {
		return nil
	}
	n.syncing.Lock()
	defer n.syncing.Unlock()
	if !n.unsynced.Swap(false) {
		return nil
	}
	err := errors.Join(syncDir(s.fs, n.path), syncDir(s.fs, s.root.path))
	if err != nil {
		n.unsynced.Store(true)
	}
	return err
}

// dropTemp removes a temp file, and gives the bytes it still takes if that fails:
// then it is tried again. To the breaker the write has failed once already.
func (j *writeJob) dropTemp(temp string) (took int64) {
	s := j.d.s
	err := s.fs.Unlink(temp)
	if err == nil || absent(err) || foreign(err) {
		return 0
	}
	s.count.inc(s.count.errors, errnoName(err))
	took = j.d.layout.FileBytes // too much rather than too little
	if st, err := s.fs.Lstat(temp); err == nil {
		took = accounted(&st)
	}
	s.mu.Lock()
	s.leftovers = append(s.leftovers, leftover{temp, took})
	s.mu.Unlock()
	return took
}

// leftover is a temp file that could not be removed, and what is accounted for it.
type leftover struct {
	path  string
	bytes int64
}

// dropLeftovers tries again; what remains is left to the next session.
func (s *Store) dropLeftovers() {
	s.mu.Lock()
	again := s.leftovers
	s.leftovers = nil
	s.mu.Unlock()
	for i, l := range again {
		err := s.fs.Unlink(l.path)
		gone := err == nil || absent(err) || foreign(err)
		s.mu.Lock()
		if gone {
			s.budget.freed(l.bytes)
			s.changed.Broadcast()
		} else {
			s.leftovers = append(s.leftovers, again[i:]...)
		}
		s.mu.Unlock()
		if !gone {
			return // one error a tick is enough, and this one was counted
		}
	}
}

func dropName(err error) string {
	for _, r := range []struct {
		err  error
		name string
	}{
		{ErrRemoved, "removed"}, {ErrOff, "off"}, {ErrClosed, "closed"}, {ErrNoRoom, "room"},
	} {
		if errors.Is(err, r.err) {
			return r.name
		}
	}
	return "io"
}
