package soak

import (
	"flag"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/disktest"
	"github.com/kvtier/kvtier/tier"
)

var (
	length = flag.Duration("soak", defaultLength, "how long the root is used")
	seed   = flag.Uint64("soak-seed", 0, "of everything that is drawn at random; 0: another one each time")
)

const (
	soakCap  = 40 << 20
	soakDRAM = 12 << 20
	workers  = 4
	patience = 2 * time.Minute
)

var shapes = []shape{{"soak/big model", 64 << 10}, {"soak-small", 20000}}

func TestSoak(t *testing.T) {
	if *seed == 0 {
		*seed = uint64(time.Now().UnixNano())
	}
	t.Logf("seed %d, %v", *seed, *length)
	rng := rand.New(rand.NewPCG(*seed, 0))
	root := filepath.Join(t.TempDir(), "root")
	require.NoError(t, os.Mkdir(root, 0o700))
	tool := buildTools(t, root)

	// Ten times what the cap lets stay.
	chains := 10 * soakCap / (shapes[0].Bytes + shapes[1].Bytes) / chainLength
	c := newCrew(t, rng, order{Root: root, Cap: soakCap, DRAM: soakDRAM, Chains: chains, Shapes: shapes}, workers)
	v := &vandal{t: t, rng: rng, root: root}
	s := startSampler(t, root, 50*time.Millisecond)
	end := time.Now().Add(*length)
	// A slow machine needs longer until each kind of disturbance has happened.
	everything := func() bool { return c.LeaderKills > 0 && v.Damaged > 0 && v.Deleted > 0 && len(tool.Runs) > 0 }
	for turn := 0; !t.Failed() && (time.Now().Before(end) || !everything() && time.Now().Before(end.Add(patience))); turn++ {
		time.Sleep(time.Duration(100+rng.IntN(300)) * time.Millisecond)
		c.check()
		switch {
		case turn < 10: // something has to lie there first
		case turn%3 == 0:
			c.disturb()
		case turn%3 == 1:
			v.strike()
		case turn%15 == 2:
			useTools(tool, rng)
		}
	}
	c.check()
	c.endAll()
	samples, highest := s.stop()
	t.Logf("%d puts, %d hits, %d misses, %d lookups, %d removals, other outcomes %v",
		c.sum.Puts, c.sum.Hits, c.sum.Misses, c.sum.Looks, c.sum.Drops, c.sum.Failed)
	t.Logf("%d kills, %d of them of the leader, %d stops, %d ends in good order, %d deletions, %d damages, tools %v",
		c.Kills, c.LeaderKills, c.Stops, c.Ends, v.Deleted, v.Damaged, tool.Runs)
	t.Logf("%d samples, at most %d of %d bytes", samples, highest, soakCap)
	require.LessOrEqual(t, highest, int64(soakCap), "the cap was exceeded")
	require.Positive(t, c.sum.Puts)
	require.Positive(t, c.sum.Hits)
	require.Positive(t, c.Kills)
	require.True(t, everything(), "%d kills of leaders, %d damages, %d deletions, tools %v", c.LeaderKills, v.Damaged, v.Deleted, tool.Runs)

	afterwards(t, tool, root)
}

// useTools does what an operator may do to a root in use.
func useTools(tool *tools, rng *rand.Rand) {
	switch rng.IntN(6) {
	case 0:
		tool.verify()
	case 1:
		tool.verify("--repair")
	case 2:
		tool.run("info", "--json")
	case 3:
		tool.run("ls", "--json")
	case 4:
		tool.run("gc", "--json")
	default:
		tool.run("purge", "--older-than", "3s", "--yes", "--json")
	}
}

// afterwards looks at what a root is like that nobody uses any more.
func afterwards(t *testing.T, tool *tools, root string) {
	require.Empty(t, users(t, root), "processes that are left")
	left, err := os.ReadDir(filepath.Join(root, "run"))
	require.NoError(t, err)
	require.Empty(t, left, "sockets that are left")

	// A run that knows the namespaces makes damaged sidecars good again.
	r, store := lead(t, root)
	require.NoError(t, store.Close(patience))
	require.NoError(t, r.Close())
	_, v := tool.verify("--repair")
	require.Zero(t, v.Unchecked)
	require.Zero(t, v.Swept, "the leader leaves no temp files of dead processes")
	code, v := tool.verify()
	require.Zero(t, code, "%+v", v)
	require.Positive(t, v.Checked)
	require.Equal(t, v.Checked, v.Good)
	require.Zero(t, v.Temps)
	require.Empty(t, v.Foreign)
	t.Logf("%d chunks at the end, all good", v.Good)

	// What is counted is what lies there.
	r, store = lead(t, root)
	require.Equal(t, uint64(v.Good), store.Stats().Adopted)
	require.Empty(t, store.Stats().Rejected)
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		real := disktest.Allocated(t, root)
		if st := store.Stats(); st.UsedBytes != real { // perhaps eviction is at it
			require.True(t, time.Now().Before(end), "%d bytes lie there, and counted are %+v", real, st)
			continue
		}
		break
	}
	require.NoError(t, store.Close(patience))
	require.NoError(t, r.Close())
	require.Empty(t, disktest.Files(t, root, ".tmp"))
}

// lead opens the disk tier and waits until it knows all that lies there.
func lead(t *testing.T, root string) (*tier.Root, *tier.Store) {
	t.Helper()
	r, err := tier.OpenRoot(root, tier.RootOptions{})
	require.NoError(t, err)
	ok, holder, err := r.TryLock()
	require.NoError(t, err)
	require.True(t, ok, holder)
	store, err := tier.OpenStore(r, tier.StoreOptions{CapBytes: soakCap, Log: slog.New(slog.DiscardHandler), Tick: 10 * time.Millisecond})
	require.NoError(t, err)
	var disks []*tier.Disk
	for _, s := range shapes {
		d, err := store.Namespace(&chunk.Namespace{
			Model: s.Model, ChunkTokens: 16,
			Groups: []chunk.Group{{Kind: chunk.GroupBlob, TokensPerRow: 16, Regions: []chunk.Region{
				{Bytes: s.Bytes, Component: "target", Layer: -1, Head: -1, Name: "blob"}}}},
		})
		require.NoError(t, err)
		disks = append(disks, d)
	}
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		known := uint64(0)
		for _, d := range disks {
			known += uint64(d.Count())
		}
		st := store.Stats()
		// Files of a wrong size are looked at, and go, after the scan.
		if st.Known && st.QueuedUnlinks == 0 && st.Adopted >= known && files(st) == int(known) {
			return r, store
		}
		require.True(t, time.Now().Before(end), "%+v", st)
	}
}

func files(st tier.StoreStats) (n int) {
	for _, ns := range st.Namespaces {
		n += ns.Files
	}
	return n
}

// users lists the processes that were started for a root and still run.
func users(t *testing.T, root string) (found []string) {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	require.NoError(t, err)
	for _, path := range all {
		b, err := os.ReadFile(path)
		if err == nil && strings.Contains(string(b), workerArgument) && strings.Contains(string(b), root) {
			found = append(found, strings.ReplaceAll(string(b), "\x00", " "))
		}
	}
	return found
}
