package kvtier

import (
	"errors"
	"fmt"
	"hash/fnv"
	"unsafe"

	"github.com/kvtier/kvtier/dcp"
	"github.com/kvtier/kvtier/internal/sys"
)

// testPages are the pages that a self-test goes through, and its pattern. Every byte
// is a function of (run, region, token or opaque page, place), the region being named
// as in the namespace: each rank can say what every byte of a chunk must be, also of
// rows that others wrote.
type testPages struct {
	v      *view
	rank   *Rank    // whose groups are the pages, or the private memory for them
	blocks []uint32 // by virtual block
	seed   uint64
	saved  []byte   // what restore brings back, in the order of eachRow
	kept   bool     // saved is complete
	memory [][]byte // private, outside of the Go heap as pages are
}

// patternBits keeps every byte below what makes a number of any KV dtype infinite or
// not a number: engines look for those.
const patternBits = 0x3f3f3f3f3f3f3f3f

// testChunksOf is the most chunks that a rank can take in a self-test.
func testChunksOf(r *Rank, pages bool) uint32 {
	if n := chunksIn(r); pages && n > 0 {
		return uint32(min(n, maxTestChunks))
	}
	return maxTestChunks
}

// chunksIn is how many chunks fit into the pages beside block 0.
func chunksIn(r *Rank) int { return (r.blocks - 1) * r.geometry.VirtualBlock() / r.geometry.C }

func newTestPages(r *Rank, v *view, pages bool, chunks int, seed uint64) (*testPages, error) {
	need := ceil(chunks*r.geometry.C, r.geometry.VirtualBlock())
	t := &testPages{v: v, rank: r, seed: seed}
	if !pages || chunksIn(r) < chunks {
		if err := t.private(r, need); err != nil {
			return nil, errors.Join(err, t.restore())
		}
	}
	// From both ends of the pool: a stride that is wrong leads furthest there.
	for i := range need {
		block := uint32(1 + i/2)
		if i%2 == 0 {
			block = uint32(t.rank.blocks - 1 - i/2)
		}
		t.blocks = append(t.blocks, block)
	}
	if err := t.check(); err != nil {
		return nil, errors.Join(err, t.restore())
	}
	if t.memory == nil {
		t.save()
	}
	return t, nil
}

// private makes memory of the shape of the pages, with one block more.
func (t *testPages) private(r *Rank, blocks int) error {
	shadow := &Rank{m: r.m, part: r.part, geometry: r.geometry, blocks: blocks + 1}
	t.rank = shadow
	for _, g := range r.groups {
		mine := g
		mine.regions = append([]Region(nil), g.regions...)
		for i := range mine.regions {
			reg := &mine.regions[i]
			reg.TokenStride = int64(reg.Bytes)
			reg.BlockStride = int64(reg.Bytes) * int64(pageOf(r.geometry, reg).B/g.tokensPerRow)
			m, err := sys.NewPages(shadow.blocks * int(reg.BlockStride))
			if err != nil {
				return err
			}
			reg.Base = uintptr(unsafe.Pointer(unsafe.SliceData(m)))
			t.memory = append(t.memory, m)
		}
		shadow.groups = append(shadow.groups, mine)
	}
	return nil
}

// check makes sure that the acceptance fits the regions, which everything below
// relies on.
func (t *testPages) check() error {
	if _, err := t.rank.columns(t.v, false); err != nil {
		return err
	}
	for gi := range t.rank.groups {
		for i, reg := range t.rank.groups[gi].regions {
			if t.v.accept.Columns[gi][i].Offset != t.offset(gi, &reg) {
				return fmt.Errorf("region %q of layer %d is at another place of the row than its name: %w", reg.Name, reg.Layer, errAcceptance)
			}
		}
	}
	return nil
}

// offset is where the namespace has a region in the row, -1 when it does not.
func (t *testPages) offset(group int, reg *Region) int {
	for i, n := range t.v.namespace.Groups[group].Regions {
		if n.Name == reg.Name && n.Component == reg.Component && n.Layer == reg.Layer && n.Head == reg.Head && n.Bytes == reg.Bytes {
			return t.v.layout.Groups[group].RegionOffsets[i]
		}
	}
	return -1
}

// eachRow calls do for every addressable piece of the pages of the test: a token, or
// a whole block where pages are opaque. row counts them over the prefix, from 0.
func (t *testPages) eachRow(do func(g *rankGroup, reg *Region, row int, p pattern, bytes []byte) bool) {
	for gi := range t.rank.groups {
		g := &t.rank.groups[gi]
		for i := range g.regions {
			reg := &g.regions[i]
			geo := pageOf(t.rank.geometry, reg)
			name := columnName(gi, reg.Component, reg.Name, reg.Layer, reg.Head)
			for vb, block := range t.blocks {
				for local := 0; local < geo.B; local += g.tokensPerRow {
					row := geo.Global(vb, geo.Rank, local) / g.tokensPerRow
					at := unsafe.Add(pointer(reg.Base), int64(block)*reg.BlockStride+int64(local/g.tokensPerRow)*tokenStride(g, reg))
					if !do(g, reg, row, t.pattern(name, row), unsafe.Slice((*byte)(at), reg.Bytes)) {
						return
					}
				}
			}
		}
	}
}

