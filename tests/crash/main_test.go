package crash

import (
	"flag"
	"os"
	"strings"
	"testing"
)

func TestMain(m *testing.M) {
	for _, arg := range os.Args[1:] {
		if work, ok := strings.CutPrefix(arg, childArgument); ok {
			child(work)
			return
		}
	}
	flag.Parse()
	// A step of the model test opens and closes whole tiers: the usual number of
	// runs takes too long for every day. -rapid.checks asks for more.
	asked := false
	flag.Visit(func(f *flag.Flag) { asked = asked || f.Name == "rapid.checks" })
	if !asked {
		_ = flag.Set("rapid.checks", "40")
	}
	os.Exit(m.Run())
}
