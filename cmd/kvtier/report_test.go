package main

import (
	"bytes"
	"encoding/json"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestWhatCannotBeRemovedIsAProblem(t *testing.T) {
	r := &sweepReport{Failed: []badFile{{Path: "/nvme/kv/a.tmp", State: "temp", Error: "operation not permitted"}}}
	var out bytes.Buffer
	err := tellRemoval(&out, false, r, r.print, r.Failed, "removed")
	require.ErrorIs(t, err, errProblem)
	require.ErrorContains(t, err, "1 name cannot be removed")
	require.Contains(t, out.String(), "/nvme/kv/a.tmp: operation not permitted\n")

	out.Reset()
	require.ErrorIs(t, tellRemoval(&out, true, r, r.print, r.Failed, "removed"), errProblem)
	var told sweepReport
	require.NoError(t, json.Unmarshal(out.Bytes(), &told))
	require.Equal(t, *r, told)

	require.NoError(t, tellRemoval(&out, true, r, r.print, nil, "removed"))
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	require.NoError(t, err)
	defer full.Close()
	err = tellRemoval(full, true, r, r.print, r.Failed, "removed")
	require.Error(t, err)
	require.NotErrorIs(t, err, errProblem, "nobody was told what was found")
}
