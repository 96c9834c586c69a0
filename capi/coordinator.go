package main

// #include "shim.h"
import "C"

import (
	"errors"
	"time"
	"unsafe"

	"github.com/kvtier/kvtier"
	"github.com/kvtier/kvtier/internal/chunk"
)

//export go_kvt_coordinate
func go_kvt_coordinate(cache C.kvt_cache, group unsafe.Pointer, length C.size_t, ranks C.uint32_t, out *C.kvt_coord, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	c, err := object[*kvtier.Cache](uint64(cache))
	if err != nil {
		return fail(e, err)
	}
	k, err := c.Coordinate(string(bytesAt(group, length)), int(ranks))
	if err != nil {
		return fail(e, err)
	}
	h, ok := handles.put(k, uint64(cache))
	if !ok {
		_ = k.Close() // the cache was closed meanwhile, which is what is reported
		return fail(e, errHandle)
	}
	*out = C.kvt_coord(h)
	return C.KVT_OK
}

//export go_kvt_coord_close
func go_kvt_coord_close(coord C.kvt_coord, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	k, err := take[*kvtier.Coordinator](uint64(coord))
	if err != nil {
		return fail(e, err)
	}
	return result(e, k.Close())
}

// putAccepted fills what the header shows of a.
func putAccepted(out *C.kvt_accepted, a *kvtier.Accepted) {
	*out = C.kvt_accepted{
		struct_size:  C.uint32_t(unsafe.Sizeof(*out)),
		chunk_tokens: C.uint32_t(a.ChunkTokens),
		block_tokens: C.uint32_t(a.BlockTokens),
		dcp:          C.uint32_t(a.DCP),
		interleave:   C.uint32_t(a.Interleave),
		slots:        C.uint32_t(a.Slots),
		session:      C.uint64_t(a.Session),
		slot_bytes:   C.uint64_t(a.SlotBytes),
		dram_bytes:   C.uint64_t(a.DRAMBytes),
	}
	if a.DiskEnabled {
		out.disk_bytes = C.uint64_t(a.DiskBytesCap)
	}
	copy(unsafe.Slice((*byte)(&out.fingerprint[0]), len(out.fingerprint)), a.Fingerprint[:])
}

//export go_kvt_coord_ready
func go_kvt_coord_ready(coord C.kvt_coord, timeout C.int64_t, out *C.kvt_accepted, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	k, err := object[*kvtier.Coordinator](uint64(coord))
	if err != nil {
		return fail(e, err)
	}
	a, err := k.Ready(milliseconds(timeout))
	if err != nil {
		return fail(e, err)
	}
	putAccepted(out, a)
	return C.KVT_OK
}

//export go_kvt_coord_session
func go_kvt_coord_session(coord C.kvt_coord, session *C.uint64_t, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	k, err := object[*kvtier.Coordinator](uint64(coord))
	if err != nil {
		return fail(e, err)
	}
	*session = C.uint64_t(k.Session())
	return C.KVT_OK
}

//export go_kvt_lease
func go_kvt_lease(coord C.kvt_coord, lease C.uint64_t, keys unsafe.Pointer, n C.size_t, flags C.uint32_t, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	defer hostMemory()()
	k, err := object[*kvtier.Coordinator](uint64(coord))
	if err != nil {
		return fail(e, err)
	}
	// A lease is always of a leading run: its parent, the root, is not needed.
	return result(e, k.Lease(uint64(lease), chunk.Key{}, 0, keysAt(keys, n), uint32(flags)))
}

// leaseResult waits for an answer newer than after. The error is ErrPending with
// the older answer, if there is one.
func leaseResult(k *kvtier.Coordinator, lease uint64, after uint32, timeout time.Duration) (kvtier.Hits, error) {
	hits, err := k.LeaseResult(lease, 0)
	if waits := err == nil && hits.Seq <= after || errors.Is(err, kvtier.ErrPending); waits && timeout > 0 {
		hits, err = k.LeaseResult(lease, timeout)
	}
	if err == nil && hits.Seq <= after {
		err = kvtier.ErrPending
	}
	return hits, err
}

