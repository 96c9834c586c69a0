package ranks

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvtier/kvtier/internal/sys"
	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/shm"
)

// socketAttacks go through the socket alone.
var socketAttacks = map[string]func(a *attackSpec, n int, r *rand.Rand) error{
	"hello": (*attackSpec).handshake, "declare": (*attackSpec).handshake,
	"reset": (*attackSpec).life, "remove": (*attackSpec).life, "elsewhere": (*attackSpec).elsewhere,
	"frames": (*attackSpec).anyOrder, "lengths": (*attackSpec).lengths, "descriptors": (*attackSpec).descriptors,
	"slow": (*attackSpec).slow,
}

// rawConn is a connection whose frames, lengths and descriptors are whatever is written.
// What comes with the leader's frames is lost.
type rawConn struct {
	*net.UnixConn
	got     []string    // types of the frames so far
	refusal wire.Refuse // the last one
}

func (a *attackSpec) dialRaw() (*rawConn, error) {
	dir, err := os.Open(filepath.Join(a.Dir, "run"))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	c, err := sys.DialUnix(dir, "sock", wait)
	return &rawConn{UnixConn: c}, err
}

// framed puts the length in front.
func framed(body string) []byte {
	return append(binary.LittleEndian.AppendUint32(nil, uint32(len(body))), body...)
}

// put writes bytes. That the leader has dropped the connection shows when it is read.
func (c *rawConn) put(b []byte) {
	_ = c.SetWriteDeadline(time.Now().Add(wait))
	_, _ = c.Write(b)
}

func (c *rawConn) frame(v any) {
	raw, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	c.put(framed(string(raw)))
}

// next gives the type of the next frame.
func (c *rawConn) next() (string, error) {
	_ = c.SetReadDeadline(time.Now().Add(wait))
	var length [4]byte
	_, err := io.ReadFull(c, length[:])
	if err == nil {
		body := make([]byte, binary.LittleEndian.Uint32(length[:]))
		if _, err = io.ReadFull(c, body); err == nil {
			var f struct {
				Type string `json:"type"`
			}
			if err = json.Unmarshal(body, &f); f.Type == "refuse" {
				err = json.Unmarshal(body, &c.refusal)
			}
			return f.Type, err
		}
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return "", errors.New("the leader neither answers nor drops")
	}
	return "", errDropped
}

// until takes frames up to one of this type, or to the end of the connection.
func (c *rawConn) until(typ string) error {
	for {
		got, err := c.next()
		if err != nil {
			return ignoreDropped(err)
		}
		if c.got = append(c.got, got); got == typ {
			return nil
		}
	}
}

// expect asks for the statistics and takes all frames up to them, or to the end of the
// connection: frames of these types have come since it began, and after the last one, if
// it is no stats_reply, it was dropped.
func (c *rawConn) expect(want ...string) error {
	c.frame(&wire.StatsRequest{})
	if err := c.until("stats_reply"); err != nil {
		return fmt.Errorf("after %q: %w", c.got, err)
	}
	if !slices.Equal(c.got, want) {
		return fmt.Errorf("answered %q and not %q", c.got, want)
	}
	return nil
}

// framing is something written to a fresh connection, and what the leader answers before
// it drops it, or else answers a request for the statistics.
type framing struct {
	name string
	do   func(c *rawConn)
	want []string
}

