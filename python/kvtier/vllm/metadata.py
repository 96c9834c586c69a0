"""What the scheduler half tells the worker half in a step.

Plain integers and lists only: it is pickled for every worker in every step,
also while the engine only waits for loads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from typing import TYPE_CHECKING

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

import kvtier

if TYPE_CHECKING:
    import numpy.typing as npt

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


def first_window(verdicts: npt.NDArray[np.uint32]) -> list[Verdict]:
    """The verdicts that travel: the leading resident chunks and one more, so that
    a load whose first chunk is not read yet is not taken for a failed one."""
    codes = verdicts[:, 0]
    later = np.flatnonzero(codes != kvtier.READY)
    n = int(later[0]) + 1 if len(later) else len(codes)
    return [(int(c), int(s), int(g)) for c, s, g in verdicts[:n, :3]]
