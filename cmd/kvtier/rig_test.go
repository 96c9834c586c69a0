package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/disktest"
	"github.com/kvtier/kvtier/tier"
)

const patience = 20 * time.Second

// asCommand as the first argument makes the test binary the command itself.
const asCommand = "-as-kvtier"

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == asCommand {
		os.Exit(run(os.Args[2:], console{in: os.Stdin, out: os.Stdout, err: os.Stderr}))
	}
	os.Exit(m.Run())
}

// said is what a command has printed.
type said struct {
	code     int
	out, err string
}

// command runs a command line in this process, with nobody at a terminal.
func command(t *testing.T, args ...string) said {
	t.Helper()
	return answering(t, "", false, args...)
}

// answering runs it with a person who types answer.
func answering(t *testing.T, answer string, asks bool, args ...string) said {
	t.Helper()
	var out, errs bytes.Buffer
	code := run(args, console{in: strings.NewReader(answer), out: &out, err: &errs, asks: asks})
	return said{code, out.String(), errs.String()}
}

// fine is for a command that must find nothing wrong.
func fine(t *testing.T, args ...string) string {
	t.Helper()
	s := command(t, args...)
	require.Equal(t, exitFine, s.code, s.out+s.err)
	return s.out
}

// parsed runs a command with --json.
func parsed[T any](t *testing.T, code int, args ...string) (v T) {
	t.Helper()
	s := command(t, append(args, "--json")...)
	require.Equal(t, code, s.code, s.out+s.err)
	d := json.NewDecoder(strings.NewReader(s.out))
	d.DisallowUnknownFields()
	require.NoError(t, d.Decode(&v), s.out)
	require.False(t, d.More())
	return v
}

func rigNamespace(model string) *chunk.Namespace {
	n := disktest.Namespace(model)
	n.KVDtype = "bf16"
	return n
}

func rigKey(n int) chunk.Key {
	return sha256.Sum256(binary.LittleEndian.AppendUint64(nil, uint64(n)))
}

// write stores chunks 0 to n-1 of a model through the disk tier, with their numbers
// as ordinals, and ends the session.
func write(t *testing.T, root, model string, n int) {
	t.Helper()
	r, err := tier.OpenRoot(root, tier.RootOptions{})
	require.NoError(t, err)
	ok, holder, err := r.TryLock()
	require.NoError(t, err)
	require.True(t, ok, holder)
	s, err := tier.OpenStore(r, tier.StoreOptions{CapBytes: 64 << 20})
	require.NoError(t, err)
	d, err := s.Namespace(rigNamespace(model))
	require.NoError(t, err)
	done := make(chan error, n)
	for i := range n {
		k := rigKey(i)
		p := disktest.Payload(k)
		require.True(t, d.Write(tier.WriteJob{
			Key: k, Ordinal: uint32(i), Payload: p, Hash: chunk.HashPayload(p), Done: func(err error) { done <- err }}))
	}
	for range n {
		select {
		case err := <-done:
			require.NoError(t, err)
		case <-time.After(patience):
			t.Fatal("no answer")
		}
	}
	require.NoError(t, s.Close(patience))
	require.NoError(t, r.Close())
}

// directory is that of a model's namespace.
func directory(t *testing.T, root, model string) string {
	t.Helper()
	fp, err := rigNamespace(model).Fingerprint()
	require.NoError(t, err)
	return filepath.Join(root, chunk.DirName(model, fp))
}

func file(t *testing.T, root, model string, n int) string {
	t.Helper()
	return filepath.Join(directory(t, root, model), chunk.SubDir(rigKey(n)), chunk.FileName(rigKey(n)))
}

// change overwrites bytes of a file in place.
func change(t *testing.T, path string, edit func([]byte) []byte) {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, edit(b), 0o600))
}

func flip(at int) func([]byte) []byte {
	return func(b []byte) []byte {
		b[at] ^= 4
		return b
	}
}

// newer makes a footer that a later version might have written.
func newer(b []byte) []byte {
	page := b[len(b)-chunk.FooterBytes:]
	page[8] = 2
	hash := chunk.HashPayload(page[:4080])
	copy(page[4080:], hash[:])
	return b
}

func put(t *testing.T, path, text string) string {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// tempOf is a temp file of a session that is gone.
func tempOf(t *testing.T, root, model string, n int) string {
	t.Helper()
	return put(t, filepath.Join(filepath.Dir(file(t, root, model, n)), chunk.TempName(rigKey(n), 77, 3)), "half")
}

// names are all below a directory, but for what a leader keeps in the root.
func names(t *testing.T, root string) (found []string) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(root, func(path string, _ os.DirEntry, err error) error {
		rel, rerr := filepath.Rel(root, path)
		require.NoError(t, rerr)
		if rel != "." && !strings.HasPrefix(rel, "run") && rel != "LOCK" && rel != "kvtier.json" {
			found = append(found, rel)
		}
		return err
	}))
	return found
}

// serving runs `kvtier serve` on a root as another process until the end of the
// test, and gives its pid.
func serving(t *testing.T, root string) int {
	t.Helper()
	cmd := exec.Command(os.Args[0], asCommand, "serve", root, "--dram-gib", "0.0625", "--disk-gib", "0.0625")
	cmd.Stdout, cmd.Stderr = io.Discard, io.Discard
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	require.Eventually(t, func() bool {
		_, err := leaderStatistics(root, patience)
		return err == nil
	}, patience, 10*time.Millisecond)
	return cmd.Process.Pid
}
