package kvtier

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The test binary is also the second process: it opens the configuration that it
// is given, says what it became, and ends in good order when its input ends.
const childConfig = "KVTIER_TEST_CONFIG"

func TestMain(m *testing.M) {
	if text, ok := os.LookupEnv(childConfig); ok {
		if err := child(text); err != nil {
			fmt.Fprintln(os.Stderr, "child:", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func child(text string) error {
	cfg, err := ParseConfig([]byte(text))
	if err != nil {
		return err
	}
	c, err := Open(cfg)
	if err != nil {
		return err
	}
	for turn := uint64(0); ; {
		turn = c.turn()
		state, _ := c.State()
		if state != StateOpening {
			fmt.Println(state)
			break
		}
		c.waitTurn(turn, nil)
	}
	in := bufio.NewReader(os.Stdin)
	for {
		line, err := in.ReadString('\n')
		if err == io.EOF {
			return c.Close(testWait)
		}
		switch strings.TrimSpace(line) {
		case "records":
			for _, r := range c.Records(1000) {
				fmt.Fprintln(os.Stderr, "child:", r.Level, r.Text)
			}
		}
	}
}

// process is a running child.
type process struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

// startProcess runs a second process with that configuration.
func startProcess(t *testing.T, config string) *process {
	t.Helper()
	p := &process{t: t, cmd: exec.Command(os.Args[0])}
	p.cmd.Env = append(os.Environ(), childConfig+"="+config)
	p.cmd.Stderr = os.Stderr
	var err error
	p.in, err = p.cmd.StdinPipe()
	require.NoError(t, err)
	out, err := p.cmd.StdoutPipe()
	require.NoError(t, err)
	p.out = bufio.NewReader(out)
	require.NoError(t, p.cmd.Start())
	t.Cleanup(p.kill)
	return p
}

// state waits for what the process became.
func (p *process) state() string {
	p.t.Helper()
	line, err := p.out.ReadString('\n')
	require.NoError(p.t, err)
	return strings.TrimSpace(line)
}

// end closes it in good order.
func (p *process) end() {
	p.t.Helper()
	require.NoError(p.t, p.in.Close())
	require.NoError(p.t, p.cmd.Wait())
	p.cmd = nil
}

func (p *process) kill() {
	if p.cmd != nil {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
		p.cmd = nil
	}
}
