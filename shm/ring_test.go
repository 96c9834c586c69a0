package shm

import (
	"bytes"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestRequestAndReply(t *testing.T) {
	s, c := newPair(t)
	require.Equal(t, uint64(0xABCDEF0123456789), c.Session())
	require.EqualValues(t, 7, c.Member())
	req := request(1, 96, 64)
	require.NoError(t, c.Send(req, 64))
	got, err := s.Next(nil)
	require.NoError(t, err)
	require.Equal(t, req, got)
	rep := message(1, 1, 64)
	require.NoError(t, s.Reply(rep))
	require.ErrorIs(t, s.Reply(rep), ErrNoRequest, "one reply per request")
	got, err = c.Next(nil)
	require.NoError(t, err)
	require.Equal(t, rep, got)
	require.Zero(t, c.reserved)
	require.Zero(t, s.reserved)
}

func TestSegmentBytesOfTheHeader(t *testing.T) {
	s := newServer(t)
	mem := s.segment.Bytes()
	require.Len(t, mem, 4096+2<<20)
	require.Equal(t, "KVTRING1"+
		"\x01\x00\x00\x00"+"\x00\x10\x00\x00"+"\x00\x00\x10\x00"+"\x00\x00\x04\x00"+
		"\x89\x67\x45\x23\x01\xEF\xCD\xAB"+"\x07\x00\x00\x00"+"\x40\x00\x00\x00", string(mem[:40]))
	require.Equal(t, make([]byte, len(mem)-40), mem[40:])
}

func TestWrongMessagesAreNotSent(t *testing.T) {
	s, c := newPair(t)
	short := message(1, 1, 64)
	for name, m := range map[string][]byte{
		"empty":        nil,
		"too short":    make([]byte, 16),
		"not of 32":    message(1, 1, 72),
		"too long":     message(1, 1, MaxMessage+32),
		"type of pads": message(0, 1, 64),
		"other length": short[:32],
	} {
		require.ErrorIs(t, c.Send(m, 32), ErrMessage, name)
		require.ErrorIs(t, c.SendSure(m, 32), ErrMessage, name)
		require.ErrorIs(t, s.Reply(m), ErrMessage, name)
	}
	for _, reply := range []int{-32, 0, 16, 33, MaxMessage + 32} {
		require.ErrorIs(t, c.Send(short, reply), ErrMessage, reply)
	}
	require.NoError(t, c.Send(request(2, 64, 32), 32))
	_, err := s.Next(nil)
	require.NoError(t, err)
	require.ErrorIs(t, s.Reply(message(1, 2, 64)), ErrMessage, "more than reserved")
	require.NoError(t, s.Reply(message(1, 2, 32)))
}

func TestNextStops(t *testing.T) {
	s, c := newPair(t)
	for round := range 3 {
		stop := make(chan struct{})
		var err error
		within(t, "stopped Next", func() {
			time.AfterFunc(time.Millisecond, func() { close(stop) })
			_, err = s.Next(stop)
		})
		require.ErrorIs(t, err, ErrStopped)
		_, err = s.Next(stop)
		require.ErrorIs(t, err, ErrStopped)
		// A stopped ring still works, with another channel.
		require.NoError(t, c.Send(request(uint32(round), 32, 32), 32))
		within(t, "Next after a stop", func() { _, err = s.Next(make(chan struct{})) })
		require.NoError(t, err)
	}
}

// The message comes while the consumer already waits with a new stop channel,
// and the end of an old one must not count.
func TestOldStopChannelDoesNotStop(t *testing.T) {
	s, c := newPair(t)
	old := make(chan struct{})
	require.NoError(t, c.Send(request(1, 32, 32), 32))
	s.in.watch(old)
	_, err := s.Next(nil)
	require.NoError(t, err)
	within(t, "Next", func() {
		time.AfterFunc(time.Millisecond, func() { close(old) })
		time.AfterFunc(5*time.Millisecond, func() { _ = c.Send(request(2, 32, 32), 32) })
		_, err = s.Next(make(chan struct{}))
	})
	require.NoError(t, err)
}

func TestCloseEndsBothSides(t *testing.T) {
	for _, fromServer := range []bool{true, false} {
		s, c := newPair(t)
		require.NoError(t, c.Send(request(1, 32, 32), 32))
		_, err := s.Next(nil)
		require.NoError(t, err)
		require.NoError(t, c.Send(request(2, 32, 32), 32))
		require.NoError(t, s.Reply(message(1, 1, 32)))
		closer, other := &s.endpoint, &c.endpoint
		next := c.Next
		if !fromServer {
			closer, other, next = other, closer, s.Next
		}
		require.NoError(t, closer.Close())
		require.NoError(t, closer.Close())
		_, err = next(nil)
		require.NoError(t, err, "what was sent before the end counts")
		within(t, "Next after the peer's end", func() { _, err = next(nil) })
		require.ErrorIs(t, err, ErrPeerClosed)
		if fromServer {
			require.ErrorIs(t, c.Send(request(3, 32, 32), 32), ErrPeerClosed)
			require.ErrorIs(t, c.SendSure(request(4, 32, 32), 32), ErrPeerClosed)
			require.ErrorIs(t, s.Reply(message(1, 2, 32)), ErrClosed)
			_, err = s.Next(nil)
			require.ErrorIs(t, err, ErrClosed)
		} else {
			require.ErrorIs(t, c.Send(request(3, 32, 32), 32), ErrClosed)
			_, err = c.Next(nil)
			require.ErrorIs(t, err, ErrClosed)
		}
		require.NoError(t, other.Close())
	}
}

func TestCloseWakesWaiters(t *testing.T) {
	s, c := newPair(t)
	var own, peer error
	var both sync.WaitGroup
	both.Add(2)
	go func() { defer both.Done(); _, own = s.Next(nil) }()
	go func() { defer both.Done(); _, peer = c.Next(nil) }()
	require.Eventually(t, func() bool { return s.in.sleeps.Load() == 1 && c.in.sleeps.Load() == 1 }, patience, time.Millisecond)
	require.NoError(t, s.Close())
	within(t, "both sides of a closed ring", both.Wait)
	require.ErrorIs(t, own, ErrClosed)
	require.ErrorIs(t, peer, ErrPeerClosed)
}

// The message comes between the last look at the ring and the note that the
// consumer sleeps: the producer saw nobody asleep and rang for nobody.
func TestNoWakeUpIsLost(t *testing.T) {
	s, c := newPair(t)
	require.NoError(t, c.Send(request(1, 32, 32), 32))
	within(t, "sleep over a message", func() { require.NoError(t, s.in.sleep(nil)) })

	got, err := s.Next(nil)
	require.NoError(t, err)
	require.NotNil(t, got)
	require.NoError(t, s.Reply(message(1, 1, 32)))
	within(t, "sleep over a reply", func() { require.NoError(t, c.in.sleep(nil)) })

	require.NoError(t, s.Close())
	_, err = c.Next(nil)
	require.NoError(t, err)
	within(t, "sleep over an end", func() { require.NoError(t, c.in.sleep(nil)) })
}

// Two sleeping sides that wake each other many times, each with its own timing.
func TestPingPong(t *testing.T) {
	for name, spin := range map[string]time.Duration{"sleeping": 0, "spinning": DefaultSpin} {
		t.Run(name, func(t *testing.T) {
			const rounds = 5000
			s, c := newPair(t)
			s.SetSpin(spin)
			c.SetSpin(spin)
			go func() {
				for {
					m, err := s.Next(nil)
					if err != nil {
						return
					}
					_ = s.Reply(message(1, messageSeq(m), 64))
				}
			}()
			within(t, "ping-pong", func() {
				for seq := range uint32(rounds) {
					require.NoError(t, c.Send(request(seq, 32*int(1+seq%9), 64), 64))
					m, err := c.Next(nil)
					require.NoError(t, err)
					require.Equal(t, seq, messageSeq(m))
				}
			})
		})
	}
}

// Many senders and repliers at once, all of whom come through.
func TestManyGoroutines(t *testing.T) {
	const senders, each = 8, 400
	s, c := newPair(t)
	go func() {
		for {
			m, err := s.Next(nil)
			if err != nil {
				return
			}
			rep := message(1, messageSeq(m), 32)
			go func() { _ = s.Reply(rep) }()
		}
	}()
	for sender := range senders {
		go func() {
			for i := range each {
				_ = c.SendSure(request(uint32(sender*each+i), 32*(1+i%50), 32), 32)
			}
		}()
	}
	seen := make(map[uint32]bool)
	within(t, "all replies", func() {
		for range senders * each {
			m, err := c.Next(nil)
			require.NoError(t, err)
			require.False(t, seen[messageSeq(m)])
			seen[messageSeq(m)] = true
		}
	})
	require.Zero(t, c.Queued())
	require.Zero(t, c.reserved)
}

func TestBusyWithoutCredit(t *testing.T) {
	s, c := newPair(t)
	seq := uint32(0)
	for ; c.Send(request(seq, 32, 32), 32) == nil; seq++ {
	}
	require.EqualValues(t, Credits-sureCredits, seq)
	require.ErrorIs(t, c.Send(request(seq, 32, 32), 32), ErrBusy)
	for range sureCredits {
		require.NoError(t, c.SendSure(request(seq, 32, 32), 32))
		seq++
	}
	require.Zero(t, c.Queued(), "credits are kept for what must not be lost")
	require.NoError(t, c.SendSure(request(seq, 32, 32), 32))
	require.Equal(t, 1, c.Queued())
	for range Credits {
		_, err := s.Next(nil)
		require.NoError(t, err)
	}
	require.NoError(t, s.Reply(message(1, 0, 32)))
	_, err := c.Next(nil)
	require.NoError(t, err)
	require.Zero(t, c.Queued(), "a reply makes room")
	m, err := s.Next(nil)
	require.NoError(t, err)
	require.Equal(t, seq, messageSeq(m))
}

func TestBusyWithoutReplyRoom(t *testing.T) {
	s, c := newPair(t)
	require.NoError(t, c.Send(request(1, 32, MaxMessage), MaxMessage))
	require.ErrorIs(t, c.Send(request(2, 32, MaxMessage), MaxMessage), ErrBusy, "replies stay within half a ring")
	require.NoError(t, c.Send(request(3, 32, 32), 32))
	require.NoError(t, c.SendSure(request(4, 32, MaxMessage), MaxMessage))
	require.ErrorIs(t, c.Send(request(5, 32, 32), 32), ErrBusy, "what waits goes first")
	for range 2 {
		_, err := s.Next(nil)
		require.NoError(t, err)
	}
	require.NoError(t, s.Reply(message(1, 1, MaxMessage)))
	_, err := c.Next(nil)
	require.NoError(t, err)
	require.Zero(t, c.Queued())
	m, err := s.Next(nil)
	require.NoError(t, err)
	require.EqualValues(t, 4, messageSeq(m))
}

func TestBusyWhenFull(t *testing.T) {
	s, c := newPair(t)
	var sent [][]byte
	for seq := uint32(0); ; seq++ {
		m := request(seq, MaxMessage-32, 32)
		if err := c.Send(m, 32); err != nil {
			require.ErrorIs(t, err, ErrBusy)
			break
		}
		sent = append(sent, m)
	}
	require.Len(t, sent, 4)
	for _, want := range sent {
		m, err := s.Next(nil)
		require.NoError(t, err)
		require.True(t, bytes.Equal(want, m))
	}
	require.NoError(t, c.Send(request(9, MaxMessage, 32), 32), "behind the padding")
	m, err := s.Next(nil)
	require.NoError(t, err)
	require.EqualValues(t, 9, messageSeq(m))
}

// A member that uses all it may, and reads its replies as late as it may, never
// makes a reply find no room, wherever in the ring it stands.
func TestReservedRepliesFit(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		s, err := NewRingServer(1, 1, replyRoom)
		require.NoError(rt, err)
		defer s.Close()
		c, err := OpenRing(files(t, s))
		require.NoError(rt, err)
		defer c.Close()
		startAt(s, c, rapid.Uint32().Draw(rt, "start")&^(align-1))
		seq, open := uint32(0), []uint32(nil)
		room := map[uint32]int{}
		for range rapid.IntRange(1, 30).Draw(rt, "rounds") {
			for {
				reply := align * rapid.IntRange(1, MaxMessage/align).Draw(rt, "reply")
				if c.Send(request(seq, 32, reply), reply) != nil {
					break
				}
				_, err := s.Next(nil)
				require.NoError(rt, err)
				open = append(open, seq)
				room[seq] = reply
				seq++
			}
			for _, q := range open {
				require.NoError(rt, s.Reply(message(1, q, room[q])))
			}
			for _, q := range open {
				m, err := c.Next(nil)
				require.NoError(rt, err)
				require.Equal(rt, q, messageSeq(m))
			}
			open = open[:0]
		}
	})
}

