package kvtier

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/tier"
)

const (
	copyPiece  = 1 << 20 // bytes between two looks at a stop flag
	firstRetry = time.Millisecond
	lastRetry  = 20 * time.Millisecond
	// hurry is how long a put asks for its chunk without a pause.
	hurry = 500 * time.Microsecond

	lookupTimeout = time.Second
	removeTimeout = 5 * time.Second
	// declinePatience is how long a put that is declined tries again: the arena
	// grows on demand, and its slots come a moment after they were first asked for.
	declinePatience = 100 * time.Millisecond
)

// Blob puts and gets whole chunks: the caller's bytes, all of one length. It is a
// group of its own, rank and coordinator in one. Its methods may be called from any
// goroutine.
type Blob struct {
	m     *member
	bytes int
	ids   atomic.Uint64 // operations and leases
}

// Blob attaches to the namespace of chunks of a model that have chunkBytes bytes
// for chunkTokens tokens each. extra holds what else the bytes depend on; its Model
// is not used.
func (c *Cache) Blob(model string, chunkBytes, chunkTokens int, extra Identity) (*Blob, error) {
	if model == "" || chunkBytes < 1 || chunkTokens < 1 {
		return nil, fmt.Errorf("%w: model %q with chunks of %d bytes for %d tokens", ErrArgument, model, chunkBytes, chunkTokens)
	}
	extra.Model = model
	if extra.Encoding == "" {
		extra.Encoding = chunk.EncodingRows
	}
	var unique [8]byte
	rand.Read(unique[:]) // never fails
	h := wire.Hello{
		Group: fmt.Sprintf("blob-%d-%s", os.Getpid(), hex.EncodeToString(unique[:])),
		Ranks: 1, Rank: 0, Coordinator: true,
	}
	b := &Blob{bytes: chunkBytes}
	b.m = newMember(c, h, &wire.Declare{
		Identity: extra, ChunkTokens: chunkTokens, BlockTokens: chunkTokens, DCP: 1, Interleave: chunkTokens,
		Groups: []wire.DeclaredGroup{{
			Kind: chunk.GroupBlob, TokensPerRow: chunkTokens,
			Regions: []wire.DeclaredRegion{{Name: "blob", Component: "target", Layer: -1, Head: -1, Bytes: chunkBytes}},
		}},
	})
	if err := b.m.start(); err != nil {
		return nil, err
	}
	return b, nil
}

// Ready waits until chunks can be put and got; as Coordinator.Ready.
func (b *Blob) Ready(timeout time.Duration) error {
	_, err := b.m.ready(timeout)
	return err
}

// Fingerprint is that of the namespace, which roots of keys begin with; zero until
// Ready, and while there is no leader.
func (b *Blob) Fingerprint() Fingerprint {
	v, _, _, release, err := b.m.use()
	if err != nil {
		return Fingerprint{}
	}
	defer release()
	return v.fingerprint
}

// Fingerprint identifies a namespace.
type Fingerprint = chunk.Fingerprint

// Put stores the chunk with this ordinal behind parent (the root of the prefix for
// ordinal 0) and waits until it can be got, or for timeout. It is no error when it
// is held already. ErrDeclined: there is no room, or parent is not held.
func (b *Blob) Put(key, parent Key, ordinal uint32, payload []byte, timeout time.Duration) error {
	if len(payload) != b.bytes {
		return fmt.Errorf("%w: a chunk of %d bytes, this namespace has chunks of %d", ErrArgument, len(payload), b.bytes)
	}
	end := time.Now().Add(timeout)
	patience := time.Now().Add(min(timeout, declinePatience))
	for retry := firstRetry; ; retry = min(2*retry, lastRetry) {
		again, err := b.put(key, parent, ordinal, payload, end)
		if err == ErrDeclined && b.wait(retry, patience) {
			continue
		}
		if !again {
			return err
		}
		if !b.wait(retry, end) {
			return errors.Join(ErrTimeout, err)
		}
	}
}

