package chunk

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

type goldenNamespace struct {
	Name        string
	Given       json.RawMessage
	Canonical   string
	Fingerprint string
	Directory   string
	Groups      []struct {
		Rows          int
		RowBytes      int   `json:"row_bytes"`
		RowStride     int   `json:"row_stride"`
		Offset        int64 `json:"offset"`
		RegionOffsets []int `json:"region_offsets"`
	}
	PayloadBytes int64 `json:"payload_bytes"`
	PaddedBytes  int64 `json:"padded_bytes"`
	FileBytes    int64 `json:"file_bytes"`
}

func goldenNamespaces(t testing.TB) []goldenNamespace {
	b, err := os.ReadFile("testdata/layouts.json")
	require.NoError(t, err)
	var all []goldenNamespace
	require.NoError(t, json.Unmarshal(b, &all))
	require.GreaterOrEqual(t, len(all), 8)
	return all
}

func (g *goldenNamespace) namespace(t testing.TB) *Namespace {
	var n Namespace
	require.NoError(t, json.Unmarshal(g.Given, &n))
	return &n
}

func TestNamespacesMatchTheSecondImplementation(t *testing.T) {
	for _, g := range goldenNamespaces(t) {
		t.Run(g.Name, func(t *testing.T) {
			n := g.namespace(t)
			before := fmt.Sprint(n)
			b, err := n.Canonical()
			require.NoError(t, err)
			require.Equal(t, g.Canonical, string(b))
			fp, err := n.Fingerprint()
			require.NoError(t, err)
			require.Equal(t, g.Fingerprint, fp.String())
			require.Equal(t, g.Directory, DirName(n.Model, fp))

			l, err := n.Layout()
			require.NoError(t, err)
			require.Equal(t, before, fmt.Sprint(n), "only Normalize changes a namespace")
			require.Equal(t, g.PayloadBytes, l.PayloadBytes)
			require.Equal(t, g.PaddedBytes, l.PaddedBytes)
			require.Equal(t, g.FileBytes, l.FileBytes)
			require.Equal(t, n.ChunkTokens, l.ChunkTokens)
			require.Len(t, l.Groups, len(g.Groups))
			for i, want := range g.Groups {
				got := l.Groups[i]
				require.Equal(t, want.Rows, got.Rows)
				require.Equal(t, want.RowBytes, got.RowBytes)
				require.Equal(t, want.RowStride, got.RowStride)
				require.Equal(t, want.Offset, got.Offset)
				require.Equal(t, want.RegionOffsets, got.RegionOffsets)
				require.Equal(t, n.Groups[i].TokensPerRow, got.TokensPerRow)
			}

			back, err := ParseNamespace([]byte(g.Canonical))
			require.NoError(t, err)
			require.NoError(t, n.Normalize())
			require.Equal(t, n, back)
			sorted, err := n.Layout()
			require.NoError(t, err)
			for i := range sorted.Groups {
				require.True(t, slices.IsSorted(sorted.Groups[i].RegionOffsets), "normalized regions stand in row order")
			}
		})
	}
}

func TestSidecarIsGolden(t *testing.T) {
	b, err := os.ReadFile("testdata/layout.json")
	require.NoError(t, err)
	n, err := ParseNamespace(b)
	require.NoError(t, err)
	require.Equal(t, "zai-org/GLM-5.2", n.Model)
	again, err := n.Canonical()
	require.NoError(t, err)
	require.Equal(t, string(b), string(again))
}

func plainNamespace() *Namespace {
	return &Namespace{Model: "m", ChunkTokens: 16, Groups: []Group{{
		Kind: GroupFull, TokensPerRow: 1, Regions: []Region{{Name: "k", Component: "target", Head: -1, Bytes: 64}},
	}}}
}

func TestNormalizeFillsWhatIsLeftOut(t *testing.T) {
	n := plainNamespace()
	require.NoError(t, n.Normalize())
	require.Equal(t, Format, n.Format)
	require.Equal(t, KeyScheme, n.KeyScheme)
	require.Equal(t, EncodingRows, n.Encoding)
}

