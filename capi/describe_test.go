package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier"
)

func TestDescriptionsSayWhatIsWrong(t *testing.T) {
	for text, want := range map[string]string{
		`{"num_block": 3}`:                  `unknown key "num_block"; the nearest one is "num_blocks"`,
		`{"Model_Name": "x"}`:               `unknown key "Model_Name"; the nearest one is "model"`,
		`{"groups": [{"token_per_row":1}]}`: `unknown key "token_per_row"; the nearest one is "tokens_per_row"`,
		`{"ranks": "2"}`:                    `"ranks": want a whole number, got string`,
		`{"ranks": 1.5}`:                    `"ranks": want a whole number, got number 1.5`,
		`{"memory_only": 1}`:                `"memory_only": want true or false, got number`,
		`{"groups": {}}`:                    `"groups": want a list, got object`,
		`{"provenance": []}`:                `"provenance": want an object, got array`,
		`[]`:                                `a JSON object is expected, got array`,
		`{"ranks": 1`:                       `the JSON text ends too early`,
		``:                                  `the JSON text ends too early`,
		`{} {}`:                             `there is text after the object`,
	} {
		_, err := parseRank([]byte(text))
		require.ErrorIs(t, err, kvtier.ErrConfig, text)
		require.ErrorContains(t, err, want, text)
	}
	var d blobDescription
	require.ErrorContains(t, decodeStrict([]byte(`{"chunk_byte": 1}`), &d), `unknown key "chunk_byte"; the nearest one is "chunk_bytes"`)
	require.NoError(t, decodeStrict([]byte(`{"chunk_bytes": 1}`), &d))
}
