package main

// #include "shim.h"
import "C"

import (
	"log/slog"
	"time"
	"unsafe"

	"github.com/kvtier/kvtier"
	"github.com/kvtier/kvtier/internal/spawn"
)

//export go_kvt_open
func go_kvt_open(text unsafe.Pointer, length C.size_t, out *C.kvt_cache, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	defer hostMemory()()
	cfg, err := kvtier.ParseConfig(bytesAt(text, length))
	if err != nil {
		return fail(e, err)
	}
	c, err := kvtier.Open(cfg)
	if err != nil {
		return failPath(e, err)
	}
	h, _ := handles.put(c, 0)
	*out = C.kvt_cache(h)
	return C.KVT_OK
}

//export go_kvt_close
func go_kvt_close(h C.kvt_cache, timeout C.int64_t, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	c, err := take[*kvtier.Cache](uint64(h))
	if err != nil {
		return fail(e, err)
	}
	end := time.Now().Add(milliseconds(timeout))
	closeChildren(uint64(h), end)
	if err := c.Close(left(end)); err != nil {
		// Closed it is. Whatever the disk said, the caller learns that something
		// may not have reached it.
		tell(e, err.Error())
		return C.KVT_E_TIMEOUT
	}
	return C.KVT_OK
}

// closeChildren ends what was opened on a handle of a cache, also when the cache
// itself stays open under another handle. What does not end in time goes on ending
// behind the caller's back.
func closeChildren(owner uint64, end time.Time) {
	children := handles.owned(owner)
	if len(children) == 0 {
		return
	}
	done := make(chan struct{})
	spawn.Go("closing of children", func(error) { close(done) }, func() {
		for _, h := range children {
			closeChild(h, end)
		}
		close(done)
	})
	timer := time.NewTimer(left(end))
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
	}
}

// left is the time until end, at least a nanosecond: 0 would mean the configured
// bound to what it is handed to.
func left(end time.Time) time.Duration { return max(time.Until(end), time.Nanosecond) }

// closeChild ends what a handle names. One that somebody else is closing is left to
// him.
func closeChild(h uint64, end time.Time) {
	v, err := take[any](h)
	if err != nil {
		return
	}
	switch v := v.(type) {
	case *rank:
		_ = v.Close(left(end))
		rankHandles.Delete(v.ID())
	case *kvtier.Coordinator:
		_ = v.Close()
	case *kvtier.Blob:
		_ = v.Close()
	}
}

var states = map[string]C.int32_t{
	kvtier.StateOpening: C.KVT_STATE_OPENING,
	kvtier.StateLeader:  C.KVT_STATE_LEADER,
	kvtier.StateMember:  C.KVT_STATE_MEMBER,
	kvtier.StateClosed:  C.KVT_STATE_CLOSED,
}

//export go_kvt_state
func go_kvt_state(h C.kvt_cache, state *C.int32_t, detail *C.char, capacity C.size_t, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	c, err := object[*kvtier.Cache](uint64(h))
	if err != nil {
		return fail(e, err)
	}
	name, line := c.State()
	*state = states[name]
	putText(detail, capacity, line)
	return C.KVT_OK
}

// openPoll is how often a wait for opening looks: it takes tens of milliseconds at
// best, and there is one such wait in the life of a process.
const openPoll = 2 * time.Millisecond

//export go_kvt_wait_open
func go_kvt_wait_open(h C.kvt_cache, timeout C.int64_t, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	c, err := object[*kvtier.Cache](uint64(h))
	if err != nil {
		return fail(e, err)
	}
	for end := time.Now().Add(milliseconds(timeout)); ; time.Sleep(openPoll) {
		switch state, detail := c.State(); {
		case state == kvtier.StateLeader || state == kvtier.StateMember:
			return C.KVT_OK
		case state == kvtier.StateClosed:
			return fail(e, kvtier.ErrClosed)
		case !time.Now().Before(end):
			tell(e, "still opening: "+detail)
			return C.KVT_E_TIMEOUT
		}
		// Close ends the handle before the state changes.
		if _, err := object[*kvtier.Cache](uint64(h)); err != nil {
			return fail(e, kvtier.ErrClosed)
		}
	}
}

