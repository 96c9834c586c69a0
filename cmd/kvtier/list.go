package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"syscall"
	"time"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/tier"
	"github.com/spf13/cobra"
)

// listedChunk is one line of ls --json.
type listedChunk struct {
	Key       string    `json:"key"`
	Ordinal   *uint32   `json:"ordinal"` // null: the footer does not tell
	Footer    string    `json:"footer"`  // good, damaged, newer, unreadable
	Bytes     int64     `json:"bytes"`
	Used      time.Time `json:"used"`
	Namespace string    `json:"namespace"`
}

func newListCommand() *cobra.Command {
	var namespace string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "ls ROOT",
		Short: "List the chunks on disk, one a line",
		Long: "Lists every chunk file with its key, its place in the prefix, its size, the time\n" +
			"since its last use, and its namespace. Place - means that the file does not tell:\n" +
			"it is damaged, or of a later version (see `kvtier verify`).\n\n" +
			"With --json every line is one object.",
		Example: "  kvtier ls /nvme/kv\n" +
			"  kvtier ls /nvme/kv --namespace meta-llama/Llama-3.1-8B\n" +
			"  kvtier ls /nvme/kv --json | jq -r 'select(.ordinal == 0) | .key'",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			t, err := openTarget(args[0], namespace)
			if err != nil {
				return err
			}
			w := bufio.NewWriterSize(cmd.OutOrStdout(), 1<<16)
			unreadable, err := list(w, t, asJSON)
			if ferr := w.Flush(); err == nil {
				err = ferr
			}
			if errors.Is(err, syscall.EPIPE) {
				return nil // the reader has seen enough
			}
			if err == nil && unreadable > 0 {
				return problem("%s could not be read: `kvtier verify` tells which", plural(unreadable, "name"))
			}
			return err
		},
	}
	cmd.Flags().StringVar(&namespace, "namespace", "", "only this one: directory, beginning of the fingerprint, or model")
	cmd.Flags().BoolVar(&asJSON, "json", false, "one JSON object a line")
	return cmd
}

func list(w *bufio.Writer, t *target, asJSON bool) (unreadable int, err error) {
	now := time.Now()
	if !asJSON {
		fmt.Fprintf(w, "%-64s %7s %11s %8s %s\n", "KEY", "ORDINAL", "BYTES", "UNUSED", "NAMESPACE")
	}
	encode := json.NewEncoder(w)
	for _, n := range t.namespaces {
		err := n.Walk(func(e tier.Entry) error {
			if e.Kind == tier.EntryUnreadable {
				unreadable++
			}
			if !e.Good() {
				return nil
			}
			c := listedChunk{Key: e.Key.String(), Footer: "good", Bytes: e.Bytes, Used: e.Modified.UTC(), Namespace: n.Name}
			footer, err := n.Footer(e)
			var system syscall.Errno
			switch {
			case err == nil:
				c.Ordinal = &footer.Ordinal
			case errors.Is(err, fs.ErrNotExist):
				return nil
			case errors.As(err, &system):
				c.Footer = "unreadable"
				unreadable++
			default:
				c.Footer = footerState(err)
			}
			if asJSON {
				return encode.Encode(c)
			}
			ordinal := "-"
			if c.Ordinal != nil {
				ordinal = strconv.FormatUint(uint64(*c.Ordinal), 10)
			}
			_, err = fmt.Fprintf(w, "%s %7s %11d %8s %s\n", c.Key, ordinal, c.Bytes, span(now.Sub(e.Modified)), c.Namespace)
			return err
		})
		if err != nil {
			return unreadable, err
		}
	}
	return unreadable, nil
}

// footerState names why a footer that was read is not accepted.
func footerState(err error) string {
	if errors.Is(err, chunk.ErrNewerMajor) {
		return "newer"
	}
	return "damaged"
}
