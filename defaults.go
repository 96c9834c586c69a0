package kvtier

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"runtime"
	"slices"
	"strings"
	"time"
)

const (
	gib = 1 << 30

	defaultDRAM    = 16 * gib
	defaultName    = "default"
	leaderMaxProcs = 4
	memberMaxProcs = 3
)

// DRAMBudget returns the bytes for arenas when free bytes of memory are free for
// container and machine: what was asked for, else 16 GiB, at most a quarter of
// what is free.
func (c *Config) DRAMBudget(free int64) int64 {
	if c.DRAMBytes > 0 {
		return c.DRAMBytes
	}
	return min(defaultDRAM, free/4)
}

// DirtyBound returns the bytes that may wait for the disk under a DRAM budget.
func (c *Config) DirtyBound(dram int64) int64 {
	if c.DirtyBytes > 0 {
		return c.DirtyBytes
	}
	return min(gib, dram/10)
}

// WorkerCount returns how many workers of the library may copy or hash at once.
// Two Ps stay free: with all of them in a copy a call of the host waits for one
// for milliseconds.
func (c *Config) WorkerCount() int {
	if c.Workers > 0 {
		return c.Workers
	}
	return max(1, runtime.GOMAXPROCS(0)-2)
}

// maxProcs returns the GOMAXPROCS that a process of this configuration wants on
// a machine with n of them, or 0 to leave it alone.
func (c *Config) maxProcs(n int) int {
	switch {
	case c.GOMAXPROCS < 0:
		return 0
	case c.GOMAXPROCS > 0:
		return c.GOMAXPROCS
	case c.Role == RoleMember:
		return min(n, memberMaxProcs)
	default:
		return min(n, leaderMaxProcs)
	}
}

// Setting describes one key of the configuration.
type Setting struct {
	Name    string
	Default string // for people
	Unit    string // "GiB", "s", ... or the kind of value
	Help    string

	set  func(*Config, json.RawMessage) error
	fill func(*Config) // puts the default in place of a zero value; may be nil
}

// Settings returns all keys that ParseConfig knows, in the order of the
// documentation.
func Settings() []Setting { return slices.Clone(settings) }

