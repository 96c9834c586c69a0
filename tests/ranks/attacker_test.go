package ranks

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/sys"
	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/shm"
)

// attackSpec is a part of what a hostile process does to a leader.
type attackSpec struct {
	Dir      string
	Kind     string // ring, hello, declare, frames, soup, hoard
	From, To int    // of the attacks of this kind
	Seed     uint64
}

// attacker is one connection of a process that does not keep the rules. It writes its
// rings itself.
type attacker struct {
	conn   *shm.Conn
	seg    []byte
	memory *sys.Segment
	bell   *sys.Event // of requests
	other  *sys.Event
	tail   uint32
	head   uint32 // of replies
	seq    uint32
	// patience is how long it waits for a reply. One that has spoiled its own ring
	// gets none that it can read.
	patience time.Duration

	grants []wire.Verdict // of op 1, reported; of op 3, open
	ready  wire.Verdict   // of op 2, a load
	keys   []chunk.Key
}

// Offsets of the ring segment.
const (
	requestTail = 0x080
	requestHead = 0x100
	replyTail   = 0x200
	replyHead   = 0x280
	closedBy    = 0x380
	rings       = 4096
)

var errDropped = errors.New("dropped by the leader")

var evilShape = shape{D: 1, I: 8, B: 8, C: 24, Blocks: 8, Widths: []int{48, 17}}

var evilNumber atomic.Uint64

func evilGroup() string { return fmt.Sprintf("evil-%d-%d", os.Getpid(), evilNumber.Add(1)) }

func (a *attackSpec) dial() (*shm.Conn, error) {
	dir, err := os.Open(filepath.Join(a.Dir, "run"))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	return shm.Dial(dir, "sock", wait)
}

func validHello() *wire.Hello {
	return &wire.Hello{Protocol: wire.Protocol, Features: []string{}, Group: evilGroup(), Ranks: 1, Coordinator: true, PID: os.Getpid()}
}

func validDeclare() *wire.Declare {
	d := &wire.Declare{
		Identity:    wire.Identity{Model: model, Attention: "aa", KVDtype: "u8", Weights: "0123", Encoding: chunk.EncodingRows},
		ChunkTokens: evilShape.C, BlockTokens: evilShape.B, DCP: 1, Interleave: evilShape.I,
		Groups: []wire.DeclaredGroup{{Kind: chunk.GroupFull, TokensPerRow: 1}},
	}
	for i, w := range evilShape.Widths {
		d.Groups[0].Regions = append(d.Groups[0].Regions, wire.DeclaredRegion{Name: "kv", Component: "target", Layer: i, Head: -1, Bytes: w})
	}
	return d
}

// recv waits for a frame. A leader that says nothing for so long hangs.
func recv(conn *shm.Conn) (any, []*os.File, error) {
	raw, files, err := conn.Recv(wait)
	if errors.Is(err, shm.ErrTimeout) {
		return nil, nil, errors.New("the leader neither answers nor drops")
	}
	if err != nil {
		return nil, nil, errDropped
	}
	f, err := wire.ParseFrame(raw)
	return f, files, err
}

// join goes the right way until the group is accepted and has chunks.
func (a *attackSpec) join() (*attacker, error) {
	conn, err := a.dial()
	if err != nil {
		return nil, err
	}
	t := &attacker{conn: conn, patience: wait}
	if err := t.attach(); err != nil {
		t.close()
		return nil, err
	}
	return t, nil
}

func (t *attacker) attach() error {
	if err := t.conn.Send(validHello()); err != nil {
		return err
	}
	f, files, err := recv(t.conn)
	if err != nil {
		return err
	}
	if _, ok := f.(*wire.Welcome); !ok || len(files) != 3 {
		return fmt.Errorf("%+v instead of a welcome", f)
	}
	if t.memory, err = sys.OpenSegment(files[0], shm.SegmentBytes, true); err != nil {
		return err
	}
	t.seg = t.memory.Bytes()
	if t.bell, err = sys.OpenEvent(files[1]); err != nil {
		return err
	}
	if t.other, err = sys.OpenEvent(files[2]); err != nil {
		return err
	}
	if err := t.conn.Send(validDeclare()); err != nil {
		return err
	}
	f, files, err = recv(t.conn)
	sys.CloseFiles(files)
	if err != nil {
		return err
	}
	if _, ok := f.(*wire.Accept); !ok {
		return fmt.Errorf("%+v instead of an acceptance", f)
	}
	return t.settle()
}

