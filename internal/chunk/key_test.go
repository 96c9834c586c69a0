package chunk

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"encoding/json"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

type vectorExtra struct {
	Chunk  int
	Kind   uint16
	Offset int32
	Bytes  string
}

type vectorCase struct {
	Name        string
	Fingerprint string
	Prefix      []vectorExtra
	ChunkTokens int `json:"chunk_tokens"`
	Tokens      []uint32
	Extras      []vectorExtra
	Root        string
	Keys        []string
}

type vectors struct {
	Cases   []vectorCase
	Digests []struct{ Name, Text, SHA256 string }
}

func readVectors(t *testing.T) *vectors {
	t.Helper()
	b, err := os.ReadFile("testdata/keys.json")
	require.NoError(t, err)
	var v vectors
	require.NoError(t, json.Unmarshal(b, &v))
	require.GreaterOrEqual(t, len(v.Cases), 18)
	return &v
}

func unhex(t *testing.T, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	require.NoError(t, err)
	return b
}

func (x vectorExtra) extra(t *testing.T) Extra {
	return Extra{Kind: x.Kind, Offset: x.Offset, Bytes: unhex(t, x.Bytes)}
}

func (c *vectorCase) inputs(t *testing.T) (prefix []Extra, extras []IndexedExtra) {
	for _, x := range c.Prefix {
		prefix = append(prefix, x.extra(t))
	}
	for _, x := range c.Extras {
		extras = append(extras, IndexedExtra{Chunk: x.Chunk, Extra: x.extra(t)})
	}
	return prefix, extras
}

func TestKeysMatchTheSecondImplementation(t *testing.T) {
	for _, c := range readVectors(t).Cases {
		t.Run(c.Name, func(t *testing.T) {
			fp, ok := ParseFingerprint(c.Fingerprint)
			require.True(t, ok)
			prefix, extras := c.inputs(t)
			root, err := Root(fp, prefix)
			require.NoError(t, err)
			require.Equal(t, c.Root, root.String())

			keys, err := Chain([]Key{{1}}, root, c.ChunkTokens, c.Tokens, extras)
			require.NoError(t, err)
			require.Equal(t, Key{1}, keys[0], "what was in dst stays")
			var got []string
			for _, k := range keys[1:] {
				got = append(got, k.String())
			}
			require.Equal(t, c.Keys, append([]string{}, got...))

			// The order in which a host finds extras is no property of the chunk.
			slices.Reverse(prefix)
			slices.Reverse(extras)
			again, err := Root(fp, prefix)
			require.NoError(t, err)
			require.Equal(t, root, again)
			other, err := Chain(nil, root, c.ChunkTokens, c.Tokens, extras)
			require.NoError(t, err)
			require.Equal(t, keys[1:], append([]Key{}, other...))
		})
	}
}

func TestDigestsMatchTheSecondImplementation(t *testing.T) {
	for _, d := range readVectors(t).Digests {
		got := Digest(d.Text)
		require.Equal(t, d.SHA256, hex.EncodeToString(got[:]), d.Name)
	}
}

// The flat form is what C reads; it must say the same as the JSON.
func TestFlatVectorsEqualTheJSON(t *testing.T) {
	b, err := os.ReadFile("testdata/keys.txt")
	require.NoError(t, err)
	var got []vectorCase
	var cur *vectorCase
	num := func(s string) int64 {
		v, err := strconv.ParseInt(s, 10, 64)
		require.NoError(t, err)
		return v
	}
	lines := bufio.NewScanner(bytes.NewReader(b))
	for lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), " ")
		f := strings.Fields(value)
		switch name {
		case "case":
			got = append(got, vectorCase{Name: value, Prefix: []vectorExtra{}, Extras: []vectorExtra{}, Tokens: []uint32{}, Keys: []string{}})
			cur = &got[len(got)-1]
		case "fingerprint":
			cur.Fingerprint = value
		case "prefix":
			cur.Prefix = append(cur.Prefix, vectorExtra{Kind: uint16(num(f[0])), Offset: int32(num(f[1])), Bytes: f[2]})
		case "chunk_tokens":
			cur.ChunkTokens = int(num(value))
		case "tokens":
			for _, s := range f {
				cur.Tokens = append(cur.Tokens, uint32(num(s)))
			}
		case "extra":
			cur.Extras = append(cur.Extras, vectorExtra{int(num(f[0])), uint16(num(f[1])), int32(num(f[2])), f[3]})
		case "root":
			cur.Root = value
		case "key":
			cur.Keys = append(cur.Keys, value)
		}
	}
	require.Equal(t, readVectors(t).Cases, got)
}

// However the tokens come in, in one call or many, the keys are the same.
func TestChainGrowsInAnySteps(t *testing.T) {
	const c = 8
	tokens := make([]uint32, 10*c+3)
	for i := range tokens {
		tokens[i] = uint32(i * i)
	}
	root, err := Root(Fingerprint{7}, nil)
	require.NoError(t, err)
	whole, err := Chain(nil, root, c, tokens, nil)
	require.NoError(t, err)
	require.Len(t, whole, 10)

	r := rand.New(rand.NewPCG(1, 2))
	var grown []Key
	parent := root
	for known := 0; known < len(tokens); {
		known = min(len(tokens), known+1+r.IntN(2*c))
		grown, err = Chain(grown, parent, c, tokens[len(grown)*c:known], nil)
		require.NoError(t, err)
		if len(grown) > 0 {
			parent = grown[len(grown)-1]
		}
	}
	require.Equal(t, whole, grown)

	for i := range whole {
		parent := root
		if i > 0 {
			parent = whole[i-1]
		}
		k, err := Next(parent, tokens[i*c:(i+1)*c], nil)
		require.NoError(t, err)
		require.Equal(t, whole[i], k)
	}
}

