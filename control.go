package kvtier

import (
	"os"
	"sync"
	"time"

	"github.com/kvtier/kvtier/internal/spawn"
	"github.com/kvtier/kvtier/internal/sys"
	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/shm"
)

// control is the connection of a Cache that is a member: it has no group and no
// ring, asks for statistics, and ends when the leader ends.
type control struct {
	conn    *shm.Conn
	session uint64

	asking  sync.Mutex // one question at a time
	replies chan []byte

	lostOnce sync.Once
	lostCh   chan struct{}
	stop     chan struct{}
}

func dialControl(dir *os.File, timeout time.Duration, stop <-chan struct{}) (*control, error) {
	conn, w, files, err := dial(dir, &wire.Hello{Rank: -1}, timeout, stop)
	if err != nil {
		return nil, err
	}
	sys.CloseFiles(files)
	c := &control{
		conn: conn, session: w.Session, replies: make(chan []byte, 1),
		lostCh: make(chan struct{}), stop: make(chan struct{}),
	}
	failed := func(error) { c.fail() }
	spawn.Go("control frames", failed, func() {
		defer c.fail()
		for {
			raw, files, err := conn.Recv(0)
			if err != nil {
				return
			}
			sys.CloseFiles(files)
			frame, err := wire.ParseFrame(raw)
			reply, ok := frame.(*wire.StatsReply)
			if err != nil || !ok {
				return
			}
			select {
			case c.replies <- reply.JSON:
			default: // nobody asks any more
			}
		}
	})
	if death, err := conn.WatchDeath(); err == nil {
		spawn.Go("leader watch", failed, func() {
			select {
			case <-death:
				c.fail()
			case <-c.stop:
			}
		})
	}
	return c, nil
}

func (c *control) fail() { c.lostOnce.Do(func() { close(c.lostCh) }) }

// stats asks the leader for its statistics, a JSON object.
func (c *control) stats(timeout time.Duration) ([]byte, error) {
	c.asking.Lock()
	defer c.asking.Unlock()
	select {
	case <-c.replies: // of a question that was given up
	default:
	}
	if err := c.conn.Send(&wire.StatsRequest{}); err != nil {
		return nil, ErrNoLeader
	}
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case b := <-c.replies:
		return b, nil
	case <-c.lostCh:
		return nil, ErrNoLeader
	case <-timer.C:
		return nil, ErrTimeout
	}
}

// close is called once.
func (c *control) close() {
	_ = c.conn.Send(&wire.Goodbye{})
	close(c.stop)
	c.conn.Close()
	c.conn.Forget()
}