// settle has op 1 stored, a lease 1, op 2 loading it, and op 3 open with grants.
func (t *attacker) settle() error {
	t.keys = []chunk.Key{t.key(), t.key()}
	for tries := 0; ; tries++ {
		r, err := t.ask(&wire.Request{Type: wire.StoreBegin, Op: 1, Run: &wire.Run{Keys: t.keys[:1]}})
		if err != nil {
			return err
		}
		if r.Verdicts[0].Code == wire.Granted {
			t.grants = r.Verdicts
			break
		}
		if tries > 1000 {
			return errors.New("no slot")
		}
		time.Sleep(time.Millisecond)
		if _, err := t.ask(&wire.Request{Type: wire.Cancel, Op: 1}); err != nil {
			return err
		}
	}
	g := t.grants[0]
	if _, err := t.ask(&wire.Request{Type: wire.StoreDone, Op: 1, Done: []wire.Done{{Slot: g.Slot, Generation: g.Generation}}}); err != nil {
		return err
	}
	for tries := 0; ; tries++ {
		r, err := t.ask(&wire.Request{Type: wire.Lease, Run: &wire.Run{Lease: 1, Flags: wire.LeasePin, Keys: t.keys[:1]}})
		if err != nil {
			return err
		}
		if r.Hits.Leased == 1 {
			break
		}
		if tries > 5000 {
			return errors.New("no lease")
		}
		time.Sleep(time.Millisecond)
	}
	r, err := t.ask(&wire.Request{Type: wire.LoadBegin, Op: 2, Run: &wire.Run{Lease: 1, Keys: t.keys[:1]}})
	if err != nil {
		return err
	}
	t.ready = r.Verdicts[0]
	if r, err = t.ask(&wire.Request{Type: wire.StoreBegin, Op: 3, Run: &wire.Run{Keys: t.keys[1:2]}}); err != nil {
		return err
	}
	t.grants = r.Verdicts
	return nil
}

func (t *attacker) word(offset int) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&t.seg[offset]))
}

// put writes bytes into the ring of requests as they are, and says that they are there.
func (t *attacker) put(m []byte) {
	for len(m)%32 != 0 {
		m = append(m, 0)
	}
	at := t.tail % shm.RingBytes
	if int(at)+len(m) > shm.RingBytes { // as the rules want it
		pad := t.seg[rings+at:][:32]
		clear(pad)
		binary.LittleEndian.PutUint32(pad, shm.RingBytes-at)
		t.tail += shm.RingBytes - at
		at = 0
	}
	copy(t.seg[rings+int(at):], m)
	t.tail += uint32(len(m))
	t.word(requestTail).Store(t.tail)
	_ = t.bell.Signal()
}

func (t *attacker) ask(req *wire.Request) (*wire.Reply, error) {
	t.seq++
	req.Seq = t.seq
	m, err := req.Append(nil)
	if err != nil {
		return nil, err
	}
	t.put(m)
	return t.reply(req.Seq)
}

// reply waits for the reply with this seq and drops others.
func (t *attacker) reply(seq uint32) (*wire.Reply, error) {
	for end := time.Now().Add(t.patience); time.Now().Before(end); {
		if t.word(replyTail).Load() == t.head {
			if t.word(closedBy).Load() != 0 {
				return nil, errDropped
			}
			time.Sleep(20 * time.Microsecond)
			continue
		}
		at := t.head % shm.RingBytes
		b := t.seg[rings+shm.RingBytes+int(at):]
		length := binary.LittleEndian.Uint32(b)
		if length < 32 || int(length) > len(b) {
			return nil, errors.New("a reply without a length")
		}
		pad := binary.LittleEndian.Uint16(b[4:]) == 0
		var r *wire.Reply
		var err error
		if !pad {
			r, err = wire.ParseReply(append([]byte(nil), b[:length]...))
		}
		t.head += length
		t.word(replyHead).Store(t.head)
		if err != nil {
			return nil, err
		}
		if r != nil && r.Seq == seq {
			return r, nil
		}
	}
	return nil, errors.New("the leader neither answers nor drops")
}

