"""What the scheduler half tells the worker half in a step, and once at start.

Plain integers and lists only: it is pickled for every worker in every step,
also while the engine only waits for loads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

#: Code, slot, generation.
Verdict = tuple[int, int, int]


@dataclass(slots=True)
class LoadPlan:
    """One load. Only pages of exactly ``[first_token, first_token + tokens)`` may
    be written: those before and after are shared and in use, also inside the
    first and the last chunk."""

    op: int
    #: Leader session of the verdicts; 0 with none: a load that failed before it
    #: began and is only reported.
    session: int
    request_id: str
    first_token: int
    tokens: int
    #: Block ids of that range, in order.
    blocks: list[int]
    #: Of the first window; none means that the load has failed.
    verdicts: list[Verdict]
    #: Chunks the range touches.
    chunks: int


@dataclass(slots=True)
class StorePlan:
    """Chunks to be copied into granted slots while their pages are the request's."""

    op: int
    session: int
    #: Ordinal of the chunk that index 0 means.
    first_ordinal: int
    #: Index, slot, generation.
    grants: list[Verdict]
    #: Block ids from the one that holds the first token of chunk
    #: ``first_ordinal`` to the one that holds the last token of the last grant.
    blocks: list[int]


@dataclass
class KVTierMetadata(KVConnectorMetadata):
    loads: list[LoadPlan] = field(default_factory=list)
    stores: list[StorePlan] = field(default_factory=list)


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
