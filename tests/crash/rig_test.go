// Package crash breaks the disk tier in every way that a machine can: kills, power
// cuts, errors at each call, and long mixed use.
package crash

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/disktest"
	"github.com/kvtier/kvtier/tier"
)

const patience = 30 * time.Second

var errDropped = errors.New("dropped at once")

// box is a disk tier with one namespace.
type box struct {
	t     rapid.TB
	root  *tier.Root
	store *tier.Store
	disk  *tier.Disk
}

// tryOpen opens the tier; nil and the error when a fault is in the way.
func tryOpen(t rapid.TB, dir string, o tier.StoreOptions) (*box, error) {
	t.Helper()
	r, err := tier.OpenRoot(dir, tier.RootOptions{})
	require.NoError(t, err)
	ok, holder, err := r.TryLock()
	require.NoError(t, err)
	require.True(t, ok, holder)
	if o.CapBytes == 0 {
		o.CapBytes = 64 << 20
	}
	if o.Tick == 0 {
		o.Tick = 5 * time.Millisecond
	}
	o.Log = slog.New(slog.DiscardHandler)
	s, err := tier.OpenStore(r, o)
	if err != nil {
		require.NoError(t, r.Close())
		return nil, err
	}
	d, err := s.Namespace(disktest.Namespace("crash/model"))
	if err != nil {
		_ = s.Close(patience)
		require.NoError(t, r.Close())
		return nil, err
	}
	return &box{t, r, s, d}, nil
}

func open(t rapid.TB, dir string, o tier.StoreOptions) *box {
	t.Helper()
	b, err := tryOpen(t, dir, o)
	require.NoError(t, err)
	return b
}

func (b *box) close() {
	require.NoError(b.t, b.store.Close(patience))
	require.NoError(b.t, b.root.Close())
}

func (b *box) wait(what string, cond func() bool) {
	b.t.Helper()
	for end := time.Now().Add(patience); !cond(); time.Sleep(200 * time.Microsecond) {
		if time.Now().After(end) {
			b.t.Fatalf("%s: %+v", what, b.store.Stats())
		}
	}
}

func (b *box) scanned() *box {
	b.t.Helper()
	b.wait("scan", func() bool { return b.disk.Scanned() && b.store.Stats().Known })
	return b
}

// idle waits until nothing is on its way to the disk.
func (b *box) idle() {
	b.t.Helper()
	b.wait("idle", func() bool {
		st := b.store.Stats()
		return st.QueuedReads == 0 && st.QueuedWrites == 0 && st.QueuedUnlinks == 0 && st.DirtyBytes == 0 && st.ReservedBytes == 0
	})
}

// key gives keys of which several share a subdirectory.
func key(n int) chunk.Key {
	k := sha256.Sum256(binary.LittleEndian.AppendUint64(nil, uint64(n)))
	k[0] = byte(n % 5)
	return k
}

// start queues a chunk.
func (b *box) start(n int, done func(error)) bool {
	k := key(n)
	p := disktest.Payload(k)
	return b.disk.Write(tier.WriteJob{Key: k, Payload: p, Hash: chunk.HashPayload(p), Done: done})
}

func (b *box) put(n int) error {
	b.t.Helper()
	done := make(chan error, 1)
	if !b.start(n, func(err error) { done <- err }) {
		return errDropped
	}
	select {
	case err := <-done:
		return err
	case <-time.After(patience):
		b.t.Fatalf("no answer to a put: %+v", b.store.Stats())
		return nil
	}
}

// get reads a chunk. The buffer holds the right bytes or none, whatever happens.
func (b *box) get(n int) error {
	b.t.Helper()
	dst := disktest.Used(disktest.PaddedBytes)
	done := make(chan tier.ReadResult, 1)
	b.disk.Read(key(n), dst, func(r tier.ReadResult) { done <- r })
	select {
	case r := <-done:
		want := make([]byte, disktest.PaddedBytes)
		if r.Err == nil {
			want = disktest.Payload(key(n))
		}
		if string(want) != string(dst) {
			b.t.Fatalf("wrong bytes for chunk %d with error %v", n, r.Err)
		}
		return r.Err
	case <-time.After(patience):
		b.t.Fatalf("no answer to a get: %+v", b.store.Stats())
		return nil
	}
}

// clock can be set by hand and goes on by itself.
type clock struct{ shift atomic.Int64 }

func (c *clock) now() time.Time { return time.Now().Add(time.Duration(c.shift.Load())) }

func (c *clock) jump(by time.Duration) { c.shift.Add(int64(by)) }
