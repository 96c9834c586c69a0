package ranks

import (
	"os"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/wire"
)

// commanded are the kinds that a test leads step by step.
var commanded = map[string]func(a *attackSpec, c *child) error{}

// between is a group of two ranks, of which rank 1 is hostile. Its chunks are those of the
// engine that works on.
var between = shape{D: 2, I: 2, B: 8, C: 24, Blocks: 32, Widths: []int{48, 17}}

func rankHello(group string) *wire.Hello {
	return &wire.Hello{Protocol: wire.Protocol, Features: []string{}, Group: group, Ranks: between.D, Rank: 1, PID: os.Getpid()}
}

func rankDeclare() *wire.Declare {
	d := validDeclare()
	d.Identity.Weights = "" // rank 0 knows them
	d.Identity.Encoding = chunk.EncodingRows
	d.DCP, d.DCPRank, d.Interleave, d.BlockTokens = between.D, 1, between.I, between.B
	return d
}
