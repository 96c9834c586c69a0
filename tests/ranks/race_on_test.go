//go:build race

package ranks

import "time"

// All of it has run before, without the race detector.
const (
	soakTime = 15 * time.Second
	thinned  = 4 // one of so many hostile processes runs
)