func (t *attacker) close() {
	t.conn.Close()
	t.conn.Forget()
	if t.memory != nil {
		t.memory.Close()
	}
	for _, e := range []*sys.Event{t.bell, t.other} {
		if e != nil {
			e.Close()
		}
	}
}

// key is one that nobody has used.
func (t *attacker) key() chunk.Key {
	return chunk.Digest(fmt.Sprint("evil ", os.Getpid(), evilNumber.Add(1)))
}

// messages are valid ones of each type, that fit what settle has made.
func (t *attacker) messages() []*wire.Request {
	run := func(flags uint32, lease uint64, keys ...chunk.Key) *wire.Run {
		return &wire.Run{Flags: flags, Lease: lease, Keys: keys}
	}
	g := wire.Verdict{}
	if len(t.grants) > 0 {
		g = t.grants[0]
	}
	k := t.keys
	const soon = 20 * time.Millisecond
	return []*wire.Request{
		{Type: wire.Lookup, Run: run(0, 0, k[0], k[1])},
		{Type: wire.Prefetch, Run: run(0, 0, k[0])},
		{Type: wire.Lease, Timeout: soon, Run: run(wire.LeasePin|wire.LeasePrefetch, 5, k[0])},
		{Type: wire.Lease, Renew: []uint64{1, 5}, Run: run(wire.LeaseRenew, 0)},
		{Type: wire.Release, Run: run(0, 5)},
		{Type: wire.StoreBegin, Op: 4, Run: run(0, 0, t.key(), t.key())},
		{Type: wire.StoreDone, Op: 3, Done: []wire.Done{{Slot: g.Slot, Generation: g.Generation}}},
		{Type: wire.LoadBegin, Op: 5, Run: run(0, 5, k[0])},
		{Type: wire.LoadWait, Op: 2, Timeout: soon},
		{Type: wire.LoadDone, Op: 2, Done: []wire.Done{{Slot: t.ready.Slot, Generation: t.ready.Generation}}},
		{Type: wire.LoadDone, Op: 2, Flags: wire.LoadDoneEnd},
		{Type: wire.Cancel, Op: 3},
		{Type: wire.Cancel, Op: 4, Flags: wire.CancelUnsent},
		{Type: wire.SelfTest, Timeout: soon, Test: &wire.SelfTestBody{Step: wire.SelfTestJoin, Chunks: 1}},
		{Type: wire.SelfTest, Timeout: soon, Test: &wire.SelfTestBody{Step: wire.SelfTestReport, Report: wire.ReportWrong, Text: "no"}},
		{Type: wire.SelfTest, Test: &wire.SelfTestBody{Step: wire.SelfTestLeave}},
	}
}

// field is a number in a message.
type field struct{ offset, bytes int }

// fieldsOf are the header's, and the 4-byte words of the body's beginning.
func fieldsOf(m []byte) []field {
	f := []field{{0, 4}, {4, 2}, {6, 2}, {8, 8}, {16, 4}, {20, 4}, {24, 4}, {28, 4}}
	for at := 32; at < min(len(m), 96); at += 4 {
		f = append(f, field{at, 4})
	}
	return f
}

const mutations = 7

// mutate changes one field: 0, 1, the most, one more, one less, anything, its high bit.
func mutate(m []byte, f field, how int, r *rand.Rand) {
	var b [8]byte
	copy(b[:], m[f.offset:f.offset+f.bytes])
	v := binary.LittleEndian.Uint64(b[:])
	switch how {
	case 0:
		v = 0
	case 1:
		v = 1
	case 2:
		v = ^uint64(0)
	case 3:
		v++
	case 4:
		v--
	case 5:
		v = r.Uint64()
	case 6:
		v ^= 1 << (f.bytes*8 - 1)
	}
	binary.LittleEndian.PutUint64(b[:], v)
	copy(m[f.offset:f.offset+f.bytes], b[:f.bytes])
}

// ringAttacks is how many attacks of kind ring there are.
func ringAttacks() int {
	t := &attacker{keys: make([]chunk.Key, 2)}
	n := 0
	for _, req := range t.messages() {
		m, err := req.Append(nil)
		if err != nil {
			panic(err)
		}
		n += len(fieldsOf(m)) * mutations
	}
	return n
}