var settings = []Setting{
	text("disk_path", "none", "path", "directory of the disk tier; without it nothing goes to disk",
		"", func(c *Config) *string { return &c.DiskPath }),
	gibs("disk_gib", "min(200, half of the file system)", "cap of the disk tier, on allocated bytes of everything under its root",
		func(c *Config) *int64 { return &c.DiskBytes }),
	text("name", defaultName, "name", "identity of a root without a disk: who opens the same name shares one leader",
		defaultName, func(c *Config) *string { return &c.Name }),
	{Name: "role", Default: "auto", Unit: "auto|leader|member",
		Help: "auto leads when the root is free and joins its leader else; leader waits until it leads; member never leads",
		set:  setRole},
	gibs("dram_gib", "min(16, a quarter of what is free)", "DRAM budget of the leader for all its groups together; a member's value is ignored",
		func(c *Config) *int64 { return &c.DRAMBytes }),
	{Name: "free_floor_gib", Default: "max(5 %, 10), at most half of what is free at the first start", Unit: "GiB",
		Help: "what stays free on the file system; 0 keeps nothing free", set: setFloor},
	{Name: "namespace_floor_gib", Default: "0", Unit: "GiB",
		Help: "what each model that was used since the start keeps on disk when others need room; all together should stay below disk_gib",
		set: func(c *Config, raw json.RawMessage) (err error) {
			c.NamespaceFloorBytes, err = bytesOfGiB(raw)
			return err
		}},
	flag("durable", "fsync each chunk before it is published", func(c *Config) *bool { return &c.Durable }),
	flag("allow_network_fs", "accept a root on a network file system, whose locks may hold on one host only",
		func(c *Config) *bool { return &c.AllowNetworkFS }),
	gibs("dirty_gib", "min(1, 10 % of DRAM)", "bound of what waits for the disk; more is kept in DRAM only, and counted",
		func(c *Config) *int64 { return &c.DirtyBytes }),
	seconds("touch_interval_s", 10, "least time between two updates of the recency of one chunk on disk",
		func(c *Config) *time.Duration { return &c.Touch }),
	seconds("lease_ttl_s", 60, "a lease that nobody renews ends after this time",
		func(c *Config) *time.Duration { return &c.LeaseTTL }),
	seconds("part_deadline_s", 120, "time from a grant until all ranks have copied their part",
		func(c *Config) *time.Duration { return &c.PartDeadline }),
	seconds("part_first_done_deadline_s", 10, "time from the first copied part of a chunk to the last",
		func(c *Config) *time.Duration { return &c.PartFirstDoneDeadline }),
	seconds("load_window_deadline_s", 10, "time for one window of a load to be read from disk",
		func(c *Config) *time.Duration { return &c.LoadWindowDeadline }),
	seconds("connect_timeout_s", 10, "time for one attempt to attach to the leader",
		func(c *Config) *time.Duration { return &c.ConnectTimeout }),
	seconds("close_timeout_s", 10, "time for close, used when the caller names none; a leader writes out dirty chunks within it",
		func(c *Config) *time.Duration { return &c.CloseTimeout }),
	count("breaker_errors", 8, 1, 1<<20, "errors of the disk within breaker_window_s that switch it off",
		func(c *Config) *int { return &c.BreakerErrors }),
	seconds("breaker_window_s", 60, "see breaker_errors", func(c *Config) *time.Duration { return &c.BreakerWindow }),
	seconds("breaker_off_s", 60, "how long the disk stays off at first; doubles up to ten minutes",
		func(c *Config) *time.Duration { return &c.BreakerOff }),
	count("read_lanes", 4, 1, 64, "disk reads at once", func(c *Config) *int { return &c.ReadLanes }),
	count("write_lanes", 2, 1, 64, "disk writes at once", func(c *Config) *int { return &c.WriteLanes }),
	{Name: "gomaxprocs", Default: "4; 3 for a member; never more than before", Unit: "number",
		Help: "threads that run Go code in this process; -1 leaves it alone",
		set:  number(-1, 1024, func(c *Config, n int) { c.GOMAXPROCS = n })},
	{Name: "workers", Default: "gomaxprocs - 2, at least 1", Unit: "number", Help: "library threads that copy or hash at once",
		set: number(0, 256, func(c *Config, n int) { c.Workers = n })},
	{Name: "log_level", Default: "info", Unit: "debug|info|warn|error", Help: "least level of the log records that are kept",
		set: setLevel},
	text("runtime_dir", "runtime directory of the user, else one in the temp directory", "path",
		"where lock and socket of a root without a disk live", "", func(c *Config) *string { return &c.RuntimeDir }),
}

func settingByName(name string) *Setting {
	for i := range settings {
		if settings[i].Name == name {
			return &settings[i]
		}
	}
	return nil
}

func nearestSetting(name string) string {
	names := make([]string, len(settings))
	for i, s := range settings {
		names[i] = s.Name
	}
	return Nearest(name, names)
}

// Nearest returns the one of known, which is not empty, that name most likely was
// meant to be: the one with the smallest edit distance.
func Nearest(name string, known []string) string {
	name = strings.ToLower(name)
	return slices.MinFunc(known, func(a, b string) int {
		return cmp.Compare(editDistance(name, a), editDistance(name, b))
	})
}

// editDistance counts the insertions, deletions and replacements of bytes that
// make b of a.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replace := diagonal
			if a[i] != b[j] {
				replace++
			}
			diagonal = row[j+1]
			row[j+1] = min(replace, row[j]+1, diagonal+1)
		}
	}
	return row[len(b)]
}

func text(name, def, unit, help, fill string, field func(*Config) *string) Setting {
	return Setting{Name: name, Default: def, Unit: unit, Help: help,
		set: func(c *Config, raw json.RawMessage) error { return decode(raw, "text", field(c)) },
		fill: func(c *Config) {
			if *field(c) == "" {
				*field(c) = fill
			}
		}}
}

