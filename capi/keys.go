package main

// #include "shim.h"
import "C"

import (
	"unsafe"

	"github.com/kvtier/kvtier/internal/chunk"
)

// extrasAt reads host extras. Their Bytes lie in host memory.
func extrasAt(p unsafe.Pointer, n C.size_t) []chunk.IndexedExtra {
	if n == 0 {
		return nil
	}
	host := unsafe.Slice((*C.kvt_extra)(p), int(n))
	extras := make([]chunk.IndexedExtra, n)
	for i := range host {
		x := &host[i]
		extras[i] = chunk.IndexedExtra{Chunk: int(x.chunk), Extra: chunk.Extra{
			Kind:   uint16(x.kind),
			Offset: int32(x.offset),
			Bytes:  unsafe.Slice((*byte)(unsafe.Pointer(&x.bytes[0])), int(x.length)),
		}}
	}
	return extras
}

//export go_kvt_key_root
func go_kvt_key_root(fingerprint, extras unsafe.Pointer, n C.size_t, out *C.kvt_key, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	defer hostMemory()()
	prefix := make([]chunk.Extra, 0, n)
	for _, x := range extrasAt(extras, n) {
		if x.Chunk != 0 {
			tell(e, "an extra of a prefix has a chunk index, needs 0")
			return C.KVT_E_ARG
		}
		prefix = append(prefix, x.Extra)
	}
	root, err := chunk.Root(*(*chunk.Fingerprint)(fingerprint), prefix)
	if err != nil {
		return fail(e, err)
	}
	*(*chunk.Key)(unsafe.Pointer(out)) = root
	return C.KVT_OK
}

//export go_kvt_keys
func go_kvt_keys(parent unsafe.Pointer, c C.uint32_t, tokens unsafe.Pointer, ntokens C.size_t, extras unsafe.Pointer, nextras C.size_t, out *C.kvt_key, n *C.size_t, e *C.shim_error) (rc C.int32_t) {
	defer guard(&rc, e)
	defer hostMemory()()
	room := keysAt(unsafe.Pointer(out), ntokens/C.size_t(c))
	keys, err := chunk.Chain(room[:0], keyAt(parent), int(c), unsafe.Slice((*uint32)(tokens), int(ntokens)), extrasAt(extras, nextras))
	if err != nil {
		return fail(e, err)
	}
	*n = C.size_t(len(keys))
	return C.KVT_OK
}
