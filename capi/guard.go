package main

// #include "shim.h"
import "C"

import (
	"errors"
	"fmt"
	"runtime/debug"
	"time"
	"unicode/utf8"
	"unsafe"

	"github.com/kvtier/kvtier"
	"github.com/kvtier/kvtier/dcp"
	"github.com/kvtier/kvtier/internal/chunk"
)

// A version that differs makes this a double key, which does not compile.
var _ = map[bool]string{false: "", C.SHIM_VERSION == kvtier.Version: ""}

// guard is deferred first thing by every export: a panic must not reach the host.
func guard(rc *C.int32_t, e *C.shim_error) {
	if v := recover(); v != nil {
		*rc = C.KVT_E_INTERNAL
		if fault, ok := v.(interface{ Addr() uintptr }); ok {
			tell(e, fmt.Sprintf("memory fault at %#x: is the memory handed in still mapped?\n%s", fault.Addr(), debug.Stack()))
			return
		}
		tell(e, fmt.Sprintf("kvtier has a defect: %v\n%s", v, debug.Stack()))
	}
}

// hostMemory makes faults panic on this goroutine until the function it returns is
// called. Exports that read or write host memory in bulk defer that: a page that
// the host unmapped then is an error instead of the end of the process.
// It is the second line of defence only, a host may replace Go's fault handler.
func hostMemory() func() {
	before := debug.SetPanicOnFault(true)
	return func() { debug.SetPanicOnFault(before) }
}

// tell keeps text as the message of the calling thread's last failure.
func tell(e *C.shim_error, text string) {
	if e == nil {
		return
	}
	room := unsafe.Slice((*byte)(unsafe.Pointer(&e.text[0])), len(e.text))
	if len(text) > len(room) {
		text = text[:len(room)]
		for !utf8.ValidString(text) && len(text) > len(room)-utf8.UTFMax {
			text = text[:len(text)-1]
		}
	}
	e.length = C.uint32_t(copy(room, text))
}

// fail keeps the text of err and returns its code.
func fail(e *C.shim_error, err error) C.int32_t {
	tell(e, err.Error())
	return codeOf(err)
}

// result is fail for an error that may be nil.
func result(e *C.shim_error, err error) C.int32_t {
	if err == nil {
		return C.KVT_OK
	}
	return fail(e, err)
}

// codes maps the sentinels of the packages below to the codes of the header. The
// first one that fits counts.
var codes = []struct {
	err  error
	code C.int32_t
}{
	{errHandle, C.KVT_E_HANDLE},
	{kvtier.ErrConfig, C.KVT_E_CONFIG},
	{kvtier.ErrArgument, C.KVT_E_ARG},
	{chunk.ErrExtra, C.KVT_E_ARG},
	{chunk.ErrTokens, C.KVT_E_ARG},
	{chunk.ErrNamespace, C.KVT_E_ARG},
	{chunk.ErrTooLarge, C.KVT_E_ARG},
	{kvtier.ErrSelfTest, C.KVT_E_SELFTEST},
	{kvtier.ErrClosed, C.KVT_E_CLOSED},
	{kvtier.ErrMiss, C.KVT_E_MISS},
	{kvtier.ErrDeclined, C.KVT_E_DECLINED},
	{kvtier.ErrBusy, C.KVT_E_BUSY},
	{kvtier.ErrTimeout, C.KVT_E_TIMEOUT},
	{kvtier.ErrPending, C.KVT_E_PENDING},
	{kvtier.ErrNotAccepted, C.KVT_E_NO_LEADER},
	{kvtier.ErrStale, C.KVT_E_STALE},
	{kvtier.ErrNoLeader, C.KVT_E_NO_LEADER},
	{dcp.ErrTable, C.KVT_E_ARG},
	{dcp.ErrBlock, C.KVT_E_ARG},
	{dcp.ErrRegion, C.KVT_E_ARG},
	{dcp.ErrClip, C.KVT_E_ARG},
	{dcp.ErrStopped, C.KVT_E_CLOSED},
}

func codeOf(err error) C.int32_t {
	if err == nil {
		return C.KVT_OK
	}
	for _, c := range codes {
		if errors.Is(err, c.err) {
			return c.code
		}
	}
	var refused *kvtier.RefusedError
	if errors.As(err, &refused) {
		return C.KVT_E_REFUSED
	}
	return C.KVT_E_INTERNAL
}

// failPath is fail for opening: what is not about the settings is about their paths.
func failPath(e *C.shim_error, err error) C.int32_t {
	code := fail(e, err)
	if code == C.KVT_E_INTERNAL {
		return C.KVT_E_IO
	}
	return code
}

func milliseconds(ms C.int64_t) time.Duration { return time.Duration(ms) * time.Millisecond }

// bytesAt makes a slice of n bytes of host memory.
func bytesAt(p unsafe.Pointer, n C.size_t) []byte { return unsafe.Slice((*byte)(p), int(n)) }

// keysAt makes a slice of n keys of host memory; kvt_key and chunk.Key are both 32
// plain bytes.
func keysAt(p unsafe.Pointer, n C.size_t) []chunk.Key { return unsafe.Slice((*chunk.Key)(p), int(n)) }

// keyAt copies a key.
func keyAt(p unsafe.Pointer) chunk.Key { return *(*chunk.Key)(p) }

// putText writes text with a NUL, cut to cap bytes.
func putText(buf *C.char, cap C.size_t, text string) {
	if cap == 0 {
		return
	}
	room := bytesAt(unsafe.Pointer(buf), cap)
	n := copy(room[:cap-1], text)
	room[n] = 0
}
