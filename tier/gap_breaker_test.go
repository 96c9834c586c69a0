package tier

import (
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/disktest"
)

// Subdirectories of a former model that cannot be read say little about the disk: the
// tier stays on, and when it was off for another reason they do not keep it off.
func TestUnreadableDirectoriesDoNotSwitchTheTierOff(t *testing.T) {
	for _, errno := range []syscall.Errno{syscall.EACCES, syscall.EIO} {
		t.Run(errno.Error(), func(t *testing.T) {
			dir := t.TempDir()
			h := openShelf(t, dir, "former", StoreOptions{}).scanned()
			for n := range 30 {
				require.NoError(t, h.put(n))
			}
			ns := h.disk.dir.path
			h.close()

			fs := &faultFS{}
			blocked := refusing(errno, func(_, path string) bool {
				return strings.HasPrefix(path, ns+"/") && filepath.Base(path) != sidecarName
			})
			fs.set(blocked)
			began := time.Now()
			var shift atomic.Int64
			h = openShelf(t, dir, "m", StoreOptions{FS: fs, Now: func() time.Time { return began.Add(time.Duration(shift.Load())) }})
			require.NoError(t, h.put(1))
			tries := func() uint64 { return h.store.Stats().Errors[errnoName(errno)] }
			retry := func() {
				before := tries()
				shift.Add(int64(maxScanRetry))
				h.wait("all are tried again", func() bool { return tries() >= before+20 })
			}
			for range 6 {
				retry()
				require.NoError(t, h.get(1))
				require.NoError(t, h.put(1))
			}
			st := h.store.Stats()
			require.Equal(t, "on", st.State)
			require.Zero(t, st.BreakerTrips)

			// Off for reads that fail, back for a trial, and in it the scan fails again.
			sick := failing("read", syscall.ENXIO)
			fs.set(func(call, path string) error {
				if err := blocked(call, path); err != nil {
					return err
				}
				return sick(call, path)
			})
			for range 8 {
				require.ErrorIs(t, h.get(1), ErrIO)
			}
			require.Equal(t, "off", h.store.Stats().State)
			fs.set(blocked)
			shift.Add(int64(time.Minute))
			h.wait("trial", func() bool { return h.store.Stats().State == "trial" })
			retry()
			require.Equal(t, "trial", h.store.Stats().State)
			require.NoError(t, h.get(1))
			require.Equal(t, "on", h.store.Stats().State)
		})
	}
}

// Lookups of chunks that would lie in a subdirectory that cannot be read are misses
// and nothing more.
func TestProbesOfAnUnreadableDirectory(t *testing.T) {
	dir := t.TempDir()
	h := openShelf(t, dir, "m", StoreOptions{}).scanned()
	require.NoError(t, h.put(1))
	sub := filepath.Dir(h.file(1))
	require.NoError(t, h.put(2))
	h.close()
	require.NotEqual(t, sub, filepath.Dir(h.file(2)))

	fs := &faultFS{}
	fs.set(refusing(syscall.EIO, func(_, path string) bool { return strings.HasPrefix(path, sub) }))
	h = openShelf(t, dir, "m", StoreOptions{FS: fs})
	h.wait("the first pass", func() bool { return h.store.Stats().Known })
	k := shelfKey(1)
	for i := range 100 {
		k[31] = byte(i)
		require.Zero(t, h.disk.Probe([]chunk.Key{k}, time.Minute))
	}
	st := h.store.Stats()
	require.Equal(t, "on", st.State)
	require.GreaterOrEqual(t, st.Errors["EIO"], uint64(100))
	require.NoError(t, h.get(2))
	require.Len(t, disktest.Files(t, dir, ".kvc"), 2)
}
