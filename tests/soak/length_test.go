//go:build !race

package soak

import "time"

const defaultLength = 60 * time.Second
