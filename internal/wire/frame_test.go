package wire

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func goldenFrames() map[string]any {
	return map[string]any{
		"hello":   &Hello{Protocol: 1, Features: []string{}, Group: "engine-0", Ranks: 4, Rank: 2, Coordinator: true, PID: 42},
		"welcome": &Welcome{Session: 1<<64 - 1, Member: 3, Protocol: 1},
		"declare": &Declare{
			Identity:    Identity{Model: "org/model <x>", Attention: "aa", Encoding: "rows", KVDtype: "bf16", Weights: "bb", MemoryOnly: true},
			ChunkTokens: 256, BlockTokens: 64, DCP: 4, Interleave: 16, DCPRank: 2,
			Groups:     []DeclaredGroup{{Kind: "full", TokensPerRow: 1, Regions: []DeclaredRegion{{Name: "kv", Component: "target", Layer: 3, Head: -1, Bytes: 656, Replicated: true}}}},
			Provenance: map[string]string{"engine": "1.2"},
		},
		"accept": &Accept{
			Namespace: json.RawMessage(`{"model":"<&>"}`), Fingerprint: "ff", SlotBytes: 1 << 40, Slots: 10,
			ChunkTokens: 256, BlockTokens: 64, DCP: 4, Interleave: 16, DCPRank: 2,
			Columns: [][]AcceptedRegion{{{Offset: 0, Writes: true}, {Offset: 656}}}, DiskEnabled: true, DiskBytesCap: 1 << 37, DRAMBytes: 1 << 34,
		},
		"refuse":      &Refuse{Reason: "two ranks 1", Final: true},
		"reset":       &Reset{Epoch: []byte("0123456789abcdef")},
		"stats":       &StatsRequest{},
		"stats_reply": &StatsReply{JSON: json.RawMessage(`{"hits":1}`)},
		"goodbye":     &Goodbye{},
	}
}

// encodeFrame encodes as the socket does.
func encodeFrame(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	err := enc.Encode(v)
	return bytes.TrimSpace(b.Bytes()), err
}

func TestGoldenFrames(t *testing.T) {
	for name, v := range goldenFrames() {
		b, err := encodeFrame(v)
		require.NoError(t, err, name)
		path := filepath.Join("testdata", "frame_"+name+".json")
		if *update {
			require.NoError(t, os.WriteFile(path, append(b, '\n'), 0o644))
		}
		want, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Equal(t, string(want), string(b)+"\n")
		back, err := ParseFrame(b)
		require.NoError(t, err, name)
		require.Equal(t, v, back, name)
	}
}

// The fingerprint of a namespace is a hash over its bytes, so they must arrive
// as they were, also what HTML would escape.
func TestRawJSONKeepsItsBytes(t *testing.T) {
	raw := "{\"model\":\"<&>\u2028\"}"
	b, err := encodeFrame(&Accept{Namespace: json.RawMessage(raw)})
	require.NoError(t, err)
	v, err := ParseFrame(b)
	require.NoError(t, err)
	require.Equal(t, raw, string(v.(*Accept).Namespace))
}

func TestFramesRefused(t *testing.T) {
	for _, text := range []string{
		``, `null`, `[]`, `7`, `{}`, `{"type":7}`, `{"type":"nobody"}`, `{"type":"hello"`,
		`{"type":"hello","ranks":"4"}`, `{"type":"hello","ranks":1e99}`, `{"type":"welcome","session":7}`,
		`{"type":"welcome","session":"-1"}`, `{"type":"reset","epoch":"***"}`,
	} {
		_, err := ParseFrame([]byte(text))
		require.ErrorIs(t, err, ErrMalformed, text)
	}
}

func TestUnknownMembersAreIgnored(t *testing.T) {
	v, err := ParseFrame([]byte(`{"type":"goodbye","reason":"later version"}`))
	require.NoError(t, err)
	require.Equal(t, &Goodbye{}, v)
}

func FuzzParseFrame(f *testing.F) {
	for _, v := range goldenFrames() {
		b, err := encodeFrame(v)
		require.NoError(f, err)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		v, err := ParseFrame(b)
		if err != nil {
			require.ErrorIs(t, err, ErrMalformed)
			return
		}
		again, err := encodeFrame(v)
		require.NoError(t, err)
		_, err = ParseFrame(again)
		require.NoError(t, err)
	})
}
