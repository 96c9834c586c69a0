//go:build !race

package ranks

import "time"

const soakTime = 60 * time.Second
