//go:build !race

package mutants

// rankMutants break what is promised when several ranks hold a chunk together.
var rankMutants = []mutant{
	{
		name: "rank 0's part taken for the whole",
		file: "groupunion.go",
		old:  "ranks |= ag.writers[bits.TrailingZeros64(parts)]",
		new:  "ranks |= ag.writers[bits.TrailingZeros64(parts)] & 1",
		pkg:  ".", run: "^TestStoreLeaseLoad$|^TestExpectedParts$",
	},
	{
		name: "capacity from the global token count",
		file: "dcp/copy.go",
		old:  "end: g.LocalTokens(hi, g.Rank), stripe: g.I",
		new:  "end: g.LocalTokens(lo, g.Rank) + hi - lo, stripe: g.I",
		pkg:  "dcp", run: "^TestGatherAgainstTheFormula$",
	},
	{
		name: "a page's bytes before the first token are taken for the copy's own",
		file: "dcp/stream.go",
		old:  "dense && !first, dense && !last)",
		new:  "dense, dense && !last)",
		pkg:  "dcp", run: "^TestLargeChunksAgainstTheFormula$|^TestAnyTopologyToAnyOther$",
	},
	{
		name: "load not clipped at its beginning",
		file: "dcp/copy.go",
		old:  "lo, hi := max(start, clip.First), min(start+g.C, clip.First+clip.Tokens)",
		new:  "lo, hi := start, min(start+g.C, clip.First+clip.Tokens)",
		pkg:  "dcp", run: "^TestScatterAgainstTheFormulaWithEveryClip$",
	},
	{
		name: "load not clipped at its end",
		file: "dcp/copy.go",
		old:  "lo, hi := max(start, clip.First), min(start+g.C, clip.First+clip.Tokens)",
		new:  "lo, hi := max(start, clip.First), start+g.C",
		pkg:  "dcp", run: "^TestScatterAgainstTheFormulaWithEveryClip$",
	},
}
