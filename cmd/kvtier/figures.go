package main

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// size is bytes for people.
func size(n int64) string {
	units := []string{"KiB", "MiB", "GiB", "TiB", "PiB"}
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	v, u := float64(n)/1024, 0
	for v >= 1024 && u < len(units)-1 {
		v, u = v/1024, u+1
	}
	return fmt.Sprintf("%.1f %s", v, units[u])
}

// span is a duration for people: its two largest units. What lies in the future,
// as on another machine's clock, is 0s.
func span(d time.Duration) string {
	s := int64(max(d, 0) / time.Second)
	switch {
	case s >= 86400:
		return fmt.Sprintf("%dd%dh", s/86400, s%86400/3600)
	case s >= 3600:
		return fmt.Sprintf("%dh%dm", s/3600, s%3600/60)
	case s >= 60:
		return fmt.Sprintf("%dm%ds", s/60, s%60)
	}
	return fmt.Sprintf("%ds", s)
}

// parseSpan takes what Go calls a duration, and whole days (7d) and weeks (2w).
func parseSpan(text string) (time.Duration, error) {
	unit := map[string]time.Duration{"d": 24 * time.Hour, "w": 7 * 24 * time.Hour}
	var d time.Duration
	var err error
	if n := len(text) - 1; n > 0 && unit[text[n:]] > 0 {
		var count int
		count, err = strconv.Atoi(text[:n])
		if d = time.Duration(count) * unit[text[n:]]; err == nil && d/unit[text[n:]] != time.Duration(count) {
			err = strconv.ErrRange
		}
	} else {
		d, err = time.ParseDuration(text)
	}
	if err != nil || d <= 0 {
		return 0, fmt.Errorf("%q is not a span of time: write 30m, 12h, 7d or 2w", text)
	}
	return d, nil
}

// counts is "a 1, b 2".
func counts(m map[string]int) string {
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		parts = append(parts, fmt.Sprintf("%s %d", k, m[k]))
	}
	return strings.Join(parts, ", ")
}

func total(m map[string]int) (n int) {
	for _, v := range m {
		n += v
	}
	return n
}

// plural is "1 chunk", "2 chunks".
func plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	if strings.HasSuffix(noun, "y") {
		return fmt.Sprintf("%d %sies", n, strings.TrimSuffix(noun, "y"))
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
