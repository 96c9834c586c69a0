package tier

import (
	"errors"
	"fmt"
	"syscall"
	"time"
	"unsafe"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/sys"
)

// ReadResult is how a read ended. With Err nil, dst holds the payload, checked;
// else dst is zero: ErrAbsent, ErrCorrupt, ErrIO, ErrOff, ErrNewer or ErrClosed.
type ReadResult struct {
	Err     error
	Hash    [16]byte
	Ordinal uint32
	Parent  chunk.Key
}

type readJob struct {
	d    *Disk
	key  chunk.Key
	dst  []byte
	done func(ReadResult)
}

// Read fetches a chunk into dst, which is P bytes, should be page aligned, and
// belongs to the read until done is called. done is called exactly once, and
// perhaps never when the disk hangs: nobody else may touch dst until then.
func (d *Disk) Read(k chunk.Key, dst []byte, done func(ReadResult)) {
	j := &readJob{d: d, key: k, dst: dst, done: done}
	s := d.s
	switch {
	case int64(len(dst)) != d.layout.PaddedBytes:
		err := fmt.Errorf("buffer of %d bytes for a payload of %d: %w", len(dst), d.layout.PaddedBytes, ErrIO)
		s.later(func() { j.refuse(err) })
	case !s.ok():
		s.later(func() { j.refuse(ErrOff) })
	case !s.lanes.push(&s.lanes.reads, j):
		s.later(func() { j.refuse(ErrClosed) })
	case !s.ok():
		// The queue may have been emptied between the two looks.
		s.refuseQueued(ErrOff)
	}
}

func (j *readJob) size() int64 { return int64(len(j.dst)) }

func (j *readJob) refuse(err error) {
	clear(j.dst)
	j.d.s.count.inc(j.d.s.count.misses, missName(err))
	j.done(ReadResult{Err: err})
}

func (j *readJob) run(page []byte) {
	s, began := j.d.s, time.Now()
	result := ReadResult{Err: ErrIO}
	defer func() { j.done(result) }() // also when the read panics
	res, err := j.d.read(j.key, j.dst, page)
	if took := time.Since(began); s.breaker.took(took) {
		s.diskError("slow read", fmt.Errorf("%v: %w", took, errSlow))
	}
	if err != nil {
		clear(j.dst) // nothing unchecked stays in a slot, and its padding is zero again
		s.count.inc(s.count.misses, missName(err))
		result = ReadResult{Err: err}
		return
	}
	s.breaker.succeed()
	s.count.add(&s.count.reads, 1)
	s.count.add(&s.count.readBytes, uint64(len(j.dst)))
	result = res
}

// mismatch is a file that is not what its name says.
type mismatch struct {
	reason string // of the counter
	file   sys.Stat
}

func (m *mismatch) Error() string { return m.reason + " does not match" }

func (d *Disk) read(k chunk.Key, dst, page []byte) (ReadResult, error) {
	s := d.s
	if !s.ok() {
		return ReadResult{}, ErrOff
	}
	if err := d.claim(k); err != nil {
		return ReadResult{}, err
	}
	defer d.release(k)
	res, err := d.readOnce(k, dst, page, false)
	var first, second *mismatch
	if !errors.As(err, &first) {
		return res, d.judged(k, err)
	}
	// A transfer can go wrong as well: only what two reads show is proved.
	res, err = d.readOnce(k, dst, page, true)
	if err == nil {
		s.count.add(&s.count.reread, 1)
		return res, nil
	}
	if !errors.As(err, &second) {
		return ReadResult{}, d.judged(k, err)
	}
	s.count.inc(s.count.corrupt, second.reason)
	if first.file.SameFile(&second.file) && s.own() {
		if err := s.unlinkProved(d.dir, k, &second.file); err != nil {
			s.diskError("unlink "+chunk.FileName(k), err)
		}
	}
	return ReadResult{}, fmt.Errorf("%s: %w", second.reason, ErrCorrupt)
}

