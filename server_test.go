package kvtier

import (
	"encoding/json"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/shm"
)

// A peer that does not keep to the protocol is dropped, and nobody else notices.
func TestServerDropsBrokenPeers(t *testing.T) {
	dir := t.TempDir()
	c := openTest(t, dir, RoleLeader)
	b := newBlob(t, c)
	hello := func(h wire.Hello) *wire.Hello {
		h.Protocol = wire.Protocol
		return &h
	}
	rank := hello(wire.Hello{Group: "g", Ranks: 2, Rank: 0})
	for name, frames := range map[string][]any{
		"no JSON object":       {json.RawMessage(`[]`)},
		"unknown type":         {json.RawMessage(`{"type":"hallo"}`)},
		"declare before hello": {&wire.Declare{}},
		"hello twice":          {rank, rank},
		"a frame of a leader":  {rank, &wire.Accept{}},
		"declare twice":        {rank, &wire.Declare{}, &wire.Declare{}},
		"half a key":           {rank, json.RawMessage(`{"type":"remove","keys":"AAAA"}`)},
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := shm.Dial(c.root.RunDir(), socketName, testWait)
			require.NoError(t, err)
			defer conn.Close()
			for _, f := range frames {
				if conn.Send(f) != nil {
					break // dropped already
				}
			}
			requireEnd(t, conn)
		})
	}
	t.Run("another protocol", func(t *testing.T) {
		_, _, _, err := dial(c.root.RunDir(), &wire.Hello{Rank: 5, Ranks: 3, Group: "g"}, testWait, nil)
		var refused *RefusedError
		require.ErrorAs(t, err, &refused)
		conn, err := shm.Dial(c.root.RunDir(), socketName, testWait)
		require.NoError(t, err)
		defer conn.Close()
		require.NoError(t, conn.Send(&wire.Hello{Protocol: 99, Rank: -1}))
		raw, _, err := conn.Recv(testWait)
		require.NoError(t, err)
		require.Contains(t, string(raw), "protocol 99")
		requireEnd(t, conn)
	})
	t.Run("ring", func(t *testing.T) {
		r, err := dialRing(c.root.RunDir(), hello(wire.Hello{Group: "h", Ranks: 1, Rank: 0, Coordinator: true}), testWait, nil)
		require.NoError(t, err)
		defer r.close()
		bad := make([]byte, 32) // type 99
		bad[0], bad[4], bad[16] = 32, 99, 1
		require.NoError(t, r.ring.Send(bad, 32))
		select {
		case <-r.lost():
		case <-time.After(testWait):
			t.Fatal("a broken ring is not dropped")
		}
		require.ErrorIs(t, r.send(&wire.Request{Type: wire.Cancel}, nil), ErrNoLeader)
	})
	require.NoError(t, b.Put(blobKey(0), Key{}, 0, payload(0, suiteBlob), testWait))
	// Nobody who only lost its socket keeps a place in its group.
	require.Eventually(t, func() bool {
		r, err := dialRing(c.root.RunDir(), rank, testWait, nil)
		if err != nil {
			return false
		}
		r.close()
		return true
	}, testWait, time.Millisecond)
}

func requireEnd(t *testing.T, conn *shm.Conn) {
	t.Helper()
	for {
		_, _, err := conn.Recv(testWait)
		if err != nil {
			require.ErrorIs(t, err, shm.ErrPeerClosed)
			return
		}
	}
}

// Loss of the link answers everything that waits, once.
func TestRingLinkAnswersEachRequestOnce(t *testing.T) {
	dir := t.TempDir()
	leader, err := Open(parsed(t, testConfig(dir, RoleLeader)))
	require.NoError(t, err)
	requireState(t, leader, StateLeader)
	r, err := dialRing(leader.root.RunDir(), &wire.Hello{Group: "g", Ranks: 1, Rank: 0, Coordinator: true}, testWait, nil)
	require.NoError(t, err)
	const n = 2000
	answers := make(chan error, 2*n)
	sent := 0
	go leader.Close(testWait)
	for range n {
		if r.send(&wire.Request{Type: wire.Lookup, Run: &wire.Run{Keys: make([]Key, 1)}}, func(_ *wire.Reply, err error) { answers <- err }) == nil {
			sent++
		}
	}
	<-r.lost()
	r.close()
	require.Eventually(t, func() bool { return len(answers) == sent }, testWait, time.Millisecond, "%d requests were sent", sent)
	require.ErrorIs(t, r.send(&wire.Request{Type: wire.Cancel}, nil), ErrNoLeader)
	require.Len(t, answers, sent)
	require.NoError(t, leader.Close(testWait))
}

// What a leader has answered before it closes is heard, also by a member that has not
// read it yet: the end of the socket may be seen first.
func TestRingLinkReadsTheLastReplies(t *testing.T) {
	leader, err := Open(parsed(t, testConfig(t.TempDir(), RoleLeader)))
	require.NoError(t, err)
	requireState(t, leader, StateLeader)
	r, err := dialRing(leader.root.RunDir(), &wire.Hello{Group: "g", Ranks: 1, Rank: 0, Coordinator: true}, testWait, nil)
	require.NoError(t, err)
	defer r.close()
	lookup := &wire.Request{Type: wire.Lookup, Run: &wire.Run{Keys: make([]Key, 1)}}
	busy, free := make(chan struct{}), make(chan struct{})
	read := sync.OnceFunc(func() { close(free) })
	defer read()
	require.NoError(t, r.send(lookup, func(*wire.Reply, error) { close(busy); <-free }))
	<-busy // nobody reads the ring from here on
	answers := make(chan error, 1)
	require.NoError(t, r.send(lookup, func(_ *wire.Reply, err error) { answers <- err }))
	l := leader.leader
	require.Eventually(t, func() (heard bool) {
		l.mu.Lock()
		defer l.mu.Unlock()
		for _, a := range l.members {
			heard = heard || a.served[wire.Lookup] == 2
		}
		return heard
	}, testWait, time.Millisecond)
	early := func() bool { return len(answers) > 0 }
	require.Never(t, early, 50*time.Millisecond, time.Millisecond) // the reply is on its way to the ring
	require.NoError(t, leader.Close(testWait))
	require.Never(t, early, 100*time.Millisecond, time.Millisecond)
	read()
	require.NoError(t, <-answers)
	<-r.lost()
}