// put tries once. It says whether it is worth trying again.
func (b *Blob) put(key, parent Key, ordinal uint32, payload []byte, end time.Time) (again bool, err error) {
	v, l, _, release, err := b.m.use()
	if err != nil {
		return err != ErrClosed, err
	}
	defer release()
	op := b.ids.Add(1)
	run := &wire.Run{Parent: parent, First: ordinal, Keys: []Key{key}}
	r, err := b.ask(l, &wire.Request{Type: wire.StoreBegin, Op: op, Run: run}, end)
	if errors.Is(err, ErrTimeout) {
		takeBack(l, op)
	}
	if err != nil {
		return errors.Is(err, ErrBusy), err
	}
	verdicts, err := outcome{reply: r}.verdicts(1)
	if err != nil {
		return false, err
	}
	switch w := verdicts[0]; w.Code {
	case Have:
		return false, nil
	case Pending:
		return true, nil
	case Granted:
		return false, b.fill(v, l, op, w, run, payload, end)
	default:
		return false, ErrDeclined
	}
}

// fill copies the payload into a granted slot and waits until the chunk is visible.
func (b *Blob) fill(v *view, l link, op uint64, w Verdict, run *wire.Run, payload []byte, end time.Time) error {
	ref := tier.Ref{Slot: w.Slot, Generation: w.Generation}
	done := wire.Done{Slot: w.Slot, Generation: w.Generation, Status: wire.StatusAborted}
	slot := b.place(v, ref)
	if slot != nil && v.table.Check(ref, tier.Assembling) && copyPieces(slot, payload, &v.stop) && v.table.Check(ref, tier.Assembling) {
		done.Status = wire.StatusOK
	}
	l.sure(&wire.Request{Type: wire.StoreDone, Op: op, Done: []wire.Done{done}})
	if done.Status != wire.StatusOK {
		return ErrStale
	}
	// The checksum takes less time than the shortest sleep of a timer.
	hurried := time.Now().Add(hurry)
	for retry := firstRetry; ; {
		r, err := b.ask(l, &wire.Request{Type: wire.Lookup, Run: run}, end)
		if err == nil && r.Hits.Held == 1 {
			return nil
		}
		if err != nil && !errors.Is(err, ErrBusy) {
			return err
		}
		if time.Now().Before(hurried) {
			runtime.Gosched()
			continue
		}
		if !b.wait(retry, end) {
			return ErrTimeout
		}
		retry = min(2*retry, lastRetry)
	}
}

// Get brings a chunk into dst, which has exactly its length. ErrMiss: it is not
// held, or cannot be read. After an error dst holds anything; nobody writes it any
// more.
func (b *Blob) Get(key Key, dst []byte, timeout time.Duration) error {
	if len(dst) != b.bytes {
		return fmt.Errorf("%w: %d bytes for a chunk, this namespace has chunks of %d", ErrArgument, len(dst), b.bytes)
	}
	end := time.Now().Add(timeout)
	for retry := firstRetry; ; retry = min(2*retry, lastRetry) {
		err := b.get(key, dst, end)
		if !errors.Is(err, ErrBusy) {
			return err
		}
		if !b.wait(retry, end) {
			return ErrTimeout
		}
	}
}

