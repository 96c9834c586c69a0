package main

import (
	"fmt"
	"io"

	"github.com/kvtier/kvtier/tier"
	"github.com/spf13/cobra"
)

// sweepReport is gc --json.
type sweepReport struct {
	Root        string       `json:"root"`
	Leader      leaderReport `json:"leader"`
	DryRun      bool         `json:"dry_run"`
	Swept       bool         `json:"swept"` // false: dry run, or somebody leads
	Temps       fileCount    `json:"temps"`
	Directories fileCount    `json:"directories"` // with nothing in them; with the sidecars of namespaces that have none left
	Failed      []badFile    `json:"failed"`
}

func newSweepCommand(c console) *cobra.Command {
	var asJSON, dryRun, watch bool
	cmd := &cobra.Command{
		Use:   "gc ROOT",
		Short: "Remove what dead processes have left over",
		Long: "Removes temp files of processes that died while they wrote, directories with\n" +
			"nothing in them, and the directories of namespaces that have no chunk left. Chunks\n" +
			"and files that are not the cache's stay.\n\n" +
			"It is for roots that no engine uses, and keeps engines that start meanwhile\n" +
			"waiting. While somebody leads the root it only tells what it finds: temp files may\n" +
			"be in the middle of being written. Every leader sweeps by itself when it starts.",
		Example: "  kvtier gc /nvme/kv --dry-run\n  kvtier gc /nvme/kv",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			t, err := openTarget(args[0], "")
			if err != nil {
				return err
			}
			s, err := sweep(t, dryRun, newProgress(c, watch))
			if err != nil {
				return err
			}
			return tellRemoval(cmd.OutOrStdout(), asJSON, s, s.print, s.Failed, "removed")
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "remove nothing, say what would be removed")
	cmd.Flags().BoolVar(&watch, "progress", false, "tell progress on stderr though it is no terminal")
	return cmd
}

func sweep(t *target, dryRun bool, p *progress) (s *sweepReport, err error) {
	held := false
	if !dryRun {
		var release func() error
		if held, release, err = t.hold(); err != nil {
			return nil, err
		}
		defer func() {
			if rerr := release(); err == nil {
				err = rerr
			}
		}()
	}
	s = &sweepReport{Root: t.Path(), Leader: t.leaderReport(), DryRun: dryRun, Swept: held, Failed: []badFile{}}
	c := tier.Clearing{Temps: true, Directories: true, DryRun: !held, Each: func(e tier.Entry, err error) {
		switch {
		case err != nil:
			s.Failed = append(s.Failed, badFile{Path: e.Path, State: string(e.Kind), Error: err.Error()})
		case e.Kind == tier.EntryTemp:
			s.Temps.add(e)
		case e.Kind == tier.EntrySidecar:
			s.Directories.Bytes += e.Allocated
		default:
			s.Directories.add(e)
		}
	}}
	for i, n := range t.namespaces {
		p.step("looked at %d of %s", i, plural(len(t.namespaces), "namespace"))
		n.Clear(c)
	}
	p.end("looked at %s", plural(len(t.namespaces), "namespace"))
	return s, t.ClearBeside(c)
}

func (s *sweepReport) print(w io.Writer) {
	for _, f := range s.Failed {
		fmt.Fprintf(w, "%s: %s\n", f.Path, f.Error)
	}
	verb := "removed"
	if !s.Swept {
		verb = "found"
	}
	fmt.Fprintf(w, "%s (%s) and %s without chunks (%s) %s\n", plural(s.Temps.Files, "temp file"), size(s.Temps.Bytes),
		plural(s.Directories.Files, "directory"), size(s.Directories.Bytes), verb)
	switch {
	case s.Leader.Held:
		fmt.Fprintf(w, "nothing was removed: %s leads this root, and the temp files may be what it is writing\n",
			tier.Leadership{Held: true, PID: s.Leader.PID})
	case s.DryRun:
		fmt.Fprintln(w, "nothing was removed: dry run")
	}
}
