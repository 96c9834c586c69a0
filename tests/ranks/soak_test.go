package ranks

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier"
)

var soakFlag = flag.Duration("soak", soakTime, "how long the soak goes on")

// soakShapes have the same chunks in other topologies.
var soakShapes = []shape{
	{D: 4, I: 2, B: 8, C: 24, Blocks: 48, Widths: []int{48, 17}},
	{D: 2, I: 8, B: 8, C: 24, Blocks: 48, Widths: []int{48, 17}},
	{D: 4, I: 16, B: 16, C: 24, Blocks: 24, Widths: []int{48, 17}}, // D*I > C: some ranks have no rows
	{D: 1, I: 16, B: 16, C: 24, Blocks: 96, Widths: []int{48, 17}},
}

// drawReplicas gives one of up to four ranks with the same chunks, in which some bytes
// are on several ranks.
func drawReplicas(r *rand.Rand) shape {
	tp := 2 + r.IntN(3)
	s := shape{D: 1 + r.IntN(tp), TP: tp, C: 24, Widths: []int{48, 17}}
	for tp%s.D != 0 {
		s.D--
	}
	s.B = []int{8, 16, 32}[r.IntN(3)]
	s.I = s.B >> r.IntN(4)
	s.Blocks = soakTokens / (s.B * s.D)
	// One of the regions is everywhere, so that no rank is without any.
	s.Kinds = []kind{[]kind{replicated, allRows}[r.IntN(2)], []kind{split, replicated, allRows}[r.IntN(3)]}
	if r.IntN(2) == 0 {
		s.Kinds[0], s.Kinds[1] = s.Kinds[1], s.Kinds[0]
	}
	return s
}

const (
	soakPrompts = 40   // prompts in use; each has its own length
	soakLongest = 14   // chunks
	soakTokens  = 1536 // in the pages of all ranks of an engine
	soakSlots   = 56
	soakDisk    = 160 * 8192.0 / (1 << 30) // for about half of all chunks of these prompts
)

func soakLength(seed uint32) int { return 1 + int(seed*2654435761>>16)%soakLongest }

// soak is one root with a leader process that may be killed, and an engine whose ranks
// may be, too; from life to life its topology changes.
type soak struct {
	t      *testing.T // of the present life
	top    *testing.T
	r      *rand.Rand
	root   root
	c      *kvtier.Cache
	leader *process
	g      *group
	life   int
	spare  bool // no rank is killed now: another one could not become ready
	count  map[string]int
}

func TestSoak(t *testing.T) {
	s := seed(t)
	k := &soak{t: t, top: t, r: rand.New(rand.NewPCG(s, 1)), count: map[string]int{}, root: root{
		dir: t.TempDir(), slots: soakSlots, disk: soakDisk,
		extra: `,"part_deadline_s":2,"part_first_done_deadline_s":1,"load_window_deadline_s":2,"lease_ttl_s":3`,
	}}
	k.lead()
	k.c = open(t, k.root.config("member"))
	for end := time.Now().Add(*soakFlag); time.Now().Before(end); k.life++ {
		k.engine(end)
	}
	t.Logf("%d lives: %v", k.life, k.count)
	require.NotZero(t, k.count["stored"])
	require.NotZero(t, k.count["loaded"])
	require.NotZero(t, k.count["killed ranks"])
}

func (k *soak) lead() {
	k.t.Helper()
	k.leader = start(k.top, childSpec{Config: k.root.config("leader"), Rank: -1})
	require.Equal(k.t, kvtier.StateLeader, k.leader.call(request{Cmd: "state"}).State)
}