func (b *Blob) get(key Key, dst []byte, end time.Time) error {
	v, l, _, release, err := b.m.use()
	if err != nil {
		return err
	}
	defer release()
	id := b.ids.Add(1)
	run := wire.Run{Flags: LeasePrefetch | LeasePin, Lease: id, Keys: []Key{key}}
	// The lease is answered when the read from disk has ended.
	r, err := b.ask(l, &wire.Request{Type: wire.Lease, Run: &run}, end)
	// Of a lease that is not answered nobody knows: it is given up all the same.
	defer l.sure(&wire.Request{Type: wire.Release, Run: &wire.Run{Lease: id}})
	if err != nil {
		return err
	}
	if r.Hits.Held == 0 {
		return ErrMiss
	}
	run.Flags = 0
	defer l.sure(&wire.Request{Type: wire.LoadDone, Op: id, Flags: wire.LoadDoneEnd})
	r, err = b.ask(l, &wire.Request{Type: wire.LoadBegin, Op: id, Run: &run}, end)
	if err != nil {
		return err
	}
	verdicts, err := outcome{reply: r}.verdicts(1)
	if err != nil {
		return err
	}
	w := verdicts[0]
	if w.Code == Later {
		if r, err = b.ask(l, &wire.Request{Type: wire.LoadWait, Op: id}, end); err != nil {
			return err
		}
		if verdicts, err = (outcome{reply: r}).verdicts(1); err != nil {
			return err
		}
		w = verdicts[0]
	}
	if w.Code != Ready {
		return ErrMiss
	}
	ref := tier.Ref{Slot: w.Slot, Generation: w.Generation}
	done := wire.Done{Slot: w.Slot, Generation: w.Generation, Status: wire.StatusAborted}
	slot := b.place(v, ref)
	if slot != nil && v.table.Check(ref, tier.Ready) && copyPieces(dst, slot, &v.stop) && v.table.Check(ref, tier.Ready) {
		done.Status = wire.StatusOK
	}
	l.sure(&wire.Request{Type: wire.LoadDone, Op: id, Done: []wire.Done{done}})
	if done.Status != wire.StatusOK {
		return ErrMiss
	}
	return nil
}

// place is where the payload lies in a slot; nil for a slot that does not exist.
func (b *Blob) place(v *view, ref tier.Ref) []byte {
	slot := v.slot(ref)
	g := &v.layout.Groups[0]
	if slot == nil || len(v.layout.Groups) != 1 || g.RowBytes != b.bytes || g.Rows != 1 {
		return nil
	}
	return slot[g.Offset : g.Offset+int64(b.bytes)]
}

// Lookup counts the leading chunks of keys that are held, and those of them that are
// in DRAM.
func (b *Blob) Lookup(keys []Key) (held, resident int, err error) {
	l, _, err := b.m.attached()
	if err != nil {
		return 0, 0, err
	}
	r, err := b.ask(l, &wire.Request{Type: wire.Lookup, Run: &wire.Run{Keys: cutKeys(keys)}}, time.Now().Add(lookupTimeout))
	if err != nil {
		return 0, 0, err
	}
	return int(r.Hits.Held), int(r.Hits.Resident), nil
}

// Remove forgets chunks, in DRAM and on disk; those that are not held are passed
// over. Who is getting one meanwhile still gets it.
func (b *Blob) Remove(keys []Key) error {
	l, _, err := b.m.attached()
	if err != nil {
		return err
	}
	for batch := range slices.Chunk(keys, MaxKeys) {
		if err := l.remove(batch, removeTimeout); err != nil {
			return err
		}
	}
	return nil
}

// Close ends the attachment; chunks stay.
func (b *Blob) Close() error { return b.m.close(b.m.cache.cfg.CloseTimeout) }

// ask waits for the reply until end.
func (b *Blob) ask(l link, req *wire.Request, end time.Time) (*wire.Reply, error) {
	left := time.Until(end)
	if left <= 0 {
		return nil, ErrTimeout
	}
	req.Timeout = left
	return askOver(l, req, left, b.m.closing)
}

// wait pauses before a second try; false when there is no time for one.
func (b *Blob) wait(d time.Duration, end time.Time) bool {
	return time.Now().Add(d).Before(end) && pause(d, b.m.closing)
}

// copyPieces copies all of the shorter one; false when it was stopped.
func copyPieces(dst, src []byte, stop interface{ Load() bool }) bool {
	n := min(len(dst), len(src))
	for at := 0; at < n; at += copyPiece {
		if stop.Load() {
			return false
		}
		copy(dst[at:min(at+copyPiece, n)], src[at:])
	}
	return true
}
