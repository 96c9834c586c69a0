package main

import (
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/kvtier/kvtier/tier"
	"github.com/spf13/cobra"
)

// rootReport is info --json.
type rootReport struct {
	Root   string       `json:"root"`
	ID     string       `json:"id"`     // empty: kvtier.json is missing
	Format int          `json:"format"` // 0: kvtier.json is missing
	Leader leaderReport `json:"leader"`
	// Disk is what the leader says of its disk tier; missing when nobody leads, or
	// it does not answer.
	Disk *diskReport `json:"disk,omitempty"`

	FilesystemBytes     int64 `json:"filesystem_bytes"`
	FilesystemFreeBytes int64 `json:"filesystem_free_bytes"`

	// AllocatedBytes is of everything that is ours: what the cap holds for.
	AllocatedBytes int64             `json:"allocated_bytes"`
	Namespaces     []namespaceReport `json:"namespaces"`
	Temps          fileCount         `json:"temps"`   // beside the namespaces
	Foreign        fileCount         `json:"foreign"` // beside the namespaces
	Problems       []string          `json:"problems"`
}

type diskReport struct {
	State     string `json:"state"`
	CapBytes  int64  `json:"cap_bytes"`
	UsedBytes int64  `json:"used_bytes"`
	Known     bool   `json:"known"`
}

type namespaceReport struct {
	Name         string            `json:"name"`
	Sidecar      tier.SidecarState `json:"sidecar"`
	Fingerprint  string            `json:"fingerprint"` // its beginning, where the sidecar is not good
	Model        string            `json:"model,omitempty"`
	KVDtype      string            `json:"kv_dtype,omitempty"`
	ChunkTokens  int               `json:"chunk_tokens,omitempty"`
	FileBytes    int64             `json:"file_bytes,omitempty"` // of every chunk
	Chunks       fileCount         `json:"chunks"`
	Oldest       *time.Time        `json:"oldest,omitempty"` // last use
	Newest       *time.Time        `json:"newest,omitempty"`
	OtherSize    int               `json:"other_size"` // chunks that are damaged, or of a later version
	Temps        fileCount         `json:"temps"`
	Foreign      fileCount         `json:"foreign"`
	ForeignWhy   map[string]int    `json:"foreign_why"` // name, path, type, links
	Unreadable   int               `json:"unreadable"`  // names that the file system tells nothing of
	Allocated    int64             `json:"allocated_bytes"`
	sidecarError error
	unreadable   error // one of them
}

// fileCount counts files, with the bytes they take.
type fileCount struct {
	Files int   `json:"files"`
	Bytes int64 `json:"bytes"`
}

func (c *fileCount) add(e tier.Entry) {
	c.Files++
	c.Bytes += e.Allocated
}

