// Package soak lets many processes use, kill and spoil one root for a long time:
// readers, writers, tools, a killer, and somebody who deletes and damages files. An
// outside sampler watches the cap, and every byte that is read is checked.
package soak

import (
	"os"
	"strings"
	"testing"
)

func TestMain(m *testing.M) {
	for _, arg := range os.Args[1:] {
		if text, ok := strings.CutPrefix(arg, workerArgument); ok {
			work(text)
			return
		}
	}
	os.Exit(m.Run())
}
