//go:build !race

package dcp

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

var vectors = cpu.X86.HasAVX2

// copyWide is copyRows for at least 32 bytes.
//
//go:noescape
func copyWide(dst, src unsafe.Pointer, n, dstStep, srcStep, width int)

// streamRows is copyRows without reading the destination into the cache first, which
// saves a third of the memory traffic of what is not read again soon. For pieces that
// streams approves. Only fence makes the bytes visible to other threads.
//
// The destination is written in whole lines of 64 bytes. With keep, what a piece has of
// the line that it ends in goes to carry+i*carryStep, for piece i, and is not written;
// with join, what precedes a piece in the line that it begins in is there. So pieces
// that follow one another without a gap share no line: each is the join of the keep
// before it.
//
//go:noescape
func streamRows(dst, src unsafe.Pointer, n, dstStep, srcStep, width int, carry unsafe.Pointer, carryStep int, join, keep bool)

// prefetch asks for the lines from p on, which need not be there.
//
//go:noescape
func prefetch(p unsafe.Pointer, lines int)

// fence ends a series of streamRows.
func fence()
