package chunk

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"unicode/utf8"
)

const (
	// Format is the version of layout.json that this package writes.
	Format = 1
	// KeyScheme is the version of the key encoding that this package computes.
	KeyScheme = 1

	// EncodingRows says that a row is the bytes of one token, as the engine has them.
	EncodingRows = "rows"

	GroupFull = "full" // every token of the prefix has its row
	GroupBlob = "blob" // one region, one row: the caller's bytes, put and got whole

	KindFull = 1 // GroupFull in a footer
	KindBlob = 2 // GroupBlob in a footer

	MaxGroups    = 64
	maxRegions   = 1 << 16
	maxText      = 4096
	maxDigestHex = 128
	maxNamespace = 4 << 20 // what one message on the socket can carry
)

// Namespace is everything that must be equal for the bytes of two chunks to be
// interchangeable. Format and KeyScheme may be left 0, and Encoding empty:
// Normalize puts the present ones in.
type Namespace struct {
	Attention    string  `json:"attention"` // hex digest over all settings of attention that change KV
	ChunkTokens  int     `json:"chunk_tokens"`
	Draft        string  `json:"draft"`    // name of the draft model, or empty
	Encoding     string  `json:"encoding"` // EncodingRows, or the name of an opaque page format
	Format       int     `json:"format"`
	Groups       []Group `json:"groups"`
	KeyScheme    int     `json:"key_scheme"`
	KVDtype      string  `json:"kv_dtype"`
	KVScales     string  `json:"kv_scales"` // hex digest, or empty
	Model        string  `json:"model"`
	Quantisation string  `json:"quantisation"`
	Weights      string  `json:"weights"` // hex digest over the content of the weights
}

// Group is one KV group: layers that keep the same tokens in the same blocks.
type Group struct {
	Kind         string   `json:"kind"`
	Regions      []Region `json:"regions"`
	TokensPerRow int      `json:"tokens_per_row"` // 1; B where pages are opaque; C for a blob
}

// Region is one independently addressable piece of a row. Layer and Head are
// global numbers, -1 for none; Bytes is its width in a row.
type Region struct {
	Bytes     int    `json:"bytes"`
	Component string `json:"component"` // target or draft
	Head      int    `json:"head"`
	Layer     int    `json:"layer"`
	Name      string `json:"name"`
}

// Normalize fills in what may be left out, checks every field and puts the regions
// of each group in row order.
func (n *Namespace) Normalize() error {
	n.fill()
	if err := n.check(); err != nil {
		return err
	}
	for i := range n.Groups {
		g := &n.Groups[i]
		sorted := make([]Region, len(g.Regions))
		for to, from := range g.rowOrder() {
			sorted[to] = g.Regions[from]
		}
		g.Regions = sorted
	}
	return nil
}

// Canonical gives the bytes of layout.json. It does not change n, which need not
// be normalized.
func (n *Namespace) Canonical() ([]byte, error) {
	c := *n
	c.Groups = slices.Clone(n.Groups)
	if err := c.Normalize(); err != nil {
		return nil, err
	}
	return c.encode(), nil
}

// Fingerprint is SHA-256 of the canonical bytes.
func (n *Namespace) Fingerprint() (Fingerprint, error) {
	b, err := n.Canonical()
	if err != nil {
		return Fingerprint{}, err
	}
	return sha256.Sum256(b), nil
}

// ParseNamespace reads the bytes that Canonical gave. It takes nothing else: a file
// that says the same in other bytes would have another fingerprint.
// ErrNewerFormat tells that b is not damaged but from a later version.
func ParseNamespace(b []byte) (*Namespace, error) {
	if len(b) > maxNamespace {
		return nil, fmt.Errorf("%d bytes: %w", len(b), ErrNamespace)
	}
	var version struct {
		Format    int `json:"format"`
		KeyScheme int `json:"key_scheme"`
	}
	if err := json.Unmarshal(b, &version); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNamespace, err)
	}
	if version.Format > Format || version.KeyScheme > KeyScheme {
		return nil, fmt.Errorf("format %d, key scheme %d: %w", version.Format, version.KeyScheme, ErrNewerFormat)
	}
	var n Namespace
	if err := json.Unmarshal(b, &n); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNamespace, err)
	}
	again, err := n.Canonical()
	if err != nil {
		return nil, err
	}
	if !bytes.Equal(again, b) {
		return nil, fmt.Errorf("the JSON is not in canonical form: %w", ErrNamespace)
	}
	return &n, nil
}

