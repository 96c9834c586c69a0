package kvtier

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/kvtier/kvtier/internal/spawn"
	"github.com/kvtier/kvtier/internal/sys"
	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/shm"
)

// socketName is the leader's socket in the run directory of a root.
const socketName = "sock"

// ringLink connects a member to a leader in another process (or, for tests, in
// this one): a socket for what is rare, a pair of rings for the rest.
type ringLink struct {
	conn  *shm.Conn
	ring  *shm.RingClient
	w     *wire.Welcome
	hello wire.Hello
	calls calls
	ready chan declaration

	removing sync.Mutex // one removal at a time
	removed  chan struct{}

	sending sync.Mutex // keeps the order of seqs on the ring

	resets epochs

	lostOnce  sync.Once
	lostCh    chan struct{}
	closeOnce sync.Once
	stop      chan struct{} // closed by close
	readers   sync.WaitGroup
}

// dialRing attaches through the socket in dir. It gives up after timeout or when
// stop is closed.
func dialRing(dir *os.File, h *wire.Hello, timeout time.Duration, stop <-chan struct{}) (*ringLink, error) {
	conn, w, files, err := dial(dir, h, timeout, stop)
	if err != nil {
		return nil, err
	}
	if err := shm.WantFiles(files, 3); err != nil {
		conn.Close()
		return nil, err
	}
	ring, err := shm.OpenRing(files[0], files[1], files[2])
	if err != nil {
		conn.Close()
		return nil, err
	}
	if ring.Session() != w.Session {
		conn.Close()
		ring.Close()
		return nil, fmt.Errorf("the leader's ring is of session %x, its welcome of %x", ring.Session(), w.Session)
	}
	r := &ringLink{
		conn: conn, ring: ring, w: w, hello: *h,
		ready: make(chan declaration, 1), removed: make(chan struct{}, 1),
		lostCh: make(chan struct{}), stop: make(chan struct{}),
	}
	r.start()
	return r, nil
}

// dial connects and shakes hands. The files are the caller's.
func dial(dir *os.File, h *wire.Hello, timeout time.Duration, stop <-chan struct{}) (*shm.Conn, *wire.Welcome, []*os.File, error) {
	end := time.Now().Add(timeout)
	conn, err := shm.Dial(dir, socketName, timeout)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("%w: %w", ErrNoLeader, err)
	}
	w, files, err := shakeHands(conn, h, end, stop)
	if err != nil {
		conn.Close()
		return nil, nil, nil, err
	}
	return conn, w, files, nil
}

func shakeHands(conn *shm.Conn, h *wire.Hello, end time.Time, stop <-chan struct{}) (*wire.Welcome, []*os.File, error) {
	hello := *h
	hello.Protocol, hello.PID, hello.Features = wire.Protocol, os.Getpid(), []string{}
	if err := conn.Send(&hello); err != nil {
		return nil, nil, err
	}
	for {
		// In slices, so that a close does not wait for a leader that is stopped.
		raw, files, err := conn.Recv(min(100*time.Millisecond, max(time.Until(end), time.Millisecond)))
		if errors.Is(err, shm.ErrTimeout) {
			select {
			case <-stop:
				return nil, nil, ErrClosed
			default:
			}
			if time.Now().After(end) {
				return nil, nil, fmt.Errorf("%w: it does not answer", ErrNoLeader)
			}
			continue
		}
		if err != nil {
			return nil, nil, fmt.Errorf("%w: %w", ErrNoLeader, err)
		}
		frame, err := wire.ParseFrame(raw)
		if err != nil {
			sys.CloseFiles(files)
			return nil, nil, err
		}
		switch f := frame.(type) {
		case *wire.Welcome:
			if f.Protocol != wire.Protocol || f.Session == 0 {
				sys.CloseFiles(files)
				return nil, nil, &RefusedError{Reason: fmt.Sprintf("the leader speaks protocol %d, this process %d: use the same version everywhere", f.Protocol, wire.Protocol)}
			}
			return f, files, nil
		case *wire.Refuse:
			sys.CloseFiles(files)
			return nil, nil, &RefusedError{Reason: f.Reason, Final: f.Final}
		default:
			sys.CloseFiles(files)
			return nil, nil, fmt.Errorf("%w: %T in answer to hello", wire.ErrMalformed, frame)
		}
	}
}

func (r *ringLink) start() {
	failed := func(error) { r.fail() }
	r.readers.Add(2)
	spawn.Go("ring replies", failed, func() {
		defer r.readers.Done()
		defer r.fail()
		for {
			msg, err := r.ring.Next(r.stop)
			if err != nil {
				return
			}
			reply, err := wire.ParseReply(msg)
			if err != nil || !r.calls.answer(reply) {
				return
			}
		}
	})
	spawn.Go("socket frames", failed, func() {
		defer r.readers.Done()
		defer r.fail()
		for {
			raw, files, err := r.conn.Recv(0)
			if err != nil {
				r.drain()
				return
			}
			if !r.frame(raw, files) {
				return
			}
		}
	})
	// A leader whose forked children keep its socket open is gone all the same.
	// Where its process cannot be watched the end of the socket has to do.
	if death, err := r.conn.WatchDeath(); err == nil {
		spawn.Go("leader watch", failed, func() {
			select {
			case <-death:
				r.fail()
			case <-r.stop:
			}
		})
	}
}

