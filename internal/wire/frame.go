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
	frameRemove     = "remove"
	frameRemoved    = "removed"
)

// Every frame encodes itself with its type in front, so that it can be handed to
// whatever sends JSON. Senders must not escape HTML: the fingerprint in an
// ACCEPT is a hash over the bytes of the namespace beside it.

func (f Hello) MarshalJSON() ([]byte, error) {
	type plain Hello // without this method
	return encode(frameHello, plain(f))
}

func (f Welcome) MarshalJSON() ([]byte, error) {
	type plain Welcome // without this method
	return encode(frameWelcome, plain(f))
}

func (f Declare) MarshalJSON() ([]byte, error) {
	type plain Declare // without this method
	return encode(frameDeclare, plain(f))
}

func (f Accept) MarshalJSON() ([]byte, error) {
	type plain Accept // without this method
	return encode(frameAccept, plain(f))
}

func (f Refuse) MarshalJSON() ([]byte, error) {
	type plain Refuse // without this method
	return encode(frameRefuse, plain(f))
}

func (f Reset) MarshalJSON() ([]byte, error) {
	type plain Reset // without this method
	return encode(frameReset, plain(f))
}

func (f StatsRequest) MarshalJSON() ([]byte, error) {
	type plain StatsRequest // without this method
	return encode(frameStats, plain(f))
}

func (f StatsReply) MarshalJSON() ([]byte, error) {
	type plain StatsReply // without this method
	return encode(frameStatsReply, plain(f))
}

func (f Goodbye) MarshalJSON() ([]byte, error) {
	type plain Goodbye // without this method
	return encode(frameGoodbye, plain(f))
}

func encode(name string, v any) ([]byte, error) {
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
	case frameRemove:
		v = new(Remove)
	case frameRemoved:
		v = new(Removed)
	default:
		return nil, fmt.Errorf("%w: frame of type %.32q", ErrMalformed, head.Type)
	}
	if err := json.Unmarshal(b, v); err != nil {
		return nil, fmt.Errorf("%w: frame %s: %w", ErrMalformed, head.Type, err)
	}
	return v, nil
}
