package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"

	"github.com/kvtier/kvtier/internal/spawn"
	"github.com/kvtier/kvtier/tier"
	"github.com/spf13/cobra"
)

// verifyReport is verify --json.
type verifyReport struct {
	Root   string       `json:"root"`
	Leader leaderReport `json:"leader"`

	Checked    int            `json:"checked"` // good, damaged, unsteady, unreadable and newer
	Bytes      int64          `json:"bytes"`   // of them
	Good       int            `json:"good"`
	Damaged    map[string]int `json:"damaged"`    // proved by two reads, by the first check that failed
	Unsteady   int            `json:"unsteady"`   // two reads differ
	Unreadable map[string]int `json:"unreadable"` // by errno; also names, of which nobody knows what they are
	Newer      int            `json:"newer"`      // of a later version
	Vanished   int            `json:"vanished"`   // evicted or deleted meanwhile
	Unchecked  int            `json:"unchecked"`  // in namespaces without a good sidecar
	Foreign    map[string]int `json:"foreign"`    // not ours

	Repair       bool `json:"repair"`
	Removed      int  `json:"removed"`       // damaged chunks
	Temps        int  `json:"temps"`         // there
	TempsRemoved int  `json:"temps_removed"` // never under a leader

	Sidecars []badSidecar `json:"sidecars"` // that are not good
	Files    []badFile    `json:"files"`    // damaged, unsteady, unreadable, or not to be removed
}

type badSidecar struct {
	Namespace string            `json:"namespace"`
	State     tier.SidecarState `json:"state"`
	Cause     string            `json:"cause"`
}

type badFile struct {
	Path    string `json:"path"`
	State   string `json:"state"`
	Reason  string `json:"reason"`
	Removed bool   `json:"removed"`
	Error   string `json:"error,omitempty"` // why it was not read, or not removed
}

// verifyMemory bounds the buffers of all that read at once, beyond the first.
const verifyMemory = 512 << 20

func newVerifyCommand(c console) *cobra.Command {
	var namespace string
	var asJSON, repair, watch bool
	var jobs int
	cmd := &cobra.Command{
		Use:   "verify ROOT",
		Short: "Read every chunk and check every byte of it",
		Long: "Reads every chunk file past the page cache and checks it as an engine does before\n" +
			"it uses one: size, footer, key, namespace, layout, hash of the payload. A file\n" +
			"that does not match is read a second time; what two reads agree on is damaged.\n" +
			"Without --repair nothing is changed.\n\n" +
			"--repair removes what is damaged, also while an engine uses the root (to it that\n" +
			"is a miss), and, where no engine does, temp files of dead processes. It keeps what\n" +
			"cannot be read (that proves nothing) and files of later versions, and rebuilds\n" +
			"nothing.\n\n" +
			"Exit code 1 when something was damaged, unsteady, unreadable, or could not be\n" +
			"checked, also when it was repaired: verify again to see 0.",
		Example: "  kvtier verify /nvme/kv\n" +
			"  kvtier verify /nvme/kv --repair --jobs 4\n" +
			"  kvtier verify /nvme/kv --namespace 3f2a91 --json | jq .damaged",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if jobs < 1 || jobs > 64 {
				return fmt.Errorf("--jobs %d: 1 to 64", jobs)
			}
			t, err := openTarget(args[0], namespace)
			if err != nil {
				return err
			}
			v := newVerification(t, repair, newProgress(c, watch))
			if err := v.run(jobs); err != nil {
				return err
			}
			if err := tell(cmd.OutOrStdout(), asJSON, &v.report, v.report.print); err != nil {
				return err
			}
			return v.report.verdict()
		},
	}
	cmd.Flags().StringVar(&namespace, "namespace", "", "only this one: directory, beginning of the fingerprint, or model")
	cmd.Flags().BoolVar(&repair, "repair", false, "remove what is proved damaged, and temp files of dead processes")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	cmd.Flags().BoolVar(&watch, "progress", false, "tell progress on stderr though it is no terminal")
	cmd.Flags().IntVar(&jobs, "jobs", 1, "files to be read at once; more is faster, and slows engines down")
	return cmd
}

// verification is the work of one verify. mu guards report and progress.
type verification struct {
	t        *target
	mu       sync.Mutex
	report   verifyReport
	progress *progress
	total    int // chunks to be read
	failed   error
}

