//go:build ranksteps

// Package steps names the places of a store, a load and a self-test at which a test may
// stop a rank. Outside of builds with the tag ranksteps nothing of it is left.
package steps

import "sync/atomic"

var hook atomic.Pointer[func(string)]

// At says that a rank has come to a step.
func At(name string) {
	if h := hook.Load(); h != nil {
		(*h)(name)
	}
}

// Hook makes every At call h, on whatever goroutine copies.
func Hook(h func(name string)) { hook.Store(&h) }
