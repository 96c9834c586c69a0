package wire

import "encoding/json"

// Protocol is the major version that HELLO and WELCOME carry. Sides with
// different ones do not talk to each other.
const Protocol = 3

// Hello is a member's first frame.
type Hello struct {
	Protocol    int      `json:"protocol"`
	Features    []string `json:"features"`
	Group       string   `json:"group"`
	Ranks       int      `json:"ranks"` // of the group
	Rank        int      `json:"rank"`  // in the group, -1 = none
	Coordinator bool     `json:"coordinator"`
	PID         int      `json:"pid"` // for messages only: peers are told apart by pidfd
}

// Welcome admits a member. Descriptors: ring segment, request doorbell, reply
// doorbell.
type Welcome struct {
	Session  uint64 `json:"session,string"` // a string: JSON numbers are exact to 53 bits only
	Member   uint32 `json:"member"`
	Protocol int    `json:"protocol"`
}

// Identity is what must be equal for the bytes of two runs to be
// interchangeable, besides the layout of the rows.
type Identity struct {
	Model        string `json:"model"`
	Attention    string `json:"attention"` // hex digest of the effective configuration
	Draft        string `json:"draft"`
	Encoding     string `json:"encoding"`
	KVDtype      string `json:"kv_dtype"`
	KVScales     string `json:"kv_scales"`
	Quantisation string `json:"quantisation"`
	Weights      string `json:"weights"`     // hex digest; from rank 0 only
	MemoryOnly   bool   `json:"memory_only"` // weights without a lasting identity: nothing goes to disk
}

// DeclaredRegion is one column of the row as its rank sees it.
type DeclaredRegion struct {
	Name       string `json:"name"`
	Component  string `json:"component"`
	Layer      int    `json:"layer"` // global, -1 = none
	Head       int    `json:"head"`  // global, -1 = none
	Bytes      int    `json:"bytes"` // per token; per block where pages are opaque
	Replicated bool   `json:"replicated"`
	AllRows    bool   `json:"all_rows,omitempty"`
}

// DeclaredGroup is one KV group of a rank.
type DeclaredGroup struct {
	Kind         string           `json:"kind"`
	TokensPerRow int              `json:"tokens_per_row"`
	Regions      []DeclaredRegion `json:"regions"`
}

// Declare is what a rank says about itself.
type Declare struct {
	Identity    Identity          `json:"identity"`
	ChunkTokens int               `json:"chunk_tokens"`
	BlockTokens int               `json:"block_tokens"`
	DCP         int               `json:"dcp"`
	Interleave  int               `json:"interleave"`
	DCPRank     int               `json:"dcp_rank"`
	Groups      []DeclaredGroup   `json:"groups"`
	Provenance  map[string]string `json:"provenance"`
}

// AcceptedRegion places one declared region.
type AcceptedRegion struct {
	Offset int  `json:"offset"` // in the row, bytes
	Writes bool `json:"writes"` // false: replicated data that another rank writes
}

// Accept admits a complete group. Descriptors, for ranks only: arena, slot table.
type Accept struct {
	Namespace    json.RawMessage    `json:"namespace"`   // canonical bytes of layout.json
	Fingerprint  string             `json:"fingerprint"` // hex
	SlotBytes    int64              `json:"slot_bytes"`
	Slots        int                `json:"slots"`
	ChunkTokens  int                `json:"chunk_tokens"`
	BlockTokens  int                `json:"block_tokens"`
	DCP          int                `json:"dcp"`
	Interleave   int                `json:"interleave"`
	DCPRank      int                `json:"dcp_rank"` // of this rank, as it declared
	Columns      [][]AcceptedRegion `json:"columns"`  // per group, per region in the order this rank declared them
	DiskEnabled  bool               `json:"disk_enabled"`
	DiskBytesCap int64              `json:"disk_bytes_cap"`
	DRAMBytes    int64              `json:"dram_bytes"`
}

// Refuse says why a member or its group is not admitted. With Final false it is
// worth trying again later.
type Refuse struct {
	Reason string `json:"reason"`
	Final  bool   `json:"final"`
}

// EpochBytes is the length of an epoch.
const EpochBytes = 16

// Reset starts a new epoch of the group. It comes from its coordinator.
type Reset struct {
	Epoch []byte `json:"epoch"` // EpochBytes random bytes
}

// StatsRequest asks for the leader's statistics.
type StatsRequest struct{}

// StatsReply answers StatsRequest.
type StatsReply struct {
	JSON json.RawMessage `json:"stats"`
}

// Goodbye ends a connection whose sender has stopped all its copies.
type Goodbye struct{}
