package kvtier

import "errors"

// Errors of a configuration and of opening.
var (
	// ErrConfig is wrapped by every error that the text of a configuration
	// causes.
	ErrConfig = errors.New("bad configuration")

	// ErrClosed is returned by everything that belongs to a closed Cache, Rank,
	// Coordinator or Blob.
	ErrClosed = errors.New("closed")
)

// Errors of operations. None of them means that data is wrong: the cache may
// always say miss, and these say why.
var (
	// ErrNoLeader means that this process is attached to no leader at present.
	// It attaches again by itself.
	ErrNoLeader = errors.New("no leader is reachable at present")

	// ErrBusy means that too many requests are under way; ask again later.
	ErrBusy = errors.New("too many requests in flight")

	// ErrTimeout means that the answer did not come in the time given.
	ErrTimeout = errors.New("timed out")

	// ErrPending means that a lease is sent and not yet answered.
	ErrPending = errors.New("not answered yet")

	// ErrStale means that the lease, operation or session named is not known
	// any more: released, expired, or granted by a leader that is gone.
	ErrStale = errors.New("belongs to a session, lease or operation that is gone")

	// ErrNotAccepted means that the group has not been accepted: ranks are
	// missing, or it was refused.
	ErrNotAccepted = errors.New("the group is not accepted yet")

	// ErrDeclined means that a chunk was not stored: no slot was free, or the
	// chunk before it is not held.
	ErrDeclined = errors.New("declined: no room, or the chunk before it is not held")

	// ErrMiss means that a chunk is not held, or could not be read.
	ErrMiss = errors.New("not held")

	// ErrArgument is wrapped by errors about arguments of a call.
	ErrArgument = errors.New("bad argument")
)

// RefusedError says that the leader does not take a member or its group.
type RefusedError struct {
	Reason string
	// Final: asking again cannot help, since the group does not fit together or
	// does not fit the leader. Otherwise the member keeps asking by itself.
	Final bool
}

func (e *RefusedError) Error() string { return "refused: " + e.Reason }
