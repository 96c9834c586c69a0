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
		Use:     "stats ROOT",
		Short:   "Print the statistics of the leader of a root as JSON",
		Example: "  kvtier stats /nvme/kv | jq .leader.disk",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			text, err := leaderStatistics(args[0], wait)
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

// leaderStatistics joins the leader of a root for a moment.
func leaderStatistics(path string, wait time.Duration) ([]byte, error) {
	cache, err := open(map[string]any{"disk_path": path, "role": "member", "allow_network_fs": true})
	if err != nil {
		return nil, err
	}
	defer cache.Close(time.Second)
	if !attached(cache, wait) {
		return nil, fmt.Errorf("no leader of %s answered within %s: is an engine or `kvtier serve` running on it?", path, wait)
	}
	return cache.Stats()
}

func attached(cache *kvtier.Cache, wait time.Duration) bool {
	for end := time.Now().Add(wait); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if state, _ := cache.State(); state == "member" {
			return true
		}
	}
	return false
}
