//go:build !race

package ranks

import "time"

const (
	soakTime = 60 * time.Second
	thinned  = 1 // every hostile process runs
)
