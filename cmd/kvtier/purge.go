package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/kvtier/kvtier/tier"
	"github.com/spf13/cobra"
)

// purgeReport is purge --json.
type purgeReport struct {
	Root       string       `json:"root"`
	Leader     leaderReport `json:"leader"`
	DryRun     bool         `json:"dry_run"`
	Namespaces []string     `json:"namespaces"`
	Chunks     fileCount    `json:"chunks"` // removed; in a dry run: that would be
	Others     fileCount    `json:"others"` // temp files, sidecars and directories
	Foreign    []string     `json:"foreign"`
	Failed     []badFile    `json:"failed"`
}

// purgePlan is what a purge is asked to remove.
type purgePlan struct {
	before time.Time // last use of what goes, unless whole
	whole  bool      // namespaces with all that is in them
}

func (p *purgePlan) takes(e tier.Entry) bool { return p.whole || e.Modified.Before(p.before) }

func newPurgeCommand(c console) *cobra.Command {
	var namespace, olderThan string
	var all, yes, dryRun, asJSON, watch bool
	cmd := &cobra.Command{
		Use:   "purge ROOT (--all | --namespace N | --older-than D)",
		Short: "Delete chunks for good",
		Long: "Deletes chunk files: all of them, those of one namespace, those that were not used\n" +
			"for a while, or the latter two together. Files that are not the cache's stay, and\n" +
			"are named.\n\n" +
			"It works while engines use the root: what was deleted is a miss to them. But what\n" +
			"they hold in DRAM is not deleted, goes on being served, and may be written to disk\n" +
			"later. To be rid of data for good, stop the engines first; then temp files, the\n" +
			"namespace's description and its directory are deleted too.\n\n" +
			"On a terminal it asks first; elsewhere it needs --yes.",
		Example: "  kvtier purge /nvme/kv --older-than 30d --yes\n" +
			"  kvtier purge /nvme/kv --namespace meta-llama/Llama-3.1-8B --dry-run\n" +
			"  kvtier purge /nvme/kv --all",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			plan, err := planPurge(cmd, namespace, olderThan, all)
			if err != nil {
				return err
			}
			if !yes && !dryRun && !c.asks {
				return errors.New("nobody is there to be asked: add --yes to delete, or --dry-run to see what would be deleted")
			}
			t, err := openTarget(args[0], namespace)
			if err != nil {
				return err
			}
			r, err := purge(t, plan, true, newProgress(c, false))
			if err != nil {
				return err
			}
			if !dryRun && !yes {
				if err := confirm(c, t, r); err != nil {
					return err
				}
			}
			if !dryRun {
				if r, err = purge(t, plan, false, newProgress(c, watch)); err != nil {
					return err
				}
			}
			return tellRemoval(cmd.OutOrStdout(), asJSON, r, r.print, r.Failed, "deleted")
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "every chunk of every namespace")
	cmd.Flags().StringVar(&namespace, "namespace", "", "this one: directory, beginning of the fingerprint, or model")
	cmd.Flags().StringVar(&olderThan, "older-than", "", "what was not used for so long: 12h, 30d, 4w")
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "delete nothing, say what would be deleted")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	cmd.Flags().BoolVar(&watch, "progress", false, "tell progress on stderr though it is no terminal")
	cmd.MarkFlagsMutuallyExclusive("all", "namespace")
	cmd.MarkFlagsMutuallyExclusive("all", "older-than")
	cmd.MarkFlagsOneRequired("all", "namespace", "older-than")
	return cmd
}

func planPurge(cmd *cobra.Command, namespace, olderThan string, all bool) (*purgePlan, error) {
	switch {
	case cmd.Flags().Changed("namespace") && namespace == "":
		return nil, errors.New("--namespace is empty: name one, or say --all") // an unset variable of a script
	case !cmd.Flags().Changed("older-than"):
		if !all && namespace == "" {
			return nil, errors.New("say --all, --namespace or --older-than")
		}
		return &purgePlan{whole: true}, nil
	}
	d, err := parseSpan(olderThan)
	if err != nil {
		return nil, fmt.Errorf("--older-than: %w", err)
	}
	return &purgePlan{before: time.Now().Add(-d)}, nil
}

func purge(t *target, plan *purgePlan, dryRun bool, p *progress) (r *purgeReport, err error) {
	held := dryRun && !t.leader.Held
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
	r = &purgeReport{
		Root: t.Path(), Leader: t.leaderReport(), DryRun: dryRun,
		Namespaces: []string{}, Foreign: []string{}, Failed: []badFile{},
	}
	whole, done := plan.whole && held, "deleted"
	if dryRun {
		done = "found"
	}
	c := tier.Clearing{Chunks: plan.takes, Temps: whole, Directories: whole, AnySidecar: true, DryRun: dryRun,
		Each: func(e tier.Entry, err error) {
			switch {
			case err != nil:
				r.Failed = append(r.Failed, badFile{Path: e.Path, State: string(e.Kind), Error: err.Error()})
			case e.Kind == tier.EntryChunk:
				r.Chunks.add(e)
				p.step("%s %s, %s", done, plural(r.Chunks.Files, "chunk"), size(r.Chunks.Bytes))
			default:
				r.Others.add(e)
			}
		}}
	for _, n := range t.namespaces {
		r.Namespaces = append(r.Namespaces, n.Name)
		_ = n.Walk(func(e tier.Entry) error {
			if e.Kind == tier.EntryForeign {
				r.Foreign = append(r.Foreign, e.Path)
			}
			return nil
		})
		n.Clear(c)
	}
	p.end("%s %s, %s", done, plural(r.Chunks.Files, "chunk"), size(r.Chunks.Bytes))
	return r, nil
}

// confirm has a person type yes.
func confirm(c console, t *target, r *purgeReport) error {
	fmt.Fprintf(c.err, "Delete %s (%s) of %s below %s?\n", plural(r.Chunks.Files, "chunk"), size(r.Chunks.Bytes),
		plural(len(r.Namespaces), "namespace"), r.Root)
	if t.leader.Held {
		fmt.Fprintf(c.err, "%s uses them and goes on with what it holds in DRAM.\n", t.leader)
	}
	fmt.Fprint(c.err, "Type yes: ")
	answer, err := bufio.NewReader(c.in).ReadString('\n')
	if err != nil && err != io.EOF {
		return err
	}
	if strings.TrimSpace(answer) != "yes" {
		return errors.New("nothing was deleted")
	}
	return nil
}

func (r *purgeReport) print(w io.Writer) {
	for _, f := range r.Failed {
		fmt.Fprintf(w, "%s: %s\n", f.Path, f.Error)
	}
	for _, path := range r.Foreign {
		fmt.Fprintf(w, "%s: is not the cache's and stays, look at it yourself\n", path)
	}
	verb := "deleted"
	if r.DryRun {
		verb = "would be deleted"
	}
	fmt.Fprintf(w, "%s, %s, of %s %s\n", plural(r.Chunks.Files, "chunk"), size(r.Chunks.Bytes), plural(len(r.Namespaces), "namespace"), verb)
	if r.Leader.Held {
		fmt.Fprintf(w, "%s leads this root: what it holds in DRAM is not deleted, is still served, and may be written again\n",
			tier.Leadership{Held: true, PID: r.Leader.PID})
	}
}
