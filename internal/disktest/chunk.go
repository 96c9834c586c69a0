package disktest

import (
	"unsafe"

	"github.com/kvtier/kvtier/internal/chunk"
)

// Sizes of the chunk that tests store.
const (
	pageBytes    = 4096
	PayloadBytes = 10000                           // of the one region it has
	PaddedBytes  = 12288                           // the payload in whole pages
	FileBytes    = PaddedBytes + chunk.FooterBytes // its file
	CostBytes    = FileBytes + pageBytes           // with the directory that the file may need
)

// Namespace has whole chunks of PayloadBytes bytes. It is the caller's to change.
func Namespace(model string) *chunk.Namespace {
	return &chunk.Namespace{
		ChunkTokens: 16, Model: model,
		Groups: []chunk.Group{{Kind: chunk.GroupBlob, TokensPerRow: 16, Regions: []chunk.Region{
			{Bytes: PayloadBytes, Component: "target", Head: -1, Layer: -1, Name: "blob"}}}},
	}
}

// Payload makes the chunk of a key: PaddedBytes bytes as Aligned gives them, which
// depend on the whole key, with zeros behind the first PayloadBytes.
func Payload(k chunk.Key) []byte {
	b := Aligned(PaddedBytes)
	for i := range PayloadBytes {
		b[i] = k[i%len(k)] ^ byte(i>>5)
	}
	return b
}

// Aligned makes n zero bytes that begin with a page, as direct I/O wants them.
func Aligned(n int) []byte {
	b := make([]byte, n+pageBytes)
	skip := -uintptr(unsafe.Pointer(unsafe.SliceData(b))) % pageBytes
	return b[skip:][:n:n]
}

// Used is Aligned in which something else lay before: no byte of it is zero.
func Used(n int) []byte {
	b := Aligned(n)
	for i := range b {
		b[i] = 0xa5
	}
	return b
}
