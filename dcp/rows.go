package dcp

import "unsafe"

// copyRows copies n pieces of width bytes that lie dstStep and srcStep bytes apart.
// The steps of narrow regions are made without a call for each.
func copyRows(dst, src unsafe.Pointer, n, dstStep, srcStep, width int) {
	switch {
	case width == 4:
		for i := range n {
			*(*[4]byte)(unsafe.Add(dst, i*dstStep)) = *(*[4]byte)(unsafe.Add(src, i*srcStep))
		}
	case width == 8:
		for i := range n {
			*(*[8]byte)(unsafe.Add(dst, i*dstStep)) = *(*[8]byte)(unsafe.Add(src, i*srcStep))
		}
	case width <= shortRow && width%16 == 0:
		copyShort(dst, src, n, dstStep, srcStep, width)
	default:
		for i := range n {
			move(unsafe.Add(dst, i*dstStep), unsafe.Add(src, i*srcStep), width)
		}
	}
}

// streams tells whether streamRows takes such pieces: it writes whole lines past the
// cache, in steps of 16 bytes.
func streams(dst unsafe.Pointer, dstStep, width int) bool {
	return canStream && width >= 64 && (uintptr(dst)|uintptr(dstStep)|uintptr(width))%16 == 0
}

func move(dst, src unsafe.Pointer, n int) {
	copy(unsafe.Slice((*byte)(dst), n), unsafe.Slice((*byte)(src), n))
}
