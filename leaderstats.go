package kvtier

import (
	"encoding/json"
	"fmt"
	"math/bits"

	"github.com/kvtier/kvtier/internal/wire"
	"github.com/kvtier/kvtier/tier"
)

// counters only grow. Guarded by the leader's lock.
type counters struct {
	Members uint64 `json:"members_admitted"`
	Deaths  uint64 `json:"members_ended"`
	// Strangers are connections of processes of other users.
	Strangers uint64 `json:"members_refused_user"`
	Resets    uint64 `json:"resets"`

	Lookups       uint64 `json:"lookups"` // LOOKUPs, and leases when they are new
	LookupTokens  uint64 `json:"lookup_tokens"`
	HitTokensDRAM uint64 `json:"hit_tokens_dram"`
	HitTokensDisk uint64 `json:"hit_tokens_disk"`
	Probes        uint64 `json:"probes"`
	Misses        misses `json:"misses"`

	Leases        uint64 `json:"leases_made"`
	LeasesExpired uint64 `json:"leases_expired"`
	LeasesUnknown uint64 `json:"leases_unknown"` // renewals of leases that had ended

	Stores        storeCounters `json:"stores"`
	Published     uint64        `json:"published"`
	PublishFailed uint64        `json:"publish_failed"`

	Loads        loadCounters `json:"loads"`
	Fills        uint64       `json:"disk_reads"`
	FillsFailed  uint64       `json:"disk_reads_failed"`
	FillsGivenUp uint64       `json:"disk_reads_given_up"`

	SelfTests selfTestCounters `json:"self_tests"`
}

// misses are why a run was answered shorter than it was asked for.
type misses struct {
	Absent        uint64 `json:"absent"` // runs that end at a chunk that is not held
	OverCap       uint64 `json:"over_cap"`
	Unreadable    uint64 `json:"unreadable"`
	GroupNotReady uint64 `json:"group_not_ready"`
}

type storeCounters struct {
	Begun    uint64 `json:"begun"`
	Granted  uint64 `json:"granted"`
	Have     uint64 `json:"have"`
	Pending  uint64 `json:"pending"`
	Declined uint64 `json:"declined"`
	NoSlot   uint64 `json:"declined_no_slot"`
	Stuck    uint64 `json:"declined_stuck"` // a rank of the group does not end a copy
	Aborted  uint64 `json:"aborted"`
	Expired  uint64 `json:"expired"`
	Dropped  uint64 `json:"dropped"` // for any reason
	Orphans  uint64 `json:"orphans"` // published though their parent is not held
	Ignored  uint64 `json:"done_ignored"`
}

type loadCounters struct {
	Begun        uint64 `json:"begun"`
	Windows      uint64 `json:"windows"`
	Ready        uint64 `json:"chunks_ready"`
	ChunksFailed uint64 `json:"chunks_failed"`
	Failed       uint64 `json:"failed"`
	Expired      uint64 `json:"expired"`
	LeaseLost    uint64 `json:"lease_lost"`
	Busy         uint64 `json:"busy"` // refused: too many loads, or of too many chunks, run
	Ignored      uint64 `json:"done_ignored"`
}

// countLookup notes what a run of n keys was answered: promised leading chunks.
func (l *leader) countLookup(sp *space, h wire.Hits, n int, promised uint32) {
	c, tokens := &l.count, uint64(sp.layout.ChunkTokens)
	c.Lookups++
	c.LookupTokens += uint64(n) * tokens
	c.HitTokensDRAM += uint64(h.Resident) * tokens
	c.HitTokensDisk += uint64(promised-h.Resident) * tokens
	if int(h.Held) < n {
		c.Misses.Absent++
	}
}

// leaderStats is the leader's part of the statistics.
type leaderStats struct {
	Session       string  `json:"session"`
	UptimeSeconds float64 `json:"uptime_seconds"`
	counters
	Members    int              `json:"members"`
	Groups     []groupStats     `json:"groups"`
	Namespaces []namespaceStats `json:"namespaces"`
	DRAMBytes  int64            `json:"dram_bytes"`
	DRAMUsed   int64            `json:"dram_used_bytes"`
	Disk       *tier.StoreStats `json:"disk,omitempty"`
}

