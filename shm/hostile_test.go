package shm

import (
	"encoding/binary"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvtier/kvtier/internal/sys"
	"github.com/kvtier/kvtier/internal/wire"
)

// hostile is a member that holds the shared memory and obeys nothing.
type hostile struct {
	header            *header
	requests, replies []byte
	memory            *sys.Segment
	bell              *sys.Event
}

func newHostile(t testing.TB, s *RingServer) *hostile {
	t.Helper()
	segment, request, reply := files(t, s)
	reply.Close()
	memory, err := sys.OpenSegment(segment, SegmentBytes, true)
	require.NoError(t, err)
	t.Cleanup(func() { memory.Close() })
	bell, err := sys.OpenEvent(request)
	require.NoError(t, err)
	t.Cleanup(func() { bell.Close() })
	h := &hostile{memory: memory, bell: bell}
	h.header, h.requests, h.replies = rings(memory.Bytes())
	return h
}

// at writes m into the request ring and says that the ring reaches to tail.
func (h *hostile) at(offset uint32, m []byte, tail uint32) {
	copy(h.requests[offset:], m)
	h.header.requestTail.Store(tail)
}

// claim is a header that claims to be of length bytes.
func claim(length uint32, typ uint16) []byte {
	m := request(1, 32, 32)
	binary.LittleEndian.PutUint32(m, length)
	binary.LittleEndian.PutUint16(m[typeOffset:], typ)
	return m
}

func TestServerDropsABrokenPeer(t *testing.T) {
	// How many good requests come before.
	before := map[string]int{"replies over half": 2, "seq twice": 1, "over the credits": Credits}
	for name, act := range map[string]func(h *hostile){
		"tail beyond the ring":  func(h *hostile) { h.at(0, request(1, 64, 32), RingBytes+32) },
		"tail behind the head":  func(h *hostile) { h.at(0, request(1, 64, 32), 1<<32-32) },
		"tail between lines":    func(h *hostile) { h.at(0, request(1, 64, 32), 95) },
		"length 0":              func(h *hostile) { h.at(0, claim(0, 1), 4096) },
		"length below header":   func(h *hostile) { h.at(0, claim(31, 1), 4096) },
		"length not of 32":      func(h *hostile) { h.at(0, claim(40, 1), 4096) },
		"length over available": func(h *hostile) { h.at(0, claim(128, 1), 96) },
		"length over maximum":   func(h *hostile) { h.at(0, claim(MaxMessage+32, 1), RingBytes) },
		"length all ones":       func(h *hostile) { h.at(0, claim(1<<32-32, 1), RingBytes) },
		"padding too short": func(h *hostile) {
			h.at(64, request(1, 32, 32), 96)
			h.at(0, claim(64, 0), 96)
		},
		"padding of all":     func(h *hostile) { h.at(0, claim(RingBytes, 0), RingBytes) },
		"reply too small":    func(h *hostile) { h.at(0, request(1, 32, 0), 32) },
		"reply not of 32":    func(h *hostile) { h.at(0, request(1, 32, 40), 32) },
		"reply over maximum": func(h *hostile) { h.at(0, request(1, 32, MaxMessage+32), 32) },
		"replies over half": func(h *hostile) {
			for i := range uint32(3) {
				h.at(32*i, request(i, 32, MaxMessage), 32*i+32)
			}
		},
		"seq twice": func(h *hostile) { h.at(0, append(request(5, 32, 32), request(5, 32, 32)...), 64) },
		"over the credits": func(h *hostile) {
			for i := range uint32(Credits + 1) {
				h.at(32*i, request(i, 32, 32), 32*i+32)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newServer(t)
			act(newHostile(t, s))
			var err error
			good := 0
			within(t, "drop", func() {
				for ; err == nil; good++ {
					_, err = s.Next(nil)
				}
			})
			require.ErrorIs(t, err, ErrPeerBroken)
			require.Equal(t, before[name], good-1, "nothing of the broken message is taken")
			_, again := s.Next(nil)
			require.Equal(t, err, again, "for good")
			require.ErrorIs(t, s.Reply(message(1, 1, 32)), ErrPeerBroken)
		})
	}
}

// A length that is right for the ring but reaches over its end.
func TestRecordsDoNotWrap(t *testing.T) {
	for name, m := range map[string][]byte{"record": claim(128, 1), "padding": claim(32, 0)} {
		s := newServer(t)
		h := newHostile(t, s)
		s.in.pos = RingBytes - 64
		h.at(RingBytes-64, m, RingBytes+1024)
		_, err := s.Next(nil)
		require.ErrorIs(t, err, ErrPeerBroken, name)
	}
}

