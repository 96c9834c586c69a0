//go:build !race

package mutants

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var only = flag.String("mutant", "", "try this one only, by its name")

const (
	buildTime = 10 * time.Minute
	runTime   = 5 * time.Minute
)

// mutant is one way to break the library. Paths are below the top of the module.
type mutant struct {
	name string
	file string // that is changed
	old  string // stands there exactly once
	new  string // takes its place; must compile
	pkg  string // directory of the package whose test notices
	run  string // ^names$ of those tests, with | between them
}

// The source tree is not touched: the compiler reads the changed file in place of
// the true one. Every named test has to pass on the true code, and to fail on the
// changed one by its own judgement: not by a panic, and not by running out of time.
func TestEveryMutantIsNoticed(t *testing.T) {
	top, err := filepath.Abs("../..")
	require.NoError(t, err)
	all := append(append([]mutant{}, diskMutants...), rankMutants...)
	seen := map[string]bool{}
	var chosen []mutant
	for _, m := range all {
		require.False(t, seen[m.name], "two mutants have the name %q", m.name)
		seen[m.name] = true
		if *only == "" || *only == m.name {
			chosen = append(chosen, m)
		}
	}
	require.NotEmpty(t, chosen, "no mutant has the name %q", *only)

	// One after the other: the compiler uses all CPUs by itself.
	for _, pkg := range packages(chosen) {
		t.Run("as it is/"+pkg, func(t *testing.T) {
			var tests []string
			for _, m := range chosen {
				if m.pkg == pkg {
					tests = append(tests, m.run)
				}
			}
			out, err := runTests(t, top, pkg, build(t, top, pkg, ""), strings.Join(tests, "|"))
			require.NoError(t, err, "the tests fail on code that is not mutated:\n%s", out)
			for _, name := range strings.Split(strings.Join(tests, "|"), "|") {
				name, _, _ = strings.Cut(strings.Trim(name, "^$"), "$/")
				require.Contains(t, out, "--- PASS: "+name+" (", "no test is called so, or it was skipped")
			}
		})
	}
	for _, m := range chosen {
		t.Run(m.name, func(t *testing.T) {
			out, err := runTests(t, top, m.pkg, build(t, top, m.pkg, overlay(t, top, m)), m.run)
			require.Error(t, err, "nobody has noticed: %s passes with\n%s\nin place of\n%s", m.run, m.new, m.old)
			var exit *exec.ExitError
			require.ErrorAs(t, err, &exit)
			require.Equal(t, 1, exit.ExitCode(), "not by a failed assertion:\n%s", out)
			require.Contains(t, out, "--- FAIL: ", "not by a failed assertion")
		})
	}
}

// packages of the mutants, each once.
func packages(of []mutant) (pkgs []string) {
	seen := map[string]bool{}
	for _, m := range of {
		if !seen[m.pkg] {
			seen[m.pkg] = true
			pkgs = append(pkgs, m.pkg)
		}
	}
	return pkgs
}

// overlay writes the changed file and the list that puts it in place.
func overlay(t *testing.T, top string, m mutant) (list string) {
	t.Helper()
	path := filepath.Join(top, m.file)
	source, err := os.ReadFile(path)
	require.NoError(t, err)
	changed, err := m.apply(source)
	require.NoError(t, err)
	dir := t.TempDir()
	copied := filepath.Join(dir, filepath.Base(m.file))
	require.NoError(t, os.WriteFile(copied, changed, 0o600))
	b, err := json.Marshal(map[string]any{"Replace": map[string]string{path: copied}})
	require.NoError(t, err)
	list = filepath.Join(dir, "overlay.json")
	require.NoError(t, os.WriteFile(list, b, 0o600))
	return list
}

func (m *mutant) apply(source []byte) ([]byte, error) {
	if m.old == m.new {
		return nil, errors.New("it changes nothing")
	}
	if n := bytes.Count(source, []byte(m.old)); n != 1 {
		return nil, fmt.Errorf("%d places in %s read\n%s\nand it must be one: fit the mutant to the code as it is now", n, m.file, m.old)
	}
	return bytes.Replace(source, []byte(m.old), []byte(m.new), 1), nil
}

// build makes the test binary of a package.
func build(t *testing.T, top, pkg, overlay string) (binary string) {
	t.Helper()
	binary = filepath.Join(t.TempDir(), "test")
	args := []string{"test", "-c", "-o", binary, "-ldflags=-s -w", "-gcflags=-N -l"} // quick to make
	if overlay != "" {
		args = append(args, "-overlay="+overlay)
	}
	ctx, cancel := context.WithTimeout(context.Background(), buildTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, "go", append(args, "./"+pkg)...)
	cmd.Dir = top
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "it does not compile:\n%s", out)
	return binary
}

func runTests(t *testing.T, top, pkg, binary, tests string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), runTime+time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, binary, "-test.v", "-test.failfast", "-test.count=1", "-test.timeout="+runTime.String(), "-test.run="+tests)
	cmd.Dir = filepath.Join(top, pkg)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// The rules of the table itself.
func TestMutantsMustFitTheCode(t *testing.T) {
	m := mutant{file: "x.go", old: "a == b", new: "a != b"}
	b, err := m.apply([]byte("if a == b {"))
	require.NoError(t, err)
	require.Equal(t, "if a != b {", string(b))
	_, err = m.apply([]byte("if a == c {"))
	require.ErrorContains(t, err, "0 places in x.go")
	_, err = m.apply([]byte("a == b; a == b"))
	require.ErrorContains(t, err, "2 places in x.go")
	m.new = m.old
	_, err = m.apply([]byte("if a == b {"))
	require.ErrorContains(t, err, "changes nothing")
}
