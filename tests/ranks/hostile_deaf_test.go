package ranks

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/sys"
	"github.com/kvtier/kvtier/shm"
)

// A peer that asks and does not read its answers uses up its own ring, and may be stopped
// with it full. What it may ask for at once it is answered when it goes on; with more it
// is dropped.
func TestDeafPeerHarmsOnlyItself(t *testing.T) {
	b := newBesieged(t)
	files, _, members := b.holds()
	for i, kind := range fillings {
		for _, stopped := range []bool{false, true} {
			if stopped && kind.over {
				continue // its requests need a leader that takes some
			}
			t.Run(fmt.Sprintf("%s, leader stopped %v", kind.name, stopped), func(t *testing.T) {
				b.t, b.g.t = t, t
				spec := attackSpec{Kind: "fill", Dir: b.r.dir, From: i}
				p := start(t, childSpec{Attack: &spec})
				p.call(request{Cmd: "ready"})
				if stopped { // so that the ring still has all requests when the peer stops
					b.leader.freeze()
					defer b.leader.thaw()
				}
				group := p.call(request{Cmd: "fill"}).State
				p.freeze()
				b.leader.thaw()
				for range 3 {
					b.works()
				}
				if kind.over {
					require.Eventually(t, func() bool { return !b.coordinated(group) }, wait, time.Millisecond, "it is dropped")
					b.works()
				} else {
					p.thaw()
					p.call(request{Cmd: "drain"})
				}
				p.kill()
				requireQuiet(t, b.c)
			})
		}
	}
	b.t, b.g.t = t, t
	require.Eventually(t, func() bool {
		f, _, m := b.holds()
		return f <= files && m == members
	}, wait, 10*time.Millisecond, "the leader keeps what deaf peers had")
	b.works()
	require.Zero(t, panics(t, b))
}

// coordinated says whether a group has a coordinator that is attached.
func (b *besieged) coordinated(group string) bool {
	b.t.Helper()
	s, _, _ := statsOf(b.t, b.c)
	g, _ := s.of(group)
	return g.Coordinated
}

// A process that connects again and again takes no place of others.
func TestConnectionsOfOneProcessAreBounded(t *testing.T) {
	b := newBesieged(t)
	a := &attackSpec{Dir: b.r.dir}
	var conns []*shm.Conn
	defer func() {
		for _, c := range conns {
			c.Close()
			c.Forget()
		}
	}()
	full := false
	for range 1100 {
		conn, err := a.dial()
		if err != nil {
			break
		}
		conns = append(conns, conn)
		if conn.Send(validHello()) != nil {
			full = true
			break
		}
		_, files, err := recv(conn)
		sys.CloseFiles(files)
		if err != nil {
			full = true
			break
		}
	}
	require.True(t, full)
	require.Less(t, len(conns), 300)
	// Others come in.
	p := start(t, childSpec{Config: b.r.config("member"), Group: "late", Ranks: 1, Rank: 0, Shape: evilShape, Model: model})
	p.call(request{Cmd: "ready"})
	b.works()
}
