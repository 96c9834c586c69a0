package ranks

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/sys"
	"github.com/kvtier/kvtier/internal/wire"
)

// frameOf gives a frame as the handshake or a member's life has it, with every member
// that it can have.
func frameOf(kind string) map[string]any {
	switch kind {
	case "hello":
		return asMap(validHello())
	case "declare":
		d := validDeclare()
		d.Provenance = map[string]string{"engine": "evil 1.0"}
		for i := range d.Groups[0].Regions {
			d.Groups[0].Regions[i].AllRows = true // left out when false
		}
		return asMap(d)
	case "reset":
		return asMap(&wire.Reset{Epoch: make([]byte, wire.EpochBytes)})
	case "remove":
		return asMap(wire.NewRemove(nil))
	}
	panic(kind)
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

// absent stands for a member that is left out.
type absent struct{}

// values are what a member of a frame may be instead.
var values = []any{
	nil, 0, 1, -1, 2, 63, 64, 65, 1 << 31, uint64(1) << 63, 0.5, "", "x", true, []any{}, map[string]any{}, []any{0}, "\u0000\uffff", absent{},
}

// place is a member of a frame, or of a member.
type place struct {
	path string // of names with dots between; an element of a list has none
	set  func(any)
}

// placesOf finds all members of a frame but its type.
func placesOf(m map[string]any) (places []place) {
	var walk func(path string, v any)
	walk = func(path string, v any) {
		switch v := v.(type) {
		case map[string]any:
			for _, k := range slices.Sorted(maps.Keys(v)) {
				if path == "" && k == "type" {
					continue
				}
				places = append(places, place{path + k, func(x any) {
					if v[k] = x; x == any(absent{}) {
						delete(v, k)
					}
				}})
				walk(path+k+".", v[k])
			}
		case []any:
			for i := range v {
				places = append(places, place{path, func(x any) {
					if x == any(absent{}) {
						x = nil
					}
					v[i] = x
				}})
				walk(path, v[i])
			}
		}
	}
	walk("", m)
	return places
}

// twiceMangled is how many attacks give two members other values.
const twiceMangled = 50

// handshakeAttacks is how many attacks there are with a frame: every member with every
// value, and some with two.
func handshakeAttacks(kind string) int {
	return len(placesOf(frameOf(kind)))*len(values) + twiceMangled
}

// mangle gives one member another value, and from a number on a second one too.
func mangle(m map[string]any, n int, r *rand.Rand) {
	places := placesOf(m)
	places[n/len(values)%len(places)].set(values[n%len(values)])
	if n >= len(places)*len(values) {
		places[r.IntN(len(places))].set(values[r.IntN(len(values))])
	}
}

// handshake attaches with a hello or a declaration that is mangled. Whatever the leader
// says, it answers or drops.
func (a *attackSpec) handshake(n int, r *rand.Rand) error {
	hello, declare := frameOf("hello"), frameOf("declare")
	if a.Kind == "hello" {
		mangle(hello, n, r)
	} else {
		mangle(declare, n, r)
	}
	conn, err := a.dial()
	if err != nil {
		return err
	}
	defer conn.Forget()
	defer conn.Close()
	if conn.Send(hello) != nil {
		return nil
	}
	f, files, err := recv(conn)
	sys.CloseFiles(files)
	if _, refused := f.(*wire.Refuse); err != nil || refused {
		return ignoreDropped(err)
	}
	if conn.Send(declare) != nil {
		return nil
	}
	// An answer comes, or nothing ever because the group is not complete: then stats do.
	_ = conn.Send(&wire.StatsRequest{})
	_, files, err = recv(conn)
	sys.CloseFiles(files)
	return ignoreDropped(err)
}

func ignoreDropped(err error) error {
	if errors.Is(err, errDropped) {
		return nil
	}
	return err
}

// lifeValue is what the one member of a reset or of a removal may be, and whether the
// leader may take it.
type lifeValue struct {
	value any
	good  bool
}

// lifeValues are those of a kind. Bytes that are good ask for nothing that is there; those
// that are not name what the engine has stored, in full and in front.
func (a *attackSpec) lifeValues() (out []lifeValue) {
	coded := func(b []byte) string { return base64.StdEncoding.EncodeToString(b) }
	if a.Kind == "reset" {
		for _, v := range values {
			out = append(out, lifeValue{v, false})
		}
		for _, n := range []int{1, 8, wire.EpochBytes - 1, wire.EpochBytes, wire.EpochBytes + 1, 2 * wire.EpochBytes, 4096, 1 << 20} {
			out = append(out, lifeValue{coded(make([]byte, n)), n == wire.EpochBytes})
		}
		return append(out, lifeValue{strings.Repeat("A", 22), false}) // without what pads it
	}
	for _, v := range values {
		list, isList := v.([]any)
		none := v == nil || v == any(absent{}) || v == any("") || isList && len(list) == 0
		out = append(out, lifeValue{v, none})
	}
	held := wire.NewRemove(a.Keys).Keys
	for _, n := range []int{1, 16, 31} {
		out = append(out, lifeValue{coded(held[:n]), false}, lifeValue{coded(append(held[:len(held):len(held)], held[:n]...)), false},
			lifeValue{coded(held[:len(held)-n]), false})
	}
	const most = wire.MaxKeys * 32
	for _, n := range []int{32, 64, most} { // of zeros, which no chunk has
		out = append(out, lifeValue{coded(make([]byte, n)), true})
	}
	for _, n := range []int{most + 32, most + 1, 2 << 20} {
		b := make([]byte, n)
		copy(b, held)
		out = append(out, lifeValue{coded(b), false})
	}
	return out
}

// lifeStates are who sends it: someone who has no group, a rank that has not declared, and
// one whose group is accepted. The latter two are alone in it and its coordinator.
const lifeStates = 3

func lifeAttacks(kind string) int {
	a := &attackSpec{Kind: kind, Keys: make([]chunk.Key, 1)}
	return len(a.lifeValues()) * lifeStates
}

// life sends a reset or a removal, as it is meant or otherwise: what is wrong ends the
// connection, and the rest has its answer.
func (a *attackSpec) life(n int, _ *rand.Rand) error {
	list := a.lifeValues()
	v, state := list[n/lifeStates], n%lifeStates
	h, d := validHello(), validDeclare()
	if state == 0 {
		h.Rank, h.Coordinator = -1, false
	}
	frame := frameOf(a.Kind)
	placesOf(frame)[0].set(v.value)
	c, err := a.dialRaw()
	if err != nil {
		return err
	}
	defer c.Close()
	c.frame(h)
	want := []string{"welcome"}
	if state == 2 {
		c.frame(d)
		if err := c.until("accept"); err != nil {
			return err
		}
		want = append(want, "accept")
	}
	good := v.good && (a.Kind == "remove" || state != 0) // who has no group begins no epoch
	c.frame(frame)
	if a.Kind == "remove" && good {
		want = append(want, "removed")
	}
	if good {
		want = append(want, "stats_reply")
	}
	if err := c.expect(want...); err != nil {
		return fmt.Errorf("%s of %.60v in state %d: %w", a.Kind, v.value, state, err)
	}
	return nil
}

// elsewhere removes what the engine has stored, from another namespace, which has none of
// these keys.
func (a *attackSpec) elsewhere(int, *rand.Rand) error {
	c, err := a.dialRaw()
	if err != nil {
		return err
	}
	defer c.Close()
	d := validDeclare()
	d.Identity.Model = "evil/model"
	c.frame(validHello())
	c.frame(d)
	if err := c.until("accept"); err != nil {
		return err
	}
	c.frame(wire.NewRemove(a.Keys))
	return c.expect("welcome", "accept", "removed", "stats_reply")
}

// Whatever member a frame gets is attacked too.
func TestEveryMemberOfAFrameIsAttacked(t *testing.T) {
	for kind, typ := range map[string]reflect.Type{
		"hello": reflect.TypeFor[wire.Hello](), "declare": reflect.TypeFor[wire.Declare](),
		"reset": reflect.TypeFor[wire.Reset](), "remove": reflect.TypeFor[wire.Remove](),
	} {
		known := map[string]bool{}
		for _, p := range placesOf(frameOf(kind)) {
			known[p.path] = true
		}
		members := 0
		var walk func(path string, t reflect.Type)
		walk = func(path string, typ reflect.Type) {
			switch typ.Kind() {
			case reflect.Slice:
				walk(path, typ.Elem())
			case reflect.Map:
				require.Contains(t, known, path+"engine", "%s has an entry of this map", kind)
			case reflect.Struct:
				for f := range typ.Fields() {
					name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
					require.Contains(t, known, path+name, kind)
					members++
					walk(path+name+".", f.Type)
				}
			}
		}
		walk("", typ)
		require.Positive(t, members)
		// And each member gets every value, of which it may have had one.
		mangled := map[string]bool{}
		for n := range handshakeAttacks(kind) - twiceMangled {
			f := frameOf(kind)
			mangle(f, n, nil)
			raw, err := json.Marshal(f)
			require.NoError(t, err)
			mangled[string(raw)] = true
		}
		require.GreaterOrEqual(t, len(mangled), len(known)*(len(values)-2), kind)
	}
}
