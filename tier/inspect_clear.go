package tier

import (
	"path/filepath"
)

// Clearing says what Clear removes.
type Clearing struct {
	// Chunks chooses among files that are chunks by their names; nil: none. They may
	// be removed under a running leader, which takes them for vanished: misses.
	Chunks func(Entry) bool
	// Temps and Directories are for a root that is held (see Hold): a leader writes
	// the one and counts the other. Directories go when nothing is left in them, a
	// namespace's with its sidecar.
	Temps       bool
	Directories bool
	// AnySidecar: also one that this version cannot read goes with its directory.
	AnySidecar bool
	DryRun     bool // remove nothing
	// Each is told of every entry that was chosen, with the error that kept it, and of
	// every one that could not be read.
	Each func(Entry, error)
}

// Clear removes what is chosen of a namespace. An entry that cannot be read or removed
// is told to Each and stays.
func (n *InspectedNamespace) Clear(c Clearing) {
	var inSub, inTop int // names that stay
	_ = n.Walk(func(e Entry) error {
		left := &inSub
		if filepath.Dir(e.Path) == n.path {
			left = &inTop
		}
		chosen := false
		remove := n.i.fs.Unlink
		switch e.Kind {
		case EntryUnreadable:
			c.tell(e, e.Err)
		case EntryChunk:
			chosen = c.Chunks != nil && c.Chunks(e)
		case EntryTemp:
			chosen = c.Temps
		case EntrySidecar:
			chosen = c.Directories && inTop == 0 && (c.AnySidecar || n.Sidecar == SidecarGood)
		case EntryDirectory:
			remove = n.i.fs.Rmdir
			if e.Path == n.path {
				chosen = c.Directories && inTop == 0
			} else {
				chosen = c.Directories && inSub == 0
				inSub = 0
			}
		}
		if !chosen || !c.remove(e, remove) {
			*left++
		}
		return nil
	})
}

// ClearBeside removes temp files beside the namespaces, of processes that died while
// they made the root. For a root that is held. The error is of the list of names.
func (i *Inspection) ClearBeside(c Clearing) error {
	return i.WalkBeside(func(e Entry) error {
		switch {
		case e.Kind == EntryUnreadable:
			c.tell(e, e.Err)
		case e.Kind == EntryTemp && c.Temps:
			c.remove(e, i.fs.Unlink)
		}
		return nil
	})
}

// remove says whether the name is gone, or would be.
func (c *Clearing) remove(e Entry, remove func(string) error) bool {
	var err error
	if !c.DryRun {
		if err = remove(e.Path); absent(err) {
			return true // somebody else was faster, and it is not ours to count
		}
	}
	c.tell(e, err)
	return err == nil
}

func (c *Clearing) tell(e Entry, err error) {
	if c.Each != nil {
		c.Each(e, err)
	}
}