// Random traffic of both kinds against a model: everything accepted arrives once,
// in order and whole, through wrap-around of ring and cursors; busy is only said
// for a reason; what is sent surely is never lost.
func TestRandomTraffic(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		s, err := NewRingServer(1, 1, replyRoom)
		require.NoError(rt, err)
		defer s.Close()
		c, err := OpenRing(files(t, s))
		require.NoError(rt, err)
		defer c.Close()
		startAt(s, c, -(rapid.Uint32Range(0, 4<<20).Draw(rt, "before the wrap") &^ (align - 1)))

		var accepted, open, answered [][]byte // requests: on their way, unanswered, with replies on their way
		seq := uint32(0)
		draw := func() ([]byte, int) {
			largest := rapid.SampledFrom([]int{32, 128, 4096, MaxMessage}).Draw(rt, "largest")
			size := align * rapid.IntRange(1, largest/align).Draw(rt, "size")
			reply := align * rapid.IntRange(1, largest/align).Draw(rt, "reply")
			m := request(seq, size, reply)
			seq++
			return m, reply
		}
		take := func() {
			m, err := s.Next(nil)
			require.NoError(rt, err)
			require.True(rt, bytes.Equal(accepted[0], m), "in order and whole")
			open, accepted = append(open, accepted[0]), accepted[1:]
		}
		reply := func() {
			i := rapid.IntRange(0, len(open)-1).Draw(rt, "which")
			req := open[i]
			room, _ := replyRoom(req)
			m := message(1, messageSeq(req), align*rapid.IntRange(1, room/align).Draw(rt, "reply size"))
			require.NoError(rt, s.Reply(m))
			open = append(open[:i:i], open[i+1:]...)
			answered = append(answered, m)
		}
		hear := func() {
			m, err := c.Next(nil)
			require.NoError(rt, err)
			require.True(rt, bytes.Equal(answered[0], m))
			answered = answered[1:]
		}
		rt.Repeat(map[string]func(*rapid.T){
			"send": func(*rapid.T) {
				m, room := draw()
				inFlight := len(accepted) + len(open) + len(answered)
				err := c.Send(m, room)
				if err == nil {
					accepted = append(accepted, m)
					return
				}
				require.ErrorIs(rt, err, ErrBusy)
				require.NotZero(rt, inFlight, "busy without a reason")
			},
			"send surely": func(*rapid.T) {
				m, room := draw()
				require.NoError(rt, c.SendSure(m, room))
				accepted = append(accepted, m)
			},
			"take": func(*rapid.T) {
				if len(accepted) > c.Queued() {
					take()
				}
			},
			"reply": func(*rapid.T) {
				if len(open) > 0 {
					reply()
				}
			},
			"hear": func(*rapid.T) {
				if len(answered) > 0 {
					hear()
				}
			},
		})
		for len(accepted)+len(open)+len(answered) > 0 {
			for len(accepted) > c.Queued() {
				take()
			}
			for len(open) > 0 {
				reply()
			}
			require.NotEmpty(rt, answered, "what is queued waits for nothing")
			for len(answered) > 0 {
				hear()
			}
		}
		require.Zero(rt, c.Queued())
		require.Zero(rt, c.reserved)
		require.Zero(rt, s.reserved)
	})
}

func BenchmarkRoundTrip(b *testing.B) {
	for name, spin := range map[string]time.Duration{"sleeping": 0, "spinning": DefaultSpin} {
		b.Run(name, func(b *testing.B) {
			s, c := newPair(b)
			s.SetSpin(spin)
			c.SetSpin(spin)
			rep := message(1, 0, 32)
			go func() {
				for {
					if _, err := s.Next(nil); err != nil {
						return
					}
					_ = s.Reply(rep)
				}
			}()
			req := request(0, 64, 32)
			for b.Loop() {
				if err := c.Send(req, 32); err != nil {
					b.Fatal(err)
				}
				if _, err := c.Next(nil); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
