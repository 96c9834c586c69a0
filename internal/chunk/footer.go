package chunk

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"

	"github.com/zeebo/xxh3"
)

const (
	// FooterBytes is the size of a footer: one page behind the padded payload.
	FooterBytes = 4096
	// MaxProvenance bounds the provenance text of a footer.
	MaxProvenance = 2048

	footerMajor = 1
	footerMinor = 0
	hashXXH3    = 1
	footerMagic = "KVTCHNK1"
)

// Where the fields of a footer lie.
const (
	offMagic      = 0
	offMajor      = 8
	offMinor      = 10
	offSize       = 12
	offKey        = 16
	offPrint      = 48
	offPayload    = 80
	offPadded     = 88
	offTokens     = 96
	offOrdinal    = 100
	offFlags      = 104
	offHashKind   = 108
	offHash       = 112
	offParent     = 128
	offCreated    = 160
	offSession    = 168
	offGroupCount = 184
	offProvLen    = 188
	offGroups     = 256
	offProvenance = 1280
	offFooterHash = 4080
	groupBytes    = 16
)

// FooterGroup is one KV group as a footer records it.
type FooterGroup struct {
	Rows         uint32
	RowStride    uint32
	TokensPerRow uint32
	Kind         uint32
}

// Footer is the last page of a chunk file: what the file claims to hold, and the
// hash that proves it.
type Footer struct {
	Minor        uint16 // as read; Encode writes the minor version of this package
	Key          Key
	Fingerprint  Fingerprint
	PayloadBytes int64
	PaddedBytes  int64
	ChunkTokens  uint32
	Ordinal      uint32
	Flags        uint32
	Hash         [16]byte // of all PaddedBytes, taken when the chunk was published in DRAM
	Parent       Key      // the root for ordinal 0
	Created      int64    // Unix nanoseconds
	Session      uint64   // of the leader that wrote it
	Groups       []FooterGroup
	Provenance   []byte // JSON for people, at most MaxProvenance bytes
}

// Footer gives a footer with the lengths and groups of this layout; the caller adds
// what belongs to the one chunk.
func (l *Layout) Footer() *Footer {
	f := &Footer{
		PayloadBytes: l.PayloadBytes,
		PaddedBytes:  l.PaddedBytes,
		ChunkTokens:  uint32(l.ChunkTokens),
		Groups:       make([]FooterGroup, len(l.Groups)),
	}
	for i := range l.Groups {
		f.Groups[i] = l.Groups[i].footer()
	}
	return f
}

func (g *GroupLayout) footer() FooterGroup {
	return FooterGroup{Rows: uint32(g.Rows), RowStride: uint32(g.RowStride), TokensPerRow: uint32(g.TokensPerRow), Kind: g.Kind}
}

// Encode fills dst, which must be FooterBytes long, with the footer and its hash.
func (f *Footer) Encode(dst []byte) error {
	if len(dst) != FooterBytes {
		return fmt.Errorf("%d bytes: %w", len(dst), ErrFooterSize)
	}
	if err := f.checkFields(); err != nil {
		return err
	}
	if len(f.Provenance) > 0 && !json.Valid(f.Provenance) {
		return fmt.Errorf("provenance is not JSON: %w", ErrFooterField)
	}
	clear(dst)
	le := binary.LittleEndian
	copy(dst[offMagic:], footerMagic)
	le.PutUint16(dst[offMajor:], footerMajor)
	le.PutUint16(dst[offMinor:], footerMinor)
	le.PutUint32(dst[offSize:], FooterBytes)
	copy(dst[offKey:], f.Key[:])
	copy(dst[offPrint:], f.Fingerprint[:])
	le.PutUint64(dst[offPayload:], uint64(f.PayloadBytes))
	le.PutUint64(dst[offPadded:], uint64(f.PaddedBytes))
	le.PutUint32(dst[offTokens:], f.ChunkTokens)
	le.PutUint32(dst[offOrdinal:], f.Ordinal)
	le.PutUint32(dst[offFlags:], f.Flags)
	dst[offHashKind] = hashXXH3
	copy(dst[offHash:], f.Hash[:])
	copy(dst[offParent:], f.Parent[:])
	le.PutUint64(dst[offCreated:], uint64(f.Created))
	le.PutUint64(dst[offSession:], f.Session)
	le.PutUint32(dst[offGroupCount:], uint32(len(f.Groups)))
	le.PutUint32(dst[offProvLen:], uint32(len(f.Provenance)))
	for i, g := range f.Groups {
		b := dst[offGroups+i*groupBytes:]
		le.PutUint32(b, g.Rows)
		le.PutUint32(b[4:], g.RowStride)
		le.PutUint32(b[8:], g.TokensPerRow)
		le.PutUint32(b[12:], g.Kind)
	}
	copy(dst[offProvenance:], f.Provenance)
	h := HashPayload(dst[:offFooterHash])
	copy(dst[offFooterHash:], h[:])
	return nil
}

