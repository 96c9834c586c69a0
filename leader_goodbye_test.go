package kvtier

import (
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"
)

// An engine closes its workers before its scheduler at every exit: only a rank that
// is gone without a word is worth a warning.
func TestRankThatTakesItsLeaveIsNoWarning(t *testing.T) {
	for _, orderly := range []bool{true, false} {
		r := newLeaderRig(t)
		b, err := newBell()
		require.NoError(t, err)
		defer b.close()
		ring := &recordRing{bell: b}
		r.l.log = slog.New(&recordHandler{ring: ring, level: slog.LevelInfo})
		g := r.join("engine", 1, 1)
		ring.take(100)
		level, text := slog.LevelWarn, "lost a rank"
		if orderly {
			g.ranks[0].goodbye()
			level, text = slog.LevelInfo, "a rank has left"
		} else {
			g.ranks[0].gone()
		}
		g.ranks[0].dead()
		got := ring.take(100)
		require.Len(t, got, 1)
		require.Equal(t, level, got[0].Level)
		require.Contains(t, got[0].Text, text)
		require.Contains(t, got[0].Text, "engine")
	}
}