func flag(name, help string, field func(*Config) *bool) Setting {
	return Setting{Name: name, Default: "false", Unit: "true|false", Help: help,
		set: func(c *Config, raw json.RawMessage) error { return decode(raw, "true or false", field(c)) }}
}

func gibs(name, def, help string, field func(*Config) *int64) Setting {
	return Setting{Name: name, Default: def, Unit: "GiB", Help: help,
		set: func(c *Config, raw json.RawMessage) (err error) {
			*field(c), err = bytesOfGiB(raw)
			if err == nil && *field(c) == 0 {
				return errors.New("must be above 0")
			}
			return err
		}}
}

func seconds(name string, def float64, help string, field func(*Config) *time.Duration) Setting {
	fallback := time.Duration(def * float64(time.Second))
	return Setting{Name: name, Default: fmt.Sprintf("%g", def), Unit: "s", Help: help,
		set: func(c *Config, raw json.RawMessage) error {
			var s float64
			if err := decode(raw, "a number of seconds", &s); err != nil {
				return err
			}
			if s < 0.001 || s > 86400 {
				return errors.New("must be from 0.001 to 86400 seconds")
			}
			*field(c) = time.Duration(s * float64(time.Second))
			return nil
		},
		fill: func(c *Config) {
			if *field(c) <= 0 {
				*field(c) = fallback
			}
		}}
}

func count(name string, def, least, most int, help string, field func(*Config) *int) Setting {
	return Setting{Name: name, Default: fmt.Sprint(def), Unit: "number", Help: help,
		set: number(least, most, func(c *Config, n int) { *field(c) = n }),
		fill: func(c *Config) {
			if *field(c) <= 0 {
				*field(c) = def
			}
		}}
}

func number(least, most int, put func(*Config, int)) func(*Config, json.RawMessage) error {
	return func(c *Config, raw json.RawMessage) error {
		var n int
		if err := decode(raw, "a whole number", &n); err != nil {
			return err
		}
		if n < least || n > most {
			return fmt.Errorf("must be from %d to %d", least, most)
		}
		put(c, n)
		return nil
	}
}

func setRole(c *Config, raw json.RawMessage) error {
	var s string
	if err := decode(raw, "text", &s); err != nil {
		return err
	}
	i := slices.Index(roleNames, s)
	if i < 0 {
		return fmt.Errorf("%q is none of %s", s, strings.Join(roleNames, ", "))
	}
	c.Role = Role(i)
	return nil
}

func setLevel(c *Config, raw json.RawMessage) error {
	var s string
	if err := decode(raw, "text", &s); err != nil {
		return err
	}
	levels := map[string]slog.Level{"debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError}
	level, ok := levels[s]
	if !ok {
		return fmt.Errorf("%q is none of debug, info, warn, error", s)
	}
	c.LogLevel = level
	return nil
}

func setFloor(c *Config, raw json.RawMessage) (err error) {
	c.FreeFloorBytes, err = bytesOfGiB(raw)
	if err == nil && c.FreeFloorBytes == 0 {
		c.FreeFloorBytes = -1
	}
	return err
}

// bytesOfGiB allows fractions; the result is whole bytes.
func bytesOfGiB(raw json.RawMessage) (int64, error) {
	var g float64
	if err := decode(raw, "a number of GiB", &g); err != nil {
		return 0, err
	}
	if g < 0 || g > 1<<20 {
		return 0, fmt.Errorf("must be from 0 to %d GiB", 1<<20)
	}
	return int64(math.Round(g * gib)), nil
}

func decode(raw json.RawMessage, want string, into any) error {
	if string(raw) == "null" {
		return fmt.Errorf("want %s, got null", want)
	}
	if err := json.Unmarshal(raw, into); err != nil {
		shown := string(raw)
		if len(shown) > 40 {
			shown = shown[:40] + "..."
		}
		return fmt.Errorf("want %s, got %s", want, shown)
	}
	return nil
}