// ring sends the nth mutated message, and then one that is right: either it is answered
// or the peer is dropped.
func (t *attacker) ring(n int, r *rand.Rand) error {
	for _, req := range t.messages() {
		t.seq++
		req.Seq = t.seq
		m, err := req.Append(nil)
		if err != nil {
			return err
		}
		fields := fieldsOf(m)
		if n >= len(fields)*mutations {
			n -= len(fields) * mutations
			t.seq--
			continue
		}
		mutate(m, fields[n/mutations], n%mutations, r)
		t.put(m)
		t.seq += 2 // a seq that was made one more is in use now
		_, err = t.ask(&wire.Request{Type: wire.Lookup, Run: &wire.Run{Keys: t.keys}})
		return err
	}
	return errors.New("no such attack")
}

// soup puts random bytes, lengths and cursors into the ring.
func (t *attacker) soup(r *rand.Rand) error {
	t.patience = 50 * time.Millisecond
	b := make([]byte, 32*(1+r.IntN(64)))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	switch r.IntN(5) {
	case 0: // a length that is possible
		binary.LittleEndian.PutUint32(b, uint32(len(b)))
	case 1: // and a type
		binary.LittleEndian.PutUint32(b, uint32(len(b)))
		binary.LittleEndian.PutUint16(b[4:], uint16(1+r.IntN(12)))
		binary.LittleEndian.PutUint16(b[6:], uint16(r.IntN(4)))
		binary.LittleEndian.PutUint32(b[20:], uint32(r.IntN(len(b)/16)))
	case 2: // a word of the header
		binary.LittleEndian.PutUint32(t.seg[r.IntN(rings/4)*4:], r.Uint32())
	case 3: // a cursor
		t.word([]int{requestTail, requestHead, replyTail, replyHead}[r.IntN(4)]).Store(r.Uint32())
		_ = t.bell.Signal()
	}
	t.put(b)
	_, err := t.ask(&wire.Request{Type: wire.Lookup, Run: &wire.Run{Keys: t.keys}})
	return err
}

// hoardedRuns is how many loads, and how many leases, of the most keys that fit a message
// a hoarder has on one connection.
const hoardedRuns = 300

// hoard begins loads and leases of what is not there, and ends none.
func (t *attacker) hoard() error {
	keys := append([]chunk.Key{t.keys[0]}, make([]chunk.Key, wire.MaxKeys-1)...)
	for i := range keys[1:] {
		keys[1+i] = t.key()
	}
	for i := range hoardedRuns {
		for _, req := range []*wire.Request{
			{Type: wire.LoadBegin, Op: uint64(1000 + i), Run: &wire.Run{Keys: keys[i%2:]}},
			{Type: wire.Lease, Run: &wire.Run{Lease: uint64(1000 + i), Flags: uint32(i % 4), Keys: keys[i%2:]}},
		} {
			if r, err := t.ask(req); err != nil {
				return err
			} else if r.Status != wire.StatusOK && r.Status != wire.StatusBusy {
				return fmt.Errorf("a %v is answered %v", req.Type, r.Status)
			}
		}
	}
	return nil
}

// frames are what may come through the socket, as it was meant and otherwise.
func (a *attackSpec) frame(n int, r *rand.Rand) error {
	conn, err := a.dial()
	if err != nil {
		return err
	}
	defer conn.Forget()
	defer conn.Close()
	hello, declare := asMap(validHello()), asMap(validDeclare())
	switch a.Kind {
	case "hello":
		mangle(hello, n, r)
	case "declare":
		mangle(declare, n, r)
	default:
		// Anything, in any order.
		frames := []map[string]any{hello, declare, {"type": "goodbye"}, {"type": "stats"}, {"type": "reset", "epoch": "AAAA"},
			{"type": "remove", "keys": "%%"}, {"type": "remove"}, {"type": "welcome"}, {"type": "accept"}, {"type": "removed"},
			{"type": "refuse"}, {"type": ""}, {}, {"type": 7}, {"type": "stats_reply", "json": "x"}}
		if n == 0 {
			frames = frames[1:]
		}
		for range 1 + r.IntN(6) {
			if conn.Send(frames[r.IntN(len(frames))]) != nil {
				return nil
			}
		}
		_ = conn.Send(map[string]any{"type": "nothing"}) // which ends it
		for {
			_, files, err := recv(conn)
			sys.CloseFiles(files)
			if errors.Is(err, errDropped) {
				return nil
			}
			if err != nil {
				return err
			}
		}
	}
	if conn.Send(hello) != nil {
		return nil
	}
	f, files, err := recv(conn)
	sys.CloseFiles(files)
	if err != nil || isRefusal(f) {
		return ignoreDropped(err)
	}
	if conn.Send(declare) != nil {
		return nil
	}
	// An answer comes, or nothing ever because the group is not complete: then stats do.
	_ = conn.Send(map[string]any{"type": "stats"})
	f, files, err = recv(conn)
	sys.CloseFiles(files)
	return ignoreDropped(err)
}

