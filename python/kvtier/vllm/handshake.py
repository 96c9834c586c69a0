"""What a worker tells the scheduler before the first request, and what must agree."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

import kvtier

from .settings import Settings
from .stats import logger


def group_name(engine_id: str) -> str:
    """The group of an engine's ranks and scheduler; at most 255 bytes."""
    name = f"vllm:{engine_id}"
    if len(name.encode()) > 255:
        name = f"vllm:{kvtier.keys.digest(engine_id).hex()}"
    return name


def root_of(settings: Settings) -> str:
    """What both halves must have opened."""
    path = settings.library.get("disk_path")
    if path:
        return os.path.abspath(path)
    return f"name:{settings.library.get('name', 'default')}"


@dataclass
class KVTierHandshake(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler before the first request. The leader
    decides over geometry; this catches a scheduler that is attached elsewhere."""

    root: str
    group: str
    #: D, I and B as this rank has them; 0 when it does not take part.
    dcp: int
    interleave: int
    block_tokens: int
    rank: int
    ranks: int
    #: Why this worker does not take part; empty when it does.
    off: str = ""


def check_handshakes(workers: Sequence[KVTierHandshake], mine: KVTierHandshake) -> str:
    """Compares what all workers say with ``mine``, what the scheduler sees. Returns why
    one of them does not take part, or nothing; raises ValueError where they disagree.
    The interleave of the workers counts: engines adjust it in them only."""
    here = sorted(w.rank for w in workers)
    if here != list(range(mine.ranks)):
        raise ValueError(f"{mine.ranks} workers are expected, those of ranks {here} are here")
    for w in workers:
        where = f"worker rank {w.rank}"
        if w.off:
            return f"{where} does not take part: {w.off}"
        for what, ours, theirs in (
            ("group", mine.group, w.group),
            ("root", mine.root, w.root),
            ("ranks", mine.ranks, w.ranks),
            ("decode context parallel size", mine.dcp, w.dcp),
            ("block size", mine.block_tokens, w.block_tokens),
        ):
            if ours != theirs:
                raise ValueError(f"scheduler and {where} disagree on the {what}: {ours!r} and {theirs!r}")
    interleaves = {w.interleave for w in workers}
    if len(interleaves) > 1:
        raise ValueError(f"the workers disagree on the interleave: {sorted(interleaves)}")
    if mine.dcp > 1 and interleaves != {mine.interleave}:
        logger.warning(
            "kvtier: the workers interleave by %d tokens, the scheduler is configured for %d; "
            "what the workers do counts",
            interleaves.pop(),
            mine.interleave,
        )
    return ""
