// Package kvtier keeps the KV cache of an inference engine in host DRAM and on the
// local disk, and gives it back bit for bit, also after a restart and to another
// topology of ranks.
//
// A process opens a root ([Open]) and becomes its leader, which owns index, slots
// and disk, or a member of the leader in another process. Both do the same:
//
//   - a rank ([Cache.Register]) copies its pages into slots ([Rank.Store]) and out
//     of them ([Rank.Load]);
//   - the coordinator of its group ([Cache.Coordinate]) asks what is held, keeps it
//     with leases, and begins the operations that ranks carry out;
//   - a program without pages puts and gets whole chunks ([Cache.Blob]).
//
// The cache may always say miss. Nothing waits without a bound, and a leader that
// is lost costs no more than its hits: members attach again by themselves. What was
// granted belongs to a session, and means nothing under another one.
//
// The library starts goroutines and sets GOMAXPROCS, but installs no signal
// handlers, reads no environment and calls nothing of its host: completions and log
// records wait behind one descriptor ([Cache.EventFD]).
package kvtier
