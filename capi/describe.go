package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"

	"github.com/kvtier/kvtier"
)

// blobDescription is the JSON of kvt_blob_open.
type blobDescription struct {
	Model        string `json:"model"`
	ChunkBytes   int    `json:"chunk_bytes"`
	ChunkTokens  int    `json:"chunk_tokens"`
	Weights      string `json:"weights"`
	KVDtype      string `json:"kv_dtype"`
	Attention    string `json:"attention"`
	Quantisation string `json:"quantisation"`
}

func (d *blobDescription) open(c *kvtier.Cache) (*kvtier.Blob, error) {
	return c.Blob(d.Model, d.ChunkBytes, d.ChunkTokens, kvtier.Identity{
		Weights: d.Weights, KVDtype: d.KVDtype, Attention: d.Attention, Quantisation: d.Quantisation,
	})
}

// rankDescription is the JSON of kvt_register.
type rankDescription struct {
	Group        string             `json:"group"`
	Ranks        int                `json:"ranks"`
	Rank         int                `json:"rank"`
	Model        string             `json:"model"`
	ChunkTokens  int                `json:"chunk_tokens"`
	BlockTokens  int                `json:"block_tokens"`
	NumBlocks    int                `json:"num_blocks"`
	DCP          int                `json:"dcp"`
	DCPRank      int                `json:"dcp_rank"`
	Interleave   int                `json:"interleave"`
	Encoding     string             `json:"encoding"`
	KVDtype      string             `json:"kv_dtype"`
	Attention    string             `json:"attention"`
	KVScales     string             `json:"kv_scales"`
	Quantisation string             `json:"quantisation"`
	Draft        string             `json:"draft"`
	Weights      string             `json:"weights"`
	MemoryOnly   bool               `json:"memory_only"`
	Groups       []groupDescription `json:"groups"`
	Provenance   map[string]string  `json:"provenance"`
}

type groupDescription struct {
	Kind         string `json:"kind"`
	TokensPerRow int    `json:"tokens_per_row"`
}

// parseRank fills in what the header calls optional: one rank without DCP, one full
// group with plain rows.
func parseRank(text []byte) (*rankDescription, error) {
	d := &rankDescription{Ranks: 1, DCP: 1, Interleave: 1, Encoding: "rows"}
	if err := decodeStrict(text, d); err != nil {
		return nil, err
	}
	if len(d.Groups) == 0 {
		d.Groups = []groupDescription{{}}
	}
	return d, nil
}

func (d *rankDescription) config() kvtier.RankConfig {
	c := kvtier.RankConfig{
		Group: d.Group, Ranks: d.Ranks, Rank: d.Rank,
		DCP: d.DCP, DCPRank: d.DCPRank, Interleave: d.Interleave,
		BlockTokens: d.BlockTokens, NumBlocks: d.NumBlocks, ChunkTokens: d.ChunkTokens,
		Identity: kvtier.Identity{
			Model: d.Model, Attention: d.Attention, Draft: d.Draft, Encoding: d.Encoding, KVDtype: d.KVDtype,
			KVScales: d.KVScales, Quantisation: d.Quantisation, Weights: d.Weights, MemoryOnly: d.MemoryOnly,
		},
		Provenance: d.Provenance,
	}
	for _, g := range d.Groups {
		c.Groups = append(c.Groups, kvtier.GroupConfig{Kind: g.Kind, TokensPerRow: g.TokensPerRow})
	}
	return c
}

// decodeStrict reads one JSON object into a struct and refuses what the struct does
// not have: a misspelt key would otherwise change what a cache means in silence.
func decodeStrict(text []byte, into any) error {
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		return fmt.Errorf("%w: %s", kvtier.ErrConfig, whyNot(err, into))
	}
	if _, err := dec.Token(); err != io.EOF {
		return fmt.Errorf("%w: there is text after the object", kvtier.ErrConfig)
	}
	return nil
}

// whyNot says in a line what a JSON text has wrong that is not a description.
func whyNot(err error, into any) string {
	var kind *json.UnmarshalTypeError
	why := strings.TrimPrefix(err.Error(), "json: ")
	name, unknown := strings.CutPrefix(why, "unknown field ")
	switch {
	case unknown:
		return fmt.Sprintf("unknown key %s; the nearest one is %q", name, kvtier.Nearest(strings.Trim(name, `"`), fieldNames(reflect.TypeOf(into).Elem())))
	case errors.As(err, &kind) && kind.Field != "":
		return fmt.Sprintf("%q: want %s, got %s", kind.Field, kindName(kind.Type), kind.Value)
	case errors.As(err, &kind):
		return "a JSON object is expected, got " + kind.Value
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return "the JSON text ends too early"
	}
	return why
}

func kindName(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Int:
		return "a whole number"
	case reflect.Bool:
		return "true or false"
	case reflect.String:
		return "text"
	case reflect.Slice:
		return "a list"
	default:
		return "an object"
	}
}

// fieldNames lists the keys of a description and of what is inside it.
func fieldNames(t reflect.Type) []string {
	var names []string
	for i := range t.NumField() {
		f := t.Field(i)
		names = append(names, f.Tag.Get("json"))
		if f.Type.Kind() == reflect.Slice {
			names = append(names, fieldNames(f.Type.Elem())...)
		}
	}
	return names
}
