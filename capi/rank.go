package main

// #include "shim.h"
import "C"

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"time"
	"unsafe"

	"github.com/kvtier/kvtier"
)

// rankHandles names the handle of each rank that events may still come for, by
// Rank.ID. An entry stays until the cache is closed: a rank's last events come
// after it was unregistered.
var rankHandles sync.Map // uint64 -> uint64

//export go_kvt_register
func go_kvt_register(cache C.kvt_cache, text unsafe.Pointer, length C.size_t, regions unsafe.Pointer, n, stride C.size_t, out *C.kvt_rank, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	defer hostMemory()()
	c, err := object[*kvtier.Cache](uint64(cache))
	if err != nil {
		return fail(e, err)
	}
	d, err := parseRank(bytesAt(text, length))
	if err != nil {
		return fail(e, err)
	}
	r, err := c.Register(d.config(), regionsAt(regions, int(n), int(stride)))
	if err != nil {
		return fail(e, err)
	}
	h, ok := handles.put(&rank{Rank: r, chunkTokens: uint64(d.ChunkTokens)}, uint64(cache))
	if !ok {
		_ = r.Close(time.Nanosecond) // the cache was closed meanwhile, which is what is reported
		return fail(e, errHandle)
	}
	rankHandles.Store(r.ID(), h)
	*out = C.kvt_rank(h)
	return C.KVT_OK
}

// rank is what a rank's handle names.
type rank struct {
	*kvtier.Rank
	chunkTokens uint64
}

// chunks of the range of a load.
func (r *rank) chunks(first, tokens uint64) uint64 {
	return (first+tokens+r.chunkTokens-1)/r.chunkTokens - first/r.chunkTokens
}

// regionsAt reads host regions, which lie stride bytes apart: the caller's header
// may know more fields than this library.
func regionsAt(p unsafe.Pointer, n, stride int) []kvtier.Region {
	out := make([]kvtier.Region, n)
	for i := range out {
		r := (*C.kvt_region)(unsafe.Add(p, i*stride))
		out[i] = kvtier.Region{
			Name:        C.GoString(&r.name[0]),
			Component:   C.GoString(&r.component[0]),
			Layer:       int(r.layer),
			Head:        int(r.head),
			Bytes:       int(r.bytes),
			Replicated:  r.flags&C.KVT_REGION_REPLICATED != 0,
			AllRows:     r.flags&C.KVT_REGION_ALL_ROWS != 0,
			Group:       int(r.group),
			Base:        uintptr(r.base),
			BlockStride: int64(r.block_stride),
			TokenStride: int64(r.token_stride),
		}
	}
	return out
}

//export go_kvt_unregister
func go_kvt_unregister(h C.kvt_rank, timeout C.int64_t, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	r, err := object[*rank](uint64(h))
	if err != nil {
		return fail(e, err)
	}
	// The handle outlives a timeout: the caller may not free the pages yet and has
	// to be able to ask again. 0 would mean the configured bound to Close.
	if err := r.Close(max(milliseconds(timeout), time.Nanosecond)); errors.Is(err, kvtier.ErrTimeout) {
		return fail(e, err)
	}
	if _, err := take[*rank](uint64(h)); err != nil {
		return fail(e, err)
	}
	return C.KVT_OK
}

//export go_kvt_rank_ready
func go_kvt_rank_ready(h C.kvt_rank, timeout C.int64_t, out *C.kvt_accepted, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	r, err := object[*rank](uint64(h))
	if err != nil {
		return fail(e, err)
	}
	a, err := r.Ready(milliseconds(timeout))
	if err != nil {
		return fail(e, err)
	}
	putAccepted(out, a)
	return C.KVT_OK
}

//export go_kvt_selftest
func go_kvt_selftest(h C.kvt_rank, flags, timeout C.uint32_t, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	defer hostMemory()()
	r, err := object[*rank](uint64(h))
	if err != nil {
		return fail(e, err)
	}
	return result(e, r.SelfTest(flags&C.KVT_SELFTEST_PAGES != 0, milliseconds(C.int64_t(timeout))))
}