// engine is one life: ranks and a coordinator in some topology, random operations,
// and an accounting at the end.
func (k *soak) engine(end time.Time) {
	k.t.Helper()
	shape := soakShapes[k.r.IntN(len(soakShapes))]
	if k.life%2 == 1 {
		shape = drawReplicas(k.r)
	}
	k.t.Run(fmt.Sprintf("life %d, D %d of %d, I %d, B %d, %v", k.life, shape.D, shape.ranks(), shape.I, shape.B, shape.Kinds), func(t *testing.T) {
		k.c.Records(1 << 20) // only the last life is of interest
		outer := k.t
		k.t = t
		defer func() {
			k.t = outer
			if t.Failed() {
				k.tell(t)
			}
		}()
		k.g = &group{t: t, name: "soak", shape: shape, conf: k.root.config, ranks: make([]*process, shape.ranks())}
		k.g.start(k.c)
		stop := time.Now().Add(time.Duration(2+k.r.IntN(4)) * time.Second)
		for time.Now().Before(end) && time.Now().Before(stop) {
			k.step()
			if t.Failed() {
				return
			}
		}
		k.settle()
	})
	require.False(k.t, k.t.Failed())
}

// tell shows what everybody has to say.
func (k *soak) tell(t *testing.T) {
	text, err := k.c.Stats()
	t.Logf("%s %v %v", text, err, k.count)
	for _, p := range append([]*process{k.leader}, k.g.ranks...) {
		_, err := p.try(request{Cmd: "records"})
		t.Log(p.spec.Rank, err)
	}
}

func (k *soak) step() {
	switch n := k.r.IntN(100); {
	case n < 40:
		k.store()
	case n < 80:
		k.load()
	case n < 88:
		k.lease()
	case n < 92:
		k.cancel()
	case n < 94:
		_, _ = k.g.k.Reset()
		k.count["resets"]++
	case n < 97:
		k.killRank()
	case n < 98:
		k.freezeRank()
	case n < 99:
		k.selfTest()
	default:
		k.killLeader()
	}
}

func (k *soak) prefix() *prefix {
	seed := uint32(1 + k.r.IntN(soakPrompts))
	n := soakLength(seed)
	v := k.g.shape.B * k.g.shape.D
	need := (n*k.g.shape.C + v - 1) / v
	return k.g.newPrefix(seed, n, k.r.IntN(k.g.shape.Blocks-need+1))
}

// all asks all ranks at once and gives who answered.
func (k *soak) all(r request) []error {
	out := make([]error, len(k.g.ranks))
	var wg sync.WaitGroup
	for i, p := range k.g.ranks {
		wg.Go(func() { _, out[i] = p.try(r) })
	}
	wg.Wait()
	return out
}

// store offers a prefix, from some chunk on. Every rank gets what was granted, unless
// one of them is killed in the middle of it.
func (k *soak) store() {
	p := k.prefix()
	k.all(request{Cmd: "fill", Seed: p.seed, Table: p.table, To: len(p.keys) * k.g.shape.C})
	op := kvtier.StoreOp{Op: opNumbers.Add(1)}
	first := 0
	if k.r.IntN(3) == 0 {
		first = k.r.IntN(len(p.keys))
	}
	op.FirstOrdinal = uint32(first)
	a := k.g.k.StoreBegin([]kvtier.StoreBegin{{
		Op: op.Op, Parent: p.parent(first), First: op.FirstOrdinal, Keys: p.keys[first:], NoDisk: k.r.IntN(10) == 0,
	}}, wait)[0]
	if a.Err != nil {
		k.count["stores refused"]++
		return
	}
	op.Session = a.Session
	for i, v := range a.Verdicts {
		if v.Code == kvtier.Granted {
			op.Grants = append(op.Grants, kvtier.Grant{Index: uint32(i), Slot: v.Slot, Generation: v.Generation})
		}
	}
	if len(op.Grants) == 0 {
		return
	}
	if k.r.IntN(20) == 0 {
		k.g.k.Cancel(op.Op, true)
		return
	}
	op.Blocks = p.table[first*k.g.shape.C/(k.g.shape.B*k.g.shape.D):]
	var answers []<-chan line
	dies := k.victim(12)
	for _, r := range k.g.ranks {
		answers = append(answers, r.send(request{Cmd: "store", Store: &op}))
	}
	if dies >= 0 {
		k.g.ranks[dies].kill()
	}
	for _, c := range answers {
		select {
		case <-c: // also closed
		case <-time.After(wait):
			require.FailNow(k.t, "a store does not end")
		}
	}
	k.count["stored"] += len(op.Grants)
	k.replace(dies)
}

