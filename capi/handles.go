package main

import (
	"errors"
	"sync"
)

var errHandle = errors.New("the handle is closed, of another kind, or was never given out")

// handleTable gives out the handles of the C side. A handle is the generation of
// an entry (high half) and its place in the table plus 1 (low half), so that a
// closed handle is known as such after its place is used again.
type handleTable struct {
	mu      sync.RWMutex
	entries []handleEntry
	free    []uint32
}

type handleEntry struct {
	generation uint32
	owner      uint64 // the handle of the cache that this one ends with; 0 for a cache
	value      any    // nil: free
}

var handles handleTable

// put gives value a handle. ok is false when owner was closed meanwhile: the
// caller then closes value.
func (t *handleTable) put(value any, owner uint64) (h uint64, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if owner != 0 && t.entry(owner) == nil {
		return 0, false
	}
	var place uint32
	if n := len(t.free); n > 0 {
		place = t.free[n-1]
		t.free = t.free[:n-1]
	} else {
		place = uint32(len(t.entries))
		t.entries = append(t.entries, handleEntry{})
	}
	e := &t.entries[place]
	e.generation++
	e.owner, e.value = owner, value
	return uint64(e.generation)<<32 | uint64(place+1), true
}

// entry finds what h names, nil if nothing. Called with the lock held.
func (t *handleTable) entry(h uint64) *handleEntry {
	place := h&0xffffffff - 1
	if place >= uint64(len(t.entries)) {
		return nil
	}
	e := &t.entries[place]
	if e.value == nil || uint64(e.generation) != h>>32 {
		return nil
	}
	return e
}

// owned lists the handles that end with owner.
func (t *handleTable) owned(owner uint64) []uint64 {
	t.mu.RLock()
	defer t.mu.RUnlock()
	var all []uint64
	for i := range t.entries {
		if e := &t.entries[i]; e.value != nil && e.owner == owner {
			all = append(all, uint64(e.generation)<<32|uint64(i+1))
		}
	}
	return all
}

// object finds what h names, if it is a T.
func object[T any](h uint64) (T, error) {
	handles.mu.RLock()
	defer handles.mu.RUnlock()
	if e := handles.entry(h); e != nil {
		if v, ok := e.value.(T); ok {
			return v, nil
		}
	}
	var none T
	return none, errHandle
}

// take is object that also ends the handle: of several callers one gets it.
func take[T any](h uint64) (T, error) {
	handles.mu.Lock()
	defer handles.mu.Unlock()
	if e := handles.entry(h); e != nil {
		if v, ok := e.value.(T); ok {
			e.value, e.owner = nil, 0
			handles.free = append(handles.free, uint32(h&0xffffffff-1))
			return v, nil
		}
	}
	var none T
	return none, errHandle
}
