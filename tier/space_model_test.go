package tier

import (
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// model is what a leader may rely on, kept beside a real Space with a real disk and
// compared to it while workers and lanes do what they do.
type model struct {
	mu    sync.Mutex
	space *Space
	disk  *Disk

	assembling map[Ref]int  // granted, by chunk number
	late       map[Ref]bool // dropped or removed, ranks may still write
	awaited    map[Ref]int  // sealed or filling, Settled to come
	pinned     map[Ref]int  // how often
	held       map[int]int
	promised   map[int]bool // held while it was retrievable: has to stay
	generation map[uint32]uint32
	wrong      string // said by a callback
}

const modelKeys = 24

// complain notes a wrong; the test looks at it after every step.
func (m *model) complain(format string, args ...any) {
	if m.wrong == "" {
		m.wrong = fmt.Sprintf(format, args...)
	}
}

func (m *model) settled(e SettledEvent) {
	n, ok := m.awaited[e.Ref]
	if !ok {
		m.complain("%v settled unasked or twice", e.Ref)
		return
	}
	delete(m.awaited, e.Ref)
	if e.Key != rigKey(n) || e.Ready != (e.Err == nil) {
		m.complain("chunk %d settled as %+v", n, e)
	}
	if e.Ready != m.space.is(e.Ref, Ready) {
		m.complain("chunk %d settled as ready: %t, its slot says otherwise", n, e.Ready)
	}
	if e.Ready {
		m.mustHold(e.Ref, n)
	}
}

// mustHold looks whether a READY slot has its chunk's bytes.
func (m *model) mustHold(r Ref, n int) {
	b, want := m.space.Bytes(r), make([]byte, rigChunk)
	fillRows(want, rigKey(n))
	if string(b) != string(want) {
		m.complain("slot %v does not hold chunk %d", r, n)
	}
}

// took checks that a slot which was given is nobody's.
func (m *model) took(r Ref) {
	if old, ok := m.generation[r.Slot]; ok && r.Generation <= old {
		m.complain("slot %d came with generation %d after %d", r.Slot, r.Generation, old)
	}
	m.generation[r.Slot] = r.Generation
	for _, used := range []func(Ref) bool{
		func(r Ref) bool { _, ok := m.assembling[r]; return ok },
		func(r Ref) bool { _, ok := m.awaited[r]; return ok },
		func(r Ref) bool { return m.late[r] },
		func(r Ref) bool { return m.pinned[r] > 0 },
	} {
		for g := r.Generation - min(r.Generation, 60); g < r.Generation; g++ {
			if used(Ref{r.Slot, g}) {
				m.complain("slot %d is still in use as generation %d", r.Slot, g)
			}
		}
	}
}

func (m *model) retrievable(n int) bool {
	p := m.space.Look(rigKey(n))
	return p.State == Ready || p.OnDisk
}

// check is what holds after every step.
func (m *model) check(t *rapid.T) {
	m.mu.Lock()
	defer m.mu.Unlock()
	total := 0
	for _, n := range m.space.Counts() {
		total += n
	}
	if total != m.space.Slots() {
		m.complain("states add up to %d of %d", total, m.space.Slots())
	}
	for r := range m.pinned {
		if !m.space.is(r, Ready) && !m.space.is(r, Draining) {
			m.complain("pinned %v is gone", r)
		}
	}
	for r := range m.late {
		if !m.space.table.Check(r, Draining) {
			m.complain("slot %v is not draining although a rank may write", r)
		}
		m.space.Bytes(r)[7]++ // and it does
	}
	for r, n := range m.assembling {
		if p := m.space.Look(rigKey(n)); p.State != Assembling || p.Ref != r {
			m.complain("assembling chunk %d is %v", n, p)
		}
	}
	for n := range m.promised {
		if !m.retrievable(n) {
			m.complain("held chunk %d is gone", n)
		}
	}
	if off := m.space.Stats().Off; off != "" {
		m.complain("switched off: %s", off)
	}
	if m.wrong != "" {
		t.Fatal(m.wrong)
	}
}

// pick draws one of the keys of a map, in a stable order.
func pick[V any](t *rapid.T, of map[Ref]V) Ref {
	var refs []Ref
	for i := range uint32(64) {
		for r := range of {
			if r.Slot == i {
				refs = append(refs, r)
			}
		}
	}
	if len(refs) == 0 {
		t.Skip("none")
	}
	return refs[rapid.IntRange(0, len(refs)-1).Draw(t, "which")]
}

// step wraps an action in the leader's lock.
func (m *model) step(act func(t *rapid.T)) func(*rapid.T) {
	return func(t *rapid.T) {
		m.mu.Lock()
		defer m.mu.Unlock()
		act(t)
	}
}

func (m *model) actions() map[string]func(*rapid.T) {
	number := rapid.IntRange(0, modelKeys-1)
	s := m.space
	// known says whether the arena has to refuse a second slot for this chunk.
	known := func(n int) bool { return s.Look(rigKey(n)).State != Free }
	given := func(n int, r Ref, err error, was bool) bool {
		switch {
		case was != errors.Is(err, ErrKnown), err != nil && !was && !errors.Is(err, ErrNoSlot):
			m.complain("a slot for chunk %d, known: %t: %v", n, was, err)
		case err == nil:
			m.took(r)
		}
		return err == nil
	}
	return map[string]func(*rapid.T){
		"grant": m.step(func(t *rapid.T) {
			n := number.Draw(t, "chunk")
			was := known(n)
			r, err := s.Grant(rigKey(n), rigKey(n-1), uint32(n%6), rapid.Bool().Draw(t, "noDisk"))
			if given(n, r, err, was) {
				m.assembling[r] = n
			}
		}),
		"seal": m.step(func(t *rapid.T) {
			r := pick(t, m.assembling)
			n := m.assembling[r]
			fillRows(s.Bytes(r), rigKey(n))
			delete(m.assembling, r)
			m.awaited[r] = n
			if err := s.Seal(r); err != nil {
				m.complain("sealing chunk %d: %v", n, err)
			}
		}),
		"drop": m.step(func(t *rapid.T) {
			r := pick(t, m.assembling)
			delete(m.assembling, r)
			m.late[r] = true
			s.Drop(r)
		}),
		"drained": m.step(func(t *rapid.T) {
			r := pick(t, m.late)
			delete(m.late, r)
			s.Drained(r)
		}),
		"fill": m.step(func(t *rapid.T) {
			n := number.Draw(t, "chunk")
			was := known(n)
			r, err := s.Fill(rigKey(n), uint32(n%6))
			if given(n, r, err, was) {
				m.awaited[r] = n
			}
		}),
		"give up": m.step(func(t *rapid.T) {
			r := pick(t, m.awaited)
			if s.is(r, Filling) {
				s.GiveUpFill(r)
				if _, still := m.awaited[r]; still {
					m.complain("given up, but not settled")
				}
			}
		}),
		"pin": m.step(func(t *rapid.T) {
			n := number.Draw(t, "chunk")
			p := s.Look(rigKey(n))
			err := s.Pin(p.Ref)
			if (err == nil) != (p.State == Ready) {
				m.complain("pinning chunk %d that is %s: %v", n, p.State, err)
			}
			if err == nil {
				m.pinned[p.Ref]++
				m.mustHold(p.Ref, n)
			}
		}),
		"unpin": m.step(func(t *rapid.T) {
			r := pick(t, m.pinned)
			s.Unpin(r)
			if m.pinned[r]--; m.pinned[r] == 0 {
				delete(m.pinned, r)
			}
		}),
		"hold": m.step(func(t *rapid.T) {
			n := number.Draw(t, "chunk")
			s.Hold(rigKey(n))
			m.held[n]++
			if m.retrievable(n) {
				m.promised[n] = true
			}
		}),
		"unhold": m.step(func(t *rapid.T) {
			n := number.Draw(t, "chunk")
			if m.held[n] == 0 {
				t.Skip("not held")
			}
			s.Unhold(rigKey(n))
			if m.held[n]--; m.held[n] == 0 {
				delete(m.held, n)
				delete(m.promised, n)
			}
		}),
		"touch": m.step(func(t *rapid.T) {
			n := number.Draw(t, "chunk")
			s.Touch(rigKey(n), uint32(n%6))
		}),
		"remove": m.step(func(t *rapid.T) {
			n := number.Draw(t, "chunk")
			delete(m.promised, n)
			for r, of := range m.assembling {
				if of == n {
					delete(m.assembling, r)
					m.late[r] = true
				}
			}
			s.Remove(rigKey(n))
			if s.Look(rigKey(n)) != (Presence{}) {
				m.complain("removed chunk %d is %v", n, s.Look(rigKey(n)))
			}
			for r, of := range m.awaited {
				if of == n {
					m.complain("removed chunk %d waits as %v", n, r)
				}
			}
		}),
		"wait": func(t *rapid.T) { m.quiet(t) },
		"shrink": func(t *rapid.T) {
			s.SetAttached(false)
			s.Shrink(int64(rapid.IntRange(1, 3).Draw(t, "slots")) * rigChunk)
			s.SetAttached(true)
		},
		"": m.check,
	}
}

// quiet waits until workers and lanes have nothing left to do.
func (m *model) quiet(t *rapid.T) {
	m.wait(t, "something does not end", func() bool {
		for i := range m.space.slots {
			if m.space.slots[i].users&^ranks != 0 {
				return false
			}
		}
		return len(m.awaited) == 0
	})
}

func (m *model) wait(t *rapid.T, wrong string, ok func() bool) {
	for end := time.Now().Add(rigWait); ; time.Sleep(100 * time.Microsecond) {
		m.mu.Lock()
		done := ok()
		m.mu.Unlock()
		if done {
			return
		}
		if time.Now().After(end) {
			t.Fatal(wrong)
		}
	}
}

// finish ends everything that was begun: nothing may be left over.
func (m *model) finish(t *rapid.T) {
	m.quiet(t)
	m.mu.Lock()
	for r := range m.assembling {
		m.space.Drop(r)
		m.space.Drained(r)
	}
	for r := range m.late {
		m.space.Drained(r)
	}
	for r, n := range m.pinned {
		for range n {
			m.space.Unpin(r)
		}
	}
	for n := range m.held {
		for range m.held[n] {
			m.space.Unhold(rigKey(n))
		}
	}
	if c := m.space.Counts(); c[Free]+c[Ready] != m.space.Slots() {
		m.complain("left over: %v", c)
	}
	if m.space.Stats().Stale != 0 {
		m.complain("%d events were stale", m.space.Stats().Stale)
	}
	for n := range modelKeys {
		m.space.Remove(rigKey(n))
	}
	if m.space.Counts()[Free] != m.space.Slots() {
		m.complain("after all is removed: %v", m.space.Counts())
	}
	wrong := m.wrong
	m.mu.Unlock()
	if wrong != "" {
		t.Fatal(wrong)
	}
	// What is just being allocated is in nobody's count for a moment.
	m.wait(t, "slots are lost", func() bool { return m.space.Available() == m.space.Slots() })
}

func TestSpaceAgainstModel(t *testing.T) {
	store, _ := openTestStore(t, StoreOptions{})
	round := 0
	rapid.Check(t, func(t *rapid.T) {
		round++
		ns := rigNamespace(fmt.Sprint("model", round))
		layout, err := ns.Layout()
		if err != nil {
			t.Fatal(err)
		}
		m := &model{
			assembling: map[Ref]int{}, late: map[Ref]bool{}, awaited: map[Ref]int{}, pinned: map[Ref]int{},
			held: map[int]int{}, promised: map[int]bool{}, generation: map[uint32]uint32{},
		}
		if m.disk, err = store.Namespace(ns); err != nil {
			t.Fatal(err)
		}
		pool := NewPool(int64(rapid.IntRange(4, 12).Draw(t, "slots"))*rigChunk, slog.New(slog.DiscardHandler))
		m.space, err = NewSpace(SpaceOptions{Namespace: ns, Layout: layout, Pool: pool, Disk: m.disk, Mu: &m.mu,
			Workers: 2, Settled: m.settled, Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := m.space.Close(rigWait); err != nil {
				t.Fatal(err)
			}
		}()
		t.Repeat(m.actions())
		m.finish(t)
	})
}
