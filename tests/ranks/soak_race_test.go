//go:build race

package ranks

import "time"

const soakTime = 20 * time.Second // it has run before, without the race detector