// claim finds the chunk and holds it against eviction until release. Should it be
// removed all the same, its bytes count until then.
func (d *Disk) claim(k chunk.Key) error {
	s := d.s
	s.mu.Lock()
	d.dir.index.hold(k)
	d.dir.index.beginRead(k)
	e := d.dir.index.find(k)
	scanned := d.dir.scanned()
	s.mu.Unlock()
	var err error
	if e == nil && !scanned {
		if err = s.lookUp(d.dir, k); err != nil && !absent(err) {
			s.diskError("look for "+chunk.FileName(k), err)
		}
	}
	s.mu.Lock()
	e = d.dir.index.find(k)
	good, newer := d.good(e), e != nil && e.has(entryNewer)
	s.mu.Unlock()
	switch {
	case good:
		return nil
	case newer:
		err = ErrNewer
	case err != nil && !absent(err):
		err = fmt.Errorf("%w: %w", ErrIO, err)
	default:
		err = ErrAbsent
	}
	d.release(k)
	return err
}

func (d *Disk) release(k chunk.Key) {
	d.s.endRead(d.dir, k)
	d.Unhold(k)
}

// judged turns what a read found, other than a mismatch, into its answer.
func (d *Disk) judged(k chunk.Key, err error) error {
	s := d.s
	switch {
	case err == nil:
		return nil
	case errors.Is(err, chunk.ErrNewerMajor):
		s.count.inc(s.count.rejected, "newer")
		s.markNewer(d.dir, k)
		return ErrNewer
	case absent(err), foreign(err):
		d.vanished(k)
		return ErrAbsent
	case errors.Is(err, syscall.ENXIO) && d.vanished(k): // a socket, or a device that is gone
		return ErrAbsent
	}
	s.diskError("read "+chunk.FileName(k), err)
	return fmt.Errorf("%w: %w", ErrIO, err)
}

// vanished forgets a chunk if somebody else has removed its file, or has put
// something else in the place of it.
func (d *Disk) vanished(k chunk.Key) bool {
	s := d.s
	if !s.own() {
		return false
	}
	stripe := &d.dir.stripes[k[0]]
	stripe.Lock()
	defer stripe.Unlock()
	st, err := s.fs.Lstat(d.dir.filePath(k))
	if absent(err) || foreign(err) || err == nil && !st.Regular() {
		s.count.add(&s.count.vanished, 1)
		s.forget(d.dir, k)
		return true
	}
	return false
}

// readOnce reads and checks a file. again: from the device, not from a cache that
// holds what was read before. Errors are *mismatch, chunk.ErrNewerMajor, or the
// system's.
func (d *Disk) readOnce(k chunk.Key, dst, page []byte, again bool) (res ReadResult, err error) {
	s := d.s
	f, direct, err := s.openChunk(d.dir.filePath(k), sys.OpenRead|sys.OpenNonblock, dst)
	if err != nil {
		return res, err
	}
	defer func() {
		if cerr := f.Close(); err == nil && cerr != nil {
			err = cerr
		}
	}()
	st, err := f.Stat()
	if err != nil {
		return res, err
	}
	if !st.Regular() {
		return res, errForeign
	}
	if st.Size != d.layout.FileBytes {
		return res, d.wrongSize(k, &st)
	}
	if again && !direct {
		if err := f.DropCache(); err != nil {
			return res, err
		}
	}
	n, err := readFull(f, dst, page)
	if direct && invalid(err) {
		s.refuseDirect()
		return d.readOnce(k, dst, page, again)
	}
	if err != nil {
		return res, err
	}
	if n < d.layout.FileBytes {
		return res, d.wrongSize(k, &st)
	}
	footer, err := chunk.DecodeFooter(page)
	if err == nil {
		err = footer.Check(k, d.fingerprint, d.layout)
	}
	if err != nil {
		if errors.Is(err, chunk.ErrNewerMajor) {
			return res, chunk.ErrNewerMajor
		}
		return res, &mismatch{footerReason(err), st}
	}
	if chunk.HashPayload(dst) != footer.Hash {
		return res, &mismatch{"payload", st}
	}
	return ReadResult{Hash: footer.Hash, Ordinal: footer.Ordinal, Parent: footer.Parent}, nil
}

