package dcp

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"
)

// BenchmarkAssemble puts chunks together as the ranks of an engine do, one thread a
// rank, and takes them apart again, against the same threads copying as many bytes in
// one piece each. Rounds of the three take turns, so that what else the machine does
// hits all alike. It reports medians of
//
//	gather-GB/s, scatter-GB/s, memcpy-GB/s  bytes of all ranks by wall time
//	gather-share, scatter-share             of memcpy, round by round
//	gather-low, gather-high, scatter-...    the same shares, quartiles
//
// "beyond": pages and slots do not fit the caches. "inside": they do.
func BenchmarkAssemble(b *testing.B) {
	rows := []struct {
		name   string
		widths []int
	}{
		{"656", repeated(61, 656)},
		{"1152", repeated(61, 1152)},
		{"132+432", repeated(32, 128, 4, 432)},
	}
	for _, row := range rows {
		for _, size := range []struct {
			name   string
			chunks int
			row    int // about so many bytes at most
		}{{"beyond", 16, 1 << 20}, {"inside", 1, 8 << 10}} {
			for _, d := range []int{1, 2, 4} {
				for _, i := range []int{1, 16, 64} {
					if d == 1 && i > 1 || size.name == "inside" && d != 2 {
						continue // the same copies as with I=1; caches are for two threads here
					}
					name := fmt.Sprintf("row=%s/size=%s/ranks=%d/I=%d", row.name, size.name, d, i)
					b.Run(name, func(b *testing.B) {
						a := newAssembly(Geometry{D: d, I: i, B: 64, C: 256}, upTo(size.row, row.widths), size.chunks)
						a.report(b)
					})
				}
			}
		}
	}
}

func repeated(n int, widths ...int) (out []int) {
	for range n {
		out = append(out, widths...)
	}
	return out
}

// upTo gives the first regions of a row that are not more than so many bytes.
func upTo(limit int, widths []int) []int {
	sum := 0
	for i, w := range widths {
		if sum += w; sum > limit {
			return widths[:i]
		}
	}
	return widths
}

// assembly is the pages of all ranks and the slots of some chunks.
type assembly struct {
	g     Geometry
	ranks []*engine
	slots [][]byte
	bytes int       // of the rows, all ranks and chunks together
	flat  [2][]byte // as many bytes, for memcpy
}

func newAssembly(g Geometry, widths []int, chunks int) *assembly {
	// Regions of widths that are multiples of 16 come first, as in a real row.
	widths = slices.Clone(widths)
	slices.SortStableFunc(widths, func(x, y int) int { return min(x%16, 1) - min(y%16, 1) })
	gr := group{tokensPerRow: 1}
	width := 0
	for _, w := range widths {
		gr.shapes = append(gr.shapes, shape{bytes: w, rowOffset: width})
		width += w
	}
	gr.rowStride = (width + 63) / 64 * 64
	a := &assembly{g: g, bytes: chunks * g.C * width}
	for rank := range g.D {
		rg := g
		rg.Rank = rank
		a.ranks = append(a.ranks, newEngine(rg, []group{gr}, chunks*g.C, rand.New(rand.NewPCG(1, 1))))
	}
	for range chunks {
		a.slots = append(a.slots, make([]byte, g.C*gr.rowStride))
	}
	// Memory that was never written is one page of zeros, read from the cache.
	a.flat = [2][]byte{bytes.Repeat([]byte{1}, a.bytes), bytes.Repeat([]byte{2}, a.bytes)}
	return a
}

// together runs do on as many threads as there are ranks and gives bytes by time.
func (a *assembly) together(do func(rank int)) float64 {
	var wg sync.WaitGroup
	start := time.Now()
	for rank := range a.g.D {
		wg.Go(func() { do(rank) })
	}
	wg.Wait()
	return float64(a.bytes) / time.Since(start).Seconds() / 1e9
}

func (a *assembly) memcpy(rank int) {
	lo, hi := a.bytes*rank/a.g.D, a.bytes*(rank+1)/a.g.D
	copy(a.flat[0][lo:hi], a.flat[1][lo:hi])
}

func (a *assembly) gather(rank int) {
	e := a.ranks[rank]
	for ordinal, slot := range a.slots {
		if err := Gather(slot, e.g, e.cols, ordinal, e.table, 0, nil); err != nil {
			panic(err)
		}
	}
}

func (a *assembly) scatter(rank int) {
	e := a.ranks[rank]
	for ordinal, slot := range a.slots {
		if err := Scatter(slot, e.g, e.cols, ordinal, Span{0, len(a.slots) * a.g.C}, e.table, 0, nil); err != nil {
			panic(err)
		}
	}
}

func (a *assembly) report(b *testing.B) {
	const warmUps = 2
	rates := map[string][]float64{}
	rounds := max(15, min(400, 1<<30/a.bytes))
	b.ResetTimer()
	for range b.N {
		for n := range rounds + warmUps {
			once := map[string]float64{}
			once["memcpy"] = a.together(a.memcpy)
			once["gather"] = a.together(a.gather)
			once["scatter"] = a.together(a.scatter)
			if n >= warmUps {
				for what, rate := range once {
					rates[what] = append(rates[what], rate)
				}
			}
		}
	}
	quartile := func(v []float64, q int) float64 { return slices.Sorted(slices.Values(v))[len(v)*q/4] }
	for what, rate := range rates {
		b.ReportMetric(quartile(rate, 2), what+"-GB/s")
		if what == "memcpy" {
			continue
		}
		shares := make([]float64, len(rate))
		for i := range rate {
			shares[i] = rate[i] / rates["memcpy"][i]
		}
		b.ReportMetric(quartile(shares, 1), what+"-low")
		b.ReportMetric(quartile(shares, 2), what+"-share")
		b.ReportMetric(quartile(shares, 3), what+"-high")
	}
	b.ReportMetric(0, "ns/op")
}
