package main

import (
	"fmt"
	"io"
	"time"
)

const (
	progressOnTerminal = 200 * time.Millisecond
	progressInLog      = 5 * time.Second
)

// progress tells on stderr how far long work has come: on one line of a terminal, or,
// where it was asked for, on lines of their own. One goroutine at a time.
type progress struct {
	w        io.Writer
	on       bool
	terminal bool
	last     time.Time
}

func newProgress(c console, asked bool) *progress {
	return &progress{w: c.err, on: asked || c.watched, terminal: c.watched, last: time.Now()}
}

// step says where the work is, now and then.
func (p *progress) step(format string, args ...any) {
	every := progressInLog
	if p.terminal {
		every = progressOnTerminal
	}
	if p.on && time.Since(p.last) >= every {
		p.say(format, args...)
	}
}

// end says it once more, and leaves the line.
func (p *progress) end(format string, args ...any) {
	if !p.on {
		return
	}
	p.say(format, args...)
	if p.terminal {
		fmt.Fprintln(p.w)
	}
}

func (p *progress) say(format string, args ...any) {
	p.last = time.Now()
	text := fmt.Sprintf(format, args...)
	if p.terminal {
		fmt.Fprintf(p.w, "\r%s\x1b[K", text)
	} else {
		fmt.Fprintln(p.w, text)
	}
}
