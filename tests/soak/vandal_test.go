package soak

import (
	"encoding/json"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// vandal is somebody who deletes and damages files of a root in use.
type vandal struct {
	t    *testing.T
	rng  *rand.Rand
	root string

	Deleted, Damaged int
}

func gone(err error) bool { return errors.Is(err, fs.ErrNotExist) }

// strike damages or deletes some of the files that the root happens to have.
func (v *vandal) strike() {
	for range 1 + v.rng.IntN(20) {
		v.touch()
	}
}

func (v *vandal) touch() {
	subs, err := filepath.Glob(filepath.Join(v.root, "*@*", "??"))
	require.NoError(v.t, err)
	if len(subs) == 0 {
		return
	}
	sub := subs[v.rng.IntN(len(subs))]
	names, err := os.ReadDir(sub)
	if gone(err) || len(names) == 0 {
		return
	}
	require.NoError(v.t, err)
	path := filepath.Join(sub, names[v.rng.IntN(len(names))].Name())
	switch p := v.rng.IntN(100); {
	case p < 20:
		err = os.Remove(path)
		v.Deleted++
	case p == 20:
		err = os.RemoveAll(filepath.Dir(sub)) // a whole namespace, sidecar and all
		if errors.Is(err, os.ErrExist) || isNotEmpty(err) {
			err = nil // written again meanwhile
		}
		v.Deleted++
	case p == 21:
		err = os.Truncate(filepath.Join(filepath.Dir(sub), "layout.json"), int64(v.rng.IntN(200)))
		v.Damaged++
	case p < 75:
		err = v.flip(path)
		v.Damaged++
	default:
		err = v.cut(path)
		v.Damaged++
	}
	if !gone(err) {
		require.NoError(v.t, err)
	}
}

func isNotEmpty(err error) bool {
	var p *fs.PathError
	return errors.As(err, &p) && p.Err.Error() == "directory not empty"
}

// flip turns one bit over.
func (v *vandal) flip(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil || st.Size() == 0 {
		return err
	}
	at := v.rng.Int64N(st.Size())
	var b [1]byte
	if _, err := f.ReadAt(b[:], at); err != nil {
		return err
	}
	b[0] ^= 1 << v.rng.IntN(8)
	_, err = f.WriteAt(b[:], at)
	return err
}

// cut makes a file shorter.
func (v *vandal) cut(path string) error {
	st, err := os.Lstat(path)
	if err != nil {
		return err
	}
	return os.Truncate(path, v.rng.Int64N(st.Size()+1))
}

// tools runs the command line as an operator would.
type tools struct {
	t      *testing.T
	binary string
	root   string

	Runs map[string]int
}

// buildTools makes the command.
func buildTools(t *testing.T, root string) *tools {
	t.Helper()
	binary := filepath.Join(t.TempDir(), "kvtier")
	out, err := exec.Command("go", "build", "-o", binary, "../../cmd/kvtier").CombinedOutput()
	require.NoError(t, err, "%s", out)
	return &tools{t: t, binary: binary, root: root, Runs: map[string]int{}}
}

// run gives the exit code and what was printed. Exit code 2 is no answer.
func (c *tools) run(command string, args ...string) (code int, out []byte) {
	c.t.Helper()
	cmd := exec.Command(c.binary, append([]string{command, c.root}, args...)...)
	out, err := cmd.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		require.Equal(c.t, 1, exit.ExitCode(), "kvtier %s %v: %s%s", command, args, out, exit.Stderr)
	} else {
		require.NoError(c.t, err, "kvtier %s %v", command, args)
	}
	c.Runs[command]++
	return cmd.ProcessState.ExitCode(), out
}

// verified is the part of verify --json that is looked at.
type verified struct {
	Checked   int
	Good      int
	Damaged   map[string]int
	Unsteady  int
	Unchecked int
	Temps     int
	Swept     int `json:"temps_removed"`
	Foreign   map[string]int
}

func (c *tools) verify(args ...string) (code int, v verified) {
	c.t.Helper()
	code, out := c.run("verify", append([]string{"--json"}, args...)...)
	require.NoError(c.t, json.Unmarshal(out, &v), "%s", out)
	return code, v
}
