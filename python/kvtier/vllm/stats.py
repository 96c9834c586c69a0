"""Counters of the connector, in vLLM's own way, and the library's log."""

from __future__ import annotations

import logging
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
    "hits": "lookups that promised a load",
    "hit_tokens": "tokens promised",
    "waits": "lookups that held a request back for a step",
    "wait_timeouts": "lookups answered without the whole answer because the wait ended",
    "unanswered": "lookups that met no leader or one without room",
    "not_cached": "requests that cannot be identified and so bypass the cache",
    "loads": "loads begun",
    "load_tokens": "tokens of loads begun",
    "loads_unbegun": "loads that the leader did not answer in time",
    "loads_done": "loads reported by ranks",
    "loads_failed": "loads that ended without all chunks",
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
}


class KVTierStats(KVConnectorStats):
    """Counters since the last report. ``data`` maps the names of COUNTERS to
    whole numbers; absent means 0."""

    def add(self, name: str, n: int = 1) -> None:
        self.data[name] = self.data.get(name, 0) + n

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVTierStats:
        for name, n in other.data.items():
            self.data[name] = self.data.get(name, 0) + n
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line: what happened, zeros left out."""
        return {f"kvtier {name}": self.data[name] for name in COUNTERS if self.data.get(name)}

    def take(self) -> KVTierStats | None:
        """Returns what was counted and begins anew; None when nothing was."""
        if not self.data:
            return None
        taken = KVTierStats(data=self.data)
        self.data = {}
        return taken


_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)


def drain_records(cache: Any) -> None:
    """Moves waiting log records of the library into vLLM's log."""
    for record in cache.records(64):
        level = _LEVELS[max(0, min(int(record.level), len(_LEVELS) - 1))]
        lost = f" ({record.dropped} records before this one were lost)" if record.dropped else ""
        logger.log(level, "libkvtier: %s%s", record.text, lost)