// victim is a rank that is to be killed in one of so many cases, or -1.
func (k *soak) victim(oneOf int) int {
	if k.spare || k.r.IntN(oneOf) > 0 {
		return -1
	}
	return k.r.IntN(len(k.g.ranks))
}

func (k *soak) replace(rank int) {
	if rank < 0 {
		return
	}
	k.count["killed ranks"]++
	k.g.startRank(rank)
	k.g.ready()
}

// load loads a range of a prefix and looks at every byte of what each rank says that it
// has. A rank may die in the middle, or the request be cancelled.
func (k *soak) load() {
	p := k.prefix()
	c := k.g.shape.C
	from := 0
	if k.r.IntN(2) == 0 {
		from = k.r.IntN(len(p.keys) * c)
	}
	to := from + 1 + k.r.IntN(len(p.keys)*c-from)
	first, last := from/c, (to+c-1)/c
	id := opNumbers.Add(1)
	flags := uint32(k.r.IntN(4))
	if k.g.k.Lease(id, p.root, 0, p.keys, flags) != nil {
		return
	}
	h, err := k.g.k.LeaseResult(id, time.Second)
	if err != nil || int(h.Held) < last && k.r.IntN(4) > 0 {
		k.g.k.Release(id)
		k.count["misses"]++
		return
	}
	verdicts, session, err := k.g.k.LoadBegin(id, id, p.parent(first), uint32(first), p.keys[first:last], time.Second)
	if err != nil {
		session, verdicts = 0, nil // it travels all the same
	}
	v := k.g.shape.B * k.g.shape.D
	op := kvtier.LoadOp{
		Session: session, Op: id, FirstToken: uint32(from), Tokens: uint32(to - from), Verdicts: verdicts,
		Blocks: p.table[from/v : (to+v-1)/v],
	}
	k.all(request{Cmd: "wipe"})
	dies := k.victim(12)
	var loading []*process
	for _, r := range k.g.ranks {
		if _, err := r.try(request{Cmd: "load", Load: &op}); err == nil {
			loading = append(loading, r)
		}
	}
	if dies >= 0 {
		k.g.ranks[dies].kill()
	}
	if k.r.IntN(15) == 0 {
		k.g.k.Cancel(id, false)
	}
	for _, r := range loading {
		if dies >= 0 && r == k.g.ranks[dies] {
			continue
		}
		e := r.event(id)
		if _, err := r.try(request{Cmd: "check", Seed: p.seed, Table: p.table, From: from, Loaded: from + int(e.Tokens), To: to}); err != nil {
			require.NoError(k.t, err, "%+v", e)
		}
		if e.Status == kvtier.EventOK {
			require.EqualValues(k.t, to-from, e.Tokens)
			k.count["loaded"]++
		} else {
			k.count["loads failed"]++
		}
	}
	k.replace(dies)
}

// lease takes one that nobody ends: its TTL does.
func (k *soak) lease() {
	p := k.prefix()
	_ = k.g.k.Lease(opNumbers.Add(1), p.root, 0, p.keys, uint32(k.r.IntN(4)))
	k.count["leases left"]++
}

// cancel ends operations that the ranks never hear of, in every way there is.
func (k *soak) cancel() {
	p := k.prefix()
	op := opNumbers.Add(1)
	if k.r.IntN(2) == 0 {
		k.g.k.Cancel(op, true) // before its begin
	}
	k.g.k.StoreBegin([]kvtier.StoreBegin{{Op: op, Parent: p.root, Keys: p.keys}}, wait)
	k.g.k.Cancel(op, k.r.IntN(2) == 0)
	op = opNumbers.Add(1)
	_, _, _ = k.g.k.LoadBegin(op, 0, p.root, 0, p.keys, wait)
	k.g.k.Cancel(op, true)
	k.count["cancelled"]++
}

func (k *soak) killRank() {
	n := k.r.IntN(len(k.g.ranks))
	k.g.ranks[n].kill()
	if k.r.IntN(2) == 0 {
		k.spare = true
		k.store() // by those that are left
		k.spare = false
	}
	k.replace(n)
}

