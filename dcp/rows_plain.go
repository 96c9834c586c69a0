//go:build !amd64 || race

package dcp

import "unsafe"

// What the assembler of rows_amd64.s does, where there is none; also under the race
// detector, which sees only what Go code copies.

const (
	canStream = false
	shortRow  = 0
)

func copyShort(dst, src unsafe.Pointer, n, dstStep, srcStep, width int) {
	panic("dcp: no short rows here")
}

func streamRows(dst, src unsafe.Pointer, n, dstStep, srcStep, width int) {
	panic("dcp: nothing is streamed here")
}

func fence() {}
