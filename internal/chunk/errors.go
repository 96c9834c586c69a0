package chunk

import "errors"

// What a caller handed over does not describe a chunk.
var (
	ErrExtra     = errors.New("extra is not allowed here")
	ErrTokens    = errors.New("chunk needs at least one token and at most 1048576")
	ErrNamespace = errors.New("namespace is not valid")
	ErrTooLarge  = errors.New("chunk is too large")
)

// ErrNewerFormat means that bytes were written by a newer version of this
// library: leave them alone, they are not damaged.
var ErrNewerFormat = errors.New("format is newer than this library understands, update kvtier to read it")

// Why a footer is not accepted, in the order in which a reader checks.
var (
	ErrFooterSize  = errors.New("footer is not 4096 bytes long")
	ErrFooterHash  = errors.New("footer does not match its own hash")
	ErrMagic       = errors.New("footer does not begin with the magic of a chunk file")
	ErrNewerMajor  = errors.New("chunk file has a newer major version, update kvtier to read it")
	ErrFooterField = errors.New("footer field is out of range")
	ErrKey         = errors.New("footer names another key")
	ErrFingerprint = errors.New("footer names another namespace")
	ErrLengths     = errors.New("footer lengths differ from the layout")
	ErrGroups      = errors.New("footer groups differ from the layout")
)