// freezeRank stops a rank for longer than the deadlines in the middle of stores.
func (k *soak) freezeRank() {
	r := k.g.ranks[k.r.IntN(len(k.g.ranks))]
	p := k.prefix()
	k.all(request{Cmd: "fill", Seed: p.seed, Table: p.table, To: len(p.keys) * k.g.shape.C})
	op := kvtier.StoreOp{Op: opNumbers.Add(1)}
	a := k.g.k.StoreBegin([]kvtier.StoreBegin{{Op: op.Op, Parent: p.root, Keys: p.keys}}, wait)[0]
	if a.Err != nil {
		return
	}
	op.Session, op.Blocks = a.Session, p.table
	for i, v := range a.Verdicts {
		if v.Code == kvtier.Granted {
			op.Grants = append(op.Grants, kvtier.Grant{Index: uint32(i), Slot: v.Slot, Generation: v.Generation})
		}
	}
	var answers []<-chan line
	for _, r := range k.g.ranks {
		answers = append(answers, r.send(request{Cmd: "store", Store: &op}))
	}
	r.freeze()
	time.Sleep(time.Duration(k.r.IntN(2500)) * time.Millisecond)
	r.thaw()
	for _, c := range answers {
		<-c
	}
	k.count["frozen ranks"]++
}

// selfTest is one of all ranks, in the middle of which one may die. The pages of the
// others are afterwards what they were.
func (k *soak) selfTest() {
	before := k.sums()
	dies := k.victim(3)
	var answers []<-chan line
	for _, r := range k.g.ranks {
		answers = append(answers, r.send(request{Cmd: "selftest", Pages: true, Timeout: 10 * time.Second}))
	}
	if dies >= 0 {
		time.Sleep(time.Duration(k.r.IntN(20000)) * time.Microsecond)
		k.g.ranks[dies].kill()
	}
	for _, c := range answers {
		select {
		case l := <-c: // also closed
			require.NotContains(k.t, l.Err, "self-test failed")
		case <-time.After(wait):
			require.FailNow(k.t, "a self-test does not end")
		}
	}
	for i, sum := range k.sums() {
		if i != dies {
			require.Equal(k.t, before[i], sum, "the self-test has changed the pages of rank %d", i)
		}
	}
	k.replace(dies)
	k.count["self-tests"]++
}

// sums are checksums of the pages of all ranks, of one that is dead 0.
func (k *soak) sums() []uint64 {
	out := make([]uint64, len(k.g.ranks))
	for i, r := range k.g.ranks {
		l, _ := r.try(request{Cmd: "sum"})
		out[i] = l.Sum
	}
	return out
}

func (k *soak) killLeader() {
	var loading chan struct{}
	if k.r.IntN(2) == 0 {
		loading = make(chan struct{})
		leader := k.leader
		delay := time.Duration(k.r.IntN(20)) * time.Millisecond
		go func() {
			time.Sleep(delay)
			leader.kill()
			close(loading)
		}()
		k.spare = true
		k.load()
		k.spare = false
		<-loading
	} else {
		k.leader.kill()
	}
	k.lead()
	k.count["killed leaders"]++
	k.g.ready()
}

// settle ends a life: all leases are over, and every slot is free or holds a chunk;
// then everything that is held is loaded and compared.
func (k *soak) settle() {
	k.g.ready()
	requireQuiet(k.t, k.c)
	for seed := uint32(1); seed <= soakPrompts; seed++ {
		p := k.g.newPrefix(seed, soakLength(seed), 0)
		if n := k.g.lookup(p); n > 0 {
			p.keys = p.keys[:n]
			v := k.g.shape.B * k.g.shape.D
			p.table = p.table[:(n*k.g.shape.C+v-1)/v]
			k.g.load(p)
			k.count["compared"] += n
		}
	}
	requireQuiet(k.t, k.c)
	for _, r := range k.g.ranks {
		require.NoError(k.t, r.in.Close())
		<-r.gone
	}
	require.NoError(k.t, k.g.k.Close())
}
