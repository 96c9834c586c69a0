//go:build race

package soak

import "time"

// The race detector looks at the workers too; a while of it is enough.
const defaultLength = 15 * time.Second
