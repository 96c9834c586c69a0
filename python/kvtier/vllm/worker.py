"""A worker's half: owns this rank's pages, copies between them and the arena.

Stores are copied on the worker's thread, in ``wait_for_save``: when it returns,
nobody reads the pages any more, so they need no fence. Loads run behind the
engine; each is reported exactly once, after this rank's own copy has stopped.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

import kvtier

from . import identity, mapping
from .announcement import Announcement
from .handshake import KVTierHandshake, group_name, root_of
from .metadata import KVTierMetadata, LoadPlan, StorePlan
from .settings import Settings
from .stats import LOG_S, KVTierStats, drain_records, logger

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

#: How long registration waits for the leader to accept the group.
READY_S = 5.0
#: How long a self-test over all ranks may take.
SELFTEST_S = 5.0
#: Between two of them that come to no end.
RETRY_S = 1.0
_EVENTS = 256
#: Why a load failed, for the statistics.
_CAUSES = {
    kvtier.errors.E_STALE: "stale",
    kvtier.errors.E_TIMEOUT: "late",
    kvtier.errors.E_CLOSED: "cancelled",
    kvtier.errors.E_MISS: "missing",
}


class _Inbox:
    """Completions by rank handle. One cache serves every engine of a process that
    opened its root, and whoever polls takes the events of all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, deque[kvtier.LoadEvent]] = {}

    def open(self, rank: int) -> None:
        with self._lock:
            self._waiting[rank] = deque()

    def close(self, rank: int) -> None:
        with self._lock:
            self._waiting.pop(rank, None)

    def take(self, cache: kvtier.Cache, rank: int) -> list[kvtier.LoadEvent]:
        with self._lock:
            while events := cache.poll(_EVENTS):
                for e in events:
                    waiting = self._waiting.get(e.rank)
                    if waiting is not None:
                        waiting.append(e)
                if len(events) < _EVENTS:
                    break
            mine = self._waiting[rank]
            out = list(mine)
            mine.clear()
            return out


_inbox = _Inbox()


