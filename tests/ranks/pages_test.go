package ranks

import (
	"fmt"
	"unsafe"

	"github.com/kvtier/kvtier"
	"github.com/kvtier/kvtier/dcp"
	"github.com/kvtier/kvtier/internal/sys"
)

// shape is an engine: how its ranks share tokens, and what a token has in each of its
// regions. Two shapes with the same C and widths have one namespace, whatever their
// kinds.
type shape struct {
	D, I, B, C int
	TP         int // ranks, rank r has DCP rank r % D; 0: D
	Blocks     int
	Widths     []int
	Kinds      []kind // by region; none: all are split
}

// kind is which ranks have the bytes of a region. Replicas are ranks with one DCP rank.
type kind string

const (
	split      kind = "split"      // one replica has it, as with heads
	replicated kind = "replicated" // each replica has the rows of its DCP rank
	allRows    kind = "all rows"   // every rank has all rows
)

func (s shape) ranks() int { return max(s.TP, s.D) }

func (s shape) replicas() int { return s.ranks() / s.D }

func (s shape) kind(region int) kind {
	if len(s.Kinds) == 0 {
		return split
	}
	return s.Kinds[region]
}

func (s shape) holds(rank, region int) bool {
	return s.kind(region) != split || rank/s.D == region%s.replicas()
}

func (s shape) geometry(rank int) dcp.Geometry {
	return dcp.Geometry{D: s.D, I: s.I, B: s.B, C: s.C, Rank: rank % s.D}
}

// place is how tokens lie in the pages of a region.
func (s shape) place(rank, region int) dcp.Geometry {
	geo := s.geometry(rank)
	if v := geo.VirtualBlock(); s.kind(region) == allRows {
		return dcp.Geometry{D: 1, I: v, B: v, C: s.C}
	}
	return geo
}

// pages are those of one rank, outside of the Go heap; of a region that it does not
// have, none.
type pages struct {
	s       shape
	rank    int
	regions [][]byte
}

func newPages(s shape, rank int) (*pages, error) {
	p := &pages{s: s, rank: rank, regions: make([][]byte, len(s.Widths))}
	for i, w := range s.Widths {
		if !s.holds(rank, i) {
			continue
		}
		var err error
		if p.regions[i], err = sys.NewPages(s.Blocks * s.place(rank, i).B * w); err != nil {
			return nil, err
		}
	}
	return p, nil
}

func (p *pages) free() {
	for _, b := range p.regions {
		if b != nil {
			_ = sys.FreePages(b)
		}
	}
}

func (p *pages) describe() []kvtier.Region {
	var out []kvtier.Region
	for i, w := range p.s.Widths {
		if p.regions[i] == nil {
			continue
		}
		k := p.s.kind(i)
		out = append(out, kvtier.Region{
			Name: "kv", Component: "target", Layer: i, Head: -1, Bytes: w,
			Replicated: k == replicated || k == allRows && p.s.replicas() > 1, AllRows: k == allRows,
			Base: uintptr(unsafe.Pointer(&p.regions[i][0])), BlockStride: int64(p.s.place(p.rank, i).B * w), TokenStride: int64(w),
		})
	}
	return out
}

// oracle is byte at of a token in a region, for the prefix with this seed; never
// untouched.
func oracle(seed uint32, region, token, at int) byte {
	x := uint64(seed)*0x9E3779B97F4A7C15 ^ uint64(region)<<48 ^ uint64(token)<<16 ^ uint64(at)
	x ^= x >> 29
	x *= 0xBF58476D1CE4E5B9
	x ^= x >> 32
	return byte(x % 255)
}

const untouched = 0xff

func (p *pages) wipe() {
	for _, b := range p.regions {
		for i := range b {
			b[i] = untouched
		}
	}
}

// each calls do for every region of the tokens [from, to) that this rank holds.
func (p *pages) each(table []uint32, from, to int, do func(region, token int, b []byte) error) error {
	for region, w := range p.s.Widths {
		if p.regions[region] == nil {
			continue
		}
		geo := p.s.place(p.rank, region)
		for token := from; token < to; token++ {
			vb, rank, local := geo.Locate(token)
			if rank != geo.Rank {
				continue
			}
			at := (int(table[vb])*geo.B + local) * w
			if err := do(region, token, p.regions[region][at:at+w]); err != nil {
				return err
			}
		}
	}
	return nil
}

// fill computes the KV of the tokens [from, to) of a prefix.
func (p *pages) fill(seed uint32, table []uint32, from, to int) {
	_ = p.each(table, from, to, func(region, token int, b []byte) error {
		for i := range b {
			b[i] = oracle(seed, region, token, i)
		}
		return nil
	})
}

// check wants the tokens [from, to) of a prefix; the chunks from loaded on may as well
// be untouched, or half copied, but hold nothing else.
func (p *pages) check(seed uint32, table []uint32, from, loaded, to int) error {
	return p.each(table, from, to, func(region, token int, b []byte) error {
		for i, have := range b {
			if want := oracle(seed, region, token, i); have != want && (token < loaded || have != untouched) {
				return fmt.Errorf("prefix %d, rank %d, region %d, token %d of [%d, %d, %d), byte %d: 0x%02x instead of 0x%02x",
					seed, p.rank, region, token, from, loaded, to, i, have, want)
			}
		}
		return nil
	})
}

// sum is a checksum over all pages.
func (p *pages) sum() (sum uint64) {
	for _, b := range p.regions {
		for _, v := range b {
			sum = sum*1099511628211 ^ uint64(v)
		}
	}
	return sum
}
