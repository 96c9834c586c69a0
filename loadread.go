package kvtier

import "github.com/kvtier/kvtier/tier"

// startReads begins the disk reads of the open window, and waits for those of others.
// There are no more than what they bring may be pinned.
func (o *loadOp) startReads(turn bool) {
	room := o.room(turn)
	for i := o.decided; i < min(o.to, o.unreadable); i++ {
		p := o.sp.Look(o.keys[i])
		ref := p.Ref
		switch {
		case p.State == tier.Filling, p.State == tier.Ready:
			if !o.owner.counts(ref.Slot) {
				room--
			}
		case p.State == tier.Free && p.OnDisk:
			if room--; room < 0 {
				if i == o.decided { // else the end of a read brings it on
					o.wait(forRoom)
				}
				return
			}
			var err error
			if turn && o.sp.dryAt == o.sp.l.round {
				err = tier.ErrNoSlot
			} else {
				ref, err = o.sp.read(o.keys[i], o.first+uint32(i))
			}
			if err != nil {
				o.sp.dryAt = o.sp.l.round
				o.wait(forSlot)
				return
			}
		default:
			continue
		}
		if f := o.sp.fills[ref.Slot]; f != nil && f.ref == ref && o.reading[i-o.from] != f {
			o.stopReading(i)
			o.reading[i-o.from] = f
			f.addLoad(o, i)
		}
	}
}

// stopReading takes the load away from the read of one chunk of the window.
func (o *loadOp) stopReading(i int) {
	if f := o.reading[i-o.from]; f != nil {
		delete(f.loads, o)
		o.reading[i-o.from] = nil
	}
}

// readAhead starts the reads of the next window while the ranks copy this one, if
// the arena has room to spare: nothing keeps what they bring until it opens.
func (o *loadOp) readAhead() {
	if o.decided == o.total || o.sp.Available() < 4*len(o.busy) {
		return
	}
	for i := o.to; i < min(o.to+len(o.busy), o.total); i++ {
		p := o.sp.Look(o.keys[i])
		if p.State != tier.Free {
			continue
		}
		if !p.OnDisk {
			return
		}
		if _, err := o.sp.read(o.keys[i], o.first+uint32(i)); err != nil {
			return
		}
	}
}

// fillEnded is told how the disk read of a chunk of this window ended.
func (o *loadOp) fillEnded(i int, f *fill, ok bool) {
	if i < o.from || i >= o.to || o.reading[i-o.from] != f {
		return
	}
	o.reading[i-o.from] = nil
	if i < o.decided {
		return
	}
	if !ok {
		o.unreadable = min(o.unreadable, i)
	}
	if i == o.decided {
		o.progress(false)
	}
}
