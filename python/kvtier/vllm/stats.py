"""Counters of the connector, in vLLM's own way, and the library's log.

One object per process and half counts; vLLM adds the ranks and the scheduler up in
each step and hands the sum, as plain data, to the process that logs and serves
metrics (see ``metrics.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.logger import init_logger

# Under "vllm", because only that logger has a handler in an engine.
logger = init_logger("vllm.kvtier")

#: Records of the library's log are moved to vLLM's this often.
LOG_S = 1.0

#: Counter -> what it counts. Everything here adds up over steps and ranks.
COUNTERS: dict[str, str] = {
    "lookups": "lookups that got an answer",
    "lookup_tokens": "tokens of prompts that lookups asked for, besides those the engine had itself",
    "local_tokens": "tokens of prompts that the engine's own prefix cache had when it looked up",
    "hits": "lookups that promised a load",
    "hit_tokens": "tokens promised",
    "too_small": "lookups that found fewer tokens than min_load_tokens",
    "waits": "lookups that held a request back for a step",
    "wait_timeouts": "lookups answered without the whole answer because the wait ended",
    "unanswered": "lookups that met no leader or one without room",
    "not_cached": "requests that cannot be identified and so bypass the cache",
    "loads": "loads begun",
    "load_tokens": "tokens of loads begun",
    "loads_unbegun": "loads that the leader did not answer in time",
    "loads_done": "loads reported by ranks",
    "loads_failed": "loads that ended without all chunks",
    "loaded_tokens": "tokens of loads that all ranks have copied whole",
    "loaded_bytes": "bytes copied into pages",
    "chunks_offered": "chunks offered for storing",
    "chunks_granted": "chunks that got a slot",
    "chunks_held": "offered chunks that were held already, or on their way",
    "chunks_declined": "offered chunks that found no room or no parent",
    "store_timeouts": "offers without an answer in time",
    "stores": "stores copied",
    "stores_stale": "stores that met another leader session",
    "resets": "epochs begun",
    "errors": "hooks that failed and were answered with a miss",
    "breaker_trips": "times the disk was switched off for its errors",
    "disk_postponed": "chunks that had to wait for room in the queue to disk",
}

#: Family of counters -> its label and what it counts. In ``data`` a counter of a
#: family is ``family/value``.
FAMILIES: dict[str, tuple[str, str]] = {
    "tier_tokens": ("tier", "tokens of loads begun, by where they were found: dram or disk"),
    "tier_bytes": ("tier", "bytes of loads begun over all ranks, by where they were found: dram or disk"),
    "load_failures": (
        "cause",
        "loads of ranks that failed: unbegun, missing, late, stale (another leader), cancelled or off",
    ),
    "declined": ("cause", "chunks the leader declined: no_slot or no_parent"),
    "evicted": (
        "place",
        "chunks evicted: dram, dram_unwritten (of these, lost before they were on disk), disk, "
        "disk_other (of another namespace)",
    ),
    "disk_bytes": ("direction", "bytes of chunk files: read or written"),
    "disk_chunks": ("direction", "chunk files: read or written"),
    "disk_misses": ("cause", "reads of the disk without a chunk"),
    "disk_corrupt": ("cause", "chunk files that were proved wrong and removed"),
    "disk_dropped": ("cause", "chunks that did not get to disk"),
    "disk_errors": ("errno", "errors of the disk"),
    "expired": ("what", "leases, stores and loads that the leader ended at their deadline"),
}

#: Figure of the present state -> what it is. The newest value counts.
STATE: dict[str, str] = {
    "off": "1 when the cache is off for this engine",
    "dram_bytes": "memory allocated by the leader",
    "dram_cap_bytes": "memory the leader may allocate",
    "disk_used_bytes": "allocated bytes below the root",
    "disk_cap_bytes": "cap of the disk",
    "disk_waiting_bytes": "bytes queued to be written",
    "leases": "leases held",
    "members": "processes and ranks attached to the leader",
}

#: What a disk may be; the figure "disk_state" is a place in this list.
DISK_STATES = ("none", "scanning", "on", "trial", "off", "dead")

_WAIT = "lookup_wait/"  # before seconds, rounded to one digit so that there are few; counts samples
_NOW = "now/"  # before the name of a figure of the present state


class KVTierStats(KVConnectorStats):
    """Counters since the last report. ``data`` is flat and maps to numbers: the names of
    COUNTERS, ``family/value`` for those of FAMILIES, ``lookup_wait/seconds`` to how many
    lookups took so long, and ``now/figure`` to figures of the present state. Absent
    counters are 0."""

    def add(self, name: str, n: int = 1) -> None:
        self.data[name] = self.data.get(name, 0) + n

    def waited(self, seconds: float) -> None:
        """A lookup got its answer after so long."""
        self.add(f"{_WAIT}{seconds:.1g}")

    def show(self, figures: Mapping[str, int | float]) -> None:
        """Sets figures of the present state."""
        self.data.update({_NOW + name: value for name, value in figures.items()})

    @property
    def waits(self) -> dict[float, int]:
        """Seconds -> how many lookups took so long."""
        return {float(k.removeprefix(_WAIT)): n for k, n in self.data.items() if k.startswith(_WAIT)}

    @property
    def now(self) -> dict[str, int | float]:
        return {k.removeprefix(_NOW): v for k, v in self.data.items() if k.startswith(_NOW)}

    def counters(self) -> dict[str, int]:
        """What adds up, without the waits."""
        return {k: v for k, v in self.data.items() if not k.startswith((_WAIT, _NOW))}

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVTierStats:
        for name, v in other.data.items():
            if name == f"{_NOW}off":  # nobody who is on must hide that somebody is off
                self.data[name] = max(self.data.get(name, 0), v)
            elif name.startswith(_NOW):
                self.data[name] = v
            else:
                self.data[name] = self.data.get(name, 0) + v
        return self

    def take(self) -> KVTierStats | None:
        """Returns what was counted and begins anew; None when nothing was."""
        if not self.data:
            return None
        taken = KVTierStats(data=self.data)
        self.data = {}
        return taken

    def reduce(self) -> dict[str, int | float | str]:
        """For vLLM's log line: how good, from where, what was stored, what failed and
        why, how full the disk is. What did not happen is left out."""
        d = self.data
        out: dict[str, int | float | str] = {}
        if asked := d.get("lookup_tokens"):
            out["kvtier hit rate"] = f"{100 * d.get('loaded_tokens', 0) / asked:.1f}% of {asked} tokens"
        for tier, name in (("dram", "DRAM"), ("disk", "disk")):
            if n := d.get(f"tier_tokens/{tier}"):
                out[f"kvtier tokens from {name}"] = n
        for name, text in (("chunks_granted", "stored"), ("chunks_held", "held already")):
            if n := d.get(name):
                out[f"kvtier chunks {text}"] = n
        if failures := self._failures():
            out["kvtier failures"] = "(" + ", ".join(f"{n} {text}" for text, n in failures.items()) + ")"
        if text := self._disk():
            out["kvtier disk"] = text
        if self.now.get("off"):
            out["kvtier"] = "off"
        return out

    def _failures(self) -> dict[str, int]:
        out = {text: self.data[name] for name, text in _FAILURES.items() if self.data.get(name)}
        for name, n in sorted(self.data.items()):
            family, _, cause = name.partition("/")
            if family in _FAILURE_FAMILIES and n:
                out[f"{_FAILURE_FAMILIES[family]} {cause}"] = n
        return out

    def _disk(self) -> str:
        now = self.now
        state = DISK_STATES[int(now.get("disk_state", 0))]
        if state == "none":
            return ""
        gib = 1 << 30
        text = f"{now.get('disk_used_bytes', 0) / gib:.2f} of {now.get('disk_cap_bytes', 0) / gib:.2f} GiB"
        return text if state == "on" else f"{text} ({state})"


#: Counters that count what went wrong, with a name for the log line.
_FAILURES = {
    "unanswered": "lookups without an answer",
    "wait_timeouts": "lookups cut off",
    "not_cached": "requests not cached",
    "loads_failed": "loads failed",
    "chunks_declined": "chunks declined",
    "store_timeouts": "stores without an answer",
    "stores_stale": "stores stale",
    "errors": "errors",
    "breaker_trips": "breaker trips",
}
_FAILURE_FAMILIES = {
    "load_failures": "load",
    "disk_corrupt": "corrupt",
    "disk_dropped": "not written:",
    "disk_errors": "disk error",
    "expired": "expired",
}

_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)


def drain_records(cache: Any) -> list[str]:
    """Moves waiting log records of the library into vLLM's log. Returns their texts."""
    texts = []
    for record in cache.records(64):
        texts.append(record.text)
        level = _LEVELS[max(0, min(int(record.level), len(_LEVELS) - 1))]
        lost = f" ({record.dropped} records before this one were lost)" if record.dropped else ""
        logger.log(level, "libkvtier: %s%s", record.text, lost)
    return texts
