package sys

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Drain takes all signals so far without waiting. It is for an Event that only
// others wait on, by polling its descriptor.
func (e *Event) Drain() error {
	var count [8]byte
	var failed error
	err := e.raw.Control(func(fd uintptr) {
		// Looked at first: the one who polls may have made the descriptor blocking.
		if ready, err := readable(int(fd)); err != nil || !ready {
			return
		}
		failed = ignoreEINTR(func() error {
			_, err := unix.Read(int(fd), count[:])
			return err
		})
	})
	if errors.Is(failed, unix.EAGAIN) {
		failed = nil
	}
	if err = errors.Join(err, failed); err != nil {
		return fmt.Errorf("draining an eventfd: %w", err)
	}
	return nil
}
