// Package chunk says what a chunk is: its key, the namespace in which its bytes
// mean something, the layout of its payload, the names of its files and the
// footer that makes a file prove what it holds.
//
// All of it is pure: no I/O, no shared state, every function may be called from
// any number of goroutines.
package chunk

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
)

// Key names one chunk: a hash over everything its bytes depend on, the
// fingerprint of its namespace and all tokens of the prefix included.
type Key [32]byte

// String gives the key as 64 lower case hex digits.
func (k Key) String() string { return hex.EncodeToString(k[:]) }

// ParseKey reads what String wrote, and nothing else.
func ParseKey(s string) (Key, bool) {
	var k Key
	ok := parseHex(k[:], s)
	return k, ok
}

// Fingerprint identifies a namespace: SHA-256 of its canonical JSON.
type Fingerprint [32]byte

// String gives the fingerprint as 64 lower case hex digits.
func (f Fingerprint) String() string { return hex.EncodeToString(f[:]) }

// ParseFingerprint reads what String wrote, and nothing else.
func ParseFingerprint(s string) (Fingerprint, bool) {
	var f Fingerprint
	ok := parseHex(f[:], s)
	return f, ok
}

// The domains keep a root from ever being equal to a chunk's key.
const (
	rootDomain  = "kvtier-key-1\x00"
	chunkDomain = "kvtier-chunk-1\x00"
)

// MaxChunkTokens bounds C.
const MaxChunkTokens = 1 << 20

// Root gives the parent of the first chunk of every prefix that shares the
// namespace and the prefix-wide extras. The order of prefix does not matter; it
// is not changed.
func Root(fp Fingerprint, prefix []Extra) (Key, error) {
	sorted, err := sortPrefix(prefix)
	if err != nil {
		return Key{}, err
	}
	b := make([]byte, 0, len(rootDomain)+len(fp)+4+len(sorted)*extraBytes)
	b = append(b, rootDomain...)
	b = append(b, fp[:]...)
	b = appendExtras(b, sorted)
	return sha256.Sum256(b), nil
}

// Next gives the key of the chunk that follows parent: tokens are exactly the C
// tokens of the chunk, extras those that touch it. The order of extras does not
// matter; it is not changed.
func Next(parent Key, tokens []uint32, extras []Extra) (Key, error) {
	if len(tokens) == 0 || len(tokens) > MaxChunkTokens {
		return Key{}, fmt.Errorf("%d tokens: %w", len(tokens), ErrTokens)
	}
	k, _, err := next(nil, parent, tokens, extras)
	return k, err
}

// next also hands back its buffer, so that a chain encodes all its chunks in one.
func next(buf []byte, parent Key, tokens []uint32, extras []Extra) (Key, []byte, error) {
	sorted, err := sortChunk(extras, len(tokens))
	if err != nil {
		return Key{}, buf, err
	}
	buf = append(buf[:0], chunkDomain...)
	buf = append(buf, parent[:]...)
	buf = binary.LittleEndian.AppendUint32(buf, uint32(len(tokens)))
	for _, t := range tokens {
		buf = binary.LittleEndian.AppendUint32(buf, t)
	}
	buf = appendExtras(buf, sorted)
	return sha256.Sum256(buf), buf, nil
}

// IndexedExtra is an extra of one chunk among those of a Chain call: Chunk 0 is
// the chunk of the first token handed over.
type IndexedExtra struct {
	Chunk int
	Extra
}

// Chain appends to dst the key of every full chunk of c tokens, the first of
// which follows parent. Tokens beyond the last full chunk, and extras of the
// chunk that they begin, are left for a later call. An item that touches several
// chunks is handed over once for each, with its offset to that chunk. On an error
// dst comes back unchanged.
func Chain(dst []Key, parent Key, c int, tokens []uint32, extras []IndexedExtra) ([]Key, error) {
	if c < 1 || c > MaxChunkTokens {
		return dst, fmt.Errorf("%d tokens a chunk: %w", c, ErrTokens)
	}
	n := len(tokens) / c
	byChunk, err := groupExtras(extras, (len(tokens)+c-1)/c)
	if err != nil {
		return dst, err
	}
	var buf []byte
	out := dst
	for i := range n {
		var mine []Extra
		if byChunk != nil {
			mine = byChunk[i]
		}
		parent, buf, err = next(buf, parent, tokens[i*c:(i+1)*c], mine)
		if err != nil {
			return dst, fmt.Errorf("chunk %d: %w", i, err)
		}
		out = append(out, parent)
	}
	return out, nil
}

// groupExtras gives the extras of each chunk, nil when there are none at all.
func groupExtras(extras []IndexedExtra, chunks int) (map[int][]Extra, error) {
	if len(extras) == 0 {
		return nil, nil
	}
	by := make(map[int][]Extra)
	for _, x := range extras {
		if x.Chunk < 0 || x.Chunk >= chunks {
			return nil, fmt.Errorf("chunk index %d of %d begun chunks: %w", x.Chunk, chunks, ErrExtra)
		}
		by[x.Chunk] = append(by[x.Chunk], x.Extra)
	}
	return by, nil
}

// parseHex fills dst from exactly 2*len(dst) lower case hex digits.
func parseHex(dst []byte, s string) bool {
	if len(s) != 2*len(dst) {
		return false
	}
	for i := range dst {
		hi, ok1 := hexDigit(s[2*i])
		lo, ok2 := hexDigit(s[2*i+1])
		if !ok1 || !ok2 {
			return false
		}
		dst[i] = hi<<4 | lo
	}
	return true
}

// hexDigit refuses upper case: one name, one spelling.
func hexDigit(c byte) (byte, bool) {
	switch {
	case c >= '0' && c <= '9':
		return c - '0', true
	case c >= 'a' && c <= 'f':
		return c - 'a' + 10, true
	}
	return 0, false
}
