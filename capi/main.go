// Package main builds libkvtier.so: the C ABI of include/kvtier.h on top of
// package kvtier.
//
// The library has a C half and a Go half. The public kvt_* functions are C
// (guard.c, shim.c, shim_group.c): they can refuse in a forked child, where Go
// code must not run, and check arguments. Each then calls its go_kvt_* export
// here, which turns handles into objects, host memory into slices and errors
// into codes. There is no logic in either: what a call means is decided in
// package kvtier.
//
// Host memory is never kept: a slice made of it here ends with the call. Host
// pointers are addresses outside the Go heap, so nothing needs pinning, and no Go
// pointer ever reaches C.
package main

// #cgo CFLAGS: -I${SRCDIR}/../include -Wall
import "C"

func main() {}
