package tier

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/sys"
)

func TestBudgetBeyondEveryMemoryIsRefusedByName(t *testing.T) {
	const gib = 1 << 30
	limits := []sys.MemoryLimit{
		{Name: "MemAvailable of the machine", Total: 64 * gib, Free: 1 * gib},
		{Name: "/sys/fs/cgroup/x/memory.max", Total: 8 * gib, Free: 2 * gib},
	}
	require.NoError(t, checkBudget(limits, 0))
	require.NoError(t, checkBudget(limits, 7*gib), "what is full now may be free later")
	err := checkBudget(limits, 8*gib)
	require.ErrorContains(t, err, "dram_gib asks for 8 GiB and /sys/fs/cgroup/x/memory.max is 8 GiB")
	require.ErrorContains(t, err, "at most 7.6")
	require.ErrorContains(t, checkBudget(limits[:1], 1000*gib), "the memory of the machine is 64 GiB")
	require.Error(t, CheckBudget(1<<50))
	require.NoError(t, CheckBudget(0))
}