// DecodeFooter reads a footer and checks what it can without knowing what should be
// there: hash, magic, major version, ranges, in this order. The result shares
// nothing with b.
func DecodeFooter(b []byte) (*Footer, error) {
	if len(b) != FooterBytes {
		return nil, fmt.Errorf("%d bytes: %w", len(b), ErrFooterSize)
	}
	h := HashPayload(b[:offFooterHash])
	if !bytes.Equal(h[:], b[offFooterHash:]) {
		return nil, ErrFooterHash
	}
	if string(b[offMagic:offMagic+len(footerMagic)]) != footerMagic {
		return nil, ErrMagic
	}
	le := binary.LittleEndian
	if major := le.Uint16(b[offMajor:]); major > footerMajor {
		return nil, fmt.Errorf("major %d: %w", major, ErrNewerMajor)
	} else if major < footerMajor {
		return nil, fmt.Errorf("major %d: %w", major, ErrFooterField)
	}
	if n := le.Uint32(b[offSize:]); n != FooterBytes {
		return nil, fmt.Errorf("footer size %d: %w", n, ErrFooterField)
	}
	if b[offHashKind] != hashXXH3 {
		return nil, fmt.Errorf("hash kind %d: %w", b[offHashKind], ErrFooterField)
	}
	groups, prov := le.Uint32(b[offGroupCount:]), le.Uint32(b[offProvLen:])
	if groups < 1 || groups > MaxGroups {
		return nil, fmt.Errorf("%d groups: %w", groups, ErrFooterField)
	}
	if prov > MaxProvenance {
		return nil, fmt.Errorf("%d bytes of provenance: %w", prov, ErrFooterField)
	}
	f := &Footer{
		Minor:        le.Uint16(b[offMinor:]),
		PayloadBytes: int64(le.Uint64(b[offPayload:])),
		PaddedBytes:  int64(le.Uint64(b[offPadded:])),
		ChunkTokens:  le.Uint32(b[offTokens:]),
		Ordinal:      le.Uint32(b[offOrdinal:]),
		Flags:        le.Uint32(b[offFlags:]),
		Created:      int64(le.Uint64(b[offCreated:])),
		Session:      le.Uint64(b[offSession:]),
		Groups:       make([]FooterGroup, groups),
		Provenance:   bytes.Clone(b[offProvenance : offProvenance+prov]),
	}
	copy(f.Key[:], b[offKey:])
	copy(f.Fingerprint[:], b[offPrint:])
	copy(f.Hash[:], b[offHash:])
	copy(f.Parent[:], b[offParent:])
	for i := range f.Groups {
		g := b[offGroups+i*groupBytes:]
		f.Groups[i] = FooterGroup{Rows: le.Uint32(g), RowStride: le.Uint32(g[4:]), TokensPerRow: le.Uint32(g[8:]), Kind: le.Uint32(g[12:])}
	}
	if err := f.checkFields(); err != nil {
		return nil, err
	}
	return f, nil
}

func (f *Footer) checkFields() error {
	if f.PayloadBytes < 1 || f.PaddedBytes < f.PayloadBytes || f.PaddedBytes-f.PayloadBytes >= pageAlign || f.PaddedBytes%pageAlign != 0 {
		return fmt.Errorf("payload %d, padded %d: %w", f.PayloadBytes, f.PaddedBytes, ErrFooterField)
	}
	if len(f.Groups) < 1 || len(f.Groups) > MaxGroups {
		return fmt.Errorf("%d groups: %w", len(f.Groups), ErrFooterField)
	}
	if len(f.Provenance) > MaxProvenance {
		return fmt.Errorf("%d bytes of provenance, shorten it to %d: %w", len(f.Provenance), MaxProvenance, ErrFooterField)
	}
	return nil
}

// Check compares a footer with what a reader expects to find: the key, the
// namespace, the lengths, the groups, in this order. The payload's hash is the
// reader's to check.
func (f *Footer) Check(k Key, fp Fingerprint, l *Layout) error {
	if f.Key != k {
		return fmt.Errorf("%v: %w", f.Key, ErrKey)
	}
	if f.Fingerprint != fp {
		return fmt.Errorf("%v: %w", f.Fingerprint, ErrFingerprint)
	}
	if f.PayloadBytes != l.PayloadBytes || f.PaddedBytes != l.PaddedBytes || int64(f.ChunkTokens) != int64(l.ChunkTokens) {
		return fmt.Errorf("payload %d, padded %d, tokens %d: %w", f.PayloadBytes, f.PaddedBytes, f.ChunkTokens, ErrLengths)
	}
	if len(f.Groups) != len(l.Groups) {
		return fmt.Errorf("%d groups: %w", len(f.Groups), ErrGroups)
	}
	for i := range f.Groups {
		if f.Groups[i] != l.Groups[i].footer() {
			return fmt.Errorf("group %d: %w", i, ErrGroups)
		}
	}
	return nil
}

// HashPayload is XXH3-128 as one little endian number of 16 bytes.
func HashPayload(b []byte) [16]byte {
	var out [16]byte
	h := xxh3.Hash128(b)
	binary.LittleEndian.PutUint64(out[:], h.Lo)
	binary.LittleEndian.PutUint64(out[8:], h.Hi)
	return out
}
