package kvtier

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/kvtier/kvtier/internal/spawn"
	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/shm"
)

const (
	helloTimeout = 10 * time.Second
	maxPeers     = 1024
	// maxPeersOfOne bounds the connections of one process, ended ones included until
	// it is gone: what it breaks takes no place of others.
	maxPeersOfOne = 128
	// unwatchedGrace is how long after the end of its socket a process that
	// cannot be watched may still write into slots.
	unwatchedGrace = 30 * time.Second
	acceptPause    = 50 * time.Millisecond
)

// server is the leader's side of the socket and of the rings.
type server struct {
	l        *leader
	log      *slog.Logger
	listener *shm.Listener
	stop     chan struct{} // closed by close

	mu     sync.Mutex
	closed bool
	peers  map[*peer]struct{}
	wg     sync.WaitGroup // the accept loop and all peers

	strangers sync.Once // the first one is logged
}

// listen accepts members on the socket in dir, which stays open until close.
func listen(l *leader, dir *os.File, log *slog.Logger) (*server, error) {
	s := &server{l: l, log: log, stop: make(chan struct{}), peers: make(map[*peer]struct{})}
	var err error
	if s.listener, err = shm.Listen(dir, socketName, s.refuseUser); err != nil {
		return nil, err
	}
	s.wg.Add(1)
	spawn.Go("accept", func(err error) { log.Error("no more members are admitted", "error", err) }, func() {
		defer s.wg.Done()
		s.accept()
	})
	return s, nil
}

func (s *server) accept() {
	for {
		conn, err := s.listener.Accept()
		switch {
		case errors.Is(err, shm.ErrClosed):
			return
		case err != nil:
			s.log.Warn("a member could not connect", "error", err)
			if !pause(acceptPause, s.stop) {
				return
			}
			continue
		}
		p := &peer{s: s, conn: conn, stop: make(chan struct{}), out: make(chan frame, 8)}
		if err := s.add(p); err != nil {
			_ = conn.Send(&wire.Refuse{Reason: err.Error()}) // the first frame, for which there is room
			conn.Close()
			conn.Forget()
			continue
		}
		spawn.Go("peer", func(err error) { s.log.Error("a member is dropped", "error", err) }, func() {
			defer s.remove(p)
			p.run()
		})
	}
}

// refuseUser is the answer to a process of another user. The modes of directory and
// socket keep such a one out; that it came this far is worth one line in the log.
func (s *server) refuseUser(uid uint32) any {
	s.l.lock()
	s.l.count.Strangers++
	s.l.unlock()
	own := os.Geteuid()
	s.strangers.Do(func() {
		s.log.Warn("a process of another user is refused: are the modes of the run directory and its socket as kvtier made them?",
			"uid", uid, "own_uid", own)
	})
	return &wire.Refuse{Final: true, Reason: fmt.Sprintf(
		"the leader runs as user %d and this process as user %d: one cache is for processes of one user", own, uid)}
}

func (s *server) add(p *peer) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	pid, mine := p.conn.PeerPID(), 0
	for other := range s.peers {
		if pid != 0 && other.conn.PeerPID() == pid {
			mine++
		}
	}
	switch {
	case s.closed:
		return errLeaderClosed
	case mine >= maxPeersOfOne:
		return fmt.Errorf("process %d has %d connections to the leader, or had them and has not ended", pid, mine)
	case len(s.peers) >= maxPeers:
		return fmt.Errorf("the leader has %d connections", len(s.peers))
	}
	s.peers[p] = struct{}{}
	s.wg.Add(1)
	return nil
}

func (s *server) remove(p *peer) {
	s.mu.Lock()
	delete(s.peers, p)
	s.mu.Unlock()
	s.wg.Done()
}

// close drops all members. When it has returned no attachment is served any more.
// It may be called more than once.
func (s *server) close() {
	s.mu.Lock()
	was := s.closed
	s.closed = true
	conns := make([]*shm.Conn, 0, len(s.peers))
	for p := range s.peers {
		conns = append(conns, p.conn)
	}
	s.mu.Unlock()
	if !was {
		close(s.stop)
		_ = s.listener.Close()
	}
	for _, c := range conns {
		_ = c.Close()
	}
	s.wg.Wait()
}

// frame is what waits to be sent to a peer.
type frame struct {
	v     any
	files []*os.File // the sender's only
}

// peer is one connection.
type peer struct {
	s    *server
	conn *shm.Conn
	a    *attachment
	ring *shm.RingServer // nil for an observer
	rank bool

	stop chan struct{} // closed when the connection is dropped
	out  chan frame
	wg   sync.WaitGroup // goroutines of this peer that use conn or ring
	once sync.Once
}

func (p *peer) run() {
	defer p.conn.Forget()
	defer p.conn.Close()
	p.conn.RefuseFiles()
	hello, err := p.hello()
	if err != nil {
		return
	}
	a, welcome, err := p.s.l.attach(hello)
	if err != nil {
		p.s.log.Debug("member refused", "pid", hello.PID, "group", hello.Group, "rank", hello.Rank, "reason", err)
		refused := &RefusedError{Reason: err.Error()}
		_ = errors.As(err, &refused)
		_ = p.conn.Send(&wire.Refuse{Reason: refused.Reason, Final: refused.Final})
		return
	}
	p.a, p.rank = a, hello.Rank >= 0
	death, watch := p.conn.WatchDeath()
	goodbye := p.serve(hello, welcome, death)
	if goodbye {
		a.goodbye()
	} else {
		a.gone()
		p.awaitDeath(death, watch)
	}
	a.dead()
}