// pageOf is how tokens lie in the pages of a region: one that is not spread over the
// ranks has them as a single rank would.
func pageOf(geo dcp.Geometry, reg *Region) dcp.Geometry {
	if reg.AllRows {
		return dcp.Geometry{D: 1, I: geo.VirtualBlock(), B: geo.VirtualBlock(), C: geo.C}
	}
	return geo
}

func tokenStride(g *rankGroup, reg *Region) int64 {
	if g.tokensPerRow > 1 {
		return 0
	}
	return reg.TokenStride
}

// save keeps what the pages hold. All of it is read before anything is written.
func (t *testPages) save() {
	t.eachRow(func(_ *rankGroup, _ *Region, _ int, _ pattern, b []byte) bool {
		t.saved = append(t.saved, b...)
		return true
	})
	t.kept = true
}

// restore undoes save, and ends the private memory. Regions that overlap have saved
// the same bytes. t is of no use afterwards.
func (t *testPages) restore() error {
	if t.kept {
		saved := t.saved
		t.eachRow(func(_ *rankGroup, _ *Region, _ int, _ pattern, b []byte) bool {
			saved = saved[copy(b, saved):]
			return true
		})
	}
	var errs []error
	for _, m := range t.memory {
		errs = append(errs, sys.FreePages(m))
	}
	t.memory = nil
	return errors.Join(errs...)
}

// write fills the pages with the pattern, or with its opposite, which differs from it
// in every byte.
func (t *testPages) write(opposite bool) {
	t.eachRow(func(_ *rankGroup, _ *Region, _ int, p pattern, b []byte) bool {
		for i := range b {
			if b[i] = p.next(); opposite {
				b[i] ^= patternBits & 0xff
			}
		}
		return true
	})
}

// compare looks at the pages after the load: what belongs to the chunks has come
// back, and nothing else was touched.
func (t *testPages) compare(chunks int) (err error) {
	tokens := chunks * t.rank.geometry.C
	t.eachRow(func(g *rankGroup, reg *Region, row int, p pattern, b []byte) bool {
		for i := range b {
			want := p.next()
			if row*g.tokensPerRow >= tokens {
				want ^= patternBits & 0xff
			}
			if b[i] != want {
				err = fmt.Errorf("in the pages, region %q (%s, layer %d, head %d), token %d, byte %d is 0x%02x and must be 0x%02x",
					reg.Name, reg.Component, reg.Layer, reg.Head, row*g.tokensPerRow, i, b[i], want)
				return false
			}
		}
		return true
	})
	return err
}

// compareSlot looks at all bytes of a chunk in the arena, with its padding.
func (t *testPages) compareSlot(slot []byte, ordinal int) error {
	for gi := range t.v.layout.Groups {
		lay := &t.v.layout.Groups[gi]
		regions := t.v.namespace.Groups[gi].Regions
		for i, reg := range regions {
			name := columnName(gi, reg.Component, reg.Name, reg.Layer, reg.Head)
			for row := range lay.Rows {
				at := lay.Offset + int64(row*lay.RowStride+lay.RegionOffsets[i])
				p := t.pattern(name, ordinal*lay.Rows+row)
				for j, have := range slot[at:][:reg.Bytes] {
					if want := p.next(); have != want {
						token := (ordinal*lay.Rows + row) * lay.TokensPerRow
						_, from, _ := t.rank.geometry.Locate(token)
						return fmt.Errorf("in the chunk, region %q (%s, layer %d, head %d), token %d of DCP rank %d, byte %d is 0x%02x and must be 0x%02x",
							reg.Name, reg.Component, reg.Layer, reg.Head, token, from, j, have, want)
					}
				}
			}
		}
		for row := range lay.Rows {
			at := lay.Offset + int64(row*lay.RowStride)
			for j, have := range slot[at+int64(lay.RowBytes):][:lay.RowStride-lay.RowBytes] {
				if have != 0 {
					return fmt.Errorf("in the chunk, row %d of group %d has 0x%02x in its padding, byte %d", row, gi, have, lay.RowBytes+j)
				}
			}
		}
	}
	return nil
}

// columnName gives a region of the namespace a number of its own.
func columnName(group int, component, name string, layer, head int) uint64 {
	h := fnv.New64a()
	fmt.Fprintf(h, "%d/%s/%s/%d/%d", group, component, name, layer, head)
	return h.Sum64()
}

// pattern is a stream of bytes: SplitMix64, whose neighbouring states have nothing in
// common.
type pattern struct {
	state, word uint64
	left        int
}

func (t *testPages) pattern(column uint64, row int) pattern {
	return pattern{state: mix(t.seed ^ mix(column^mix(uint64(row)+1)))}
}

func (p *pattern) next() byte {
	if p.left == 0 {
		p.state += 0x9E3779B97F4A7C15
		p.word, p.left = mix(p.state)&patternBits, 8
	}
	b := byte(p.word)
	p.word >>= 8
	p.left--
	return b
}

func mix(z uint64) uint64 {
	z = (z ^ z>>30) * 0xBF58476D1CE4E5B9
	z = (z ^ z>>27) * 0x94D049BB133111EB
	return z ^ z>>31
}