func newVerification(t *target, repair bool, p *progress) *verification {
	return &verification{t: t, progress: p, report: verifyReport{
		Root: t.Path(), Leader: t.leaderReport(), Repair: repair,
		Damaged: map[string]int{}, Unreadable: map[string]int{}, Foreign: map[string]int{},
		Sidecars: []badSidecar{}, Files: []badFile{},
	}}
}

func (v *verification) run(jobs int) error {
	if v.report.Repair {
		if err := v.sweepTemps(); err != nil {
			return err
		}
	}
	work := make([][]tier.Entry, len(v.t.namespaces))
	for i, n := range v.t.namespaces {
		_ = n.Walk(func(e tier.Entry) error {
			switch {
			case e.Kind == tier.EntryUnreadable:
				v.report.Unreadable[e.Why]++
				v.report.Files = append(v.report.Files, badFile{Path: e.Path, State: string(e.Kind), Reason: e.Why, Error: e.Err.Error()})
			case e.Good():
				work[i] = append(work[i], e)
			case e.Kind == tier.EntryTemp:
				v.report.Temps++
			case e.Why != "":
				v.report.Foreign[e.Why]++
			}
			return nil
		})
		if n.Sidecar == tier.SidecarGood {
			v.total += len(work[i])
		}
	}
	for i, n := range v.t.namespaces {
		if n.Sidecar != tier.SidecarGood {
			v.skip(n, len(work[i]))
			continue
		}
		if err := v.namespace(n, work[i], jobs); err != nil {
			return err
		}
	}
	slices.SortFunc(v.report.Files, func(a, b badFile) int { return strings.Compare(a.Path, b.Path) })
	v.progress.end("checked %d of %d chunks, %s, %d not good", v.report.Checked, v.total, size(v.report.Bytes), v.report.Checked-v.report.Good)
	return nil
}

// sweepTemps has the lock for moments only: reading everything may take an hour,
// which no engine should wait for.
func (v *verification) sweepTemps() (err error) {
	held, release, err := v.t.hold()
	if err != nil {
		return err
	}
	v.report.Leader = v.t.leaderReport()
	if !held {
		return nil
	}
	defer func() {
		if rerr := release(); err == nil {
			err = rerr
		}
	}()
	for _, n := range v.t.namespaces {
		n.Clear(tier.Clearing{Temps: true, Each: func(e tier.Entry, err error) {
			switch {
			case err == nil:
				v.report.TempsRemoved++
			case e.Kind == tier.EntryTemp: // what cannot be read is told by the walk to come
				v.report.Files = append(v.report.Files, badFile{Path: e.Path, State: "temp", Error: err.Error()})
			}
		}})
	}
	return nil
}

func (v *verification) skip(n *tier.InspectedNamespace, chunks int) {
	if n.Sidecar == tier.SidecarNewer {
		v.report.Newer += chunks
		return
	}
	if n.Sidecar == tier.SidecarMissing && chunks == 0 {
		return
	}
	v.report.Unchecked += chunks
	v.report.Sidecars = append(v.report.Sidecars, badSidecar{n.Name, n.Sidecar, n.SidecarErr.Error()})
}

// namespace reads the chunks of one, by several readers with a buffer each.
func (v *verification) namespace(n *tier.InspectedNamespace, work []tier.Entry, jobs int) error {
	jobs = max(1, min(jobs, len(work), int(verifyMemory/n.Layout.PaddedBytes)))
	next := make(chan tier.Entry)
	var readers sync.WaitGroup
	for range jobs {
		r, err := n.Verifier()
		if err != nil {
			close(next)
			readers.Wait()
			return err
		}
		readers.Add(1)
		spawn.Go("verify", func(err error) { v.fail(err); drain(next); readers.Done() }, func() {
			for e := range next {
				v.check(r, e)
			}
			if err := r.Close(); err != nil {
				v.fail(err)
			}
			readers.Done()
		})
	}
	for _, e := range work {
		next <- e
	}
	close(next)
	readers.Wait()
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.failed
}

// drain keeps who hands out work from waiting for a reader that has ended.
func drain(next chan tier.Entry) {
	for range next {
		continue
	}
}

func (v *verification) fail(err error) {
	v.mu.Lock()
	v.failed = err
	v.mu.Unlock()
}

