package wire

import "errors"

var (
	// ErrMalformed is returned for bytes that are not a message or frame of the
	// protocol. Whoever sent them is not to be listened to any longer.
	ErrMalformed = errors.New("malformed message")
	// ErrTooMany is returned when a message to be sent names more than fits.
	ErrTooMany = errors.New("more entries than a message can carry")
	// ErrInvalid is returned for a message to be sent whose fields do not go
	// together.
	ErrInvalid = errors.New("message fields do not go together")
)
