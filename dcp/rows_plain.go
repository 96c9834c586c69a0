//go:build !amd64 || race

package dcp

import "unsafe"

// What the assembler of rows_amd64.s does, where there is none; also under the race
// detector, which sees only what Go code copies.

const vectors = false

func copyWide(dst, src unsafe.Pointer, n, dstStep, srcStep, width int) {
	panic("dcp: no vectors here")
}

func streamRows(dst, src unsafe.Pointer, n, dstStep, srcStep, width int, carry unsafe.Pointer, carryStep int, join, keep bool) {
	panic("dcp: no vectors here")
}

func prefetch(p unsafe.Pointer, lines int) {}

func fence() {}
