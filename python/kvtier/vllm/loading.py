"""The loading side of the scheduler's half: what the ranks are told to load, and each
load until all of them have reported it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from .metadata import LoadPlan, first_window
from .stats import logger

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput

    import kvtier

    from .diagnosis import Diagnosis
    from .leases import Incarnation
    from .stats import KVTierStats
    from .tracked import Tracked

_TIERS = {CacheHitSource.HOST: "dram", CacheHitSource.DISK: "disk"}

#: What the begin of a load may wait for the leader's verdicts.
LOAD_WAIT_S = 0.003


class Load:
    """A load from its begin until all ranks have reported."""

    __slots__ = ("op", "first", "tokens", "blocks", "owner", "failed")

    def __init__(self, op: int, first: int, tokens: int, blocks: list[int], owner: Tracked) -> None:
        self.op = op
        self.first = first  # token
        self.tokens = tokens
        self.blocks = blocks
        self.owner = owner
        self.failed = False


class Loading:
    """vLLM makes a request wait for the report of its load from ``begin`` on. So the plan
    travels with ``take_planned`` also when ``begin`` raises after it was made: without
    verdicts the ranks report it as failed. And the load is followed until ``reported``
    has heard of it, also when its request ends before.

    Not thread-safe: the scheduler's thread calls it, as all of this half. ``begin``
    waits at most LOAD_WAIT_S, nothing else waits. Kept is an entry for each load in
    flight, and each plan until the next step. ``coordinator`` and ``session`` are those
    of the moment; None and 0 when there are none.

    ``ids``: numbers of operations, shared with stores and leases."""

    def __init__(self, stats: KVTierStats, diagnosis: Diagnosis, ids: Iterator[int]) -> None:
        self._stats = stats
        self._diagnosis = diagnosis
        self._ids = ids
        # 0 until a leader session has begun.
        self._chunk = self._span = self._slot_bytes = 0
        self._loads: dict[int, Load] = {}  # by operation
        self._retired: dict[str, Load] = {}  # of requests that ended during their load
        self._planned: list[LoadPlan] = []  # to travel with the next metadata

    def adopt(self, chunk: int, span: int, slot_bytes: int) -> None:
        """A leader session begins. ``chunk``: C, ``span``: tokens of one block id,
        ``slot_bytes``: bytes of a chunk."""
        self._chunk, self._span, self._slot_bytes = chunk, span, slot_bytes

    def begin(
        self,
        t: Tracked,
        blocks: KVCacheBlocks,
        n: int,
        coordinator: kvtier.Coordinator | None,
        session: int,
    ) -> None:
        """Plans the load of ``n`` tokens after the engine's own hit into ``blocks``, all
        of the request's. Takes the incarnation of t and its lease. Raises what the
        library raises on misuse."""
        op = next(self._ids)
        try:
            ids = blocks.get_block_ids()[0]
        except Exception as e:  # no ids: the ranks report the request as a whole
            logger.error("kvtier: the blocks of a load are not known: %s", e)
            ids = []
        # request.num_computed_tokens is 0 at this moment, whatever the local hit.
        first, span, chunk = t.local, self._span or 1, self._chunk or 1
        wanted = list(ids[first // span : (first + n) // span])
        j0, j1 = first // chunk, -(-(first + n) // chunk)
        plan = LoadPlan(op, 0, t.request.request_id, first, n, wanted or list(ids), [], j1 - j0)
        t.load = self._loads[op] = Load(op, first, n, plan.blocks, t)
        # From here on the ranks will report, also if the rest fails.
        self._planned.append(plan)
        self._stats.add("loads")
        i, t.incarnation = t.incarnation, None
        if i is None or not i.sent or i.session != session or not ids:
            self._stats.add("loads_unbegun")
            return
        t.sources = self._split(i, first, n)
        begun = coordinator.load_begin(op, i.lease, j0, i.keys[j0:j1], LOAD_WAIT_S)
        if begun is None or begun[0] != i.session:
            coordinator.cancel(op, True)
            coordinator.release(i.lease)
            self._stats.add("loads_unbegun")
            return
        plan.session = begun[0]
        plan.verdicts = first_window(begun[1])
        self._stats.add("load_tokens", n)
        for source, tokens in t.sources.items():
            tier = _TIERS[source]
            self._stats.add(f"tier_tokens/{tier}", tokens)
            self._stats.add(f"tier_bytes/{tier}", tokens * self._slot_bytes // chunk)

    def _split(self, i: Incarnation, first: int, n: int) -> dict[CacheHitSource, int]:
        """Tokens by tier. What a prefetch of ours brought to DRAM came from disk."""
        a, b = i.on_disk or (0, 0)
        disk = max(0, min(first + n, b * self._chunk) - max(first, a * self._chunk))
        split = {CacheHitSource.HOST: n - disk, CacheHitSource.DISK: disk}
        return {source: k for source, k in split.items() if k}

    def take_planned(self) -> list[LoadPlan]:
        """Plans that have not travelled, each handed out once."""
        planned, self._planned = self._planned, []
        return planned

    def retire(self, t: Tracked) -> None:
        """The request ends before its load, whose report is still awaited."""
        self._retired[t.request.request_id] = t.load

    def reported(
        self,
        output: KVConnectorOutput,
        tracked: Mapping[str, Tracked],
        coordinator: kvtier.Coordinator | None,
    ) -> None:
        """Takes what the ranks say of loads: blocks that were not filled bound what is
        asked for again, and loads that all ranks have reported end. Loads of other
        connectors are passed over."""
        invalid = output.invalid_block_ids
        if invalid and self._loads:
            # Ids may come steps before the end of the load, from ranks one by one.
            for load in self._loads.values():
                bad = next((k for k, b in enumerate(load.blocks) if b in invalid), None)
                if bad is not None and self._span:
                    load.failed = True
                    chunk = (load.first + bad * self._span) // self._chunk
                    load.owner.limit = min(load.owner.limit, chunk)
        for request_id in output.finished_recving or ():
            load = self._retired.pop(request_id, None)
            if load is None:
                t = tracked.get(request_id)
                load = t.load if t is not None else None
                if load is None:
                    continue  # not ours
                t.load = None
            if request_id in output.failed_recving:
                load.failed = True
                load.owner.limit = min(load.owner.limit, load.first // (self._chunk or 1))
            self._loads.pop(load.op, None)
            if not load.failed:
                self._stats.add("loaded_tokens", load.tokens)
                self._diagnosis.loaded()
                continue
            self._diagnosis.failed()
            if coordinator is not None:
                # A rank without a handle, or without a leader then, tells it nothing. All
                # have reported, so nobody has this operation any more.
                coordinator.cancel(load.op, True)

    def leftovers(self) -> dict[str, int]:
        """What is held for loads; all 0 when the engine is idle."""
        return {"loads": len(self._loads), "retired": len(self._retired), "planned": len(self._planned)}