func newInfoCommand(c console) *cobra.Command {
	var asJSON, watch bool
	var wait time.Duration
	cmd := &cobra.Command{
		Use:   "info ROOT",
		Short: "Say what lies below a root, and who leads it",
		Long: "Counts all files below ROOT without reading chunks: namespaces with their model\n" +
			"and layout, bytes, last uses, temp files, and files that are not the cache's.\n" +
			"Where a leader answers, its cap and the state of its disk tier are told too.\n\n" +
			"Exit code 1 when a namespace cannot be adopted as it is, a chunk file has a size\n" +
			"that no chunk has, a name cannot be read, or the leader has switched its disk tier\n" +
			"off.",
		Example: "  kvtier info /nvme/kv\n  kvtier info /nvme/kv --json | jq .allocated_bytes",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			t, err := openTarget(args[0], "")
			if err != nil {
				return err
			}
			r, err := describe(t, wait, newProgress(c, watch))
			if err != nil {
				return err
			}
			err = tell(cmd.OutOrStdout(), asJSON, r, func(w io.Writer) { r.print(w, time.Now()) })
			if err == nil && len(r.Problems) > 0 {
				return problem("%s, see above", plural(len(r.Problems), "thing"))
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	cmd.Flags().BoolVar(&watch, "progress", false, "tell progress on stderr though it is no terminal")
	cmd.Flags().DurationVar(&wait, "wait", 2*time.Second, "how long to wait for the leader's answer")
	return cmd
}

func describe(t *target, wait time.Duration, p *progress) (*rootReport, error) {
	r := &rootReport{
		Root: t.Path(), ID: t.ID(), Format: t.Format(), Leader: t.leaderReport(),
		Namespaces: []namespaceReport{}, Problems: []string{},
	}
	fs, err := t.Filesystem()
	if err != nil {
		return nil, err
	}
	r.FilesystemBytes, r.FilesystemFreeBytes = fs.TotalBytes, fs.AvailBytes
	if t.leader.Held {
		r.Disk = askDisk(t.Path(), wait)
	}
	if r.Disk != nil && (r.Disk.State == "off" || r.Disk.State == "dead") {
		r.Problems = append(r.Problems, "the leader has switched its disk tier off after errors: see its log, and `kvtier stats`")
	}
	if err := t.WalkBeside(func(e tier.Entry) error {
		switch e.Kind {
		case tier.EntryForeign:
			r.Foreign.add(e)
			return nil
		case tier.EntryUnreadable:
			r.Problems = append(r.Problems, fmt.Sprintf("cannot be read: %v", e.Err))
		case tier.EntryTemp:
			r.Temps.add(e)
		}
		r.AllocatedBytes += e.Allocated
		return nil
	}); err != nil {
		return nil, err
	}
	for _, n := range t.namespaces {
		s := describeNamespace(n, p)
		r.AllocatedBytes += s.Allocated
		r.Namespaces = append(r.Namespaces, s)
		r.Problems = append(r.Problems, s.problems()...)
	}
	p.end("looked at %s", plural(len(r.Namespaces), "namespace"))
	return r, nil
}

// askDisk is nil where the leader does not answer in time.
func askDisk(path string, wait time.Duration) *diskReport {
	text, err := leaderStatistics(path, wait)
	var stats struct {
		Leader *struct {
			Disk *diskReport `json:"disk"`
		} `json:"leader"`
	}
	if err != nil || json.Unmarshal(text, &stats) != nil || stats.Leader == nil {
		return nil
	}
	return stats.Leader.Disk
}

func describeNamespace(n *tier.InspectedNamespace, p *progress) namespaceReport {
	s := namespaceReport{
		Name: n.Name, Sidecar: n.Sidecar, Fingerprint: n.Prefix, ForeignWhy: map[string]int{}, sidecarError: n.SidecarErr,
	}
	if n.Sidecar == tier.SidecarGood {
		s.Fingerprint, s.Model, s.KVDtype = n.Fingerprint.String(), n.Namespace.Model, n.Namespace.KVDtype
		s.ChunkTokens, s.FileBytes = n.Layout.ChunkTokens, n.Layout.FileBytes
	}
	_ = n.Walk(func(e tier.Entry) error {
		p.step("looking at %s: %s, %s", s.Name, plural(s.Chunks.Files, "chunk"), size(s.Allocated))
		switch {
		case e.Kind == tier.EntryUnreadable:
			s.Unreadable++
			s.unreadable = e.Err
		case e.Good():
			s.Chunks.add(e)
			used := e.Modified.UTC()
			if s.Oldest == nil || used.Before(*s.Oldest) {
				s.Oldest = &used
			}
			if s.Newest == nil || used.After(*s.Newest) {
				s.Newest = &used
			}
			if n.Layout != nil && e.Bytes != n.Layout.FileBytes {
				s.OtherSize++
			}
		case e.Kind == tier.EntryTemp:
			s.Temps.add(e)
		case e.Why != "":
			s.Foreign.add(e)
			s.ForeignWhy[e.Why]++
			if e.Kind == tier.EntryForeign {
				return nil
			}
		}
		s.Allocated += e.Allocated // what a leader counts, linked chunks too
		return nil
	})
	return s
}

func (s *namespaceReport) problems() (found []string) {
	switch {
	case s.Sidecar == tier.SidecarGood, s.Sidecar == tier.SidecarNewer:
	case s.Sidecar == tier.SidecarMissing && s.Chunks.Files == 0:
	default:
		found = append(found, fmt.Sprintf("%s: layout.json is %s: %v", s.Name, s.Sidecar, s.sidecarError))
	}
	if s.OtherSize > 0 {
		found = append(found, fmt.Sprintf("%s: %s no chunk's size: `kvtier verify` tells which", s.Name, plural(s.OtherSize, "file")+have(s.OtherSize)))
	}
	if s.Unreadable > 0 {
		found = append(found, fmt.Sprintf("%s: %s cannot be read, and what is in %s is not counted: %v", s.Name, plural(s.Unreadable, "name"), them(s.Unreadable), s.unreadable))
	}
	return found
}

func them(n int) string {
	if n == 1 {
		return "it"
	}
	return "them"
}

func have(n int) string {
	if n == 1 {
		return " has"
	}
	return " have"
}

func (r *rootReport) print(w io.Writer, now time.Time) {
	line := func(name, format string, args ...any) {
		fmt.Fprintf(w, "%-13s %s\n", name, fmt.Sprintf(format, args...))
	}
	line("root", "%s", r.Root)
	if r.Format == 0 {
		line("format", "kvtier.json is missing, the next leader makes it")
	} else {
		line("format", "%d, id %s", r.Format, r.ID)
	}
	switch {
	case r.Leader.Unknown != "":
		line("leader", "%s", r.Leader.Unknown)
	case !r.Leader.Held:
		line("leader", "nobody")
	default:
		who := tier.Leadership{Held: true, PID: r.Leader.PID}
		line("leader", "%s, since %s (%s)", who, r.Leader.Since.Local().Format(time.DateTime), span(now.Sub(*r.Leader.Since)))
	}
	line("allocated", "%s of what is the cache's", size(r.AllocatedBytes))
	switch {
	case r.Disk != nil:
		line("cap", "%s; disk tier %s, counts %s (%.0f%%)", size(r.Disk.CapBytes), r.Disk.State, size(r.Disk.UsedBytes),
			100*float64(r.Disk.UsedBytes)/float64(max(r.Disk.CapBytes, 1)))
	case r.Leader.Held:
		line("cap", "the leader did not answer")
	default:
		line("cap", "told by a leader only")
	}
	line("file system", "%s, %s free", size(r.FilesystemBytes), size(r.FilesystemFreeBytes))
	if r.Temps.Files > 0 {
		line("temp files", "%d, %s", r.Temps.Files, size(r.Temps.Bytes))
	}
	if r.Foreign.Files > 0 {
		line("not ours", "%s", plural(r.Foreign.Files, "name"))
	}
	for i := range r.Namespaces {
		r.Namespaces[i].print(w, now, r.Leader.Held)
	}
	if len(r.Problems) > 0 {
		fmt.Fprintln(w, "\nproblems")
		for _, p := range r.Problems {
			fmt.Fprintln(w, " ", p)
		}
	}
}

func (s *namespaceReport) print(w io.Writer, now time.Time, led bool) {
	line := func(name, format string, args ...any) {
		fmt.Fprintf(w, "  %-11s %s\n", name, fmt.Sprintf(format, args...))
	}
	fmt.Fprintf(w, "\nnamespace %s\n", s.Name)
	line("sidecar", "%s", s.Sidecar)
	line("fingerprint", "%s", s.Fingerprint)
	if s.Sidecar == tier.SidecarGood {
		line("model", "%s%s", s.Model, parenthesis(s.KVDtype))
		line("layout", "%d tokens a chunk, %s a file", s.ChunkTokens, size(s.FileBytes))
	}
	line("chunks", "%d, %s", s.Chunks.Files, size(s.Chunks.Bytes))
	if s.Newest != nil {
		line("last used", "between %s and %s ago", span(now.Sub(*s.Newest)), span(now.Sub(*s.Oldest)))
	}
	if s.OtherSize > 0 {
		line("wrong size", "%d", s.OtherSize)
	}
	if s.Temps.Files > 0 {
		what := "left over: the next leader removes them, or `kvtier gc`"
		if led {
			what = "being written, or left over"
		}
		line("temp files", "%d, %s, %s", s.Temps.Files, size(s.Temps.Bytes), what)
	}
	if s.Foreign.Files > 0 {
		line("not ours", "%d, %s (%s)", s.Foreign.Files, size(s.Foreign.Bytes), counts(s.ForeignWhy))
	}
}

func parenthesis(text string) string {
	if text == "" {
		return ""
	}
	return " (" + text + ")"
}
