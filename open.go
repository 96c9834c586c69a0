package kvtier

import (
	"fmt"
	"time"

	"github.com/kvtier/kvtier/tier"
)

// Open opens the root that cfg names, and returns at once: a loop in the background
// makes this process leader or member. Errors are about the configuration and the
// directory. A root that this process has open already gives the same Cache once
// more; its configuration stays that of the first opening, but for a stronger role.
func Open(cfg *Config) (*Cache, error) {
	f, err := cfg.filled()
	if err != nil {
		return nil, err
	}
	if f.Role != RoleMember { // a member's budgets do not count
		if err := tier.CheckBudget(f.DRAMBytes); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrConfig, err)
		}
	}
	root, err := openRoot(f)
	if err != nil {
		return nil, fmt.Errorf("opening the cache: %w", err)
	}
	return caches.open(f, root)
}

func openRoot(c *Config) (*tier.Root, error) {
	switch {
	case c.DiskPath != "":
		return tier.OpenRoot(c.DiskPath, tier.RootOptions{AllowNetwork: c.AllowNetworkFS})
	case c.RuntimeDir != "":
		return tier.OpenRuntimeRootIn(c.RuntimeDir, c.Name)
	default:
		return tier.OpenRuntimeRoot(c.Name)
	}
}

// run is the opening loop: leader, or member, or try again, until it is closed.
func (c *Cache) run() {
	defer c.finish()
	if c.before != nil {
		// It has the lock; touching the file before it lets go would be a race for it.
		select {
		case <-c.before.done:
		case <-c.closing:
		}
		c.before = nil
	}
	backoff := firstBackoff
	for !c.isClosing() {
		held, detail := c.lead()
		if !held {
			held, detail = c.follow(detail)
		}
		if held {
			backoff = firstBackoff
			continue
		}
		c.set(StateOpening, detail, nil)
		if !pause(backoff, c.closing) {
			return
		}
		backoff = min(2*backoff, lastBackoff)
	}
}

func (c *Cache) isClosing() bool {
	select {
	case <-c.closing:
		return true
	default:
		return false
	}
}

func (c *Cache) wantedRole() Role {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.role
}

// lead takes the lock if it is free, and then leads until the Cache is closed. It
// reports whether it led, else why not.
func (c *Cache) lead() (bool, string) {
	if c.wantedRole() == RoleMember {
		return false, "no leader yet"
	}
	ok, holder, err := c.root.TryLock()
	if err != nil {
		return false, fmt.Sprintf("cannot lock the root: %v", err)
	}
	if !ok {
		return false, "the root is led by " + holder
	}
	// From here on the lock stays: a failure below may pass, and nobody else would
	// fare better under this root.
	l, err := newLeader(c.cfg, c.root, c.log)
	if err != nil {
		return false, fmt.Sprintf("cannot lead: %v", err)
	}
	s, err := listen(l, c.root.RunDir(), c.log)
	if err != nil {
		_ = l.close(0) // nothing has been stored
		return false, fmt.Sprintf("cannot listen for members: %v", err)
	}
	gone := newSignal()
	c.set(StateLeader, "leads "+c.root.Path(), func() { c.leader, c.leaderGone = l, gone.C })
	c.log.Info("leading", "root", c.root.Path())
	defer c.endLeading(l, s, gone)
	c.watchRoot()
	if !c.isClosing() {
		c.log.Error("the root was removed or replaced, another process may lead there: the cache is off until it is opened again", "root", c.root.Path())
		c.set(StateOpening, "the root was removed or replaced", func() { c.leader = nil })
		// The leader's memory goes when no member can use it any more, at Close.
		gone.close()
		s.close()
		<-c.closing
	}
	return true, ""
}

// watchRoot returns when the Cache is closed, or when the lock that it holds will never
// again be that of the root. While the root is away, as when its file system is
// unmounted, what is in DRAM stays of use, and the disk tier comes back by itself.
func (c *Cache) watchRoot() {
	tick := time.NewTicker(c.rootCheck)
	defer tick.Stop()
	for c.root.Place() != tier.Gone {
		select {
		case <-tick.C:
		case <-c.closing:
			return
		}
	}
}

// endLeading is the order of an orderly end: this process's own members, then those
// of others, who see the end and go quiet, and then the leader writes out what is
// dirty.
func (c *Cache) endLeading(l *leader, s *server, gone *signal) {
	c.mu.Lock()
	end := time.Now().Add(c.closeTimeout)
	c.leader = nil
	c.mu.Unlock()
	gone.close()
	c.endMembers()
	s.close()
	err := l.close(max(time.Until(end), 0))
	if err != nil {
		c.log.Warn("not everything was written out", "error", err)
	}
	c.mu.Lock()
	c.closeErr = err
	c.mu.Unlock()
}

// follow joins the leader, if there is one, until one of both ends.
func (c *Cache) follow(detail string) (bool, string) {
	if c.wantedRole() == RoleLeader {
		return false, detail
	}
	k, err := dialControl(c.root.RunDir(), c.cfg.ConnectTimeout, c.closing)
	if err != nil {
		return false, fmt.Sprintf("%s; %v", detail, err)
	}
	defer k.close()
	c.set(StateMember, fmt.Sprintf("member of %s", c.root.Path()), func() { c.control = k })
	c.log.Info("joined the leader", "root", c.root.Path())
	if c.cfg.DRAMBytes > 0 || c.cfg.DiskBytes > 0 {
		c.log.Info("budgets of this process are ignored, those of the leader count")
	}
	select {
	case <-k.lostCh:
		c.set(StateOpening, "the leader is gone", func() { c.control = nil })
		c.log.Warn("the leader is gone, everything is a miss until there is one again")
	case <-c.closing:
		c.endMembers()
		c.set(StateOpening, "closing", func() { c.control = nil })
	}
	return true, ""
}

// endMembers closes what this process has attached and waits until no copy runs:
// the memory below must not go before. Close itself is bounded; this goes on.
func (c *Cache) endMembers() {
	c.mu.Lock()
	members := make([]*member, 0, len(c.members))
	for m := range c.members {
		members = append(members, m)
	}
	c.mu.Unlock()
	for _, m := range members {
		m.beginClose()
	}
	for _, m := range members {
		<-m.done
	}
}

// finish lets go of everything. It is the end of the opening loop, also of one that
// panicked.
func (c *Cache) finish() {
	c.mu.Lock()
	if c.refs > 0 {
		c.refs = 0
		close(c.closing)
	}
	c.leader, c.control = nil, nil
	c.mu.Unlock()
	c.endMembers()
	_ = c.root.Close()
	c.set(StateClosed, "", nil)
	caches.forget(c)
	c.bell.close()
	close(c.done)
}
