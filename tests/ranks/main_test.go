// Package ranks tests groups whose ranks are processes: that may die, stop or lie at
// any moment. A rank process is this test binary, executed again.
package ranks

import (
	"fmt"
	"os"
	"testing"
)

// childEnv holds what a child process is to be, as JSON.
const childEnv = "KVTIER_RANKS_CHILD"

func TestMain(m *testing.M) {
	if text, ok := os.LookupEnv(childEnv); ok {
		if err := runChild(text); err != nil {
			fmt.Fprintln(os.Stderr, "child:", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}