func ignoreDropped(err error) error {
	if errors.Is(err, errDropped) {
		return nil
	}
	return err
}

func isRefusal(f any) bool {
	_, is := f.(*wire.Refuse)
	return is
}

func asMap(v any) map[string]any {
	raw, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	var m map[string]any
	if err := json.Unmarshal(raw, &m); err != nil {
		panic(err)
	}
	return m
}

// values are what a member of a frame may be instead.
var values = []any{
	nil, 0, 1, -1, 2, 63, 64, 65, 1 << 31, uint64(1) << 63, 0.5, "", "x", true, []any{}, map[string]any{}, []any{0}, "\u0000\uffff",
}

// mangle gives the nth member, members inside of members counted, another value.
func mangle(m map[string]any, n int, r *rand.Rand) {
	var places []func(any)
	var walk func(v any)
	walk = func(v any) {
		switch v := v.(type) {
		case map[string]any:
			for _, k := range sortedKeys(v) {
				if k == "type" {
					continue
				}
				places = append(places, func(x any) { v[k] = x })
				walk(v[k])
			}
		case []any:
			for i := range v {
				places = append(places, func(x any) { v[i] = x })
				walk(v[i])
			}
		}
	}
	walk(m)
	places[n/len(values)%len(places)](values[n%len(values)])
	if n >= len(places)*len(values) {
		places[r.IntN(len(places))](values[r.IntN(len(values))])
	}
}

func sortedKeys(m map[string]any) []string {
	out := make([]string, 0, len(m))
	for k := range m {
		out = append(out, k)
	}
	for i := range out {
		for j := i; j > 0 && out[j] < out[j-1]; j-- {
			out[j], out[j-1] = out[j-1], out[j]
		}
	}
	return out
}

// run does the attacks of this process and tells the parent how it went.
func (a *attackSpec) run(c *child) error {
	r := rand.New(rand.NewPCG(a.Seed, uint64(a.From)))
	var t *attacker
	dropped := 0
	for n := a.From; n < a.To; n++ {
		var err error
		switch a.Kind {
		case "ring", "soup":
			if t == nil || n%16 == 0 {
				if t != nil {
					t.close()
				}
				if t, err = a.join(); err != nil {
					c.say(line{ID: 1, Err: fmt.Sprintf("attack %d: joining: %v", n, err)})
					return nil
				}
			}
			if a.Kind == "ring" {
				err = t.ring(n, r)
			} else {
				err = t.soup(r)
			}
			if errors.Is(err, errDropped) {
				dropped++
				err = nil
				t.close()
				t = nil
			}
		case "hoard": // on connections that all stay
			if t, err = a.join(); err == nil {
				err = t.hoard()
			}
		default:
			err = a.frame(n, r)
		}
		if err != nil && a.Kind != "soup" {
			c.say(line{ID: 1, Err: fmt.Sprintf("%s attack %d: %v", a.Kind, n, err)})
			return nil
		}
		if err != nil { // its own bytes have spoiled what it reads
			t.close()
			t = nil
		}
	}
	c.say(line{ID: 1, Sum: uint64(dropped)})
	if a.Kind == "hoard" { // the leader is looked at while it has all this
		time.Sleep(2 * wait)
	}
	// It ends without a goodbye: what it had goes because its process is gone.
	return nil
}