// The constants and the own cursors lie in memory that the peer can write.
func TestOwnWordsAreNotReadBack(t *testing.T) {
	s, c := newPair(t)
	h := newHostile(t, s)
	for seq := range uint32(4000) {
		h.header.constants = constants{ringBytes: 64, maxMessage: 1 << 31, credits: 1 << 31}
		h.header.requestHead.Store(c.out.pos) // as if all were taken: what the member reads
		require.NoError(t, c.Send(request(seq, 512, 512), 512))
		h.header.requestHead.Store(0xDEADBEEF)
		h.header.leaderClosed.Store(0)
		_, err := s.Next(nil)
		require.NoError(t, err)
		require.NoError(t, s.Reply(message(1, seq, 512)))
		h.header.replyTail.Store(s.out.pos)
		_, err = c.Next(nil)
		require.NoError(t, err)
	}
}

// The message changes after it was checked: only the checked copy counts.
func TestMessageIsAPrivateCopy(t *testing.T) {
	s := newServer(t)
	h := newHostile(t, s)
	want := request(3, 256, 32)
	h.at(0, want, 256)
	got, err := s.Next(nil)
	require.NoError(t, err)
	clear(h.requests)
	require.Equal(t, want, got)
}

// A member that never takes its replies is dropped; the leader does not wait.
func TestServerNeverWaitsForReplyRoom(t *testing.T) {
	s := newServer(t)
	h := newHostile(t, s)
	within(t, "flood of replies", func() {
		for seq := uint32(0); ; seq++ {
			h.at(32*seq%RingBytes, request(seq, 32, MaxMessage), 32*seq+32)
			_, err := s.Next(nil)
			require.NoError(t, err)
			if err := s.Reply(message(1, seq, MaxMessage)); err != nil {
				require.ErrorIs(t, err, ErrPeerBroken)
				require.EqualValues(t, 4, seq)
				break
			}
		}
	})
	_, err := s.Next(nil)
	require.ErrorIs(t, err, ErrPeerBroken)
}

func TestBrokenReplyCursorWakesTheReader(t *testing.T) {
	for _, head := range []uint32{32, 1<<32 - 16, 1 << 31} {
		s := newServer(t)
		h := newHostile(t, s)
		h.at(0, request(1, 32, 32), 32)
		_, err := s.Next(nil)
		require.NoError(t, err)
		got := make(chan error, 1)
		go func() { _, err := s.Next(nil); got <- err }()
		require.Eventually(t, func() bool { return s.in.sleeps.Load() == 1 }, patience, time.Millisecond)
		h.header.replyHead.Store(head)
		require.ErrorIs(t, s.Reply(message(1, 1, 32)), ErrPeerBroken)
		within(t, "reader of a broken ring", func() { require.ErrorIs(t, <-got, ErrPeerBroken) })
	}
}

func TestClientDropsABrokenPeer(t *testing.T) {
	put := func(h *hostile, m []byte) {
		copy(h.replies, m)
		h.header.replyTail.Store(uint32(len(m)))
	}
	for name, act := range map[string]func(h *hostile){
		"reply to nothing":     func(h *hostile) { put(h, message(1, 2, 32)) },
		"reply too long":       func(h *hostile) { put(h, message(1, 1, 96)) },
		"reply twice":          func(h *hostile) { put(h, append(message(1, 1, 32), message(1, 1, 32)...)) },
		"tail beyond the ring": func(h *hostile) { h.header.replyTail.Store(1 << 30) },
		"length 0":             func(h *hostile) { put(h, claim(0, 1)) },
	} {
		s, c := newPair(t)
		h := newHostile(t, s)
		require.NoError(t, c.Send(request(1, 32, 64), 64), name)
		act(h)
		var err error
		within(t, "drop", func() {
			for err == nil {
				_, err = c.Next(nil)
			}
		})
		require.ErrorIs(t, err, ErrPeerBroken, name)
		require.ErrorIs(t, c.Send(request(2, 32, 64), 64), ErrPeerBroken, name)
		require.ErrorIs(t, c.SendSure(request(2, 32, 64), 64), ErrPeerBroken, name)
	}
	s, c := newPair(t)
	newHostile(t, s).header.requestHead.Store(32)
	require.ErrorIs(t, c.Send(request(1, 32, 64), 64), ErrPeerBroken)
	_, err := c.Next(nil)
	require.ErrorIs(t, err, ErrPeerBroken)
}

