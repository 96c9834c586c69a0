package main

import (
	"time"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/tier"
)

type tierResult = tier.ReadResult

// checksum compares the hash over a chunk with a copy of it, on one thread, over more
// memory than caches hold.
func checksum(_ string, o options) ([]series, error) {
	const bytes, count = 19 << 19, 16
	from, free, err := pages(count, bytes)
	if err != nil {
		return nil, err
	}
	defer free()
	to, freeTo, err := pages(count, bytes)
	if err != nil {
		return nil, err
	}
	defer freeTo()
	s := series{Name: "checksum of a chunk of 9.5 MiB", Unit: "GB/s", LimitName: "memcpy, one thread", Paired: true}
	for turn := range o.runs + 1 {
		began := time.Now()
		for _, b := range from {
			sink = chunk.HashPayload(b)
		}
		hashed := time.Since(began).Seconds()
		began = time.Now()
		for i, b := range from {
			copy(to[i], b)
		}
		copied := time.Since(began).Seconds()
		if turn > 0 {
			s.Value, s.Limit = append(s.Value, bytes*count/hashed/1e9), append(s.Limit, bytes*count/copied/1e9)
		}
	}
	return []series{s}, nil
}

// sink keeps the compiler from leaving the hash out.
var sink [16]byte