// wrongSize asks whether a newer version may have written a file of another size.
func (d *Disk) wrongSize(k chunk.Key, seen *sys.Stat) error {
	f, err := d.s.fs.Open(d.dir.filePath(k), sys.OpenRead|sys.OpenNonblock)
	if err != nil {
		return err
	}
	st, newer, err := tailIsNewer(f)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	switch {
	case err != nil:
		return err
	case newer && st.SameFile(seen):
		return chunk.ErrNewerMajor
	}
	return &mismatch{"size", *seen}
}

// openChunk opens a file for the transfer of buf, past the page cache where the
// file system and the buffer allow it.
func (s *Store) openChunk(path string, flags sys.OpenFlag, buf []byte) (f OpenFile, direct bool, err error) {
	if !s.direct.Load() || !aligned(buf) {
		f, err = s.fs.Open(path, flags)
		return f, false, err
	}
	f, err = s.fs.Open(path, flags|sys.OpenDirect)
	if !invalid(err) {
		return f, true, err
	}
	create := flags&sys.OpenCreate != 0
	if create { // some file systems make the file before they refuse
		if err := s.fs.Unlink(path); err != nil && !absent(err) {
			return nil, false, err
		}
	}
	if f, err = s.fs.Open(path, flags); err != nil {
		return nil, false, err
	}
	// A pipe in place of the file is refused as well, and says nothing of the others.
	if st, err := f.Stat(); create || err == nil && st.Regular() {
		s.refuseDirect()
	}
	return f, false, nil
}

// refuseDirect remembers that this file system has no direct I/O.
func (s *Store) refuseDirect() {
	if s.direct.Swap(false) {
		s.log.Info("file system takes no direct I/O, the page cache is used", "root", s.root.path)
	}
}

func aligned(b []byte) bool {
	return uintptr(unsafe.Pointer(unsafe.SliceData(b)))%chunk.FooterBytes == 0
}

// readFull reads payload and footer with as few calls as the kernel needs.
func readFull(f OpenFile, dst, page []byte) (int64, error) {
	total := int64(len(dst) + len(page))
	for n := int64(0); n < total; {
		got, err := f.ReadV(rest(dst, page, n), n)
		if err != nil {
			return n, err
		}
		if got == 0 {
			return n, nil
		}
		n = advance(n, got, total)
	}
	return total, nil
}

// rest gives what is left of a, b after n bytes.
func rest(a, b []byte, n int64) [][]byte {
	if n < int64(len(a)) {
		return [][]byte{a[n:], b}
	}
	return [][]byte{b[n-int64(len(a)):]}
}

// advance steps over what was transferred. A short transfer is continued at a page
// border, where direct I/O can go on; what is done twice is the same bytes.
func advance(n int64, got int, total int64) int64 {
	next := n + int64(got)
	if next >= total {
		return total
	}
	if aligned := next &^ (chunk.FooterBytes - 1); aligned > n {
		return aligned
	}
	return next
}

func footerReason(err error) string {
	for _, r := range []struct {
		err  error
		name string
	}{
		{chunk.ErrFooterHash, "footer"}, {chunk.ErrMagic, "magic"}, {chunk.ErrKey, "key"},
		{chunk.ErrFingerprint, "fingerprint"}, {chunk.ErrLengths, "lengths"}, {chunk.ErrGroups, "groups"},
	} {
		if errors.Is(err, r.err) {
			return r.name
		}
	}
	return "field"
}

func missName(err error) string {
	for _, r := range []struct {
		err  error
		name string
	}{
		{ErrAbsent, "absent"}, {ErrCorrupt, "corrupt"}, {ErrNewer, "newer"}, {ErrOff, "off"}, {ErrClosed, "closed"},
	} {
		if errors.Is(err, r.err) {
			return r.name
		}
	}
	return "io"
}
