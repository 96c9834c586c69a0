package main

// #include "shim.h"
import "C"

import (
	"errors"
	"unsafe"

	"github.com/kvtier/kvtier"
	"github.com/kvtier/kvtier/internal/chunk"
)

//export go_kvt_blob_open
func go_kvt_blob_open(cache C.kvt_cache, text unsafe.Pointer, length C.size_t, out *C.kvt_blob, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	defer hostMemory()()
	c, err := object[*kvtier.Cache](uint64(cache))
	if err != nil {
		return fail(e, err)
	}
	var d blobDescription
	if err := decodeStrict(bytesAt(text, length), &d); err != nil {
		return fail(e, err)
	}
	b, err := d.open(c)
	if err != nil {
		return fail(e, err)
	}
	h, ok := handles.put(b, uint64(cache))
	if !ok {
		_ = b.Close() // the cache was closed meanwhile, which is what is reported
		return fail(e, errHandle)
	}
	*out = C.kvt_blob(h)
	return C.KVT_OK
}

//export go_kvt_blob_close
func go_kvt_blob_close(h C.kvt_blob, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	b, err := take[*kvtier.Blob](uint64(h))
	if err != nil {
		return fail(e, err)
	}
	return result(e, b.Close())
}

//export go_kvt_blob_ready
func go_kvt_blob_ready(h C.kvt_blob, timeout C.int64_t, fingerprint *C.uint8_t, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	b, err := object[*kvtier.Blob](uint64(h))
	if err != nil {
		return fail(e, err)
	}
	if err := b.Ready(milliseconds(timeout)); err != nil {
		return fail(e, err)
	}
	if fingerprint != nil {
		fp := b.Fingerprint()
		copy(bytesAt(unsafe.Pointer(fingerprint), C.size_t(len(fp))), fp[:])
	}
	return C.KVT_OK
}

// nobodyThere is an error for which the header knows no code here: without a leader
// a cache holds nothing and takes nothing.
func nobodyThere(err error) bool {
	if errors.Is(err, kvtier.ErrTimeout) {
		return false
	}
	return errors.Is(err, kvtier.ErrNoLeader) || errors.Is(err, kvtier.ErrNotAccepted) || errors.Is(err, kvtier.ErrStale)
}

//export go_kvt_put
func go_kvt_put(h C.kvt_blob, key, parent unsafe.Pointer, ordinal C.uint32_t, payload unsafe.Pointer, n C.size_t, timeout C.int64_t, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	defer hostMemory()()
	b, err := object[*kvtier.Blob](uint64(h))
	if err != nil {
		return fail(e, err)
	}
	var before chunk.Key
	if parent != nil {
		before = keyAt(parent)
	}
	err = b.Put(keyAt(key), before, uint32(ordinal), bytesAt(payload, n), milliseconds(timeout))
	if nobodyThere(err) {
		tell(e, err.Error())
		return C.KVT_E_DECLINED
	}
	return result(e, err)
}

//export go_kvt_get
func go_kvt_get(h C.kvt_blob, key, buf unsafe.Pointer, n C.size_t, timeout C.int64_t, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	defer hostMemory()()
	b, err := object[*kvtier.Blob](uint64(h))
	if err != nil {
		return fail(e, err)
	}
	err = b.Get(keyAt(key), bytesAt(buf, n), milliseconds(timeout))
	if nobodyThere(err) {
		tell(e, err.Error())
		return C.KVT_E_MISS
	}
	return result(e, err)
}

//export go_kvt_lookup
func go_kvt_lookup(h C.kvt_blob, keys unsafe.Pointer, n C.size_t, held, resident *C.uint32_t, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	defer hostMemory()()
	b, err := object[*kvtier.Blob](uint64(h))
	if err != nil {
		return fail(e, err)
	}
	all, inDRAM, err := b.Lookup(keysAt(keys, n))
	if err != nil && !nobodyThere(err) {
		return fail(e, err)
	}
	if held != nil {
		*held = C.uint32_t(all)
	}
	if resident != nil {
		*resident = C.uint32_t(inDRAM)
	}
	return C.KVT_OK
}

//export go_kvt_remove
func go_kvt_remove(h C.kvt_blob, keys unsafe.Pointer, n C.size_t, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	defer hostMemory()()
	b, err := object[*kvtier.Blob](uint64(h))
	if err != nil {
		return fail(e, err)
	}
	return result(e, b.Remove(keysAt(keys, n)))
}
