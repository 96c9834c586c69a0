package sys

import (
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestProcessIsGone(t *testing.T) {
	cmd := exec.Command("cat")
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	defer in.Close()
	require.NoError(t, cmd.Start())
	p, err := OpenProcess(cmd.Process.Pid)
	require.NoError(t, err)
	defer p.Close()
	require.False(t, p.Gone())
	done := make(chan error, 1)
	go func() { done <- p.Wait() }()
	require.NoError(t, cmd.Process.Kill())
	require.NoError(t, <-done)
	require.True(t, p.Gone(), "before it is reaped as well")
	require.Error(t, cmd.Wait())
	require.NoError(t, p.Wait())

	_, err = OpenProcess(cmd.Process.Pid)
	require.ErrorIs(t, err, ErrProcessGone)
	_, err = OpenProcess(0)
	require.ErrorIs(t, err, ErrNoPidFD)
}

func TestProcessWaitEnds(t *testing.T) {
	p, err := OpenProcess(os.Getpid())
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() { done <- p.Wait() }()
	require.NoError(t, p.Close())
	require.ErrorIs(t, <-done, os.ErrClosed)
	require.False(t, p.Gone())
}
