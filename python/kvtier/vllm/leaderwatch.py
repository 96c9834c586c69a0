"""What the leader counts, brought into vLLM's statistics.

The leader may be another process, which may be stopped: asking it can take a
second. So a thread of rank 0 asks now and then, and a step only takes what the
thread has found.
"""

from __future__ import annotations

import threading
from typing import Any

import kvtier

from .stats import DISK_STATES, KVTierStats

#: How often to ask. vLLM writes its log line every 10 s.
ASK_S = 5.0
#: How long stop waits for an answer that is under way; the library's own bound is 1 s.
_STOP_S = 2.0


class LeaderWatch:
    """Asks a cache for its leader's statistics until it is stopped or the cache is
    closed. :meth:`report` is called by the one thread that owns the statistics."""

    def __init__(self, cache: kvtier.Cache, ask_s: float = ASK_S) -> None:
        self._cache = cache
        self._ask_s = ask_s
        self._ended = threading.Event()
        # Replaced as a whole by the thread: counters, figures, session, whether it is ours.
        self._newest: tuple[dict[str, int], dict[str, int], str, bool] | None = None
        self._reported: tuple[dict[str, int], dict[str, int], str, bool] | None = None
        self._thread = threading.Thread(target=self._run, name="kvtier statistics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Bounded; idempotent."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_STOP_S)

    def report(self, stats: KVTierStats) -> None:
        """Adds what the leader has counted since the last report."""
        newest = self._newest
        if newest is None or newest is self._reported:
            return
        counters, figures, session, ours = newest
        before: dict[str, int] = {}
        if self._reported is not None and self._reported[2] == session:
            before = self._reported[0]
        elif not ours:
            before = counters  # what another process had counted before we came
        self._reported = newest
        for name, n in counters.items():
            if n > before.get(name, 0):
                stats.add(name, n - before.get(name, 0))
        stats.show(figures)

    def _run(self) -> None:
        while True:
            try:
                stats = self._cache.stats()
            except kvtier.Error:
                if self._cache.state()[0] == "closed":
                    return
                stats = {"leader": None}
            if (leader := stats["leader"]) is not None:
                ours = stats["process"]["state"] == "leader"
                self._newest = (*figures_of(leader), leader["session"], ours)
            if self._ended.wait(self._ask_s):
                return


def figures_of(leader: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Counters, which only grow while a leader lives, and figures of its state."""
    stores, loads = leader["stores"], leader["loads"]
    counters = {
        "declined/no_slot": stores["declined_no_slot"],
        "declined/no_parent": stores["declined"] - stores["declined_no_slot"],
        "expired/leases": leader["leases_expired"],
        "expired/stores": stores["expired"],
        "expired/loads": loads["expired"],
        "evicted/dram": 0,
        "evicted/dram_unwritten": 0,
        "disk_postponed": 0,
    }
    for n in leader.get("namespaces") or ():
        arena = n["arena"]
        counters["evicted/dram"] += arena["evicted"]
        counters["evicted/dram_unwritten"] += arena["evicted_dirty"]
        counters["disk_postponed"] += arena["writes_postponed"]
    figures: dict[str, int] = {
        "dram_bytes": leader["dram_used_bytes"],
        "dram_cap_bytes": leader["dram_bytes"],
        "leases": sum(g["leases"] for g in leader.get("groups") or ()),
        "members": leader["members"],
        "disk_state": 0,
    }
    disk = leader.get("disk")
    if disk is None:
        return counters, figures
    counters |= {
        "evicted/disk": disk["evicted_self"],
        "evicted/disk_other": disk["evicted_other"],
        "disk_bytes/read": disk["read_bytes"],
        "disk_bytes/written": disk["write_bytes"],
        "disk_chunks/read": disk["reads"],
        "disk_chunks/written": disk["writes"],
        "breaker_trips": disk["breaker_trips"],
    }
    for family in ("misses", "corrupt", "dropped", "errors"):
        counters |= {f"disk_{family}/{cause}": n for cause, n in disk[family].items()}
    figures |= {
        "disk_state": DISK_STATES.index(disk["state"]),
        "disk_used_bytes": disk["used_bytes"],
        "disk_cap_bytes": disk["cap_bytes"],
        "disk_waiting_bytes": disk["dirty_bytes"],
    }
    return counters, figures
