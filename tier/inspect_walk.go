package tier

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/kvtier/kvtier/internal/chunk"
	"github.com/kvtier/kvtier/internal/sys"
)

// EntryKind says what a name below a root is.
type EntryKind string

const (
	EntryChunk     EntryKind = "chunk"     // by its name; what is in it is not known
	EntryTemp      EntryKind = "temp"      // being written, or left over by a session that died
	EntrySidecar   EntryKind = "sidecar"   // layout.json
	EntryDirectory EntryKind = "directory" // of a namespace, or one of its 256
	EntryRoot      EntryKind = "root"      // kvtier.json, LOCK, run and the root itself
	EntryForeign   EntryKind = "foreign"   // not ours: nothing reads, counts or deletes it
	// EntryUnreadable: the file system gave an error instead of an answer, of a directory
	// perhaps for all that is in it. It stays.
	EntryUnreadable EntryKind = "unreadable"
)

// Entry is one name below a root.
type Entry struct {
	Kind EntryKind
	// Why a foreign entry is not ours: name, path (a chunk's name in the wrong
	// directory), type (no plain file). A chunk's is "links" when the file has more
	// names than one: no leader adopts it. An unreadable one's is the errno.
	Why       string
	Path      string
	Key       chunk.Key // of a chunk
	Bytes     int64     // size
	Allocated int64     // what it costs
	Modified  time.Time // of a chunk: its last use
	Err       error     // of an unreadable one
}

// Good reports whether a leader would take the file for a chunk by its name.
func (e *Entry) Good() bool { return e.Kind == EntryChunk && e.Why == "" }

func (e *Entry) set(st *sys.Stat) {
	e.Bytes, e.Allocated, e.Modified = st.Size, st.Allocated, time.Unix(0, st.ModifiedNS)
	if st.Regular() {
		e.Allocated = accounted(st)
	}
}

// unreadable hands on a name that nothing can be told of, so that a sick disk does not
// hide what is beside it.
func unreadable(path string, err error, visit func(Entry) error) error {
	return visit(Entry{Kind: EntryUnreadable, Why: errnoName(err), Path: path, Err: err})
}

// WalkBeside visits what lies in the root beside the namespaces.
func (i *Inspection) WalkBeside(visit func(Entry) error) error {
	names, err := i.fs.ReadNames(i.root.path)
	if err != nil {
		return err
	}
	slices.Sort(names)
	for _, name := range append(names, ".") {
		e := Entry{Path: filepath.Join(i.root.path, name)}
		st, err := i.fs.Lstat(e.Path)
		if absent(err) {
			continue
		}
		if err != nil {
			if err = unreadable(e.Path, err, visit); err != nil {
				return err
			}
			continue
		}
		e.set(&st)
		_, namespace := chunk.ParseDirName(name)
		switch {
		case namespace && st.Directory():
			continue
		case name == "." || name == rootFileName || name == lockFileName || name == runDirName:
			e.Kind = EntryRoot
		case isRootTemp(name) && st.Regular():
			e.Kind = EntryTemp
		case namespace || isRootTemp(name):
			e.Kind, e.Why = EntryForeign, "type"
		default:
			e.Kind, e.Why = EntryForeign, "name"
		}
		if err := visit(e); err != nil {
			return err
		}
	}
	return nil
}

// Walk visits every name of a namespace: each of its directories after what is in
// it, the sidecar after all others, the namespace's own directory last. What cannot be
// read is visited as such; errors are only those of visit.
func (n *InspectedNamespace) Walk(visit func(Entry) error) error {
	names, err := n.i.fs.ReadNames(n.path)
	if absent(err) {
		return nil
	}
	if err != nil {
		return unreadable(n.path, err, visit)
	}
	slices.SortFunc(names, func(a, b string) int {
		if (a == sidecarName) != (b == sidecarName) { // it goes last, and so leaves last
			if a == sidecarName {
				return 1
			}
			return -1
		}
		return strings.Compare(a, b)
	})
	for _, name := range names {
		if err := n.visitTop(name, visit); err != nil {
			return err
		}
	}
	return n.visit(Entry{Kind: EntryDirectory, Path: n.path}, visit)
}

func (n *InspectedNamespace) visitTop(name string, visit func(Entry) error) error {
	e := Entry{Path: filepath.Join(n.path, name)}
	_, sub := parseSubName(name)
	st, err := n.i.fs.Lstat(e.Path)
	switch {
	case absent(err):
		return nil
	case err != nil:
		return unreadable(e.Path, err, visit)
	case sub && st.Directory():
		return n.walkSub(name, visit)
	case name == sidecarName && st.Regular():
		e.Kind = EntrySidecar
	case name == sidecarTemp && st.Regular():
		e.Kind = EntryTemp
	case sub || name == sidecarName || name == sidecarTemp:
		e.Kind, e.Why = EntryForeign, "type"
	default:
		e.Kind, e.Why = EntryForeign, "name"
	}
	e.set(&st)
	return visit(e)
}

func (n *InspectedNamespace) walkSub(sub string, visit func(Entry) error) error {
	dir := filepath.Join(n.path, sub)
	names, err := n.i.fs.ReadNames(dir)
	if absent(err) {
		return nil
	}
	if err != nil {
		return unreadable(dir, err, visit)
	}
	slices.Sort(names)
	for _, name := range names {
		e := Entry{Path: filepath.Join(dir, name)}
		k, isChunk := chunk.ParseFileName(name)
		t, _, _, isTemp := chunk.ParseTempName(name)
		switch {
		case isChunk && chunk.SubDir(k) == sub:
			e.Kind, e.Key = EntryChunk, k
		case isTemp && chunk.SubDir(t) == sub:
			e.Kind, e.Key = EntryTemp, t
		case isChunk || isTemp:
			e.Kind, e.Why = EntryForeign, "path"
		default:
			e.Kind, e.Why = EntryForeign, "name"
		}
		if err := n.visit(e, visit); err != nil {
			return err
		}
	}
	return n.visit(Entry{Kind: EntryDirectory, Path: dir}, visit)
}

// visit fills in what the file system says of an entry.
func (n *InspectedNamespace) visit(e Entry, visit func(Entry) error) error {
	st, err := n.i.fs.Lstat(e.Path)
	if absent(err) {
		return nil
	}
	if err != nil {
		return unreadable(e.Path, err, visit)
	}
	e.set(&st)
	switch {
	case (e.Kind == EntryChunk || e.Kind == EntryTemp) && !st.Regular():
		e.Kind, e.Why = EntryForeign, "type"
	case e.Kind == EntryChunk && st.Links != 1:
		e.Why = "links"
	}
	return visit(e)
}

// Footer reads what a chunk file says of itself, without its payload. Of the rest of
// the namespace nothing is checked, but it is of the chunk that the file's name says.
// Errors are those of chunk.DecodeFooter, chunk.ErrKey, or the system's.
func (n *InspectedNamespace) Footer(e Entry) (*chunk.Footer, error) {
	f, err := n.i.fs.Open(e.Path, sys.OpenRead|sys.OpenNonblock)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	page := make([]byte, chunk.FooterBytes)
	if st.Size < int64(len(page)) {
		return nil, chunk.ErrFooterSize
	}
	got, err := f.ReadV([][]byte{page}, st.Size-int64(len(page)))
	if err != nil {
		return nil, err
	}
	footer, err := chunk.DecodeFooter(page[:got])
	if err == nil && footer.Key != e.Key {
		return nil, fmt.Errorf("%v: %w", footer.Key, chunk.ErrKey)
	}
	return footer, err
}
