// Package spawn starts every goroutine of the library.
//
// The library lives inside somebody else's process: an unrecovered panic would
// end an inference engine that serves users. So nothing here uses the go
// statement directly (a test enforces it); whoever starts a goroutine also says
// what is switched off when it panics.
package spawn

import (
	"fmt"
	"runtime/debug"
	"sync/atomic"
)

var panics atomic.Uint64

// Panics reports how many goroutines of this process ended in a panic.
func Panics() uint64 { return panics.Load() }

// Go runs fn on a new goroutine. If fn panics, failed is called on that
// goroutine with an error that holds the panic value and the stack; failed must
// switch off the component that fn served, and must not be nil.
func Go(name string, failed func(error), fn func()) {
	if failed == nil {
		panic("spawn: " + name + " has nobody to tell when it fails")
	}
	go func() {
		defer func() {
			if v := recover(); v != nil {
				panics.Add(1)
				failed(fmt.Errorf("%s panicked: %v\n%s", name, v, debug.Stack()))
			}
		}()
		fn()
	}()
}
