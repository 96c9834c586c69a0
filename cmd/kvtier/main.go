// Command kvtier looks after caches from the command line.
package main

import (
	"os"

	"github.com/kvtier/kvtier"
	"github.com/spf13/cobra"
)

func main() {
	root := &cobra.Command{
		Use:           "kvtier",
		Short:         "A KV-cache tier for LLM inference engines",
		Version:       kvtier.Version,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.AddCommand(newServeCommand(), newStatsCommand(), newSettingsCommand())
	if err := root.Execute(); err != nil {
		root.PrintErrln("kvtier:", err)
		os.Exit(1)
	}
}