func TestSuccessorIsWhatTheVectorsSay(t *testing.T) {
	k, err := Next(Key{}, []uint32{1, 2}, []Extra{Successor(2, 0x01020304)})
	require.NoError(t, err)
	want, err := Next(Key{}, []uint32{1, 2}, []Extra{{Kind: ExtraSuccessor, Offset: 2, Bytes: []byte{4, 3, 2, 1}}})
	require.NoError(t, err)
	require.Equal(t, want, k)
	other, err := Next(Key{}, []uint32{1, 2}, []Extra{Successor(2, 5)})
	require.NoError(t, err)
	require.NotEqual(t, k, other)
}

func TestExtrasAreRefused(t *testing.T) {
	d := make([]byte, 32)
	for name, prefix := range map[string][]Extra{
		"kind 0":           {{Kind: 0, Bytes: d}},
		"kind of a chunk":  {{Kind: ExtraMultimodal, Bytes: d}},
		"unknown kind":     {{Kind: 5, Bytes: d}},
		"short salt":       {{Kind: ExtraSalt, Bytes: d[:31]}},
		"no bytes":         {{Kind: ExtraLoRA}},
		"long epoch":       {{Kind: ExtraEpoch, Bytes: d}},
		"offset":           {{Kind: ExtraTag, Offset: 1, Bytes: d}},
		"salt twice":       {{Kind: ExtraSalt, Bytes: d}, {Kind: ExtraTag, Bytes: d}, {Kind: ExtraSalt, Bytes: d}},
		"salt twice, same": {{Kind: ExtraSalt, Bytes: d}, {Kind: ExtraSalt, Bytes: d}},
	} {
		_, err := Root(Fingerprint{}, prefix)
		require.ErrorIs(t, err, ErrExtra, name)
	}
	tokens := make([]uint32, 4)
	for name, extras := range map[string][]Extra{
		"kind of a prefix":    {{Kind: ExtraSalt, Bytes: d}},
		"unknown kind":        {{Kind: 19, Bytes: d}},
		"short item":          {{Kind: ExtraMultimodal, Bytes: d[:4]}},
		"item after chunk":    {{Kind: ExtraMultimodal, Offset: 4, Bytes: d}},
		"long successor":      {{Kind: ExtraSuccessor, Offset: 4, Bytes: d}},
		"successor elsewhere": {{Kind: ExtraSuccessor, Offset: 0, Bytes: d[:4]}},
		"two successors":      {Successor(4, 1), Successor(4, 2)},
		"two embeds":          {{Kind: ExtraPromptEmbeds, Bytes: d}, {Kind: ExtraPromptEmbeds, Offset: 1, Bytes: d}},
	} {
		_, err := Next(Key{}, tokens, extras)
		require.ErrorIs(t, err, ErrExtra, name)
		var indexed []IndexedExtra
		for _, x := range extras {
			indexed = append(indexed, IndexedExtra{Chunk: 1, Extra: x})
		}
		got, err := Chain([]Key{{9}}, Key{}, 4, make([]uint32, 8), indexed)
		require.ErrorIs(t, err, ErrExtra, name)
		require.Equal(t, []Key{{9}}, got, "dst is unchanged after an error")
	}
	_, err := Chain(nil, Key{}, 4, make([]uint32, 8), []IndexedExtra{{Chunk: 2, Extra: Successor(4, 1)}})
	require.ErrorIs(t, err, ErrExtra)
	_, err = Chain(nil, Key{}, 4, make([]uint32, 8), []IndexedExtra{{Chunk: -1, Extra: Successor(4, 1)}})
	require.ErrorIs(t, err, ErrExtra)
	_, err = Chain(nil, Key{}, 4, make([]uint32, 9), []IndexedExtra{{Chunk: 2, Extra: Extra{Kind: ExtraMultimodal, Bytes: d}}})
	require.NoError(t, err, "an extra of the chunk that is only begun waits")
}

func TestChunkLengthIsChecked(t *testing.T) {
	_, err := Next(Key{}, nil, nil)
	require.ErrorIs(t, err, ErrTokens)
	_, err = Next(Key{}, make([]uint32, MaxChunkTokens+1), nil)
	require.ErrorIs(t, err, ErrTokens)
	_, err = Chain(nil, Key{}, 0, nil, nil)
	require.ErrorIs(t, err, ErrTokens)
	_, err = Chain(nil, Key{}, MaxChunkTokens+1, nil, nil)
	require.ErrorIs(t, err, ErrTokens)
}

func TestChainDoesNotAllocatePerChunk(t *testing.T) {
	tokens := make([]uint32, 64*256)
	dst := make([]Key, 0, 64)
	n := testing.AllocsPerRun(20, func() {
		if _, err := Chain(dst, Key{}, 256, tokens, nil); err != nil {
			t.Fatal(err)
		}
	})
	require.LessOrEqual(t, n, 12.0, "the buffer grows a few times, whatever the number of chunks")
}

func BenchmarkChain(b *testing.B) {
	tokens := make([]uint32, 64*256)
	dst := make([]Key, 0, 64)
	b.SetBytes(int64(len(tokens)) * 4)
	for b.Loop() {
		if _, err := Chain(dst, Key{}, 256, tokens, nil); err != nil {
			b.Fatal(err)
		}
	}
}
