//go:build !race

package dcp

import "unsafe"

const (
	canStream = true
	shortRow  = 256 // wider ones are worth a call of memmove each
)

// copyShort is copyRows for widths that are multiples of 16, not 0.
//
//go:noescape
func copyShort(dst, src unsafe.Pointer, n, dstStep, srcStep, width int)

// streamRows is copyRows without reading the destination into the cache first, which
// saves a third of the memory traffic of what is not read again soon. For pieces that
// streams approves. Only fence makes the bytes visible to other threads.
//
//go:noescape
func streamRows(dst, src unsafe.Pointer, n, dstStep, srcStep, width int)

// fence ends a series of streamRows.
func fence()
