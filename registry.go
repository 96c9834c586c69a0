package kvtier

import (
	"os"
	"slices"
	"sync"

	"github.com/kvtier/kvtier/tier"
)

// registry holds the Caches of this process, one per root: opening a root twice
// gives the same Cache.
type registry struct {
	mu     sync.Mutex
	caches []*Cache // oldest first; of one root all but the last are closing
}

var caches registry

// open returns the Cache of the root, which it shares or makes. It takes ownership
// of root. A Cache that is closing still owns the lock: its successor waits for it.
func (g *registry) open(cfg *Config, root *tier.Root) (*Cache, error) {
	id, err := os.Stat(root.Path())
	if err != nil {
		_ = root.Close()
		return nil, err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	var before *Cache
	for _, c := range g.caches {
		if !os.SameFile(c.id, id) {
			continue
		}
		if c.share(cfg) {
			return c, root.Close()
		}
		before = c
	}
	c, err := newCache(cfg, root, id)
	if err != nil {
		_ = root.Close()
		return nil, err
	}
	c.before = before
	g.caches = append(g.caches, c)
	c.start()
	return c, nil
}

// forget is called when a Cache has let go of its root.
func (g *registry) forget(c *Cache) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.caches = slices.DeleteFunc(g.caches, func(x *Cache) bool { return x == c })
}
