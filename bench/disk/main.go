// Command disk measures the disk tier against plain direct I/O on the same files, in
// the same run, and prints JSON, one figure a line. bench.py --part disk shows them.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// series is one figure: Value against Limit. With Paired, sample i of both comes from
// the same turn, and what counts is the ratio of each pair: a virtual disk drifts by
// a factor of two within minutes. Else Limit holds one number.
type series struct {
	Name      string    `json:"name"`
	Unit      string    `json:"unit"`
	LimitName string    `json:"limit_name"`
	Value     []float64 `json:"value"`
	Limit     []float64 `json:"limit"`
	Paired    bool      `json:"paired"`
	Less      bool      `json:"less_is_better"`
	Want      float64   `json:"want"` // least ratio that is good enough; 0: only reported
}

type options struct {
	dir   string
	runs  int
	bytes int64 // of one transfer run
	files []int // to be adopted
}

var parts = map[string]func(string, options) ([]series, error){
	"transfers": transfers, "burst": burst, "adoption": adoptions, "checksum": checksum,
}

func main() {
	var o options
	var quick bool
	var only, files string
	flag.StringVar(&o.dir, "dir", "", "a directory on the disk to be measured, for files that go again")
	flag.IntVar(&o.runs, "runs", 5, "turns of each transfer")
	flag.Int64Var(&o.bytes, "bytes", 256<<20, "written and read in one turn")
	flag.BoolVar(&quick, "quick", false, "less of everything, to see that it works")
	flag.StringVar(&files, "files", "20000,100000", "to be adopted, in one opening after the other")
	flag.StringVar(&only, "parts", "transfers,burst,adoption,checksum", "what is measured, with commas between")
	flag.Parse()
	if quick {
		o.runs, o.bytes, files = 2, 64<<20, "2000"
	}
	for _, text := range strings.Split(files, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			fmt.Fprintf(os.Stderr, "disk: -files %q: numbers with commas between\n", files)
			os.Exit(2)
		}
		o.files = append(o.files, n)
	}
	if err := measure(o, strings.Split(only, ",")); err != nil {
		fmt.Fprintln(os.Stderr, "disk:", err)
		os.Exit(1)
	}
}

func measure(o options, names []string) error {
	dir, err := os.MkdirTemp(o.dir, "kvtier-bench")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	for _, name := range names {
		part, ok := parts[name]
		if !ok {
			return fmt.Errorf("there is no part %q", name)
		}
		all, err := part(dir, o)
		if err != nil {
			return err
		}
		for _, s := range all {
			if err := json.NewEncoder(os.Stdout).Encode(s); err != nil {
				return err
			}
		}
	}
	return nil
}
