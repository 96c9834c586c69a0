package kvtier

import (
	"fmt"
	"log/slog"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// readableNow asks the kernel, as a host's poll would.
func readableNow(t *testing.T, fd int) bool {
	t.Helper()
	var set syscall.FdSet
	set.Bits[fd/64] |= 1 << (fd % 64)
	n, err := syscall.Select(fd+1, &set, nil, nil, &syscall.Timeval{})
	require.NoError(t, err)
	return n == 1
}

func TestBellIsReadableExactlyWhileSomethingWaits(t *testing.T) {
	b, err := newBell()
	require.NoError(t, err)
	defer b.close()
	events, records := &eventQueue{bell: b}, &recordRing{bell: b}
	fd := b.fd.FD()
	require.False(t, readableNow(t, fd))

	require.True(t, events.reserve())
	require.True(t, events.reserve())
	require.False(t, readableNow(t, fd))
	events.put(Event{Op: 1})
	events.put(Event{Op: 2})
	records.add(Record{Text: "a"})
	require.True(t, readableNow(t, fd))
	require.Len(t, events.take(1), 1)
	require.True(t, readableNow(t, fd), "one event still waits")
	require.Len(t, events.take(10), 1)
	require.True(t, readableNow(t, fd), "a record still waits")
	require.Len(t, records.take(10), 1)
	require.False(t, readableNow(t, fd))
	require.Empty(t, events.take(10))
	require.Empty(t, records.take(0))

	// A host that reads the descriptor gets an edge with the next thing.
	records.add(Record{Text: "b"})
	var eight [8]byte
	_, err = syscall.Read(fd, eight[:])
	require.NoError(t, err)
	records.add(Record{Text: "c"})
	require.True(t, readableNow(t, fd))
}

func TestEventsAreNeverLostButRefusedBeforehand(t *testing.T) {
	b, err := newBell()
	require.NoError(t, err)
	defer b.close()
	q := &eventQueue{bell: b}
	for range maxEvents {
		require.True(t, q.reserve())
	}
	require.False(t, q.reserve())
	q.put(Event{})
	require.False(t, q.reserve())
	q.take(1)
	require.True(t, q.reserve())
}

func TestRecordsAreBoundedAndKeepTheNewest(t *testing.T) {
	b, err := newBell()
	require.NoError(t, err)
	defer b.close()
	r := &recordRing{bell: b}
	for i := range maxRecords + 10 {
		r.add(Record{Text: fmt.Sprint(i)})
	}
	require.EqualValues(t, 10, r.lost())
	got := r.take(1 << 20)
	require.Len(t, got, maxRecords)
	require.Equal(t, "10", got[0].Text)
	require.EqualValues(t, 10, got[0].Dropped, "the gap is told where it is")
	for _, rec := range got[1:] {
		require.Zero(t, rec.Dropped)
	}
	r.add(Record{Text: "after"})
	require.Zero(t, r.take(1)[0].Dropped, "and only once")

	for range 200 {
		r.add(Record{Text: strings.Repeat("x", 10_000)})
	}
	bytes, told := 0, r.lost()-10
	for _, rec := range r.take(1 << 20) {
		bytes += len(rec.Text)
		told -= uint64(rec.Dropped)
	}
	require.Zero(t, told, "all that were lost are told")
	require.LessOrEqual(t, bytes, maxRecordBytes)
	require.Zero(t, r.bytes)
}

func TestRecordHandlerFormats(t *testing.T) {
	b, err := newBell()
	require.NoError(t, err)
	defer b.close()
	r := &recordRing{bell: b}
	log := slog.New(&recordHandler{ring: r, level: slog.LevelInfo})
	log.Debug("hidden")
	log.With("a", 1).WithGroup("g").Warn("a thing happened", "path", "/x y", slog.Group("h", "n", time.Second), "empty", "")
	got := r.take(10)
	require.Len(t, got, 1)
	require.Equal(t, slog.LevelWarn, got[0].Level)
	require.Equal(t, `a thing happened a=1 g.path="/x y" g.h.n=1s g.empty=""`, got[0].Text)
	require.NotZero(t, got[0].TimeNS)
}
