package sys

import (
	"bufio"
	"bytes"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// MemoryLimit is one bound on what this process may still allocate.
type MemoryLimit struct {
	Name  string // what bounds it, for a person: a file or a setting
	Total int64  // bytes of the limit itself
	Free  int64  // bytes left below it; negative when it is exceeded already
}

// Memory reads how much memory is left for this process: for the machine, and for
// each control group from its own up to the root, version 1 and 2. Memory of a
// memfd is charged to the process that allocates it, cannot be reclaimed without
// swap, and going over a group's limit kills a process of the group instead of
// failing the call; so whoever allocates a lot has to look first.
//
// The answer is a snapshot: others allocate too, so keep a reserve. Safe for
// concurrent use.
type Memory struct {
	root string

	once   sync.Once
	mounts []cgroupMount
	err    error
}

// NewMemory reads proc and the control group file systems below root; "" is the
// machine's own.
func NewMemory(root string) *Memory { return &Memory{root: root} }

type cgroupMount struct {
	v2   bool
	root string // the group that is visible at dir
	dir  string
}

// unlimitedV1 is where version 1 limits stop meaning anything: "none" is the
// largest multiple of the page size.
const unlimitedV1 = math.MaxInt64 / 2

// Limits returns every limit that could be read, in no order. A limit that is not
// set is left out. It fails only when not even the machine's free memory is known.
func (m *Memory) Limits() ([]MemoryLimit, error) {
	machine, err := m.machine()
	if err != nil {
		return nil, err
	}
	limits := []MemoryLimit{machine}
	m.once.Do(func() { m.mounts, m.err = m.findMounts() })
	if m.err != nil {
		return limits, nil // no control groups here, or they are hidden: the machine is all we can see
	}
	own, err := m.ownGroups()
	if err != nil {
		return limits, nil
	}
	for _, mount := range m.mounts {
		group, ok := own[mount.v2]
		if !ok {
			continue
		}
		dirs := ancestors(mount, group)
		for _, dir := range dirs {
			if mount.v2 {
				limits = m.appendV2(limits, dir)
			} else {
				limits = m.appendV1(limits, dir)
			}
		}
		if !mount.v2 {
			limits = m.appendHidden(limits, dirs[0])
		}
	}
	return limits, nil
}

func (m *Memory) machine() (MemoryLimit, error) {
	path := m.root + "/proc/meminfo"
	b, err := os.ReadFile(path)
	if err != nil {
		return MemoryLimit{}, fmt.Errorf("free memory is unknown: %w", err)
	}
	fields := statFields(b, ":")
	free, ok := fields["MemAvailable"]
	if !ok {
		return MemoryLimit{}, fmt.Errorf("free memory is unknown: %s has no MemAvailable", path)
	}
	return MemoryLimit{Name: "MemAvailable of the machine", Total: fields["MemTotal"] << 10, Free: free << 10}, nil
}

// findMounts lists where the memory controller can be read. mountinfo has the
// group that is visible at each mount point: in a container without a cgroup
// namespace that is not the root.
func (m *Memory) findMounts() ([]cgroupMount, error) {
	b, err := os.ReadFile(m.root + "/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var mounts []cgroupMount
	for line := range strings.Lines(string(b)) {
		before, after, ok := strings.Cut(line, " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if !ok || len(left) < 5 || len(right) < 3 {
			continue
		}
		v2 := right[0] == "cgroup2"
		v1 := right[0] == "cgroup" && slices.Contains(strings.Split(right[2], ","), "memory")
		if v1 || v2 {
			mounts = append(mounts, cgroupMount{v2: v2, root: unescape(left[3]), dir: unescape(left[4])})
		}
	}
	return mounts, nil
}

// ownGroups reads the group of this process in version 1 (false) and 2 (true).
func (m *Memory) ownGroups() (map[bool]string, error) {
	b, err := os.ReadFile(m.root + "/proc/self/cgroup")
	if err != nil {
		return nil, err
	}
	own := map[bool]string{}
	for line := range strings.Lines(string(b)) {
		parts := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(parts) != 3 {
			continue
		}
		if parts[0] == "0" && parts[1] == "" {
			own[true] = parts[2]
		} else if slices.Contains(strings.Split(parts[1], ","), "memory") {
			own[false] = parts[2]
		}
	}
	return own, nil
}

// ancestors lists the directories of the group and of everything above it that this
// mount shows, the group's own first. A group outside of what the mount shows
// (another cgroup namespace) counts as the top of the mount.
func ancestors(mount cgroupMount, group string) []string {
	top := filepath.Clean(mount.dir)
	rel, inside := "", true
	if root := filepath.Clean(mount.root); root == "/" {
		rel = group
	} else if group == root {
		rel = "/"
	} else {
		rel, inside = strings.CutPrefix(group, root+"/")
	}
	if !inside || strings.HasPrefix(group, "/..") {
		rel = "/"
	}
	var dirs []string
	for dir := filepath.Join(top, rel); ; dir = filepath.Dir(dir) {
		dirs = append(dirs, dir)
		if dir == top || len(dir) <= len(top) {
			return dirs
		}
	}
}

func (m *Memory) appendV2(limits []MemoryLimit, dir string) []MemoryLimit {
	current, ok := m.number(dir + "/memory.current")
	if !ok {
		return limits // the root of the hierarchy has none, and no limit either
	}
	used := current - m.reclaimable(dir, "inactive_file")
	// Above memory.high nothing is killed, but every allocation of the engine is
	// slowed down to a crawl: as bad as a limit.
	for _, name := range []string{"memory.max", "memory.high"} {
		if limit, ok := m.number(dir + "/" + name); ok {
			limits = append(limits, MemoryLimit{Name: dir + "/" + name, Total: limit, Free: limit - used})
		}
	}
	return limits
}

func (m *Memory) appendV1(limits []MemoryLimit, dir string) []MemoryLimit {
	current, ok := m.number(dir + "/memory.usage_in_bytes")
	if !ok {
		return limits
	}
	used := current - m.reclaimable(dir, "total_inactive_file")
	if limit, ok := m.number(dir + "/memory.limit_in_bytes"); ok && limit < unlimitedV1 {
		limits = append(limits, MemoryLimit{Name: dir + "/memory.limit_in_bytes", Total: limit, Free: limit - used})
	}
	return limits
}

// appendHidden adds the least limit of all ancestors of a version 1 group, also of
// those that a container does not see. What they have in use is not to be seen
// either; it is at least what the group itself has.
func (m *Memory) appendHidden(limits []MemoryLimit, dir string) []MemoryLimit {
	b, err := os.ReadFile(m.root + dir + "/memory.stat")
	current, ok := m.number(dir + "/memory.usage_in_bytes")
	if err != nil || !ok {
		return limits
	}
	fields := statFields(b, "")
	if limit, ok := fields["hierarchical_memory_limit"]; ok && limit < unlimitedV1 {
		used := current - fields["total_inactive_file"]
		limits = append(limits, MemoryLimit{Name: "hierarchical_memory_limit of " + dir, Total: limit, Free: limit - used})
	}
	return limits
}

// reclaimable is the page cache that the kernel drops before it kills anybody. The
// limits count it as used; an engine that has just read its weights would look full.
func (m *Memory) reclaimable(dir, field string) int64 {
	b, err := os.ReadFile(m.root + dir + "/memory.stat")
	if err != nil {
		return 0
	}
	return statFields(b, "")[field]
}

// number reads a file with one number; not ok for "max" and for anything unreadable.
func (m *Memory) number(path string) (int64, bool) {
	b, err := os.ReadFile(m.root + path)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	return n, err == nil
}

// statFields parses lines of "name value"; suffix is what follows the name.
func statFields(b []byte, suffix string) map[string]int64 {
	fields := map[string]int64{}
	scan := bufio.NewScanner(bytes.NewReader(b))
	for scan.Scan() {
		words := strings.Fields(scan.Text())
		if len(words) < 2 {
			continue
		}
		if n, err := strconv.ParseInt(words[1], 10, 64); err == nil {
			fields[strings.TrimSuffix(words[0], suffix)] = n
		}
	}
	return fields
}

// unescape undoes the octal escapes of mountinfo.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// FileSizeLimit is the largest file this process may write (RLIMIT_FSIZE); it holds
// for memfds too, and crossing it kills a process that does not handle SIGXFSZ.
// math.MaxInt64 when there is none.
func FileSizeLimit() int64 {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &r); err != nil || r.Cur > math.MaxInt64 {
		return math.MaxInt64
	}
	return int64(r.Cur)
}

// PunchHole gives the memory of n bytes at off of a memfd back; they read as zero
// afterwards. off and n are multiples of the page size. The file keeps its size.
func PunchHole(f *os.File, off, n int64) error {
	for {
		err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
		if err != unix.EINTR {
			return os.NewSyscallError("fallocate", err)
		}
	}
}