func (v *verification) check(r *tier.Verifier, e tier.Entry) {
	c := r.Check(e.Key)
	bad := badFile{Path: e.Path, State: string(c.State), Reason: c.Reason}
	var removed bool
	if c.State == tier.CheckDamaged && v.report.Repair { // Repair does not change
		if err := r.Remove(e.Key, c); err != nil {
			bad.Error = err.Error()
		} else {
			removed = true
		}
	}
	if c.Err != nil {
		bad.Error = c.Err.Error()
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	s := &v.report
	if c.State == tier.CheckVanished {
		s.Vanished++
		return
	}
	s.Checked++
	s.Bytes += e.Bytes
	switch c.State {
	case tier.CheckGood:
		s.Good++
	case tier.CheckNewer:
		s.Newer++
	case tier.CheckDamaged:
		s.Damaged[c.Reason]++
	case tier.CheckUnsteady:
		s.Unsteady++
	case tier.CheckUnreadable:
		s.Unreadable[c.Reason]++
	}
	if removed {
		s.Removed++
		bad.Removed = true
	}
	if c.State != tier.CheckGood && c.State != tier.CheckNewer {
		s.Files = append(s.Files, bad)
	}
	v.progress.step("checked %d of %d chunks, %s, %d not good", s.Checked, v.total, size(s.Bytes), s.Checked-s.Good)
}

// verdict is the exit code.
func (s *verifyReport) verdict() error {
	var parts []string
	add := func(n int, text string) {
		if n > 0 {
			parts = append(parts, fmt.Sprintf("%s %s", plural(n, "chunk"), text))
		}
	}
	add(total(s.Damaged), "damaged")
	add(s.Unsteady, "unsteady")
	if n := total(s.Unreadable); n > 0 {
		parts = append(parts, plural(n, "name")+" unreadable")
	}
	add(s.Unchecked, "not checked")
	if n := len(s.Sidecars); n > 0 {
		parts = append(parts, plural(n, "namespace")+" without a good layout.json")
	}
	if len(parts) == 0 {
		for _, f := range s.Files { // a temp file that stays
			return problem("%s cannot be removed: %s", f.Path, f.Error)
		}
		return nil
	}
	return problem("%s", strings.Join(parts, ", "))
}

func (s *verifyReport) print(w io.Writer) {
	for _, f := range s.Files {
		what := f.State
		if f.Reason != "" {
			what += ", " + f.Reason
		}
		if f.Removed {
			what += ", removed"
		}
		if f.Error != "" {
			what += ": " + f.Error
		}
		fmt.Fprintf(w, "%s: %s\n", f.Path, what)
	}
	for _, c := range s.Sidecars {
		fmt.Fprintf(w, "%s: layout.json is %s, its chunks cannot be checked: %s\n", c.Namespace, c.State, c.Cause)
	}
	fmt.Fprintf(w, "%s checked, %s: %d good", plural(s.Checked, "chunk"), size(s.Bytes), s.Good)
	for _, part := range []struct {
		n    int
		text string
	}{
		{total(s.Damaged), "damaged (" + counts(s.Damaged) + ")"}, {s.Unsteady, "unsteady"},
		{total(s.Unreadable), "unreadable (" + counts(s.Unreadable) + ")"}, {s.Newer, "of a later version"},
	} {
		if part.n > 0 {
			fmt.Fprintf(w, ", %d %s", part.n, part.text)
		}
	}
	fmt.Fprintln(w)
	if s.Unchecked > 0 {
		fmt.Fprintf(w, "%s not checked\n", plural(s.Unchecked, "chunk"))
	}
	if s.Vanished > 0 {
		fmt.Fprintf(w, "%s evicted or deleted meanwhile\n", plural(s.Vanished, "chunk"))
	}
	if n := total(s.Foreign); n > 0 {
		fmt.Fprintf(w, "%s not the cache's (%s)\n", plural(n, "name"), counts(s.Foreign))
	}
	if s.Repair {
		fmt.Fprintf(w, "%s and %s removed\n", plural(s.Removed, "damaged chunk"), plural(s.TempsRemoved, "temp file"))
		if s.Leader.Held {
			fmt.Fprintln(w, "temp files stay: the root is in use, and its leader may be writing them")
		}
	} else if s.Temps > 0 && !s.Leader.Held {
		fmt.Fprintf(w, "%s left over by dead processes: `kvtier gc` removes them\n", plural(s.Temps, "temp file"))
	}
}
