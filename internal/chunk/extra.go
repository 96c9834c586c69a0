package chunk

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
)

// Kinds of extras. Below 16 they hold for a whole prefix, from 16 on for the
// chunks they touch.
const (
	ExtraLoRA         = 1  // 32 bytes, SHA-256 over the adapter's content
	ExtraSalt         = 2  // 32 bytes, Digest of the salt; no extra for an empty salt
	ExtraEpoch        = 3  // 16 random bytes
	ExtraTag          = 4  // 32 bytes, Digest of the caller's tag
	ExtraMultimodal   = 16 // 32 bytes, SHA-256 of modality, identifier of the content, and length
	ExtraPromptEmbeds = 17 // 32 bytes, digest over the chunk's range of embeddings
	ExtraSuccessor    = 18 // 4 bytes, the token after the chunk, little endian
)

// extraBytes is an upper bound of one encoded extra.
const extraBytes = 2 + 2 + 4 + 32

// Extra is something besides tokens that KV bytes depend on. Offset counts tokens
// from the chunk's start to where the item starts: negative when it began in an
// earlier chunk, C for the successor, 0 for what holds for a whole prefix.
type Extra struct {
	Kind   uint16
	Offset int32
	Bytes  []byte
}

// Digest is SHA-256 of the UTF-8 bytes of s: how salts and tags become extras.
func Digest(s string) [32]byte { return sha256.Sum256([]byte(s)) }

// Successor makes the extra for the token that follows a chunk of c tokens.
func Successor(c int, token uint32) Extra {
	return Extra{Kind: ExtraSuccessor, Offset: int32(c), Bytes: binary.LittleEndian.AppendUint32(nil, token)}
}

// sortPrefix checks the extras of a prefix and gives them in canonical order.
func sortPrefix(prefix []Extra) ([]Extra, error) {
	if len(prefix) == 0 {
		return nil, nil
	}
	sorted := slices.Clone(prefix)
	slices.SortStableFunc(sorted, func(a, b Extra) int { return cmp.Compare(a.Kind, b.Kind) })
	for i, x := range sorted {
		want := 32
		switch x.Kind {
		case ExtraLoRA, ExtraSalt, ExtraTag:
		case ExtraEpoch:
			want = 16
		default:
			return nil, fmt.Errorf("kind %d does not hold for a prefix: %w", x.Kind, ErrExtra)
		}
		if len(x.Bytes) != want {
			return nil, fmt.Errorf("kind %d has %d bytes, needs %d: %w", x.Kind, len(x.Bytes), want, ErrExtra)
		}
		if x.Offset != 0 {
			return nil, fmt.Errorf("kind %d has offset %d, needs 0: %w", x.Kind, x.Offset, ErrExtra)
		}
		if i > 0 && sorted[i-1].Kind == x.Kind {
			return nil, fmt.Errorf("kind %d is there twice: %w", x.Kind, ErrExtra)
		}
	}
	return sorted, nil
}

// sortChunk checks the extras of a chunk of c tokens and gives them in canonical
// order. Two items can begin at one token (sound and picture of a film), so equal
// (offset, kind) is ordered by content: whatever order the host found them in, the
// key is the same.
func sortChunk(extras []Extra, c int) ([]Extra, error) {
	if len(extras) == 0 {
		return nil, nil
	}
	sorted := slices.Clone(extras)
	slices.SortStableFunc(sorted, func(a, b Extra) int {
		return cmp.Or(cmp.Compare(a.Offset, b.Offset), cmp.Compare(a.Kind, b.Kind), bytes.Compare(a.Bytes, b.Bytes))
	})
	var embeds, successors int
	for _, x := range sorted {
		want := 32
		switch x.Kind {
		case ExtraMultimodal:
		case ExtraPromptEmbeds:
			embeds++
		case ExtraSuccessor:
			want = 4
			successors++
			if int(x.Offset) != c {
				return nil, fmt.Errorf("successor has offset %d, needs the chunk's length %d: %w", x.Offset, c, ErrExtra)
			}
		default:
			return nil, fmt.Errorf("kind %d does not hold for a chunk: %w", x.Kind, ErrExtra)
		}
		if len(x.Bytes) != want {
			return nil, fmt.Errorf("kind %d has %d bytes, needs %d: %w", x.Kind, len(x.Bytes), want, ErrExtra)
		}
		if x.Kind != ExtraSuccessor && int(x.Offset) >= c {
			return nil, fmt.Errorf("kind %d begins at %d, after the chunk of %d tokens: %w", x.Kind, x.Offset, c, ErrExtra)
		}
	}
	if embeds > 1 || successors > 1 {
		return nil, fmt.Errorf("a chunk has one successor and one digest of prompt embeddings: %w", ErrExtra)
	}
	return sorted, nil
}

// appendExtras writes the count and the extras, already in canonical order.
func appendExtras(b []byte, sorted []Extra) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(len(sorted)))
	for _, x := range sorted {
		b = binary.LittleEndian.AppendUint16(b, x.Kind)
		b = binary.LittleEndian.AppendUint16(b, uint16(len(x.Bytes)))
		b = binary.LittleEndian.AppendUint32(b, uint32(x.Offset))
		b = append(b, x.Bytes...)
	}
	return b
}
