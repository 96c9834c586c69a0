package kvtier

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
)

// Bounds of the records that wait for the host. A host that never asks for them
// loses the oldest ones, which is counted.
const (
	maxRecords     = 1024
	maxRecordBytes = 256 << 10
	maxRecordText  = 4096
)

// Record is one line of the library's log.
type Record struct {
	Level  slog.Level
	TimeNS int64 // Unix ns
	Text   string
	// Dropped counts the records between the one before and this one that the host
	// did not take in time.
	Dropped uint32
}

// recordRing keeps the newest records until the host takes them. Handing them to
// a callback instead would run host code on library threads, under locks.
type recordRing struct {
	bell *bell

	mu      sync.Mutex
	waiting []Record
	bytes   int
	dropped uint64
}

func (r *recordRing) add(rec Record) {
	if len(rec.Text) > maxRecordText {
		rec.Text = rec.Text[:maxRecordText] + "..."
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	var lost uint32 // since the record that the host took last
	for len(r.waiting) > 0 && (len(r.waiting) >= maxRecords || r.bytes+len(rec.Text) > maxRecordBytes) {
		lost += r.waiting[0].Dropped + 1
		r.bytes -= len(r.waiting[0].Text)
		r.waiting = r.waiting[1:]
		r.dropped++
	}
	r.waiting = append(r.waiting, rec)
	r.waiting[0].Dropped += lost
	r.bytes += len(rec.Text)
	r.bell.set(bellRecords, true)
}

// take removes and returns at most max records, oldest first.
func (r *recordRing) take(max int) []Record {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := min(max, len(r.waiting))
	if n <= 0 {
		return nil
	}
	out := append([]Record(nil), r.waiting[:n]...)
	r.waiting = r.waiting[n:]
	for _, rec := range out {
		r.bytes -= len(rec.Text)
	}
	if len(r.waiting) == 0 {
		r.waiting = nil
		r.bell.set(bellRecords, false)
	}
	return out
}

func (r *recordRing) lost() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.dropped
}

// recordHandler is a slog.Handler that writes "message key=value ..." lines to a
// ring. It never blocks: it may be called with any lock of the library held.
type recordHandler struct {
	ring  *recordRing
	level slog.Level
	attrs string // already formatted
	group string // prefix of keys
}

func (h *recordHandler) Enabled(_ context.Context, l slog.Level) bool { return l >= h.level }

func (h *recordHandler) Handle(_ context.Context, rec slog.Record) error {
	var b strings.Builder
	b.WriteString(rec.Message)
	b.WriteString(h.attrs)
	rec.Attrs(func(a slog.Attr) bool {
		appendAttr(&b, h.group, a)
		return true
	})
	h.ring.add(Record{Level: rec.Level, TimeNS: rec.Time.UnixNano(), Text: b.String()})
	return nil
}

func (h *recordHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	var b strings.Builder
	b.WriteString(h.attrs)
	for _, a := range attrs {
		appendAttr(&b, h.group, a)
	}
	out := *h
	out.attrs = b.String()
	return &out
}

func (h *recordHandler) WithGroup(name string) slog.Handler {
	if name == "" {
		return h
	}
	out := *h
	out.group += name + "."
	return &out
}

func appendAttr(b *strings.Builder, prefix string, a slog.Attr) {
	v := a.Value.Resolve()
	if v.Kind() == slog.KindGroup {
		if a.Key != "" {
			prefix += a.Key + "."
		}
		for _, sub := range v.Group() {
			appendAttr(b, prefix, sub)
		}
		return
	}
	if a.Key == "" {
		return
	}
	text := v.String()
	if strings.ContainsAny(text, " \t\n\"=") || text == "" {
		text = strconv.Quote(text)
	}
	fmt.Fprintf(b, " %s%s=%s", prefix, a.Key, text)
}
