package dcp

import "unsafe"

// memmove is as fast as copyWide from so many bytes on.
const wideRow = 4 << 10

// copyRows copies n pieces of width bytes that lie dstStep and srcStep bytes apart,
// and not over one another, without a call for each.
func copyRows(dst, src unsafe.Pointer, n, dstStep, srcStep, width int) {
	switch {
	case width == 4:
		for d, s := 0, 0; n > 0; n, d, s = n-1, d+dstStep, s+srcStep {
			*(*[4]byte)(unsafe.Add(dst, d)) = *(*[4]byte)(unsafe.Add(src, s))
		}
	case width == 8:
		for d, s := 0, 0; n > 0; n, d, s = n-1, d+dstStep, s+srcStep {
			*(*[8]byte)(unsafe.Add(dst, d)) = *(*[8]byte)(unsafe.Add(src, s))
		}
	case vectors && width >= 32 && width < wideRow:
		copyWide(dst, src, n, dstStep, srcStep, width)
	default:
		for i := range n {
			move(unsafe.Add(dst, i*dstStep), unsafe.Add(src, i*srcStep), width)
		}
	}
}

// streams tells whether streamRows takes such pieces: it writes whole lines past the
// cache, in steps of 16 bytes.
func streams(dst unsafe.Pointer, dstStep, width int) bool {
	return vectors && width >= lineBytes && (uintptr(dst)|uintptr(dstStep)|uintptr(width))%16 == 0
}

func move(dst, src unsafe.Pointer, n int) {
	copy(unsafe.Slice((*byte)(dst), n), unsafe.Slice((*byte)(src), n))
}