class WorkerHalf:
    """See the module. vLLM calls it from the worker's one thread."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings) -> None:
        self.stats = KVTierStats()
        self._config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._settings = settings
        self._group = group_name(vllm_config.kv_transfer_config.engine_id)
        self._ranks = vllm_config.parallel_config.world_size
        self._number = vllm_config.parallel_config.rank % self._ranks
        self._why_off = ""
        self._logged_at = 0.0

        self._cache: kvtier.Cache | None = None
        self._rank: kvtier.Rank | None = None
        self._stopping: kvtier.Rank | None = None  # closed, but with a copy still running
        self._pages: mapping.PageMap | None = None
        self._chunk = 0
        self._unproven: kvtier.Rank | None = None  # registered, and no self-test has passed
        self._disproved = ""  # by a self-test on a thread of its own
        self._running: dict[int, LoadPlan] = {}  # loads without a report, by operation
        self._by_request: dict[str, int] = {}
        self._finished: set[str] = set()  # to be reported with the next results
        self._invalid: set[int] = set()
        self._failed: set[str] = set()  # whole requests, when their blocks are not known

    # ---- opening and closing -------------------------------------------------

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Opens the cache and declares the pages. Raises mapping.Unsupported and
        kvtier.Error, each with a sentence for the operator."""
        mapping.check_topology(self._config)
        who = identity.describe(self._config)
        geometry = mapping.geometry(self._config, self._kv_cache_config, _dcp_rank(self._config))
        pages = mapping.page_map(
            kv_caches,
            self._kv_cache_config,
            geometry,
            _backends(self._config, kv_caches),
            who.kv_dtype,
            mapping.shards(self._config),
        )
        chunk = pages.chunk_tokens(self._settings.chunk_tokens)
        if chunk != self._settings.chunk_tokens:
            logger.info(
                "kvtier: chunk_tokens is %d instead of %d, a multiple of the %d tokens of a page",
                chunk,
                self._settings.chunk_tokens,
                pages.tokens_per_row,
            )
        memory_only, reasons = who.memory_only, [who.reason] if who.reason else []
        weights = ""
        if self._number == 0:
            found = identity.weights(self._config)
            weights, memory_only = found.digest, memory_only or found.memory_only
            reasons += [found.reason] if found.reason else []
        library = dict(self._settings.library)
        if self._number != 0:
            library["role"] = "member"
        cache = kvtier.Cache.open(library, self._settings.library_path or None)
        try:
            rank = cache.register(
                {
                    "group": self._group,
                    "ranks": self._ranks,
                    "rank": self._number,
                    "model": who.model,
                    "attention": who.attention,
                    "draft": who.draft,
                    "kv_dtype": who.kv_dtype,
                    "kv_scales": who.kv_scales,
                    "quantisation": who.quantisation,
                    "weights": weights,
                    "memory_only": memory_only,
                    "encoding": pages.encoding,
                    "chunk_tokens": chunk,
                    "block_tokens": geometry.block_tokens,
                    "num_blocks": geometry.num_blocks,
                    "dcp": geometry.dcp,
                    "dcp_rank": geometry.dcp_rank,
                    "interleave": geometry.interleave,
                    "groups": [{"kind": "full", "tokens_per_row": pages.tokens_per_row}],
                    "provenance": _provenance(self._config),
                },
                pages.regions,
            )
        except BaseException:
            cache.close(self._settings.close_timeout_s)
            raise
        self._cache, self._rank, self._pages, self._chunk = cache, rank, pages, chunk
        _inbox.open(rank.handle)
        shown = "" if memory_only else weights  # else it may be a number made up for this run
        if memory_only:
            logger.info("kvtier: nothing of this model goes to disk: %s", "; ".join(reasons))
        try:
            accepted = rank.ready(READY_S)
            proven = self._prove(rank, pages=True)  # no request yet: the pages are nobody's
            self._announce(accepted, who, shown)
            if not proven:
                logger.warning(
                    "kvtier: the self-test of all ranks did not end within %g s and is repeated in the background; "
                    "until it passes nothing proves that these pages are described right",
                    SELFTEST_S,
                )
                self._prove_later(rank, lambda accepted: None)
            if not memory_only:
                self._check_disk(accepted)
        except kvtier.Timeout:
            self._prove_later(rank, lambda accepted: self._announce(accepted, who, shown))
            logger.info(
                "kvtier: %s is registered; until a leader accepts the group, every lookup is a miss (%s)",
                who.model,
                cache.state()[1],
            )
        except kvtier.Error as e:
            self.close()
            raise e

    def _prove(self, rank: kvtier.Rank, pages: bool) -> bool:
        """Sends a pattern of all ranks through the cache and back. False: it came to no
        end, which proves nothing. Raises kvtier.SelfTestFailed, on every rank."""
        try:
            rank.selftest(pages, SELFTEST_S)
        except kvtier.SelfTestFailed:
            raise
        except kvtier.Error as e:
            logger.info("kvtier: the self-test came to no end: %s", e)
            return False
        return True

    def _prove_later(self, rank: kvtier.Rank, then: Callable[[kvtier.Accepted], None]) -> None:
        """For a group that is not accepted yet, or whose first self-test came to no end.
        The pages will be in use by then and the engine must not wait, so private memory
        stands for them, on a thread, until it passes or fails. Calls ``then`` there
        after the first one."""

        def prove() -> None:
            told = False
            while self._unproven is rank:
                try:
                    accepted = rank.ready(1.0)
                    proven = self._prove(rank, pages=False)
                    if not told:
                        then(accepted)
                        told = True
                    if proven:
                        return
                    time.sleep(RETRY_S)
                except kvtier.Timeout:
                    continue
                except kvtier.SelfTestFailed as e:
                    self._disproved = f"{type(e).__name__}: {e}"
                    return
                except kvtier.Error:
                    return  # refused, or closed meanwhile

        self._unproven = rank
        threading.Thread(target=prove, name="kvtier-selftest", daemon=True).start()

    def _announce(self, a: kvtier.Accepted, who: identity.Identity, weights: str) -> None:
        """One line an engine, not one a rank, that says what the cache will do."""
        cache = self._cache
        if self._number != 0 or cache is None:
            return
        p = self._config.parallel_config
        # Of several ranks none knows what a row of all is wide; a slot has it, padded.
        bytes_per_token = a.slot_bytes // a.chunk_tokens
        if self._ranks == 1:
            bytes_per_token = sum(r.bytes for r in self._pages.regions) // self._pages.tokens_per_row
        line = Announcement(
            *cache.state(),
            who.model,
            weights,
            bytes_per_token,
            p.tensor_parallel_size,
            p.pipeline_parallel_size,
        ).line(a, self._settings)
        logger.info("kvtier: %s", line)

    def _check_disk(self, a: kvtier.Accepted) -> None:
        """Raises kvtier.ConfigError when there is a disk that this model may not use, and
        the engine requires what its settings say; else that is one line."""
        texts = drain_records(self._cache)
        if self._number != 0 or a.disk_bytes or not self._settings.library.get("disk_path"):
            return
        why = next((t for t in texts if "memory only" in t), "the log of the leader says why")
        text = f"nothing of this engine goes to disk: {why}"
        if self._settings.required:
            raise kvtier.ConfigError(kvtier.errors.E_CONFIG, text)
        logger.error("kvtier: %s", text)

    @property
    def cache_of_rank_0(self) -> kvtier.Cache | None:
        """The open cache of the rank that speaks for the engine; None for the others."""
        return self._cache if self._number == 0 else None

    def will_report(self, plan: LoadPlan) -> bool:
        """Whether a report about a load is still to come; until then a copy may run."""
        return plan.op in self._running or plan.request_id in self._finished or self._stopping is not None

    @property
    def is_off(self) -> bool:
        return bool(self._why_off)

    def switch_off(self, why: str, starting: bool = False) -> None:
        """Stores and loads nothing more. Loads in flight are ended first, so that
        what is reported then has really stopped. ``starting``: no request has come yet,
        and the scheduler will hear the reason and say it once for all ranks."""
        if self._why_off:
            return
        self._why_off = why
        level = logging.INFO if starting else logging.ERROR
        logger.log(level, "kvtier: the cache is off for this worker: %s", why)
        self.close()

    def close(self) -> None:
        """Ends copies, then the cache. Bounded; idempotent."""
        self._unproven = None
        rank, self._rank = self._rank or self._stopping, None
        if rank is not None:
            self._stopping = rank
            # Raises while a copy is still running. Then nothing is reported: its
            # pages must not be given to somebody else.
            rank.close(self._settings.close_timeout_s)
            self._stopping = None
            _inbox.close(rank.handle)
        for op in list(self._running):
            self._report(op, 0, "off")
        cache, self._cache = self._cache, None
        if cache is not None:
            drain_records(cache)
            cache.close(self._settings.close_timeout_s)

    def handshake(self) -> KVTierHandshake:
        g = self._pages.geometry if self._pages is not None else None
        return KVTierHandshake(
            root=root_of(self._settings),
            group=self._group,
            dcp=g.dcp if g else 0,
            interleave=g.interleave if g else 0,
            block_tokens=g.block_tokens if g else 0,
            rank=self._number,
            ranks=self._ranks,
            off=self._why_off or ("" if g else "it registered no KV cache"),
        )

    # ---- step -------------------------------------------------------------------

    def start_load(self, meta: KVTierMetadata) -> None:
        failed: Exception | None = None
        for plan in meta.loads:
            self._running[plan.op] = plan
            self._by_request[plan.request_id] = plan.op
            cause = "unbegun"
            try:
                cause = self._start(plan)
            except Exception as e:
                failed = e
            if cause:
                self._report(plan.op, 0, cause)
        if failed is not None:
            raise failed

    def _start(self, plan: LoadPlan) -> str:
        """Why nothing was begun, and no event will come; empty when one will."""
        if self._rank is None or not plan.verdicts or not plan.session or not plan.blocks:
            return "unbegun"
        try:
            self._rank.load(
                plan.op,
                plan.session,
                plan.first_token,
                plan.tokens,
                np.array(plan.blocks, np.uint32),
                _quads(plan.verdicts),
                plan.chunks,
            )
        except kvtier.Error as e:
            logger.warning_once("kvtier: a load could not begin: %s", str(e))
            return _CAUSES.get(e.code, "unbegun")
        return ""

    def save(self, meta: KVTierMetadata) -> None:
        failed: Exception | None = None
        for plan in meta.stores:
            if self._rank is None:
                break
            try:
                self._store(plan)
            except Exception as e:
                failed = e
        if failed is not None:
            raise failed

    def _store(self, plan: StorePlan) -> None:
        copied = self._rank.store(
            plan.op,
            plan.session,
            plan.first_ordinal,
            _quads(plan.grants),
            np.array(plan.blocks, np.uint32),
        )
        self.stats.add("stores" if copied else "stores_stale")

    def results(self, finished_requests: set[str]) -> KVConnectorTransferResults:
        if self._stopping is not None:
            self.close()
        if self._disproved:
            self.switch_off(self._disproved)
        if self._rank is not None:
            for request_id in finished_requests:
                op = self._by_request.get(request_id)
                if op is not None:
                    self._rank.cancel_load(op)  # aborted; it still reports once
            if self._running:
                for e in _inbox.take(self._cache, self._rank.handle):
                    self._ended(e)
            if time.monotonic() - self._logged_at > LOG_S:
                self._logged_at = time.monotonic()
                drain_records(self._cache)
        return self.take_reports()

    def take_reports(self) -> KVConnectorTransferResults:
        """Loads that ended and were not reported yet. Each is reported once."""
        finished, self._finished = self._finished, set()
        failed, self._failed = self._failed, set()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def take_invalid_blocks(self) -> set[int]:
        """Asked for after the results of the same step, never later."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def _ended(self, e: kvtier.LoadEvent) -> None:
        plan = self._running.get(e.op)
        if plan is None:
            return
        self.stats.add("loaded_bytes", e.bytes)
        good = plan.chunks if e.status == 0 else min(e.failed_chunk, plan.chunks - 1)
        if good and self._settings.test_flip_byte:
            self._flip(plan)
        self._report(e.op, good, _CAUSES.get(e.status, "missing"))

    def _report(self, op: int, good: int, cause: str) -> None:
        """``good``: leading chunks of the operation that are in the pages. ``cause``: why
        they are not all."""
        plan = self._running.pop(op)
        self._by_request.pop(plan.request_id, None)
        self._finished.add(plan.request_id)
        self.stats.add("loads_done")
        if good >= plan.chunks:
            return
        self.stats.add("loads_failed")
        self.stats.add(f"load_failures/{cause}")
        if not plan.blocks:
            self._failed.add(plan.request_id)
            return
        k = 0
        if good and self._chunk and self._pages is not None:
            span = self._pages.geometry.block_tokens * self._pages.geometry.dcp
            failed_from = (plan.first_token // self._chunk + good) * self._chunk
            k = max(0, failed_from - plan.first_token) // span
        self._invalid.update(plan.blocks[k:])

    def _flip(self, plan: LoadPlan) -> None:
        """Tests only: changes one bit in the first page of a load."""
        region = self._pages.regions[0]
        at = region.base + plan.blocks[0] * region.block_stride
        byte = ctypes.c_uint8.from_address(at)
        byte.value ^= 0x40


def _quads(rows: list[tuple[int, int, int]]) -> np.ndarray:
    out = np.zeros((len(rows), 4), np.uint32)
    out[:, :3] = rows
    return out


def _dcp_rank(vllm_config: VllmConfig) -> int:
    if vllm_config.parallel_config.decode_context_parallel_size == 1:
        return 0
    from vllm.distributed.parallel_state import get_dcp_group

    return get_dcp_group().rank_in_group


def _backends(vllm_config: VllmConfig, names: Mapping[str, Any]) -> dict[str, str]:
    """The attention backend of each layer that has one."""
    layers = vllm_config.compilation_config.static_forward_context
    found = {}
    for name in names:
        get = getattr(layers.get(name), "get_attn_backend", None)
        if get is not None:
            found[name] = get().get_name()
    return found


def _provenance(vllm_config: VllmConfig) -> dict[str, str]:
    """What made the bytes, for people; no part of their identity."""
    import torch
    import vllm

    p = vllm_config.parallel_config
    return {
        "engine": f"vllm {vllm.__version__}",
        "torch": torch.__version__,
        "tp": str(p.tensor_parallel_size),
        "pp": str(p.pipeline_parallel_size),
        "dcp": str(p.decode_context_parallel_size),
        "interleave": str(p.cp_kv_cache_interleave_size),
    }
