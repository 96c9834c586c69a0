package tier

import (
	"bytes"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/sys"
)

const (
	sidecarName = "layout.json"
	sidecarTemp = "layout.json.tmp"

	maxSidecar = 4 << 20
)

// checkSidecar makes sure that the directory describes this namespace, whose
// canonical bytes are want. A missing or damaged sidecar is written anew, durably:
// the caller has made sure that the directory's name has the fingerprint of the
// namespace. One that describes something else stays as it is, with an error.
func checkSidecar(fs Filesystem, dir string, want []byte) (rebuilt bool, err error) {
	path := filepath.Join(dir, sidecarName)
	have, err := readSmall(fs, path, maxSidecar)
	switch {
	case absent(err):
	case err != nil:
		return false, fmt.Errorf("read %s: %w", path, err) // unreadable is not damaged
	case bytes.Equal(have, want):
		return false, nil
	default:
		if _, perr := chunk.ParseNamespace(have); perr == nil {
			return false, fmt.Errorf("%s: %w", dir, ErrSidecarForeign)
		} else if errors.Is(perr, chunk.ErrNewerFormat) {
			return false, fmt.Errorf("%s: %w", dir, ErrSidecarNewer)
		}
	}
	temp := filepath.Join(dir, sidecarTemp)
	if st, err := fs.Lstat(temp); err == nil && !st.Regular() {
		return false, fmt.Errorf("%s, move it away: %w", temp, errForeign)
	}
	err = writeDurably(fs, temp, want)
	if err == nil {
		err = fs.Rename(temp, path)
	}
	if err != nil {
		if uerr := fs.Unlink(temp); uerr != nil && !absent(uerr) {
			err = errors.Join(err, uerr)
		}
		return false, err
	}
	// The directory's own name must not be lost either.
	return true, errors.Join(syncDir(fs, dir), syncDir(fs, filepath.Dir(dir)))
}

// writeDurably makes path, in place of what was there, with these bytes on stable
// storage; its name is durable only after syncDir.
func writeDurably(fs Filesystem, path string, b []byte) (err error) {
	f, err := fs.Open(path, sys.OpenWrite|sys.OpenCreate|sys.OpenTruncate)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	for off := 0; off < len(b); {
		n, err := f.WriteV([][]byte{b[off:]}, int64(off))
		if err != nil {
			return fmt.Errorf("write %s: %w", path, err)
		}
		if n == 0 {
			return fmt.Errorf("write %s: %w", path, errShort)
		}
		off += n
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", path, err)
	}
	return nil
}

func syncDir(fs Filesystem, dir string) error {
	f, err := fs.Open(dir, sys.OpenRead|sys.OpenDirectory)
	if err != nil {
		return err
	}
	if err := f.SyncAll(); err != nil {
		return errors.Join(fmt.Errorf("sync %s: %w", dir, err), f.Close())
	}
	return f.Close()
}

// readSmall reads a whole file of at most limit bytes; what is longer is cut, and
// so will not parse.
func readSmall(fs Filesystem, path string, limit int64) ([]byte, error) {
	f, err := fs.Open(path, sys.OpenRead|sys.OpenNonblock)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Regular() {
		return nil, nil
	}
	b := make([]byte, min(st.Size, limit))
	for off := 0; off < len(b); {
		n, err := f.ReadV([][]byte{b[off:]}, int64(off))
		if err != nil {
			return nil, err
		}
		if n == 0 {
			return b[:off], nil
		}
		off += n
	}
	return b, nil
}