func (n *Namespace) fill() {
	if n.Format == 0 {
		n.Format = Format
	}
	if n.KeyScheme == 0 {
		n.KeyScheme = KeyScheme
	}
	if n.Encoding == "" {
		n.Encoding = EncodingRows
	}
}

func (n *Namespace) check() error {
	if n.Format > Format || n.KeyScheme > KeyScheme {
		return fmt.Errorf("format %d, key scheme %d: %w", n.Format, n.KeyScheme, ErrNewerFormat)
	}
	if n.Format < 0 || n.KeyScheme < 0 {
		return fmt.Errorf("format and key_scheme must be positive: %w", ErrNamespace)
	}
	if n.ChunkTokens < 1 || n.ChunkTokens > MaxChunkTokens {
		return fmt.Errorf("chunk_tokens is %d, must be 1 to %d: %w", n.ChunkTokens, MaxChunkTokens, ErrNamespace)
	}
	if n.Model == "" {
		return fmt.Errorf("model is empty: %w", ErrNamespace)
	}
	for _, t := range []struct{ field, text string }{
		{"model", n.Model}, {"draft", n.Draft}, {"encoding", n.Encoding}, {"kv_dtype", n.KVDtype}, {"quantisation", n.Quantisation},
	} {
		if !validText(t.text) {
			return fmt.Errorf("%s must be UTF-8 of at most %d bytes: %w", t.field, maxText, ErrNamespace)
		}
	}
	for _, d := range []struct{ field, text string }{
		{"attention", n.Attention}, {"kv_scales", n.KVScales}, {"weights", n.Weights},
	} {
		if !validDigest(d.text) {
			return fmt.Errorf("%s must be empty or lower case hex: %w", d.field, ErrNamespace)
		}
	}
	if len(n.Groups) < 1 || len(n.Groups) > MaxGroups {
		return fmt.Errorf("%d groups, must be 1 to %d: %w", len(n.Groups), MaxGroups, ErrNamespace)
	}
	for i := range n.Groups {
		if err := n.checkGroup(&n.Groups[i]); err != nil {
			return fmt.Errorf("group %d: %w", i, err)
		}
	}
	return nil
}

func (n *Namespace) checkGroup(g *Group) error {
	switch g.Kind {
	case GroupFull:
		if g.TokensPerRow < 1 || n.ChunkTokens%g.TokensPerRow != 0 {
			return fmt.Errorf("tokens_per_row %d must divide chunk_tokens %d: %w", g.TokensPerRow, n.ChunkTokens, ErrNamespace)
		}
		if g.TokensPerRow > 1 && (n.Encoding == EncodingRows || n.Encoding == "") {
			return fmt.Errorf("rows of %d tokens need an encoding that names the page format: %w", g.TokensPerRow, ErrNamespace)
		}
	case GroupBlob:
		if len(n.Groups) != 1 || len(g.Regions) != 1 || g.TokensPerRow != n.ChunkTokens {
			return fmt.Errorf("a blob is one group with one region and tokens_per_row = chunk_tokens: %w", ErrNamespace)
		}
	default:
		return fmt.Errorf("kind %q is not known: %w", g.Kind, ErrNamespace)
	}
	if len(g.Regions) < 1 || len(g.Regions) > maxRegions {
		return fmt.Errorf("%d regions, must be 1 to %d: %w", len(g.Regions), maxRegions, ErrNamespace)
	}
	type place struct {
		component, name string
		layer, head     int
	}
	seen := make(map[place]struct{}, len(g.Regions))
	for _, r := range g.Regions {
		if r.Bytes < 1 || r.Bytes > math.MaxInt32 {
			return fmt.Errorf("region %q of layer %d has %d bytes: %w", r.Name, r.Layer, r.Bytes, ErrNamespace)
		}
		if componentRank(r.Component) < 0 {
			return fmt.Errorf("region %q: component %q is not target or draft: %w", r.Name, r.Component, ErrNamespace)
		}
		if r.Layer < -1 || r.Layer > math.MaxInt32 || r.Head < -1 || r.Head > math.MaxInt32 {
			return fmt.Errorf("region %q: layer %d, head %d must be -1 or a number from 0: %w", r.Name, r.Layer, r.Head, ErrNamespace)
		}
		if r.Name == "" || !validText(r.Name) {
			return fmt.Errorf("a region of layer %d has no valid name: %w", r.Layer, ErrNamespace)
		}
		p := place{r.Component, r.Name, r.Layer, r.Head}
		if _, twice := seen[p]; twice {
			return fmt.Errorf("region %q of layer %d, head %d is there twice: %w", r.Name, r.Layer, r.Head, ErrNamespace)
		}
		seen[p] = struct{}{}
	}
	return nil
}

