package kvtier

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"strings"
	"time"
)

// Role says what a process may become under a root.
type Role uint8

const (
	RoleAuto   Role = iota // leader when the root is free, member else
	RoleLeader             // leader or nothing: waits for the root to be free
	RoleMember             // never leader
)

var roleNames = []string{RoleAuto: "auto", RoleLeader: "leader", RoleMember: "member"}

func (r Role) String() string { return roleNames[r] }

// strength orders roles: of two asked for on one root the stronger counts.
func (r Role) strength() int {
	switch r {
	case RoleMember:
		return 0
	case RoleAuto:
		return 1
	default:
		return 2
	}
}

// Config is what a Cache is opened with. The zero value of a field means its
// default (see Settings); Open works on a copy in which every default that does
// not depend on the machine is filled in.
type Config struct {
	DiskPath string // directory of the disk tier; empty: none
	// DiskBytes caps the disk tier. 0: the smaller of 200 GiB and half of the
	// file system, found by the disk tier itself.
	DiskBytes int64
	Name      string // identity of a root without a disk
	Role      Role
	// DRAMBytes is the budget for all arenas. 0: see DRAMBudget.
	DRAMBytes int64
	// FreeFloorBytes is what stays free on the file system. 0: found by the
	// disk tier; negative: nothing.
	FreeFloorBytes int64
	// NamespaceFloorBytes is what each namespace in use keeps on disk when others
	// need room.
	NamespaceFloorBytes int64
	Durable             bool
	AllowNetworkFS      bool
	// DirtyBytes bounds what waits for the disk. 0: see DirtyBound.
	DirtyBytes int64
	Touch      time.Duration

	LeaseTTL              time.Duration
	PartDeadline          time.Duration
	PartFirstDoneDeadline time.Duration
	LoadWindowDeadline    time.Duration
	ConnectTimeout        time.Duration
	CloseTimeout          time.Duration

	BreakerErrors int
	BreakerWindow time.Duration
	BreakerOff    time.Duration

	ReadLanes  int
	WriteLanes int
	// GOMAXPROCS of the process. 0: 4, or 3 for a process that never leads, and
	// never more than it was; negative: left alone.
	GOMAXPROCS int
	// Workers that copy and hash inside the library. 0: GOMAXPROCS - 2, at
	// least 1.
	Workers  int
	LogLevel slog.Level
	// RuntimeDir holds lock and socket of a root without a disk. Empty: the
	// runtime directory of the user, else one in the temp directory.
	RuntimeDir string
}

// ParseConfig reads a JSON object of settings. It is strict: an unknown, double
// or mistyped setting and a value out of range are errors that wrap ErrConfig
// and name the setting.
func ParseConfig(text []byte) (*Config, error) {
	c := &Config{}
	if err := c.parse(text); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	if err := c.check(); err != nil {
		return nil, err
	}
	return c, nil
}

func (c *Config) parse(text []byte) error {
	dec := json.NewDecoder(bytes.NewReader(text))
	open, err := dec.Token()
	if err != nil {
		return jsonError(err)
	}
	if open != json.Delim('{') {
		return errors.New("a JSON object of settings is expected")
	}
	seen := make(map[string]bool)
	for dec.More() {
		token, err := dec.Token()
		if err != nil {
			return jsonError(err)
		}
		name := token.(string)
		var value json.RawMessage
		if err := dec.Decode(&value); err != nil {
			return jsonError(err)
		}
		if seen[name] {
			return fmt.Errorf("%q is set twice", name)
		}
		seen[name] = true
		s := settingByName(name)
		if s == nil {
			return fmt.Errorf("unknown setting %q; the nearest one is %q", name, nearestSetting(name))
		}
		if err := s.set(c, value); err != nil {
			return fmt.Errorf("%q: %w", name, err)
		}
	}
	if _, err := dec.Token(); err != nil {
		return jsonError(err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return errors.New("there is text after the object of settings")
	}
	return nil
}

func jsonError(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errors.New("the JSON text ends too early")
	}
	return fmt.Errorf("reading JSON: %w", err)
}

// check looks at what no single setting can see.
func (c *Config) check() error {
	if c.DiskBytes > 0 && c.DiskPath == "" {
		return fmt.Errorf("%w: %q needs %q", ErrConfig, "disk_gib", "disk_path")
	}
	if int(c.Role) >= len(roleNames) {
		return fmt.Errorf("%w: role %d does not exist", ErrConfig, c.Role)
	}
	if strings.ContainsRune(c.DiskPath, 0) || strings.ContainsRune(c.RuntimeDir, 0) {
		return fmt.Errorf("%w: a path holds a zero byte", ErrConfig)
	}
	return checkName(c.Name)
}

func checkName(name string) error {
	if name == "" {
		return nil
	}
	ok := len(name) <= 64 && name[0] != '.'
	for _, b := range []byte(name) {
		ok = ok && (b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z' || b >= '0' && b <= '9' || b == '.' || b == '_' || b == '-')
	}
	if !ok {
		return fmt.Errorf("%w: name %q: use at most 64 of A-Z a-z 0-9 . _ -, not beginning with a dot", ErrConfig, name)
	}
	return nil
}

// filled returns a copy with defaults in place of zero values, except for those
// that depend on the machine (DiskBytes, FreeFloorBytes, DRAMBytes, DirtyBytes,
// GOMAXPROCS, Workers). Paths are made absolute.
func (c *Config) filled() (*Config, error) {
	f := *c
	if err := f.check(); err != nil {
		return nil, err
	}
	for _, s := range settings {
		if s.fill != nil {
			s.fill(&f)
		}
	}
	for _, p := range []*string{&f.DiskPath, &f.RuntimeDir} {
		if *p == "" {
			continue
		}
		abs, err := filepath.Abs(*p)
		if err != nil {
			return nil, fmt.Errorf("%w: path %q: %w", ErrConfig, *p, err)
		}
		*p = abs
	}
	return &f, nil
}