// framings are about lengths, about what is inside a length, and about the order of frames.
func framings() (out []framing) {
	add := func(name string, do func(c *rawConn), want ...string) { out = append(out, framing{name, do, want}) }
	text := func(v any) string {
		raw, err := json.Marshal(v)
		if err != nil {
			panic(err)
		}
		return string(raw)
	}
	observer := validHello()
	observer.Rank, observer.Coordinator = -1, false
	hello, declare := func() string { return text(validHello()) }, text(validDeclare())
	// The first frame, and a later one.
	for _, first := range []bool{true, false} {
		in := func(name string, do func(c *rawConn, body string), then ...string) {
			if first {
				if len(then) > 0 {
					then = append([]string{"welcome"}, then...)
				}
				add(name+" of a hello", func(c *rawConn) { do(c, hello()) }, then...)
				return
			}
			add(name+" of a later frame", func(c *rawConn) {
				c.frame(observer)
				do(c, text(&wire.Remove{}))
			}, slices.Concat([]string{"welcome"}, then)...)
		}
		answer := func(name string, do func(c *rawConn, body string)) {
			if first {
				in(name, do, "stats_reply")
			} else {
				in(name, do, "removed", "stats_reply")
			}
		}
		claim := func(length uint32) func(c *rawConn, body string) {
			return func(c *rawConn, body string) { c.put(append(binary.LittleEndian.AppendUint32(nil, length), body...)) }
		}
		answer("the right length", func(c *rawConn, body string) { c.put(framed(body)) })
		in("no length", claim(0))
		in("a length of 1", claim(1))
		in("the longest length and 1", claim(shm.MaxFrame+1))
		in("a huge length", claim(1<<31))
		in("all bits as length", claim(1<<32-1))
		in("a length too short by 1", func(c *rawConn, body string) { claim(uint32(len(body)-1))(c, body) })
		in("a length too long by 1", func(c *rawConn, body string) { claim(uint32(len(body)+1))(c, body) })
		in("a length twice as long", func(c *rawConn, body string) { // of which the rest comes
			claim(uint32(2*len(body)))(c, body+body)
		})
		answer("the longest length", func(c *rawConn, body string) {
			c.put(framed(body + strings.Repeat(" ", shm.MaxFrame-len(body))))
		})
		answer("one byte after the other", func(c *rawConn, body string) {
			for _, b := range framed(body) {
				c.put([]byte{b})
			}
		})
		for _, n := range []int{1, 3, 4, 5} { // bytes of a frame, which then ends
			in(fmt.Sprintf("%d bytes", n), func(c *rawConn, body string) {
				c.put(framed(body)[:n])
				_ = c.CloseWrite()
			})
		}
		deep := func(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }
		answer("a member of depth 5000", func(c *rawConn, body string) {
			c.put(framed(strings.TrimSuffix(body, "}") + `,"more":` + deep(5000) + "}"))
		})
		for name, body := range map[string]string{
			"nothing but a space": " ", "null": "null", "a number": "7", "a list": "[]", "a text": `"hello"`, "no type": "{}",
			"another type": `{"type":"other"}`, "a type that is a number": `{"type":7}`, "no JSON": "{]", "half": `{"type":"stats"`,
			"two objects": `{"type":"stats"}{"type":"stats"}`, "too deep": `{"type":"stats","more":` + deep(20000) + "}",
		} {
			in(name+" instead", func(c *rawConn, _ string) { c.put(framed(body)) })
		}
		for _, typ := range []string{"welcome", "accept", "refuse", "removed", "stats_reply"} { // the leader's
			in("a "+typ+" instead", func(c *rawConn, _ string) { c.put(framed(`{"type":"` + typ + `"}`)) })
		}
	}
	add("two frames at once", func(c *rawConn) { c.put(append(framed(hello()), framed(declare)...)); _ = c.until("accept") }, "welcome", "accept", "stats_reply")
	for _, frame := range []string{declare, text(&wire.StatsRequest{}), text(&wire.Remove{}), text(&wire.Goodbye{})} {
		add(fmt.Sprintf("no hello before %.20s", frame), func(c *rawConn) { c.put(framed(frame)) })
	}
	add("two hellos", func(c *rawConn) { c.frame(validHello()); c.frame(validHello()) }, "welcome")
	add("two declarations", func(c *rawConn) {
		c.put(append(framed(hello()), framed(declare)...))
		_ = c.until("accept")
		c.put(framed(declare))
	}, "welcome", "accept")
	add("a declaration of nobody", func(c *rawConn) { c.frame(observer); c.put(framed(declare)) }, "welcome", "refuse", "stats_reply")
	add("a frame after the goodbye", func(c *rawConn) { c.frame(observer); c.frame(&wire.Goodbye{}) }, "welcome")
	add("a declaration as long as can be", func(c *rawConn) {
		d := validDeclare()
		region := d.Groups[0].Regions[0]
		for i := range (shm.MaxFrame - 2048) / (len(text(region)) + 6) { // the layers have more digits
			region.Layer = 10 + i
			d.Groups[0].Regions = append(d.Groups[0].Regions, region)
		}
		c.frame(validHello())
		c.frame(d)
		_ = c.until("refuse")
	}, "welcome", "refuse", "stats_reply")
	return out
}

func (a *attackSpec) lengths(n int, _ *rand.Rand) error {
	f := framings()[n]
	c, err := a.dialRaw()
	if err != nil {
		return err
	}
	defer c.Close()
	f.do(c)
	if err := c.expect(f.want...); err != nil {
		return fmt.Errorf("%s: %w", f.name, err)
	}
	return nil
}

// anyOrder sends frames that are right or wrong in any order.
func (a *attackSpec) anyOrder(_ int, r *rand.Rand) error {
	c, err := a.dialRaw()
	if err != nil {
		return err
	}
	defer c.Close()
	frames := []any{validHello(), validDeclare(), &wire.Goodbye{}, &wire.StatsRequest{}, &wire.Remove{},
		map[string]any{"type": "reset", "epoch": "AAAA"}, map[string]any{"type": "remove", "keys": "%%"}, map[string]any{"type": "welcome"},
		map[string]any{"type": "accept"}, map[string]any{"type": "removed"}, map[string]any{"type": "refuse"}, map[string]any{"type": ""},
		map[string]any{}, map[string]any{"type": 7}, map[string]any{"type": "stats_reply", "json": "x"}}
	for range 1 + r.IntN(6) {
		c.frame(frames[r.IntN(len(frames))])
	}
	c.frame(map[string]any{"type": "nothing"}) // which ends it
	for {
		if _, err := c.next(); err != nil {
			return ignoreDropped(err)
		}
	}
}