func TestEveryFieldIsIdentity(t *testing.T) {
	base := plainNamespace()
	base.Encoding = "pages"
	seen := map[Fingerprint]string{}
	for name, change := range map[string]func(*Namespace){
		"nothing":        func(*Namespace) {},
		"attention":      func(n *Namespace) { n.Attention = "00" },
		"chunk_tokens":   func(n *Namespace) { n.ChunkTokens = 32 },
		"draft":          func(n *Namespace) { n.Draft = "d" },
		"encoding":       func(n *Namespace) { n.Encoding = "other" },
		"kv_dtype":       func(n *Namespace) { n.KVDtype = "fp8" },
		"kv_scales":      func(n *Namespace) { n.KVScales = "00" },
		"model":          func(n *Namespace) { n.Model = "n" },
		"quantisation":   func(n *Namespace) { n.Quantisation = "awq" },
		"weights":        func(n *Namespace) { n.Weights = "00" },
		"tokens_per_row": func(n *Namespace) { n.Groups[0].TokensPerRow = 2 },
		"bytes":          func(n *Namespace) { n.Groups[0].Regions[0].Bytes = 65 },
		"component":      func(n *Namespace) { n.Groups[0].Regions[0].Component = "draft" },
		"head":           func(n *Namespace) { n.Groups[0].Regions[0].Head = 0 },
		"layer":          func(n *Namespace) { n.Groups[0].Regions[0].Layer = 1 },
		"name":           func(n *Namespace) { n.Groups[0].Regions[0].Name = "v" },
		"group":          func(n *Namespace) { n.Groups = append(n.Groups, n.Groups[0]) },
	} {
		n := *base
		n.Groups = []Group{{Kind: GroupFull, TokensPerRow: 1, Regions: slices.Clone(base.Groups[0].Regions)}}
		change(&n)
		fp, err := n.Fingerprint()
		require.NoError(t, err, name)
		require.Empty(t, seen[fp], "%s makes no difference", name)
		seen[fp] = name
	}
}

func TestNamespacesAreRefused(t *testing.T) {
	for name, change := range map[string]func(*Namespace){
		"no model":             func(n *Namespace) { n.Model = "" },
		"model not UTF-8":      func(n *Namespace) { n.Model = "\xff" },
		"long model":           func(n *Namespace) { n.Model = strings.Repeat("x", maxText+1) },
		"draft not UTF-8":      func(n *Namespace) { n.Draft = "a\xc3" },
		"no tokens":            func(n *Namespace) { n.ChunkTokens = 0 },
		"too many tokens":      func(n *Namespace) { n.ChunkTokens = MaxChunkTokens + 1 },
		"negative format":      func(n *Namespace) { n.Format = -1 },
		"digest in upper case": func(n *Namespace) { n.Weights = "AB" },
		"odd digest":           func(n *Namespace) { n.Attention = "abc" },
		"digest is a word":     func(n *Namespace) { n.KVScales = "none" },
		"no groups":            func(n *Namespace) { n.Groups = nil },
		"too many groups":      func(n *Namespace) { n.Groups = slices.Repeat(n.Groups, MaxGroups+1) },
		"unknown kind":         func(n *Namespace) { n.Groups[0].Kind = "sliding" },
		"no rows":              func(n *Namespace) { n.Groups[0].TokensPerRow = 0 },
		"page cut by chunk":    func(n *Namespace) { n.Encoding = "p"; n.Groups[0].TokensPerRow = 3 },
		"page without name":    func(n *Namespace) { n.Groups[0].TokensPerRow = 4 },
		"no regions":           func(n *Namespace) { n.Groups[0].Regions = nil },
		"no bytes":             func(n *Namespace) { n.Groups[0].Regions[0].Bytes = 0 },
		"negative bytes":       func(n *Namespace) { n.Groups[0].Regions[0].Bytes = -64 },
		"huge region":          func(n *Namespace) { n.Groups[0].Regions[0].Bytes = math.MaxInt32 + 1 },
		"unknown component":    func(n *Namespace) { n.Groups[0].Regions[0].Component = "main" },
		"layer -2":             func(n *Namespace) { n.Groups[0].Regions[0].Layer = -2 },
		"head -2":              func(n *Namespace) { n.Groups[0].Regions[0].Head = -2 },
		"region without name":  func(n *Namespace) { n.Groups[0].Regions[0].Name = "" },
		"region twice": func(n *Namespace) {
			n.Groups[0].Regions = append(n.Groups[0].Regions, n.Groups[0].Regions[0])
		},
		"blob with rows": func(n *Namespace) { n.Groups[0].Kind = GroupBlob },
		"blob and full": func(n *Namespace) {
			n.Groups = append(n.Groups, Group{Kind: GroupBlob, TokensPerRow: 16, Regions: n.Groups[0].Regions})
		},
	} {
		n := plainNamespace()
		change(n)
		_, err := n.Canonical()
		require.ErrorIs(t, err, ErrNamespace, name)
		_, err = n.Layout()
		require.ErrorIs(t, err, ErrNamespace, name)
		require.ErrorIs(t, n.Normalize(), ErrNamespace, name)
	}
}

func TestHugeLayoutsAreRefused(t *testing.T) {
	n := plainNamespace()
	n.Groups[0].Regions[0].Bytes = math.MaxInt32
	_, err := n.Layout()
	require.ErrorIs(t, err, ErrTooLarge)
	n.Groups[0].Regions[0].Bytes = 1 << 30
	n.ChunkTokens = MaxChunkTokens
	_, err = n.Layout()
	require.ErrorIs(t, err, ErrTooLarge)
}

