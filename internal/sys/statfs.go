package sys

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Filesystem is the state of the file system that holds a path.
type Filesystem struct {
	TotalBytes int64
	AvailBytes int64 // what an unprivileged process can still write
	// Network names a file system whose locks or renames are not those of one
	// machine ("nfs", "fuse", ...); empty for a local one.
	Network string
	Memory  bool // tmpfs or ramfs: direct I/O there is a copy, and the bytes are RAM
}

// Magic numbers that golang.org/x/sys does not name.
const (
	magicLustre = 0x0bd00bd0
	magicGPFS   = 0x47504653
	magicBeeGFS = 0x19830326
	magicPanFS  = 0xaad7aaea
	magicGFS2   = 0x01161970
	magicVMHGFS = 0xbacbacbc
	magicVboxSF = 0x786f4256
	magicRamfs  = 0x858458f6
)

var networkNames = map[uint32]string{
	unix.NFS_SUPER_MAGIC:   "nfs",
	unix.SMB_SUPER_MAGIC:   "smb",
	unix.SMB2_SUPER_MAGIC:  "smb",
	unix.CIFS_SUPER_MAGIC:  "cifs",
	unix.FUSE_SUPER_MAGIC:  "fuse",
	unix.V9FS_MAGIC:        "9p",
	unix.CEPH_SUPER_MAGIC:  "ceph",
	unix.AFS_SUPER_MAGIC:   "afs",
	unix.AFS_FS_MAGIC:      "afs",
	unix.CODA_SUPER_MAGIC:  "coda",
	unix.OCFS2_SUPER_MAGIC: "ocfs2",
	magicLustre:            "lustre",
	magicGPFS:              "gpfs",
	magicBeeGFS:            "beegfs",
	magicPanFS:             "panfs",
	magicGFS2:              "gfs2",
	magicVMHGFS:            "vmhgfs",
	magicVboxSF:            "vboxsf",
}

// NetworkName gives the name of the network file system with that f_type, empty
// for a local one.
func NetworkName(fType int64) string { return networkNames[uint32(fType)] }

// Statfs describes the file system of path. With an error Network may be known all
// the same.
func Statfs(path string) (Filesystem, error) {
	var st unix.Statfs_t
	if err := retryErr(func() error { return unix.Statfs(path, &st) }); err != nil {
		return Filesystem{}, &os.PathError{Op: "statfs", Path: path, Err: err}
	}
	kind := uint32(st.Type)
	if st.Bsize <= 0 { // FUSE of another user says what it is, and nothing more
		return Filesystem{Network: NetworkName(int64(kind))}, fmt.Errorf("statfs %s: block size %d", path, st.Bsize)
	}
	return Filesystem{
		TotalBytes: int64(st.Blocks) * st.Bsize,
		AvailBytes: int64(st.Bavail) * st.Bsize,
		Network:    NetworkName(int64(kind)),
		Memory:     kind == unix.TMPFS_MAGIC || kind == magicRamfs,
	}, nil
}