//export go_kvt_store
func go_kvt_store(h C.kvt_rank, p unsafe.Pointer, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	defer hostMemory()()
	r, err := object[*rank](uint64(h))
	if err != nil {
		return fail(e, err)
	}
	op := (*C.kvt_store_op)(p)
	host := unsafe.Slice(op.grants, int(op.ngrants))
	grants := make([]kvtier.Grant, len(host))
	for i := range host {
		g := &host[i]
		grants[i] = kvtier.Grant{Index: uint32(g.index), Slot: uint32(g.slot), Generation: uint32(g.generation)}
	}
	err = r.Store(kvtier.StoreOp{
		Session:      uint64(op.session),
		Op:           uint64(op.op),
		FirstOrdinal: uint32(op.first_ordinal),
		Grants:       grants,
		Blocks:       unsafe.Slice((*uint32)(unsafe.Pointer(op.blocks)), int(op.nblocks)),
	})
	if err != kvtier.ErrStale && errors.Is(err, kvtier.ErrStale) {
		return C.KVT_OK // of single chunks, which the leader has given up
	}
	return result(e, err)
}

//export go_kvt_load
func go_kvt_load(h C.kvt_rank, p unsafe.Pointer, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	defer hostMemory()()
	r, err := object[*rank](uint64(h))
	if err != nil {
		return fail(e, err)
	}
	op := (*C.kvt_load_op)(p)
	first, tokens := uint64(op.first_token), uint64(op.tokens)
	if first > math.MaxUint32 || tokens > math.MaxUint32 {
		r.EndLoad(uint64(op.session), uint64(op.op))
		return fail(e, fmt.Errorf("%w: tokens beyond 2^32", kvtier.ErrArgument))
	}
	if want := r.chunks(first, tokens); uint64(op.nchunks) != want {
		r.EndLoad(uint64(op.session), uint64(op.op))
		return fail(e, fmt.Errorf("%w: nchunks is %d, the range touches %d chunks", kvtier.ErrArgument, op.nchunks, want))
	}
	host := unsafe.Slice(op.verdicts, int(op.nverdicts))
	verdicts := make([]kvtier.Verdict, len(host))
	for i := range host {
		v := &host[i]
		verdicts[i].Slot, verdicts[i].Generation = uint32(v.slot), uint32(v.generation)
		setCode(&verdicts[i].Code, uint32(v.code))
	}
	return result(e, r.Load(kvtier.LoadOp{
		Session:    uint64(op.session),
		Op:         uint64(op.op),
		FirstToken: uint32(first),
		Tokens:     uint32(tokens),
		Blocks:     unsafe.Slice((*uint32)(unsafe.Pointer(op.blocks)), int(op.nblocks)),
		Verdicts:   verdicts,
	}))
}

// go_kvt_end_load is for a load whose arguments the shim has refused: its error stands.
//
//export go_kvt_end_load
func go_kvt_end_load(h C.kvt_rank, session, op C.uint64_t) {
	var rc C.int32_t
	defer guard(&rc, nil)
	if r, err := object[*rank](uint64(h)); err == nil {
		r.EndLoad(uint64(session), uint64(op))
	}
}

// setCode writes a code of the ABI, which has the numbers of the wire.
func setCode[T ~uint32](to *T, code uint32) { *to = T(code) }

//export go_kvt_load_cancel
func go_kvt_load_cancel(h C.kvt_rank, op C.uint64_t, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	r, err := object[*rank](uint64(h))
	if err != nil {
		return fail(e, err)
	}
	r.CancelLoad(uint64(op))
	return C.KVT_OK
}

// Stores copy on the caller's thread, so that no page is being read once the call
// has returned: there is nothing to wait for.
//
//export go_kvt_fence
func go_kvt_fence(h C.kvt_rank, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	_, err := object[*rank](uint64(h))
	return result(e, err)
}
