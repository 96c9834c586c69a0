package steps

// The steps of a store on a rank, in order. StoreChunk comes once for every chunk of
// which the rank has rows.
const (
	StoreBegun  = "store begun"  // the grants are here, nothing is copied
	StoreChunk  = "store chunk"  // the next chunk's slot is checked, its copy begins
	StoreCopied = "store copied" // everything is copied, nothing reported
	StoreDone   = "store done"   // reported
)

// The steps of a load on a rank, in order; those from LoadChunk to LoadAsked repeat.
const (
	LoadBegun   = "load begun"  // the worker has it
	LoadChunk   = "load chunk"  // the next chunk's slot is checked, its copy begins
	LoadCopied  = "load copied" // a window is copied, nothing reported
	LoadWindow  = "load window" // its chunks are reported, more are to come
	LoadAsked   = "load asked"  // the next window is asked for
	LoadAllDone = "load all"    // the last window is reported, the end is not
	LoadEnded   = "load ended"  // the end is reported to the leader, not to the host
)

// The steps of a self-test on a rank, in order; between TestWritten and TestStored are
// those of the copy, as in a store. TestLoaded comes once for every chunk.
const (
	TestGranted   = "test granted"   // its slots are there, the pages are untouched
	TestWritten   = "test written"   // the pattern is in the pages, nothing is in the slots
	TestStored    = "test stored"    // reported; the others may not be so far
	TestLoading   = "test loading"   // the pages hold the opposite, the first chunk is asked for
	TestLoaded    = "test loaded"    // a chunk is in the pages, its slot is not given back
	TestComparing = "test comparing" // all chunks are in the pages
	TestCompared  = "test compared"  // the load has ended, the pages are not restored
	TestRestored  = "test restored"  // nothing is reported
)

// CopyPiece comes in every copy, of a store or a load, before each MiB, whatever the
// chunk.
const CopyPiece = "copy piece"

// Store, Load and SelfTest list the steps that every one has.
var (
	Store = []string{StoreBegun, StoreChunk, StoreCopied, StoreDone}
	Load  = []string{LoadBegun, LoadChunk, LoadCopied, LoadWindow, LoadAsked, LoadAllDone, LoadEnded}

	SelfTest = []string{TestGranted, TestWritten, StoreChunk, TestStored, TestLoading, TestLoaded, TestComparing, TestCompared, TestRestored}
)
