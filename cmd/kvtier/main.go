// Command kvtier looks after caches from the command line.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/kvtier/kvtier"
	"github.com/spf13/cobra"
)

// Exit codes.
const (
	exitFine    = 0
	exitProblem = 1 // what was asked for was done, and something is wrong with the cache
	exitFailed  = 2 // usage, or the root cannot be read or changed
)

// errProblem wraps what is wrong with a cache, as against a command that could not do
// its work.
var errProblem = errors.New("problem found")

// console is where a command reads and writes. Tests put buffers in.
type console struct {
	in       io.Reader
	out, err io.Writer
	// A person answers at in, and reads progress at err.
	asks, watched bool
}

func main() {
	os.Exit(run(os.Args[1:], console{
		in: os.Stdin, out: os.Stdout, err: os.Stderr, asks: terminal(os.Stdin), watched: terminal(os.Stderr),
	}))
}

// run is the whole command; it gives the exit code.
func run(args []string, c console) int {
	root := &cobra.Command{
		Use:   "kvtier",
		Short: "A KV-cache tier for LLM inference engines",
		Long: "A KV-cache tier for LLM inference engines.\n\n" +
			"ROOT is the directory that engines have as disk_path. Every command works while\n" +
			"engines use it.\n\n" +
			"Exit codes: 0 fine, 1 a problem was found, 2 wrong usage, or the root cannot be\n" +
			"read or changed.",
		Version:       kvtier.Version,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.AddCommand(
		newServeCommand(), newStatsCommand(), newSettingsCommand(),
		newInfoCommand(c), newListCommand(), newVerifyCommand(c), newSweepCommand(c), newPurgeCommand(c),
	)
	root.SetArgs(args)
	root.SetIn(c.in)
	root.SetOut(c.out)
	root.SetErr(c.err)
	err := root.Execute()
	switch {
	case err == nil:
		return exitFine
	case errors.Is(err, errProblem):
		fmt.Fprintln(c.err, "kvtier:", err)
		return exitProblem
	}
	fmt.Fprintln(c.err, "kvtier:", err)
	return exitFailed
}

func problem(format string, args ...any) error {
	return fmt.Errorf("%w: %s", errProblem, fmt.Sprintf(format, args...))
}
