package sys

import (
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// machine writes a tree of files that looks like proc and the control groups.
func machine(t *testing.T, files map[string]string) *Memory {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	}
	return NewMemory(root)
}

const (
	meminfo  = "MemTotal:  1000 kB\nMemFree:  10 kB\nMemAvailable:  800 kB\n"
	mountsV2 = "25 1 0:22 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
	mountsV1 = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n" +
		"32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n" +
		"35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)

func free(t *testing.T, m *Memory) map[string]int64 {
	t.Helper()
	limits, err := m.Limits()
	require.NoError(t, err)
	out := map[string]int64{}
	for _, l := range limits {
		out[l.Name] = l.Free
	}
	return out
}

func TestLimitsV2CountsEveryAncestor(t *testing.T) {
	m := machine(t, map[string]string{
		"proc/meminfo": meminfo, "proc/self/mountinfo": mountsV2, "proc/self/cgroup": "0::/a/b/c\n",
		"sys/fs/cgroup/memory.stat":          "file 1\n",
		"sys/fs/cgroup/a/memory.current":     "5000",
		"sys/fs/cgroup/a/memory.max":         "6000\n",
		"sys/fs/cgroup/a/memory.high":        "max\n",
		"sys/fs/cgroup/a/b/memory.current":   "4000\n",
		"sys/fs/cgroup/a/b/memory.max":       "max\n",
		"sys/fs/cgroup/a/b/memory.high":      "9000\n",
		"sys/fs/cgroup/a/b/memory.stat":      "anon 7\ninactive_file 1500\nactive_file 3\n",
		"sys/fs/cgroup/a/b/c/memory.current": "4000\n",
		"sys/fs/cgroup/a/b/c/memory.max":     "3500\n",
	})
	require.Equal(t, map[string]int64{
		"MemAvailable of the machine":     800 << 10,
		"/sys/fs/cgroup/a/memory.max":     1000,
		"/sys/fs/cgroup/a/b/memory.high":  6500,
		"/sys/fs/cgroup/a/b/c/memory.max": -500,
	}, free(t, m))
}

func TestLimitsV1CountsEveryAncestor(t *testing.T) {
	m := machine(t, map[string]string{
		"proc/meminfo": meminfo, "proc/self/mountinfo": mountsV1,
		"proc/self/cgroup":                               "9:name=systemd:/x\n4:cpu,memory:/a/b\n0::/elsewhere\n",
		"sys/fs/cgroup/memory/memory.usage_in_bytes":     "70",
		"sys/fs/cgroup/memory/memory.limit_in_bytes":     "9223372036854771712",
		"sys/fs/cgroup/memory/a/memory.usage_in_bytes":   "60",
		"sys/fs/cgroup/memory/a/memory.limit_in_bytes":   "100",
		"sys/fs/cgroup/memory/a/memory.stat":             "inactive_file 1\ntotal_inactive_file 20\n",
		"sys/fs/cgroup/memory/a/b/memory.usage_in_bytes": "50",
		"sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "51",
		"sys/fs/cgroup/memory/a/b/memory.stat":           "cache 4\nhierarchical_memory_limit 90\ntotal_inactive_file 0\n",
	})
	require.Equal(t, map[string]int64{
		"MemAvailable of the machine":                            800 << 10,
		"/sys/fs/cgroup/memory/a/memory.limit_in_bytes":          60,
		"/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes":        1,
		"hierarchical_memory_limit of /sys/fs/cgroup/memory/a/b": 40,
	}, free(t, m))
}

// A container without a cgroup namespace sees its own group at the mount point, but
// its path in the host's hierarchy in /proc/self/cgroup.
func TestLimitsInContainers(t *testing.T) {
	for name, c := range map[string]struct{ root, group string }{
		"host path":            {"/docker/abc", "/docker/abc"},
		"below the host path":  {"/docker/abc", "/docker/abc/"},
		"cgroup namespace":     {"/", "/"},
		"outside of the mount": {"/docker/abc", "/docker/abcdef"},
		"above the namespace":  {"/", "/../other"},
	} {
		t.Run(name, func(t *testing.T) {
			m := machine(t, map[string]string{
				"proc/meminfo":                 meminfo,
				"proc/self/mountinfo":          "25 1 0:22 " + c.root + " /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
				"proc/self/cgroup":             "0::" + c.group + "\n",
				"sys/fs/cgroup/memory.current": "10", "sys/fs/cgroup/memory.max": "30",
			})
			require.Equal(t, int64(20), free(t, m)["/sys/fs/cgroup/memory.max"])
		})
	}
}

func TestLimitsWithoutControlGroups(t *testing.T) {
	m := machine(t, map[string]string{"proc/meminfo": meminfo})
	require.Len(t, free(t, m), 1)
	_, err := machine(t, nil).Limits()
	require.Error(t, err)
}

func TestLimitsOfThisMachine(t *testing.T) {
	limits, err := NewMemory("").Limits()
	require.NoError(t, err)
	for _, l := range limits {
		require.Positive(t, l.Total, l.Name)
		require.LessOrEqual(t, l.Free, l.Total, l.Name)
	}
}

func TestFileSizeLimit(t *testing.T) {
	var before unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_FSIZE, &before))
	t.Cleanup(func() { require.NoError(t, unix.Setrlimit(unix.RLIMIT_FSIZE, &before)) })
	if before.Cur == unix.RLIM_INFINITY {
		require.EqualValues(t, math.MaxInt64, FileSizeLimit())
	}
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 1 << 30, Max: before.Max}))
	require.EqualValues(t, 1<<30, FileSizeLimit())
}

func TestPunchHoleZeroesAndFrees(t *testing.T) {
	fd, err := unix.MemfdCreate("hole", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	f := os.NewFile(uintptr(fd), "hole")
	defer f.Close()
	_, err = f.WriteAt(make([]byte, 8192), 0)
	require.NoError(t, err)
	_, err = f.WriteAt([]byte{1}, 4096)
	require.NoError(t, err)
	require.NoError(t, PunchHole(f, 4096, 4096))
	var st unix.Stat_t
	require.NoError(t, unix.Fstat(fd, &st))
	require.EqualValues(t, 8192, st.Size)
	require.EqualValues(t, 4096, st.Blocks*512)
	b := make([]byte, 1)
	_, err = f.ReadAt(b, 4096)
	require.NoError(t, err)
	require.Zero(t, b[0])
}
