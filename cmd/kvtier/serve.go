package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/kvtier/kvtier"
	"github.com/spf13/cobra"
)

// drainTimeout bounds how long a stopping leader writes what waits for disk.
const drainTimeout = 30 * time.Second

func newServeCommand() *cobra.Command {
	var dramGiB, diskGiB float64
	var durable bool
	cmd := &cobra.Command{
		Use:   "serve ROOT",
		Short: "Run the leader of a root as a process of its own",
		Long: "Owns the DRAM arenas and the disk directory ROOT, so that what is cached in\n" +
			"DRAM outlives the engines that use it. Engines on the same root join it.\n" +
			"Ends on SIGINT or SIGTERM after writing what waits for disk.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			settings := map[string]any{"disk_path": args[0], "role": "leader", "durable": durable}
			if dramGiB > 0 {
				settings["dram_gib"] = dramGiB
			}
			if diskGiB > 0 {
				settings["disk_gib"] = diskGiB
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return serve(ctx, settings, cmd.ErrOrStderr())
		},
	}
	cmd.Flags().Float64Var(&dramGiB, "dram-gib", 0, "DRAM for all arenas together (default: see docs/configuration.md)")
	cmd.Flags().Float64Var(&diskGiB, "disk-gib", 0, "cap of everything under ROOT (default: see docs/configuration.md)")
	cmd.Flags().BoolVar(&durable, "durable", false, "sync every chunk before it is published")
	return cmd
}

func serve(ctx context.Context, settings map[string]any, log io.Writer) error {
	cache, err := open(settings)
	if err != nil {
		return err
	}
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		printRecords(log, cache)
		select {
		case <-ctx.Done():
			err := cache.Close(drainTimeout)
			printRecords(log, cache)
			return err
		case <-tick.C:
		}
	}
}

func open(settings map[string]any) (*kvtier.Cache, error) {
	text, err := json.Marshal(settings)
	if err != nil {
		return nil, err
	}
	config, err := kvtier.ParseConfig(text)
	if err != nil {
		return nil, err
	}
	return kvtier.Open(config)
}

func printRecords(w io.Writer, cache *kvtier.Cache) {
	for _, r := range cache.Records(64) {
		fmt.Fprintf(w, "%s %s %s\n", time.Unix(0, r.TimeNS).UTC().Format(time.RFC3339Nano), r.Level, r.Text)
	}
}
