package wire

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// Names of the frames, the value of their "type" member.
const (
	frameHello      = "hello"
	frameWelcome    = "welcome"
	frameDeclare    = "declare"
	frameAccept     = "accept"
	frameRefuse     = "refuse"
	frameReset      = "reset"
	frameStats      = "stats"
	frameStatsReply = "stats_reply"
	frameGoodbye    = "goodbye"
)

// EncodeFrame encodes v, a pointer to one of the handshake structs, as the JSON
// object of a frame. Raw JSON inside keeps its bytes: the fingerprint in an
// ACCEPT is a hash over them.
func EncodeFrame(v any) (json.RawMessage, error) {
	name := ""
	switch v.(type) {
	case *Hello:
		name = frameHello
	case *Welcome:
		name = frameWelcome
	case *Declare:
		name = frameDeclare
	case *Accept:
		name = frameAccept
	case *Refuse:
		name = frameRefuse
	case *Reset:
		name = frameReset
	case *StatsRequest:
		name = frameStats
	case *StatsReply:
		name = frameStatsReply
	case *Goodbye:
		name = frameGoodbye
	default:
		return nil, fmt.Errorf("%w: %T is not a frame", ErrInvalid, v)
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, `{"type":%q,`, name)
	start := b.Len()
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, fmt.Errorf("encoding frame %s: %w", name, err)
	}
	// The object of v loses its brace and joins the one that was begun.
	out := bytes.TrimSuffix(b.Bytes(), []byte("\n"))
	rest := out[start+1:]
	if len(rest) == 1 {
		return append(out[:start-1], '}'), nil
	}
	return append(out[:start], rest...), nil
}

// ParseFrame decodes a frame. The result is a pointer to one of the handshake
// structs. The error is ErrMalformed, also for a type that is not known; members
// that are not known are ignored, as newer peers may send them.
func ParseFrame(b []byte) (any, error) {
	var head struct {
		Type string `json:"type"`
	}
	if err := json.Unmarshal(b, &head); err != nil {
		return nil, fmt.Errorf("%w: frame: %w", ErrMalformed, err)
	}
	var v any
	switch head.Type {
	case frameHello:
		v = new(Hello)
	case frameWelcome:
		v = new(Welcome)
	case frameDeclare:
		v = new(Declare)
	case frameAccept:
		v = new(Accept)
	case frameRefuse:
		v = new(Refuse)
	case frameReset:
		v = new(Reset)
	case frameStats:
		v = new(StatsRequest)
	case frameStatsReply:
		v = new(StatsReply)
	case frameGoodbye:
		v = new(Goodbye)
	default:
		return nil, fmt.Errorf("%w: frame of type %.32q", ErrMalformed, head.Type)
	}
	if err := json.Unmarshal(b, v); err != nil {
		return nil, fmt.Errorf("%w: frame %s: %w", ErrMalformed, head.Type, err)
	}
	return v, nil
}