// hello takes the first frame.
func (p *peer) hello() (*wire.Hello, error) {
	raw, _, err := p.conn.Recv(helloTimeout)
	if err != nil {
		return nil, err
	}
	v, err := wire.ParseFrame(raw)
	if err != nil {
		return nil, err
	}
	h, ok := v.(*wire.Hello)
	if !ok {
		return nil, wire.ErrMalformed
	}
	return h, nil
}

// serve talks to the peer until its connection ends. It reports whether the peer
// said goodbye. Then nobody uses the attachment any more.
func (p *peer) serve(hello *wire.Hello, welcome *wire.Welcome, death <-chan struct{}) (goodbye bool) {
	defer p.wg.Wait()
	defer p.drop()
	var files []*os.File
	if hello.Rank >= 0 || hello.Coordinator {
		ring, err := shm.NewRingServer(welcome.Session, welcome.Member, wire.RequestReplyBytes)
		if err != nil {
			p.s.log.Error("no ring for a member", "error", err)
			_ = p.conn.Send(&wire.Refuse{Reason: err.Error()})
			return false
		}
		p.ring = ring
		p.a.watchCopies(ring.Copying)
		segment, requests, replies := ring.Files()
		files = []*os.File{segment, requests, replies}
	}
	if err := p.conn.Send(welcome, files...); err != nil {
		return false
	}
	failed := func(err error) {
		p.s.log.Error("a member is dropped", "group", hello.Group, "rank", hello.Rank, "error", err)
		p.drop()
	}
	p.wg.Add(2)
	spawn.Go("peer writer", failed, func() {
		defer p.wg.Done()
		p.write()
	})
	spawn.Go("peer watch", failed, func() {
		defer p.wg.Done()
		select {
		case <-death: // its forked children may hold the socket open
			p.drop()
		case <-p.stop:
		}
	})
	if p.ring != nil {
		p.wg.Add(1)
		spawn.Go("ring requests", failed, func() {
			defer p.wg.Done()
			err := p.requests()
			if errors.Is(err, shm.ErrPeerClosed) {
				return // in good order: the goodbye is still to be read from the socket
			}
			if errors.Is(err, shm.ErrPeerBroken) {
				p.s.log.Warn("a member broke the protocol and is dropped", "group", hello.Group, "rank", hello.Rank, "error", err)
			}
			p.drop()
		})
	}
	if hello.Coordinator && !p.rank {
		p.a.declare(nil, p.declared)
	}
	return p.frames()
}

// drop ends the connection. It may be called from any goroutine.
func (p *peer) drop() {
	p.once.Do(func() {
		close(p.stop)
		_ = p.conn.Close()
		if p.ring != nil {
			_ = p.ring.Close()
		}
	})
}

// frames takes what comes through the socket.
func (p *peer) frames() (goodbye bool) {
	declares := 0
	for {
		raw, _, err := p.conn.Recv(0)
		if err != nil {
			return false
		}
		v, err := wire.ParseFrame(raw)
		if err != nil {
			return false
		}
		switch f := v.(type) {
		case *wire.Declare:
			if declares++; declares > 1 {
				return false // each is answered once, and the answers are not counted
			}
			p.a.declare(f, p.declared)
		case *wire.Reset:
			if !p.a.coordinator || len(f.Epoch) != wire.EpochBytes {
				return false
			}
			p.a.reset(f.Epoch)
		case *wire.Remove:
			keys, err := f.Unpack()
			if err != nil {
				return false
			}
			p.a.remove(keys)
			if !p.send(frame{v: &wire.Removed{}}) {
				return false
			}
		case *wire.StatsRequest:
			if !p.send(frame{v: &wire.StatsReply{JSON: p.s.l.stats()}}) {
				return false
			}
		case *wire.Goodbye:
			return true
		default:
			return false
		}
	}
}

// send queues a frame and waits for room.
func (p *peer) send(f frame) bool {
	select {
	case p.out <- f:
		return true
	case <-p.stop:
		return false
	}
}

// declared is called by the leader, on a goroutine of its own: it must not wait
// for this peer.
func (p *peer) declared(acc *accepted, refuse *wire.Refuse) {
	f := frame{v: refuse}
	if refuse == nil {
		f.v = acc.accept
		if p.rank {
			f.files = []*os.File{acc.space.ArenaFile(), acc.space.TableFile()}
		}
	}
	select {
	case p.out <- f:
	case <-p.stop:
	default:
		p.drop() // it asks and does not listen
	}
}

func (p *peer) write() {
	for {
		select {
		case f := <-p.out:
			err := p.conn.Send(f.v, f.files...)
			// One that has closed may have said goodbye, which is still to be read.
			if err != nil && !errors.Is(err, shm.ErrPeerClosed) {
				p.drop()
				return
			}
		case <-p.stop:
			return
		}
	}
}

// requests serves the ring until the connection ends.
func (p *peer) requests() error {
	for {
		msg, err := p.ring.Next(p.stop)
		if err != nil {
			return err
		}
		req, err := wire.ParseRequest(msg)
		if err != nil {
			return errors.Join(shm.ErrPeerBroken, err)
		}
		p.a.serve(req, p.reply)
	}
}

// reply may be called by any goroutine, also when the peer is gone.
func (p *peer) reply(r *wire.Reply) {
	msg, err := r.Append(nil)
	if err == nil {
		err = p.ring.Reply(msg)
	}
	if err != nil && !errors.Is(err, shm.ErrClosed) {
		p.s.log.Debug("a reply could not be sent", "type", r.Type.String(), "error", err)
		p.drop()
	}
}

// awaitDeath waits until nothing of the process can touch a slot any more, or the
// leader ends.
func (p *peer) awaitDeath(death <-chan struct{}, watch error) {
	if watch != nil {
		pause(unwatchedGrace, p.s.stop)
		return
	}
	select {
	case <-death:
	case <-p.s.stop:
	}
}
