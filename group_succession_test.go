package kvtier

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/dcp"
	"github.com/kvtier/kvtier/internal/wire"
)

// While a group is decided a rank may go and be followed by one with other pages. What
// is decided must be what is declared by then: a rank that were accepted as its
// predecessor would copy wrong rows.

// whileDeciding declares ranks 0 and 1, and stops before the group is decided for
// meanwhile to act.
func whileDeciding(t *testing.T, r *leaderRig, geo dcp.Geometry, meanwhile func(a1 *attachment)) (w0 <-chan groupOutcome) {
	t.Helper()
	r.l.opening.Lock()
	defer r.l.opening.Unlock()
	w0 = declareAsync(r.attach("g", 2, 0, false), rigDeclare(geo, 0))
	a1 := r.attach("g", 2, 1, false)
	w1 := declareAsync(a1, rigDeclare(geo, 1))
	r.l.mu.Lock()
	deciding := r.l.groups["g"].deciding
	r.l.mu.Unlock()
	require.True(t, deciding)
	a1.gone()
	a1.dead()
	require.NotNil(t, within(t, w1).refuse)
	meanwhile(a1)
	return w0
}

var successionGeometry = dcp.Geometry{D: 2, I: 2, B: 4, C: 16}

func TestSuccessorThatDeclaresOtherwiseIsNotAccepted(t *testing.T) {
	for name, c := range map[string]struct {
		change func(d *wire.Declare)
		reason string
	}{
		"geometry":   {func(d *wire.Declare) { d.Interleave, d.BlockTokens, d.DCPRank = 4, 8, 0 }, "rank 1 declares block tokens 8, rank 0 declares 4"},
		"interleave": {func(d *wire.Declare) { d.Interleave = 4 }, "rank 1 declares interleave 4, rank 0 declares 2"},
		"DCP rank":   {func(d *wire.Declare) { d.DCPRank = 0 }, "both hold the rows of DCP rank 0"},
		"model":      {func(d *wire.Declare) { d.Identity.Model = "other" }, "model other"},
		"width":      {func(d *wire.Declare) { d.Groups[0].Regions[0].Bytes = 32 }, "rank 1 declares 32 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newLeaderRig(t)
			var w1 <-chan groupOutcome
			w0 := whileDeciding(t, r, successionGeometry, func(*attachment) {
				d := rigDeclare(successionGeometry, 1)
				c.change(d)
				w1 = declareAsync(r.attach("g", 2, 1, false), d)
			})
			o := within(t, w0)
			require.Equal(t, o, within(t, w1), "all members get the same")
			require.NotNil(t, o.refuse, "accepted: %+v", o.acc)
			require.True(t, o.refuse.Final)
			require.Contains(t, o.refuse.Reason, c.reason)
			require.Nil(t, r.l.groups["g"].space)
			r.l.mu.Lock()
			used := 0
			for _, sp := range r.l.spaces {
				used += sp.groups
			}
			r.l.mu.Unlock()
			require.Zero(t, used, "nobody uses what was opened for the first decision")
		})
	}
}

// A successor that declares the same is accepted, with what differs only in
// provenance.
func TestSuccessorThatDeclaresTheSameIsAccepted(t *testing.T) {
	r := newLeaderRig(t)
	var w1 <-chan groupOutcome
	w0 := whileDeciding(t, r, successionGeometry, func(*attachment) {
		d := rigDeclare(successionGeometry, 1)
		d.Provenance = map[string]string{"engine": "next"}
		w1 = declareAsync(r.attach("g", 2, 1, false), d)
	})
	require.NotNil(t, within(t, w0).acc)
	require.NotNil(t, within(t, w1).acc)
	require.True(t, r.l.groups["g"].whole())
}

// Both ranks go and come back with another geometry, which fits together: it is the
// one that is accepted, and the first decision, for which both ranks are gone, leaves
// nothing behind.
func TestSuccessorsAreAcceptedWithWhatTheyDeclare(t *testing.T) {
	r := newLeaderRig(t)
	next := dcp.Geometry{D: 2, I: 4, B: 8, C: 16}
	coord := r.attach("g", 2, -1, true) // it stays, and the group with it
	wait := declareAsync(coord, nil)
	var waits []<-chan groupOutcome
	w0 := whileDeciding(t, r, successionGeometry, func(*attachment) {
		r.l.groups["g"].members[0].gone()
		for rank := range 2 {
			// In the other order of DCP ranks.
			waits = append(waits, declareAsync(r.attach("g", 2, rank, false), rigDeclare(next, 1-rank)))
		}
	})
	require.NotNil(t, within(t, w0).refuse)
	for _, w := range append(waits, wait) {
		o := within(t, w)
		require.NotNil(t, o.acc, o.refuse)
		require.Equal(t, 4, o.acc.accept.Interleave)
		require.Equal(t, 8, o.acc.accept.BlockTokens)
	}
	g := r.l.groups["g"]
	require.True(t, g.whole())
	require.Equal(t, uint64(1)<<1, g.agreement.writers[0], "rank 1 has DCP rank 0 now")
	require.Equal(t, 1, g.space.groups)
}

// The successor is gone, too, when the first decision ends: the group forms on, with
// whoever comes as rank 1.
func TestGroupFormsOnAfterADecisionThatIsOvertaken(t *testing.T) {
	r := newLeaderRig(t)
	w0 := whileDeciding(t, r, successionGeometry, func(*attachment) {
		d := rigDeclare(successionGeometry, 1)
		d.Interleave = 4
		a := r.attach("g", 2, 1, false)
		w := declareAsync(a, d)
		a.gone()
		a.dead()
		require.NotNil(t, within(t, w).refuse)
	})
	var accepted, known bool
	require.Eventually(t, func() bool {
		r.l.mu.Lock()
		defer r.l.mu.Unlock()
		g := r.l.groups["g"]
		accepted, known = g.space != nil, g.declared[1] != nil
		return !g.deciding
	}, patience, time.Millisecond)
	require.False(t, accepted, "accepted for a rank that declares otherwise")
	require.False(t, known, "who is gone has declared nothing")
	w1 := declareAsync(r.attach("g", 2, 1, false), rigDeclare(successionGeometry, 1))
	require.NotNil(t, within(t, w0).acc)
	require.NotNil(t, within(t, w1).acc)
	require.True(t, r.l.groups["g"].whole())
}