func TestParseTakesOneSpellingOnly(t *testing.T) {
	good, err := plainNamespace().Canonical()
	require.NoError(t, err)
	swap := func(from, to string) string {
		require.Contains(t, string(good), from)
		return strings.Replace(string(good), from, to, 1)
	}
	for name, bad := range map[string]string{
		"empty":           "",
		"null":            "null",
		"cut":             string(good[:len(good)-1]),
		"newline at end":  string(good) + "\n",
		"space":           swap(`:16`, `: 16`),
		"unknown field":   swap(`{"attention":""`, `{"attention":"","b":1`),
		"field twice":     swap(`"draft":""`, `"draft":"","draft":""`),
		"field left out":  swap(`"draft":"",`, ``),
		"order":           swap(`"attention":"","chunk_tokens":16`, `"chunk_tokens":16,"attention":""`),
		"upper case":      swap(`"model"`, `"Model"`),
		"escape":          swap(`"m"`, `"\u006d"`),
		"float":           swap(`:16`, `:16.0`),
		"exponent":        swap(`:16`, `:1.6e1`),
		"text for number": swap(`:16`, `:"16"`),
		"format 0":        swap(`"format":1`, `"format":0`),
		"not UTF-8":       swap(`"m"`, "\"\xff\""),
	} {
		_, err := ParseNamespace([]byte(bad))
		require.ErrorIs(t, err, ErrNamespace, name)
	}
	_, err = ParseNamespace(bytes.Repeat([]byte(" "), maxNamespace+1))
	require.ErrorIs(t, err, ErrNamespace)

	_, err = ParseNamespace([]byte(swap(`"format":1`, `"format":2,"more":[1.5]`)))
	require.ErrorIs(t, err, ErrNewerFormat)
	_, err = ParseNamespace([]byte(swap(`"key_scheme":1`, `"key_scheme":2`)))
	require.ErrorIs(t, err, ErrNewerFormat)
}

// Rows have no gaps, no overlaps, and everything whose width is a multiple of 16
// lies 16 byte aligned.
func TestRowsAreTiled(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := plainNamespace()
		n.ChunkTokens = rapid.IntRange(1, 40).Draw(t, "C")
		regions := rapid.SliceOfNDistinct(rapid.Custom(func(t *rapid.T) Region {
			return Region{
				Name:      rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "name"),
				Component: rapid.SampledFrom([]string{"target", "draft"}).Draw(t, "component"),
				Layer:     rapid.IntRange(-1, 4).Draw(t, "layer"),
				Head:      rapid.IntRange(-1, 3).Draw(t, "head"),
				Bytes:     rapid.IntRange(1, 300).Draw(t, "bytes"),
			}
		}), 1, 20, func(r Region) Region { r.Bytes = 0; return r }).Draw(t, "regions")
		n.Groups[0].Regions = regions
		l, err := n.Layout()
		require.NoError(t, err)
		g := l.Groups[0]
		used := make([]int, g.RowStride)
		for i, r := range regions {
			at := g.RegionOffsets[i]
			require.Zero(t, at%alignment(r.Bytes))
			for b := range r.Bytes {
				used[at+b]++
			}
		}
		for b, n := range used {
			if b < g.RowBytes {
				require.Equal(t, 1, n)
			} else {
				require.Zero(t, n)
			}
		}
		require.Zero(t, g.RowStride%64)
		require.Less(t, g.RowStride-g.RowBytes, 64)
		require.Equal(t, int64(n.ChunkTokens)*int64(g.RowStride), l.PayloadBytes)
		require.Zero(t, l.PaddedBytes%4096)
		require.Less(t, l.PaddedBytes-l.PayloadBytes, int64(4096))

		fp, err := n.Fingerprint()
		require.NoError(t, err)
		n.Groups[0].Regions = rapid.Permutation(regions).Draw(t, "other order")
		again, err := n.Fingerprint()
		require.NoError(t, err)
		require.Equal(t, fp, again)
	})
}

func FuzzParseNamespace(f *testing.F) {
	for _, g := range goldenNamespaces(f) {
		f.Add([]byte(g.Canonical))
	}
	f.Add([]byte(`{"format":2}`))
	f.Add([]byte(`{`))
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := ParseNamespace(b)
		if err != nil {
			return
		}
		again, err := n.Canonical()
		require.NoError(t, err)
		require.Equal(t, b, again)
		require.True(t, json.Valid(b))
		if l, err := n.Layout(); err == nil {
			require.Positive(t, l.PaddedBytes)
		} else {
			require.ErrorIs(t, err, ErrTooLarge)
		}
	})
}
