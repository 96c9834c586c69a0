package kvtier

import (
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestParseConfigReadsEverySetting(t *testing.T) {
	c, err := ParseConfig([]byte(`{"disk_path":"/nvme/kv","disk_gib":200,"name":"a-1","role":"member","dram_gib":0.5,
		"free_floor_gib":0,"namespace_floor_gib":1,"durable":true,"allow_network_fs":true,"dirty_gib":0.25,"touch_interval_s":1.5,"lease_ttl_s":2,
		"part_deadline_s":3,"part_first_done_deadline_s":4,"load_window_deadline_s":5,"connect_timeout_s":6,"close_timeout_s":7,
		"breaker_errors":9,"breaker_window_s":10,"breaker_off_s":11,"read_lanes":12,"write_lanes":13,"gomaxprocs":-1,"workers":2,
		"log_level":"debug","runtime_dir":"/run/x"}`))
	require.NoError(t, err)
	require.Equal(t, &Config{
		DiskPath: "/nvme/kv", DiskBytes: 200 << 30, Name: "a-1", Role: RoleMember, DRAMBytes: 1 << 29,
		FreeFloorBytes: -1, NamespaceFloorBytes: 1 << 30, Durable: true, AllowNetworkFS: true, DirtyBytes: 1 << 28, Touch: 1500 * time.Millisecond,
		LeaseTTL: 2 * time.Second, PartDeadline: 3 * time.Second, PartFirstDoneDeadline: 4 * time.Second,
		LoadWindowDeadline: 5 * time.Second, ConnectTimeout: 6 * time.Second, CloseTimeout: 7 * time.Second,
		BreakerErrors: 9, BreakerWindow: 10 * time.Second, BreakerOff: 11 * time.Second, ReadLanes: 12, WriteLanes: 13,
		GOMAXPROCS: -1, Workers: 2, LogLevel: slog.LevelDebug, RuntimeDir: "/run/x",
	}, c)
	for _, s := range settings {
		require.NotEmpty(t, s.Default, s.Name)
		require.NotEmpty(t, s.Help, s.Name)
		require.NotEmpty(t, s.Unit, s.Name)
	}
}

func TestConfigErrorsNameTheSetting(t *testing.T) {
	for text, want := range map[string]string{
		`{"dram_gb": 1}`:                           `unknown setting "dram_gb"; the nearest one is "dram_gib"`,
		`{"diskpath": "/x"}`:                       `unknown setting "diskpath"; the nearest one is "disk_path"`,
		`{"Lease_TTL": 1}`:                         `unknown setting "Lease_TTL"; the nearest one is "lease_ttl_s"`,
		`{"dram_gib": "16"}`:                       `"dram_gib": want a number of GiB, got "16"`,
		`{"dram_gib": 0}`:                          `"dram_gib": must be above 0`,
		`{"dram_gib": -1}`:                         `"dram_gib": must be from 0 to 1048576 GiB`,
		`{"dram_gib": null}`:                       `"dram_gib": want a number of GiB, got null`,
		`{"role": "boss"}`:                         `"role": "boss" is none of auto, leader, member`,
		`{"role": 1}`:                              `"role": want text, got 1`,
		`{"read_lanes": 0}`:                        `"read_lanes": must be from 1 to 64`,
		`{"read_lanes": 1.5}`:                      `"read_lanes": want a whole number, got 1.5`,
		`{"close_timeout_s": 0}`:                   `"close_timeout_s": must be from 0.001 to 86400 seconds`,
		`{"durable": "yes"}`:                       `"durable": want true or false, got "yes"`,
		`{"log_level": "loud"}`:                    `"log_level": "loud" is none of debug, info, warn, error`,
		`{"durable": true, "durable": true}`:       `"durable" is set twice`,
		`{"disk_gib": 1}`:                          `"disk_gib" needs "disk_path"`,
		`{"name": "../x"}`:                         `name "../x": use at most 64 of`,
		`[1]`:                                      `a JSON object of settings is expected`,
		`{"durable": true`:                         `the JSON text ends too early`,
		``:                                         `the JSON text ends too early`,
		`{"durable": true} {}`:                     `there is text after the object`,
		`{"durable": tru}`:                         `reading JSON`,
		`{"disk_path": "/x", "disk_gib": 1e300}`:   `"disk_gib": must be from 0 to`,
		`{"breaker_errors": 99999999999999999999}`: `"breaker_errors": want a whole number`,
	} {
		c, err := ParseConfig([]byte(text))
		require.ErrorIs(t, err, ErrConfig, text)
		require.ErrorContains(t, err, want, text)
		require.Nil(t, c, text)
	}
}

func FuzzParseConfig(f *testing.F) {
	f.Add([]byte(`{"dram_gib": 1, "role": "auto"}`))
	f.Add([]byte(`{"x":{}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := ParseConfig(text)
		require.Equal(t, err == nil, c != nil)
		if err != nil {
			require.ErrorIs(t, err, ErrConfig)
		}
	})
}

func TestFilledTakesDefaultsAndLeavesTheMachinesAlone(t *testing.T) {
	f, err := (&Config{DiskPath: "kv"}).filled()
	require.NoError(t, err)
	require.Equal(t, "default", f.Name)
	require.Equal(t, 60*time.Second, f.LeaseTTL)
	require.Equal(t, 10*time.Second, f.CloseTimeout)
	require.Equal(t, 8, f.BreakerErrors)
	require.Zero(t, f.DRAMBytes)
	require.True(t, len(f.DiskPath) > 3 && f.DiskPath[0] == '/')

	require.EqualValues(t, 16<<30, f.DRAMBudget(1<<40))
	require.EqualValues(t, 1<<30, f.DRAMBudget(4<<30))
	require.EqualValues(t, 1<<30, f.DirtyBound(16<<30))
	require.EqualValues(t, 100, f.DirtyBound(1000))
	require.Equal(t, 4, f.maxProcs(64))
	require.Equal(t, 2, f.maxProcs(2))
	require.Equal(t, 3, (&Config{Role: RoleMember}).maxProcs(64))
	require.Equal(t, 0, (&Config{GOMAXPROCS: -1}).maxProcs(64))
	require.Equal(t, 9, (&Config{GOMAXPROCS: 9}).maxProcs(2))
	require.Equal(t, 5, (&Config{Workers: 5}).WorkerCount())
	require.GreaterOrEqual(t, f.WorkerCount(), 1)
}

func TestEditDistance(t *testing.T) {
	require.Equal(t, 0, editDistance("abc", "abc"))
	require.Equal(t, 3, editDistance("", "abc"))
	require.Equal(t, 1, editDistance("dram_gb", "dram_gib"))
	require.Equal(t, 3, editDistance("kitten", "sitting"))
}
