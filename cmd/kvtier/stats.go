package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"time"

	"github.com/kvtier/kvtier"
	"github.com/spf13/cobra"
)

func newStatsCommand() *cobra.Command {
	var wait time.Duration
	cmd := &cobra.Command{
		Use:   "stats ROOT",
		Short: "Print the statistics of the leader of a root as JSON",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			cache, err := open(map[string]any{"disk_path": args[0], "role": "member"})
			if err != nil {
				return err
			}
			defer cache.Close(time.Second)
			if !attached(cache, wait) {
				return fmt.Errorf("no leader of %s answered within %s: is an engine or `kvtier serve` running on it?", args[0], wait)
			}
			text, err := cache.Stats()
			if err != nil {
				return err
			}
			var indented bytes.Buffer
			if err := json.Indent(&indented, text, "", "  "); err != nil {
				return err
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), indented.String())
			return err
		},
	}
	cmd.Flags().DurationVar(&wait, "wait", 2*time.Second, "how long to wait for the leader")
	return cmd
}

func attached(cache *kvtier.Cache, wait time.Duration) bool {
	for end := time.Now().Add(wait); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if state, _ := cache.State(); state == "member" {
			return true
		}
	}
	return false
}