// drain lets the replies that a leader sent before it closed be read: the end of its
// ring comes after them, the end of its socket may be seen before.
func (r *ringLink) drain() {
	timer := time.NewTimer(drainTime)
	defer timer.Stop()
	select {
	case <-r.lostCh:
	case <-r.stop:
	case <-timer.C: // a ring without an end, of a leader that closed the socket alone
	}
}

const drainTime = time.Second

// frame takes a frame of the leader; false ends the link.
func (r *ringLink) frame(raw []byte, files []*os.File) bool {
	frame, err := wire.ParseFrame(raw)
	if err != nil {
		sys.CloseFiles(files)
		return false
	}
	var answer declaration
	switch f := frame.(type) {
	case *wire.Accept:
		rank := r.hello.Rank >= 0
		want := 0
		if rank {
			want = 2
		}
		if shm.WantFiles(files, want) != nil {
			return false
		}
		answer.open = func() (*view, error) {
			if rank {
				return ringView(f, files[0], files[1])
			}
			return newView(f)
		}
	case *wire.Refuse:
		sys.CloseFiles(files)
		answer.refuse = f
	case *wire.Removed:
		sys.CloseFiles(files)
		select {
		case r.removed <- struct{}{}:
		default: // nobody waits any more
		}
		return true
	default:
		sys.CloseFiles(files)
		return false
	}
	select {
	case r.ready <- answer:
		return true
	default: // a second answer, which nobody asked for
		sys.CloseFiles(files)
		return false
	}
}

// fail ends the link from the other side.
func (r *ringLink) fail() {
	r.lostOnce.Do(func() {
		close(r.lostCh)
		r.calls.end()
	})
}

func (r *ringLink) welcome() *wire.Welcome { return r.w }

func (r *ringLink) send(req *wire.Request, done func(*wire.Reply, error)) error {
	return r.put(req, done, r.ring.Send)
}

func (r *ringLink) sure(req *wire.Request) {
	// An error is either the end of the link or a message that is no message.
	_ = r.put(req, nil, r.ring.SendSure)
}

func (r *ringLink) put(req *wire.Request, done func(*wire.Reply, error), into func([]byte, int) error) error {
	r.sending.Lock()
	defer r.sending.Unlock()
	req.Seq = r.calls.add(done)
	if req.Seq == 0 {
		return ErrNoLeader
	}
	msg, err := req.Append(nil)
	if err == nil {
		err = into(msg, req.ReplyBytes())
	}
	if err == nil {
		return nil
	}
	if !r.calls.withdraw(req.Seq) {
		return nil // the link ended meanwhile, and done has been told
	}
	switch {
	case errors.Is(err, shm.ErrBusy):
		return ErrBusy
	case errors.Is(err, shm.ErrClosed), errors.Is(err, shm.ErrPeerClosed), errors.Is(err, shm.ErrPeerBroken):
		return ErrNoLeader
	}
	return err
}

// declare tells what the rank has. For a coordinator alone there is nothing to
// send: the leader answers it when the group is complete.
func (r *ringLink) declare(d *wire.Declare) error {
	if d == nil {
		return nil
	}
	return r.conn.Send(d)
}

func (r *ringLink) declared() <-chan declaration { return r.ready }

func (r *ringLink) remove(keys []Key, timeout time.Duration) error {
	r.removing.Lock()
	defer r.removing.Unlock()
	select {
	case <-r.removed: // of one that was given up
	default:
	}
	if err := r.conn.Send(wire.NewRemove(keys)); err != nil {
		return ErrNoLeader
	}
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-r.removed:
		return nil
	case <-r.lostCh:
		return ErrNoLeader
	case <-timer.C:
		return ErrTimeout
	}
}

// reset does not wait for the socket, which a leader that is stopped leaves full: it is
// told by and by, and of many epochs only the newest.
func (r *ringLink) reset(epoch []byte) error {
	select {
	case <-r.lostCh:
		return ErrNoLeader
	default:
	}
	if !r.resets.put(epoch) {
		return nil
	}
	spawn.Go("reset", func(error) { r.fail() }, func() {
		for e := r.resets.take(); e != nil; e = r.resets.take() {
			_ = r.conn.Send(&wire.Reset{Epoch: e}) // who does not hear of it loses nothing
		}
	})
	return nil
}

// epochs is the newest epoch that the leader has not been told, and whether somebody
// is telling.
type epochs struct {
	mu      sync.Mutex
	newest  []byte
	telling bool
}

// put reports whether the caller has to begin to tell.
func (e *epochs) put(epoch []byte) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	begin := !e.telling
	e.newest, e.telling = epoch, true
	return begin
}

// take gives what is to be told next; nil ends the telling.
func (e *epochs) take() []byte {
	e.mu.Lock()
	defer e.mu.Unlock()
	epoch := e.newest
	e.newest, e.telling = nil, epoch != nil
	return epoch
}

func (r *ringLink) beginCopy() { r.ring.BeginCopy() }

func (r *ringLink) endCopy() { r.ring.EndCopy() }

func (r *ringLink) lost() <-chan struct{} { return r.lostCh }

func (r *ringLink) close() {
	r.closeOnce.Do(func() {
		_ = r.conn.Send(&wire.Goodbye{}) // without it the leader waits for the process to end
		r.fail()
		close(r.stop)
		r.conn.Close()
		r.conn.Forget()
		r.ring.Close()
		r.readers.Wait()
		select {
		case answer := <-r.ready: // nobody took it: its files are still open
			if answer.open != nil {
				if v, err := answer.open(); err == nil {
					v.close()
				}
			}
		default:
		}
	})
}