func TestOpenRingChecksTheHeader(t *testing.T) {
	for name, change := range map[string]func(c *constants){
		"magic":        func(c *constants) { c.magic++ },
		"version":      func(c *constants) { c.version++ },
		"header bytes": func(c *constants) { c.headerBytes = 8192 },
		"ring bytes":   func(c *constants) { c.ringBytes /= 2 },
		"max message":  func(c *constants) { c.maxMessage *= 2 },
		"no credits":   func(c *constants) { c.credits = sureCredits },
		"many credits": func(c *constants) { c.credits = Credits + 1 },
	} {
		s := newServer(t)
		change(&newHostile(t, s).header.constants)
		_, err := OpenRing(files(t, s))
		require.ErrorIs(t, err, ErrNotRing, name)
	}
	s := newServer(t)
	segment, request, reply := files(t, s)
	_, err := OpenRing(request, segment, reply)
	require.Error(t, err, "descriptors in another order")
	small, err := sys.NewSegment("small", SegmentBytes-4096)
	require.NoError(t, err)
	defer small.Close()
	segment, request, reply = files(t, s)
	segment.Close()
	short, err := sys.DupFile(small.File())
	require.NoError(t, err)
	_, err = OpenRing(short, request, reply)
	require.ErrorIs(t, err, sys.ErrSegmentSize)
}

// FuzzRingServer lets a member write whatever it likes, wherever it likes, while
// the consumer runs. Each step of the script is an opcode and its operands.
func FuzzRingServer(f *testing.F) {
	good, err := (&wire.Request{Type: wire.StoreDone, Done: make([]wire.Done, 3)}).Append(nil)
	require.NoError(f, err)
	copyOp := func(offset uint32, m []byte) []byte {
		b := append([]byte{1}, binary.LittleEndian.AppendUint32(nil, offset)...)
		return append(append(b, byte(len(m))), m...)
	}
	storeOp := func(word byte, v uint32) []byte {
		return append([]byte{0, word}, binary.LittleEndian.AppendUint32(nil, v)...)
	}
	f.Add(append(copyOp(0, good), storeOp(0, uint32(len(good)))...))
	f.Add(append(append(copyOp(0, good), storeOp(0, 96)...), append(copyOp(96, good), storeOp(0, 192)...)...))
	f.Add(storeOp(0, 1<<31))
	f.Add(append(storeOp(4, 64), append(copyOp(0, good), storeOp(0, uint32(len(good)))...)...))
	f.Add(append(copyOp(0, claim(RingBytes, 0)), storeOp(0, RingBytes)...))
	f.Add([]byte{2, 0, 6, 1, 0, 0, 0})

	f.Fuzz(func(t *testing.T, script []byte) {
		s, err := NewRingServer(1, 1, wire.RequestReplyBytes)
		require.NoError(t, err)
		defer s.Close()
		h := newHostile(t, s)
		words := []*word{
			&h.header.requestTail, &h.header.requestHead, &h.header.requestSleeps, &h.header.replyTail,
			&h.header.replyHead, &h.header.replySleeps, &h.header.leaderClosed, &h.header.memberClosed,
		}
		ended := make(chan error, 1)
		go func() {
			for {
				m, err := s.Next(nil)
				if err != nil {
					ended <- err
					return
				}
				if err := checkMessage(m); err != nil {
					ended <- err
					return
				}
				if req, err := wire.ParseRequest(m); err == nil {
					rep, err := (&wire.Reply{Type: req.Type, Seq: req.Seq}).Append(nil)
					if err == nil {
						_ = s.Reply(rep) // whatever the peer did to the reply cursor
					}
				}
			}
		}()
		for len(script) > 0 {
			op := script[0]
			script = script[1:]
			switch {
			case op%3 == 0 && len(script) >= 5:
				words[int(script[0])%len(words)].Store(binary.LittleEndian.Uint32(script[1:]))
				script = script[5:]
			case op%3 == 1 && len(script) >= 5:
				offset := binary.LittleEndian.Uint32(script) % RingBytes
				m := script[5:][:min(int(script[4]), len(script)-5)]
				copy(h.requests[offset:], m)
				script = script[5+len(m):]
			case op%3 == 2:
				_ = h.bell.Signal()
			}
		}
		h.header.memberClosed.Store(1) // everything before it is still read
		_ = h.bell.Signal()
		within(t, "consumer", func() { err = <-ended })
		if !errors.Is(err, ErrPeerBroken) && !errors.Is(err, ErrPeerClosed) {
			t.Fatalf("not a valid end: %v", err)
		}
	})
}
