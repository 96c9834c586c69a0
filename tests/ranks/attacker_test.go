package ranks

import (
	"encoding/binary"
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
	Kind     string // one of allAttacks, or what a test of its own commands: rank, fill
	From, To int    // of the attacks of this kind
	Seed     uint64
	Keys     []chunk.Key // that the engine has stored that goes on working
	Group    string      // it is rank 1 of the two of this group; empty: a group of its own
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

var (
	errDropped = errors.New("dropped by the leader")
	errNotYet  = errors.New("refused for now")
)

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

// join goes the right way until the group is accepted, and has chunks if it is its own.
func (a *attackSpec) join() (*attacker, error) {
	if a.Group != "" {
		return a.joinAs(rankHello(a.Group), rankDeclare())
	}
	return a.joinAs(validHello(), validDeclare())
}

func (a *attackSpec) joinAs(h *wire.Hello, d *wire.Declare) (*attacker, error) {
	conn, err := a.dial()
	if err != nil {
		return nil, err
	}
	t := &attacker{conn: conn, patience: wait}
	if err = t.attach(h, d); err == nil && h.Coordinator {
		err = t.settle()
	}
	if err != nil {
		t.close()
		return nil, err
	}
	return t, nil
}

func (t *attacker) attach(h *wire.Hello, d *wire.Declare) error {
	if err := t.conn.Send(h); err != nil {
		return err
	}
	f, files, err := recv(t.conn)
	if err != nil {
		return err
	}
	if no, ok := f.(*wire.Refuse); ok && !no.Final {
		return fmt.Errorf("%w: %s", errNotYet, no.Reason)
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
	if err := t.conn.Send(d); err != nil {
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
	return nil
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
	for {
		r, err := t.next()
		if err != nil || r.Seq == seq {
			return r, err
		}
	}
}

// next waits for a reply.
func (t *attacker) next() (*wire.Reply, error) {
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
		message := append([]byte(nil), b[:length]...)
		t.head += length
		t.word(replyHead).Store(t.head)
		if binary.LittleEndian.Uint16(message[4:]) != 0 { // else padding
			return wire.ParseReply(message)
		}
	}
	return nil, errors.New("the leader neither answers nor drops")
}

func (t *attacker) close() {
	if t == nil {
		return
	}
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

// run does the attacks of this process and tells the parent how it went.
func (a *attackSpec) run(c *child) error {
	if command, ok := commanded[a.Kind]; ok {
		return command(a, c)
	}
	r := rand.New(rand.NewPCG(a.Seed, uint64(a.From)))
	dropped := 0
	var t *attacker
	defer func() { t.close() }()
	for n := a.From; n < a.To; n++ {
		next, err := a.attack(t, n, r)
		if t = next; errors.Is(err, errDropped) {
			dropped++
			err = nil
		}
		if err != nil {
			c.say(line{ID: 1, Err: fmt.Sprintf("%s attack %d: %v", a.Kind, n, err)})
			return nil
		}
	}
	c.say(line{ID: 1, Sum: uint64(dropped)})
	if a.Kind == "hoard" { // the leader is looked at while it has all this
		time.Sleep(2 * wait)
	}
	// It ends without a goodbye: what it had goes because its process is gone.
	return nil
}

// attack is the nth one. Those through a ring use t, or join first; the result is what
// the next one may use.
func (a *attackSpec) attack(t *attacker, n int, r *rand.Rand) (*attacker, error) {
	switch a.Kind {
	case "ring", "soup":
	case "hoard": // on connections that all stay
		t, err := a.join()
		if err == nil {
			err = t.hoard()
		}
		return nil, err
	default:
		return nil, socketAttacks[a.Kind](a, n, r)
	}
	if t == nil || n%16 == 0 {
		t.close()
		var err error
		if t, err = a.join(); err != nil {
			return nil, fmt.Errorf("joining: %w", err)
		}
	}
	var err error
	if a.Kind == "ring" {
		err = t.ring(t.messages(), n, r)
	} else {
		err = t.soup(r)
	}
	if err == nil {
		return t, nil
	}
	t.close()
	if a.Kind == "soup" && !errors.Is(err, errDropped) {
		err = nil // its own bytes have spoiled what it reads
	}
	return nil, err
}