// rowOrder gives the indices of the regions in the order they have in a row. By
// alignment class first: wide regions keep 16 byte alignment with no padding
// between regions.
func (g *Group) rowOrder() []int {
	order := make([]int, len(g.Regions))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(i, j int) int {
		a, b := &g.Regions[i], &g.Regions[j]
		return cmp.Or(
			cmp.Compare(alignment(b.Bytes), alignment(a.Bytes)),
			cmp.Compare(componentRank(a.Component), componentRank(b.Component)),
			cmp.Compare(a.Layer, b.Layer),
			cmp.Compare(a.Name, b.Name),
			cmp.Compare(a.Head, b.Head),
		)
	})
	return order
}

// alignment is the largest power of two up to 16 that divides a width.
func alignment(width int) int { return min(width&-width, 16) }

func componentRank(c string) int { return slices.Index([]string{"target", "draft"}, c) }

func kindNumber(kind string) (uint32, bool) {
	switch kind {
	case GroupFull:
		return KindFull, true
	case GroupBlob:
		return KindBlob, true
	}
	return 0, false
}

func validText(s string) bool { return len(s) <= maxText && utf8.ValidString(s) }

func validDigest(s string) bool {
	if len(s) > maxDigestHex || len(s)%2 != 0 {
		return false
	}
	for i := range len(s) {
		if _, ok := hexDigit(s[i]); !ok {
			return false
		}
	}
	return true
}

// encode writes the canonical JSON. It does so by hand because the fingerprint
// hangs on every byte: encoding/json escapes more than it has to, and may change.
func (n *Namespace) encode() []byte {
	b := make([]byte, 0, 512+128*len(n.Groups[0].Regions))
	b = appendText(append(b, `{"attention":`...), n.Attention)
	b = appendNumber(append(b, `,"chunk_tokens":`...), n.ChunkTokens)
	b = appendText(append(b, `,"draft":`...), n.Draft)
	b = appendText(append(b, `,"encoding":`...), n.Encoding)
	b = appendNumber(append(b, `,"format":`...), n.Format)
	b = append(b, `,"groups":[`...)
	for i, g := range n.Groups {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendText(append(b, `{"kind":`...), g.Kind)
		b = append(b, `,"regions":[`...)
		for j, r := range g.Regions {
			if j > 0 {
				b = append(b, ',')
			}
			b = appendNumber(append(b, `{"bytes":`...), r.Bytes)
			b = appendText(append(b, `,"component":`...), r.Component)
			b = appendNumber(append(b, `,"head":`...), r.Head)
			b = appendNumber(append(b, `,"layer":`...), r.Layer)
			b = appendText(append(b, `,"name":`...), r.Name)
			b = append(b, '}')
		}
		b = appendNumber(append(b, `],"tokens_per_row":`...), g.TokensPerRow)
		b = append(b, '}')
	}
	b = appendNumber(append(b, `],"key_scheme":`...), n.KeyScheme)
	b = appendText(append(b, `,"kv_dtype":`...), n.KVDtype)
	b = appendText(append(b, `,"kv_scales":`...), n.KVScales)
	b = appendText(append(b, `,"model":`...), n.Model)
	b = appendText(append(b, `,"quantisation":`...), n.Quantisation)
	b = appendText(append(b, `,"weights":`...), n.Weights)
	return append(b, '}')
}

func appendNumber(b []byte, v int) []byte { return strconv.AppendInt(b, int64(v), 10) }

// appendText writes a JSON string that escapes only what JSON demands, with the
// short escape where there is one.
func appendText(b []byte, s string) []byte {
	const digits = "0123456789abcdef"
	b = append(b, '"')
	for i := range len(s) {
		switch c := s[i]; {
		case c == '"' || c == '\\':
			b = append(b, '\\', c)
		case c == '\b':
			b = append(b, `\b`...)
		case c == '\f':
			b = append(b, `\f`...)
		case c == '\n':
			b = append(b, `\n`...)
		case c == '\r':
			b = append(b, `\r`...)
		case c == '\t':
			b = append(b, `\t`...)
		case c < 0x20:
			b = append(b, '\\', 'u', '0', '0', digits[c>>4], digits[c&15])
		default:
			b = append(b, c)
		}
	}
	return append(b, '"')
}
