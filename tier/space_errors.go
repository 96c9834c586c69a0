package tier

import "errors"

// Errors of the arena half: Pool, Space and Table.
var (
	// ErrNoSlot: no slot is free, nothing may be evicted, and the arena could not
	// grow fast enough. Trying again later may succeed.
	ErrNoSlot = errors.New("no free slot in the arena")
	// ErrKnown: the key has a slot already.
	ErrKnown = errors.New("the chunk is in the arena already")
	// ErrStale: the slot is used for something else by now, or never was what the
	// reference says.
	ErrStale = errors.New("stale slot reference")
	// ErrTransition: the slot is in a state in which this cannot happen to it.
	ErrTransition = errors.New("the slot's state does not allow this")
	// ErrRemoved ends what is done for a chunk that was removed meanwhile.
	ErrRemoved = errors.New("the chunk was removed")
	// ErrGivenUp ends a disk read that was not waited for any longer.
	ErrGivenUp = errors.New("the disk read took too long")
	// ErrMemoryOnly: the namespace has no disk to read from.
	ErrMemoryOnly = errors.New("this namespace is not kept on disk")
	// ErrSpaceOff: the namespace was switched off by a failure of its own, or closed.
	ErrSpaceOff = errors.New("this namespace is switched off")
	// ErrSlotTooBig: the DRAM budget holds too few chunks to work with.
	ErrSlotTooBig = errors.New("the DRAM budget is too small for chunks of this size: raise dram_gib or lower the chunk's tokens")
	// ErrPoolFull: other namespaces use all of the DRAM budget.
	ErrPoolFull = errors.New("the DRAM budget is used up by other namespaces: raise dram_gib or end their engines")
	// ErrMemoryLimit: the machine or the container has too little memory left.
	ErrMemoryLimit = errors.New("too little memory is left: raise the limit or lower dram_gib")
	// ErrSpaceBusy: I/O on the arena did not end in time; its memory stays mapped.
	ErrSpaceBusy = errors.New("reads or writes of the arena did not end in time")
	// ErrTableSize: a slot table's size is no multiple of its entries.
	ErrTableSize = errors.New("the slot table has a wrong size")
)