//export go_kvt_lease_result
func go_kvt_lease_result(coord C.kvt_coord, lease C.uint64_t, after C.uint32_t, timeout C.int64_t, out *C.kvt_hits, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	k, err := object[*kvtier.Coordinator](uint64(coord))
	if err != nil {
		return fail(e, err)
	}
	session := k.Session()
	hits, err := leaseResult(k, uint64(lease), uint32(after), milliseconds(timeout))
	if k.Session() != session || errors.Is(err, kvtier.ErrStale) {
		tell(e, "the lease is not known: never sent, released, expired, or of a leader that is gone")
		return C.KVT_E_MISS
	}
	*out = C.kvt_hits{
		struct_size: C.uint32_t(unsafe.Sizeof(*out)),
		held:        C.uint32_t(hits.Held),
		resident:    C.uint32_t(hits.Resident),
		leased:      C.uint32_t(hits.Leased),
		pending:     C.uint32_t(hits.Pending),
		answer:      C.uint32_t(hits.Seq),
		read_bytes:  C.uint64_t(hits.Bytes),
		session:     C.uint64_t(session),
	}
	return result(e, err)
}

//export go_kvt_release
func go_kvt_release(coord C.kvt_coord, lease C.uint64_t, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	k, err := object[*kvtier.Coordinator](uint64(coord))
	if err != nil {
		return fail(e, err)
	}
	k.Release(uint64(lease))
	return C.KVT_OK
}

//export go_kvt_renew
func go_kvt_renew(coord C.kvt_coord, leases unsafe.Pointer, n C.size_t, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	defer hostMemory()()
	k, err := object[*kvtier.Coordinator](uint64(coord))
	if err != nil {
		return fail(e, err)
	}
	k.Renew(unsafe.Slice((*uint64)(leases), int(n)))
	return C.KVT_OK
}

// putVerdicts writes to n places of the host.
func putVerdicts(out *C.kvt_verdict, verdicts []kvtier.Verdict) {
	room := unsafe.Slice(out, len(verdicts))
	for i, v := range verdicts {
		room[i] = C.kvt_verdict{code: C.uint32_t(v.Code), slot: C.uint32_t(v.Slot), generation: C.uint32_t(v.Generation)}
	}
}

//export go_kvt_store_begin
func go_kvt_store_begin(coord C.kvt_coord, reqs *C.kvt_store_begin_req, n, stride C.size_t, timeout C.int64_t, session *C.uint64_t, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	defer hostMemory()()
	k, err := object[*kvtier.Coordinator](uint64(coord))
	if err != nil {
		return fail(e, err)
	}
	request := func(i int) *C.kvt_store_begin_req {
		return (*C.kvt_store_begin_req)(unsafe.Add(unsafe.Pointer(reqs), i*int(stride)))
	}
	batch := make([]kvtier.StoreBegin, n)
	for i := range batch {
		r := request(i)
		batch[i] = kvtier.StoreBegin{
			Op:     uint64(r.op),
			Parent: keyAt(unsafe.Pointer(&r.parent)),
			First:  uint32(r.first_ordinal),
			Keys:   keysAt(unsafe.Pointer(r.keys), r.n),
			NoDisk: r.flags&C.KVT_STORE_NO_DISK != 0,
		}
	}
	for i, a := range k.StoreBegin(batch, milliseconds(timeout)) {
		r := request(i)
		if a.Err != nil {
			r.status = fail(e, a.Err)
			continue
		}
		r.status = C.KVT_OK
		*session = C.uint64_t(a.Session)
		putVerdicts(r.verdicts, a.Verdicts)
	}
	return C.KVT_OK
}

//export go_kvt_load_begin
func go_kvt_load_begin(coord C.kvt_coord, op, lease C.uint64_t, first C.uint32_t, keys unsafe.Pointer, n C.size_t, timeout C.int64_t, verdicts *C.kvt_verdict, session *C.uint64_t, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	defer hostMemory()()
	k, err := object[*kvtier.Coordinator](uint64(coord))
	if err != nil {
		return fail(e, err)
	}
	got, s, err := k.LoadBegin(uint64(op), uint64(lease), chunk.Key{}, uint32(first), keysAt(keys, n), milliseconds(timeout))
	if err != nil {
		return fail(e, err)
	}
	*session = C.uint64_t(s)
	putVerdicts(verdicts, got)
	return C.KVT_OK
}

//export go_kvt_cancel
func go_kvt_cancel(coord C.kvt_coord, op C.uint64_t, flags C.uint32_t, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	k, err := object[*kvtier.Coordinator](uint64(coord))
	if err != nil {
		return fail(e, err)
	}
	k.Cancel(uint64(op), flags&C.KVT_CANCEL_UNSENT != 0)
	return C.KVT_OK
}

//export go_kvt_reset
func go_kvt_reset(coord C.kvt_coord, epoch *C.uint8_t, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	k, err := object[*kvtier.Coordinator](uint64(coord))
	if err != nil {
		return fail(e, err)
	}
	fresh, err := k.Reset()
	copy(bytesAt(unsafe.Pointer(epoch), C.size_t(len(fresh))), fresh[:])
	return result(e, err)
}
