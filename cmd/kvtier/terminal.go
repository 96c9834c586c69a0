package main

import (
	"os"
	"syscall"
	"unsafe"
)

// terminal reports whether a person is at the other end. /dev/null is a device too,
// so it has to be asked what only terminals know.
func terminal(f *os.File) bool {
	var settings syscall.Termios
	_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, f.Fd(), syscall.TCGETS, uintptr(unsafe.Pointer(&settings)))
	return errno == 0
}
