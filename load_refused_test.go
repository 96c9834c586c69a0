package kvtier

import (
	"encoding/json"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A load that a rank does not take (its arguments are wrong, its queue is full) ends for
// that rank at the leader, too: nothing stays pinned for it, and the other ranks fail at
// once instead of waiting for a window that never ends.
func TestLoadThatARankRefusesEndsAtTheLeader(t *testing.T) {
	for _, refusal := range []struct {
		name string
		why  error
		load func(t *testing.T, e *engine, op LoadOp) error
	}{
		{"no tokens", ErrArgument, func(_ *testing.T, e *engine, op LoadOp) error {
			op.Tokens = 0
			return e.ranks[0].Load(op)
		}},
		{"tokens beyond the last", ErrArgument, func(_ *testing.T, e *engine, op LoadOp) error {
			op.Tokens = math.MaxUint32
			return e.ranks[0].Load(op)
		}},
		{"too few blocks", ErrArgument, func(_ *testing.T, e *engine, op LoadOp) error {
			op.Blocks = op.Blocks[1:]
			return e.ranks[0].Load(op)
		}},
		{"a block that does not exist", ErrArgument, func(_ *testing.T, e *engine, op LoadOp) error {
			op.Blocks = append([]uint32{uint32(e.blocks)}, op.Blocks[1:]...)
			return e.ranks[0].Load(op)
		}},
		{"more verdicts than chunks", ErrArgument, func(_ *testing.T, e *engine, op LoadOp) error {
			op.Verdicts = append(op.Verdicts, op.Verdicts...)
			return e.ranks[0].Load(op)
		}},
		{"no room for its event", ErrBusy, func(t *testing.T, e *engine, op LoadOp) error {
			q := e.cache.events
			n := 0
			for ; q.reserve(); n++ {
			}
			defer func() {
				q.mu.Lock()
				q.reserved -= n
				q.mu.Unlock()
			}()
			return e.ranks[0].Load(op)
		}},
	} {
		for _, link := range []string{"direct", "ring"} {
			t.Run(refusal.name+"/"+link, func(t *testing.T) {
				dir := t.TempDir()
				c := openTest(t, dir, RoleLeader)
				requireState(t, c, StateLeader)
				if link == "ring" {
					c = openApart(t, dir, RoleMember)
				}
				cfg := smallEngine
				cfg.d, cfg.i, cfg.blocks = 2, 4, 256
				e := newEngine(t, c, cfg)
				const chunks = 2 * 32 // two windows
				p := e.newPrefix(1, chunks, 0)
				e.fill(p, 0, chunks*e.geo.C)
				e.store(p, 0, chunks)
				e.held(p, chunks)

				op := e.begin(p, 0, chunks*e.geo.C)
				require.Equal(t, Later, op.Verdicts[chunks-1].Code)
				require.ErrorIs(t, refusal.load(t, e, op), refusal.why)
				require.NoError(t, e.ranks[1].Load(op))
				ev := e.events(1)[0]
				require.Equal(t, e.ranks[1].ID(), ev.Rank, "who refuses brings no event")
				require.Equal(t, EventMiss, ev.Status)
				e.requireIdle()
				require.Zero(t, expiredLoads(t, c), "nobody waits for a deadline")

				// The next load finds everything as it was.
				e.wipe(0xEE)
				op = e.begin(p, 0, chunks*e.geo.C)
				e.requireLoaded(e.load(op), op)
				e.requireOnly(p, 0, chunks*e.geo.C, 0xEE)
				e.requireIdle()
			})
		}
	}
}

func expiredLoads(t *testing.T, c *Cache) uint64 {
	t.Helper()
	text, err := c.leaderStats()
	require.NoError(t, err)
	var s struct {
		Loads struct {
			Expired uint64 `json:"expired"`
		} `json:"loads"`
	}
	require.NoError(t, json.Unmarshal(text, &s))
	return s.Loads.Expired
}

// An operation that runs is not ended by a second call for it that is refused: the first
// still copies out of its slots.
func TestRefusedLoadEndsNoRunningOne(t *testing.T) {
	dir := t.TempDir()
	c := openTest(t, dir, RoleLeader)
	requireState(t, c, StateLeader)
	e := newEngine(t, c, smallEngine)
	p := e.newPrefix(1, 4, 0)
	e.fill(p, 0, 4*e.geo.C)
	e.store(p, 0, 4)
	e.held(p, 4)
	op := e.begin(p, 0, 4*e.geo.C)
	// The worker stands still: it is a load of this rank that has not copied yet.
	w := e.ranks[0].loader
	w.mu.Lock()
	held := &load{op: op, chunks: 4, verdicts: op.Verdicts, state: loadWaiting, deadline: time.Now().Add(time.Hour)}
	require.True(t, c.events.reserve())
	w.loads[held] = struct{}{}
	w.mu.Unlock()

	bad := op
	bad.Tokens = 0
	require.ErrorIs(t, e.ranks[0].Load(bad), ErrArgument)
	l := c.leader
	l.lock()
	running := len(l.groups[smallEngine.group].loads)
	l.unlock()
	require.Equal(t, 1, running)

	w.mu.Lock()
	w.enqueue(held)
	w.mu.Unlock()
	e.requireLoaded(e.events(1), op)
	e.requireIdle()
}