// slow begins a hello and does not go on, or asks and does not listen: the leader waits for
// neither without an end.
func (a *attackSpec) slow(int, *rand.Rand) error {
	hello, _ := json.Marshal(validHello())
	var begun []*rawConn
	for _, n := range []int{0, 2, 4, 20} {
		c, err := a.dialRaw()
		if err != nil {
			return err
		}
		defer c.Close()
		c.put(framed(string(hello))[:n])
		begun = append(begun, c)
	}
	deaf, err := a.dialRaw()
	if err != nil {
		return err
	}
	defer deaf.Close()
	observer := validHello()
	observer.Rank, observer.Coordinator = -1, false
	deaf.frame(observer)
	_ = deaf.SetWriteDeadline(time.Now().Add(wait))
	for err == nil {
		_, err = deaf.Write(framed(`{"type":"stats"}`))
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return errors.New("the leader waits for one that does not listen")
	}
	for _, c := range begun {
		if got, err := c.next(); !errors.Is(err, errDropped) {
			return fmt.Errorf("a hello that does not end is answered %q: %w", got, err)
		}
	}
	return nil
}

// attached is a way in which descriptors come: which, how many, and where in the bytes.
type attached struct {
	what  string
	n, at int
	later bool // not with the hello
}

// Descriptors that the leader never asked for.
var descriptorKinds = []string{"pipe", "directory", "file", "sealed segment", "segment", "event", "socket", "lock file"}

func descriptorAttacks() (out []attached) {
	for _, what := range descriptorKinds {
		for _, n := range []int{1, 2, sys.MaxFiles, sys.MaxFiles + 1, 253} { // the most that the kernel passes
			for _, at := range []int{0, 2, 9} {
				out = append(out, attached{what, n, at, false}, attached{what, n, at, true})
			}
		}
	}
	return out
}

// descriptors attaches some to a frame that is right. The leader ends the connection,
// has none of them, and still has what it had.
func (a *attackSpec) descriptors(n int, _ *rand.Rand) (err error) {
	how := descriptorAttacks()[n]
	c, err := a.dialRaw()
	if err != nil {
		return err
	}
	defer c.Close()
	file, check, err := a.descriptor(how.what, c)
	if err != nil {
		return err
	}
	fds := make([]int, how.n)
	for i := range fds {
		fds[i] = int(file.Fd())
	}
	raw, _ := json.Marshal(validHello())
	var want []string
	if how.later {
		c.frame(validHello())
		raw, _ = json.Marshal(&wire.Remove{})
		want = []string{"welcome"}
	}
	b := framed(string(raw))
	c.put(b[:how.at])
	_, _, err = c.WriteMsgUnix(b[how.at:], syscall.UnixRights(fds...), nil)
	file.Close()
	if err != nil {
		return err
	}
	if err := errors.Join(c.expect(want...), check()); err != nil {
		return fmt.Errorf("%d times a %s, at byte %d, %v: %w", how.n, how.what, how.at, how.later, err)
	}
	return nil
}

// descriptor gives one of a kind, and what has to hold when it was sent and closed here.
func (a *attackSpec) descriptor(what string, c *rawConn) (file *os.File, check func() error, err error) {
	check = func() error { return nil }
	switch what {
	case "pipe":
		var r *os.File
		if r, file, err = os.Pipe(); err != nil {
			return nil, nil, err
		}
		check = func() error {
			defer r.Close()
			_ = r.SetReadDeadline(time.Now().Add(wait))
			if _, err := r.Read(make([]byte, 1)); err != io.EOF {
				return fmt.Errorf("the leader keeps it: %w", err)
			}
			return nil
		}
	case "directory":
		file, err = os.Open(a.Dir)
	case "file":
		file, err = os.CreateTemp("", "evil")
		if err == nil {
			_ = os.Remove(file.Name())
		}
	case "sealed segment": // as a ring's, but for its size
		var s *sys.Segment
		if s, err = sys.NewSegment("evil", shm.SegmentBytes/2); err == nil {
			file, err = sys.DupFile(s.File())
			s.Close()
		}
	case "segment":
		var fd int
		if fd, err = unix.MemfdCreate("evil", unix.MFD_CLOEXEC); err == nil {
			file = os.NewFile(uintptr(fd), "evil")
			err = file.Truncate(shm.SegmentBytes)
		}
	case "event":
		var e *sys.Event
		if e, err = sys.NewEvent(); err == nil {
			file, err = sys.DupFile(e.File())
			e.Close()
		}
	case "socket": // the connection itself
		file, err = c.File()
	case "lock file": // a process that closes one has lost its lock
		file, err = os.Open(filepath.Join(a.Dir, "LOCK"))
		check = a.leads
	}
	return file, check, err
}

// leads says whether the leader still holds the lock of its root.
func (a *attackSpec) leads() error {
	lock, err := sys.OpenLock(filepath.Join(a.Dir, "LOCK"))
	if err != nil {
		return err
	}
	defer lock.Close()
	if held, err := lock.Held(); err != nil || !held {
		return fmt.Errorf("the leader has lost the lock of its root: %v", err)
	}
	return nil
}
