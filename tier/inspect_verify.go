package tier

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/sys"
)

// CheckState is how the check of a chunk file ended.
type CheckState string

const (
	CheckGood       CheckState = "good"
	CheckDamaged    CheckState = "damaged"    // two reads of one file agree that it is not what its name says
	CheckUnsteady   CheckState = "unsteady"   // two reads differ, so that nothing is proved
	CheckUnreadable CheckState = "unreadable" // a system error, which proves nothing
	CheckNewer      CheckState = "newer"      // of a later version: no damage
	CheckVanished   CheckState = "vanished"   // evicted or deleted meanwhile
)

// Check is what reading one chunk file has shown.
type Check struct {
	State  CheckState
	Reason string // damaged: see StoreStats.Corrupt; unreadable: the errno
	Err    error  // unreadable: the whole of it

	proof *sys.Stat // the file that both reads have found damaged
}

// Verifier reads chunk files of one namespace as the disk tier does, with its checks
// and its rule of proof, but beside a leader that may be running. One goroutine at a
// time may use it.
type Verifier struct {
	d    *Disk
	dst  []byte
	page []byte
}

// Verifier needs the description of the namespace. It takes memory for one chunk,
// until Close.
func (n *InspectedNamespace) Verifier() (*Verifier, error) {
	if n.Sidecar != SidecarGood {
		return nil, fmt.Errorf("%s: %s is %s, what its chunks must be is not known: %w", n.Name, sidecarName, n.Sidecar, n.SidecarErr)
	}
	// The reader of the tier needs a Store for the file system and what that can do.
	// This one has no lanes, no index and no lock of the root.
	s := &Store{
		root: n.i.root, fs: n.i.fs, log: slog.New(slog.DiscardHandler), now: time.Now, count: newDiskCounters(),
	}
	s.direct.Store(true)
	v := &Verifier{d: &Disk{
		s: s, dir: newNamespaceDir(n.i.root.path, n.Name, n.Prefix), layout: n.Layout, fingerprint: n.Fingerprint,
	}}
	var err error
	if v.dst, err = sys.NewPages(int(n.Layout.PaddedBytes)); err != nil {
		return nil, err
	}
	if v.page, err = sys.NewPages(chunk.FooterBytes); err != nil {
		return nil, errors.Join(err, sys.FreePages(v.dst))
	}
	return v, nil
}

// Check reads the file of a chunk, a second time if it does not match.
func (v *Verifier) Check(k chunk.Key) Check {
	_, err := v.d.readOnce(k, v.dst, v.page, false)
	var first, second *mismatch
	if !errors.As(err, &first) {
		return checked(err)
	}
	_, err = v.d.readOnce(k, v.dst, v.page, true)
	switch {
	case err == nil:
		return Check{State: CheckUnsteady, Reason: first.reason}
	case !errors.As(err, &second):
		return checked(err)
	case !first.file.SameFile(&second.file): // published anew between the reads
		return Check{State: CheckUnsteady, Reason: second.reason}
	}
	return Check{State: CheckDamaged, Reason: second.reason, proof: &second.file}
}

// checked is the answer to what is no mismatch.
func checked(err error) Check {
	switch {
	case err == nil:
		return Check{State: CheckGood}
	case errors.Is(err, chunk.ErrNewerMajor):
		return Check{State: CheckNewer}
	case absent(err):
		return Check{State: CheckVanished}
	}
	return Check{State: CheckUnreadable, Reason: errnoName(err), Err: err}
}

// Remove unlinks the file that Check has proved damaged, unless another one has its
// name by now. A leader takes that for a vanished file: a miss.
func (v *Verifier) Remove(k chunk.Key, c Check) error {
	if c.proof == nil {
		return fmt.Errorf("%s is not proved damaged, it stays", chunk.FileName(k))
	}
	return v.d.s.unlinkProved(v.d.dir, k, c.proof)
}

// Close frees the memory.
func (v *Verifier) Close() error {
	return errors.Join(sys.FreePages(v.dst), sys.FreePages(v.page))
}
