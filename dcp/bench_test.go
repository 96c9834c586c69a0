package dcp

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// BenchmarkCopy moves one rank's part of a chunk of 61 layers of 656 bytes a token.
// The line "copy" is what the same bytes cost in one piece.
func BenchmarkCopy(b *testing.B) {
	const layers, width, c = 61, 656, 256
	gr := group{rowStride: (layers*width + 63) / 64 * 64, tokensPerRow: 1}
	for i := range layers {
		gr.shapes = append(gr.shapes, shape{bytes: width, rowOffset: i * width})
	}
	b.Run("copy", func(b *testing.B) {
		from, to := make([]byte, layers*width*c/4), make([]byte, layers*width*c/4)
		b.SetBytes(int64(len(from)))
		for b.Loop() {
			copy(to, from)
		}
	})
	for _, g := range []Geometry{{D: 1, I: 1, B: 64, C: c}, {D: 4, I: 1, B: 64, C: c}, {D: 4, I: 16, B: 64, C: c}, {D: 4, I: 64, B: 64, C: c}} {
		e := newEngine(g, []group{gr}, 4*c, rand.New(rand.NewPCG(1, 1)))
		slot := make([]byte, c*gr.rowStride)
		part := int64(g.LocalTokens(c, 0) * layers * width)
		name := fmt.Sprintf("D%d,I%d", g.D, g.I)
		b.Run("gather,"+name, func(b *testing.B) {
			b.SetBytes(part)
			for b.Loop() {
				if err := Gather(slot, g, e.cols, 0, e.table, 0, nil); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run("scatter,"+name, func(b *testing.B) {
			b.SetBytes(part)
			for b.Loop() {
				if err := Scatter(slot, g, e.cols, 0, Span{0, c}, e.table, 0, nil); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