type groupStats struct {
	Group       string `json:"group"`
	Ranks       int    `json:"ranks"`
	State       string `json:"state"` // forming, accepted, incomplete (lost a rank), refused
	Reason      string `json:"reason,omitempty"`
	Namespace   string `json:"namespace,omitempty"`
	Coordinator bool   `json:"coordinator"`
	Missing     int    `json:"missing_ranks"`
	Leases      int    `json:"leases"`
	Charged     int    `json:"slots_charged"`
	Stores      int    `json:"stores_running"`
	Loads       int    `json:"loads_running"`

	// Requests of the members that are attached now: of the ranks, in their order, and
	// of the coordinator. Each is counted by its type.
	RankRequests        []map[string]uint64 `json:"rank_requests"`
	CoordinatorRequests map[string]uint64   `json:"coordinator_requests,omitempty"`
}

type namespaceStats struct {
	Namespace string          `json:"namespace"`
	Model     string          `json:"model"`
	Groups    int             `json:"groups"`
	Arena     tier.SpaceStats `json:"arena"`
	Slots     map[string]int  `json:"slots"` // by state
	Charged   int             `json:"slots_charged"`
	Cap       int             `json:"slots_cap"`
	Fills     int             `json:"disk_reads_running"`
	OnDisk    *int            `json:"chunks_on_disk,omitempty"`
	Scanned   *bool           `json:"scanned,omitempty"`
}

// stats gives everything as one JSON object.
func (l *leader) stats() []byte {
	s := l.snapshot()
	b, err := json.Marshal(s)
	if err != nil {
		l.log.Error("statistics cannot be encoded", "error", err)
		return []byte("{}")
	}
	return b
}

func (l *leader) snapshot() *leaderStats {
	s := &leaderStats{Session: fmt.Sprintf("%016x", l.session()), DRAMBytes: l.pool.Bytes(), DRAMUsed: l.pool.Used()}
	if l.store != nil {
		st := l.store.Stats()
		s.Disk = &st
	}
	l.lock()
	defer l.unlock()
	s.counters = l.count
	s.UptimeSeconds = l.now().Sub(l.started).Seconds()
	s.Members = len(l.members)
	for _, g := range l.groups {
		s.Groups = append(s.Groups, g.stats())
	}
	for _, sp := range l.spaces {
		s.Namespaces = append(s.Namespaces, sp.stats())
	}
	return s
}

func (g *group) stats() groupStats {
	s := groupStats{
		Group: g.id, Ranks: g.ranks, State: "forming",
		Coordinator: g.coordinator != nil && !g.coordinator.isGone,
		Missing:     bits.OnesCount64(g.missing), Stores: len(g.stores), Loads: len(g.loads),
	}
	switch {
	case g.whole():
		s.State = "accepted"
	case g.space != nil:
		s.State = "incomplete"
	case g.refused != nil:
		s.State, s.Reason = "refused", g.refused.Reason
	}
	if g.space != nil {
		s.Namespace = g.agreement.fingerprint.String()
	}
	for _, a := range g.members {
		var requests map[string]uint64
		if a != nil {
			requests = a.requests()
		}
		s.RankRequests = append(s.RankRequests, requests)
	}
	if g.coordinator != nil {
		s.CoordinatorRequests = g.coordinator.requests()
	}
	seen := map[*attachment]bool{}
	for _, a := range append([]*attachment{g.coordinator}, g.members...) {
		if a != nil && !seen[a] {
			seen[a] = true
			s.Leases += len(a.leases)
			s.Charged += a.charged
		}
	}
	return s
}

func (sp *space) stats() namespaceStats {
	s := namespaceStats{
		Namespace: sp.fingerprint.String(), Model: sp.model, Groups: sp.groups, Arena: sp.Stats(),
		Slots: make(map[string]int), Charged: sp.charged, Cap: sp.allCap(), Fills: len(sp.fills),
	}
	for state, n := range s.Arena.States {
		s.Slots[state.String()] = n
	}
	if sp.disk != nil {
		n, scanned := sp.disk.Count(), sp.disk.Scanned()
		s.OnDisk, s.Scanned = &n, &scanned
	}
	return s
}