//export go_kvt_poll
func go_kvt_poll(h C.kvt_cache, events *C.kvt_event, capacity C.size_t, n *C.size_t, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	c, err := object[*kvtier.Cache](uint64(h))
	if err != nil {
		return fail(e, err)
	}
	taken := c.Events(int(capacity))
	room := unsafe.Slice(events, len(taken))
	for i, ev := range taken {
		handle, _ := rankHandles.Load(ev.Rank)
		id, _ := handle.(uint64)
		room[i] = C.kvt_event{
			kind:         C.uint32_t(ev.Kind),
			status:       eventCode(ev.Status),
			op:           C.uint64_t(ev.Op),
			handle:       C.uint64_t(id),
			failed_chunk: C.uint32_t(ev.FirstFailed),
			tokens:       C.uint32_t(ev.Tokens),
		}
	}
	*n = C.size_t(len(taken))
	return C.KVT_OK
}

func eventCode(s kvtier.EventStatus) C.int32_t {
	switch s {
	case kvtier.EventOK:
		return C.KVT_OK
	case kvtier.EventStale:
		return C.KVT_E_STALE
	case kvtier.EventTimeout:
		return C.KVT_E_TIMEOUT
	case kvtier.EventCancelled:
		return C.KVT_E_CLOSED
	default:
		return C.KVT_E_MISS
	}
}

//export go_kvt_eventfd
func go_kvt_eventfd(h C.kvt_cache, fd *C.int32_t, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	c, err := object[*kvtier.Cache](uint64(h))
	if err != nil {
		return fail(e, err)
	}
	*fd = C.int32_t(c.EventFD())
	return C.KVT_OK
}

//export go_kvt_stats
func go_kvt_stats(h C.kvt_cache, buf *C.char, capacity C.size_t, need *C.size_t, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	c, err := object[*kvtier.Cache](uint64(h))
	if err != nil {
		return fail(e, err)
	}
	text, err := c.Stats()
	if err != nil {
		return fail(e, err)
	}
	*need = C.size_t(len(text) + 1)
	if capacity < *need {
		tell(e, "buf is too small for the statistics")
		return C.KVT_E_BUFFER
	}
	putText(buf, capacity, string(text))
	return C.KVT_OK
}

//export go_kvt_flush
func go_kvt_flush(h C.kvt_cache, timeout C.int64_t, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	c, err := object[*kvtier.Cache](uint64(h))
	if err != nil {
		return fail(e, err)
	}
	return result(e, c.Flush(milliseconds(timeout)))
}

//export go_kvt_log_poll
func go_kvt_log_poll(h C.kvt_cache, records *C.kvt_record, capacity C.size_t, n *C.size_t, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	c, err := object[*kvtier.Cache](uint64(h))
	if err != nil {
		return fail(e, err)
	}
	taken := c.Records(int(capacity))
	room := unsafe.Slice(records, len(taken))
	for i, rec := range taken {
		room[i].time_ns = C.int64_t(rec.TimeNS)
		room[i].level = levelOf(rec.Level)
		room[i].dropped = C.uint32_t(rec.Dropped)
		putText(&room[i].text[0], C.size_t(len(room[i].text)), rec.Text)
	}
	*n = C.size_t(len(taken))
	return C.KVT_OK
}

func levelOf(l slog.Level) C.int32_t {
	switch {
	case l >= slog.LevelError:
		return C.KVT_LOG_ERROR
	case l >= slog.LevelWarn:
		return C.KVT_LOG_WARN
	case l >= slog.LevelInfo:
		return C.KVT_LOG_INFO
	default:
		return C.KVT_LOG_DEBUG
	}
}
