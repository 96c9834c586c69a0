"""The connector as vLLM sees it: a thin shell around the two halves.

Every hook catches every exception and answers with a miss or with nothing, one
log line and a counter: vLLM calls connectors without protection, and an error in
a cache must not end an engine. A hook that fails five times in a row switches the
cache off for its process.

What vLLM was promised is kept whatever fails here: a load that was announced is
reported by the worker exactly once, if need be as failed, since the request waits
for it; and pages are never said to be loaded when it is not known that they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from . import metrics
from .handshake import KVTierHandshake
from .leaderwatch import LeaderWatch
from .metadata import KVTierMetadata, LoadPlan
from .policy import settle_failure_policy
from .scheduler import SchedulerHalf
from .settings import Settings, SettingsError
from .stats import KVTierStats, logger
from .worker import WorkerHalf

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

#: A hook that fails so often in a row switches the cache off.
MAX_FAILURES = 5
#: So many different failures are told apart in the log.
MAX_KINDS = 50


class _Guard:
    """Runs the hooks of one half, counts their failures and writes each kind of failure
    down now and then, not every time."""

    def __init__(self, half: SchedulerHalf | WorkerHalf | AbsentHalf) -> None:
        self._half = half
        self._in_a_row: dict[str, int] = {}
        self._said: dict[str, int] = {}  # failures by what they say

    def run(self, hook: str, call: Callable[[], Any], default: Any = None) -> Any:
        """Returns what ``call`` returns, or ``default`` after an exception."""
        if isinstance(self._half, AbsentHalf):
            return default
        try:
            result = call()
        except Exception as e:
            self.failed(hook, e)
            return default
        if self._in_a_row:
            self._in_a_row.pop(hook, None)
        return result

    def failed(self, hook: str, e: Exception) -> None:
        """Counts a failure; the last of several in a row switches the half off."""
        n = self._in_a_row[hook] = self._in_a_row.get(hook, 0) + 1
        self._half.stats.add("errors")
        self._log(hook, f"{type(e).__name__}: {e}", e)
        if n < MAX_FAILURES:
            return
        try:
            self._half.switch_off(f"{hook} failed {n} times in a row, the last time with {type(e).__name__}: {e}")
        except Exception as again:
            self._log("switching off", f"{type(again).__name__}: {again}", again)

    def _log(self, hook: str, text: str, e: Exception) -> None:
        """Of equal failures the first, the tenth, the hundredth... are written."""
        what = f"{hook}: {text}"
        if what not in self._said and len(self._said) >= MAX_KINDS:
            what = hook  # texts that differ each time, by a number perhaps
        times = self._said[what] = self._said.get(what, 0) + 1
        if times == 10 ** (len(str(times)) - 1):
            again = f", {times} times by now" if times > 1 else ""
            logger.error("kvtier: %s failed, which counts as a miss%s: %s", hook, again, text)
        logger.debug("kvtier: %s failed", hook, exc_info=e)


class AbsentHalf:
    """In place of a half that could not even be made: nothing is asked of it."""

    def __init__(self) -> None:
        self.stats = KVTierStats()

    def switch_off(self, why: str) -> None:
        logger.error("kvtier: the cache is off: %s", why)


class KVTierConnector(KVConnectorBase_V1, SupportsHMA):
    """One object per process and role."""

    _cache_hit_source = CacheHitSource.HOST

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a lost store is a miss later, never an error

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        wrong: SettingsError | None = None
        try:
            settings = Settings.parse(extra)
        except SettingsError as e:
            if extra.get("required") is True:
                raise
            wrong, settings = e, Settings()
        self._required = settings.required
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._watch: LeaderWatch | None = None  # of rank 0
        self._loads: dict[str, LoadPlan] = {}  # of the worker: announced and not reported
        self._invalid: set[int] = set()  # of the last results
        self._said_off = -1  # the newest figure "off" in the statistics
        self._unplanned: list[LoadPlan] = []  # of the scheduler: promised, but the half failed
        half = SchedulerHalf if role == KVConnectorRole.SCHEDULER else WorkerHalf
        try:
            self._half = half(vllm_config, kv_cache_config, settings)
        except Exception as e:
            if self._required:
                raise
            self._half = AbsentHalf()
            self._half.switch_off(f"{type(e).__name__}: {e}")
        self._guard = _Guard(self._half)
        if isinstance(self._half, SchedulerHalf):
            self._scheduler = self._half
            settle_failure_policy(self._kv_transfer_config, settings.load_failure_policy)
            if wrong is None:
                self._open(self._scheduler.open)
        elif isinstance(self._half, WorkerHalf):
            self._worker = self._half
        if wrong is not None:
            self._stay_off(str(wrong))

    def _open(self, opening: Callable[[], None]) -> None:
        """Runs what may fail at start: it stops the engine only when it must."""
        try:
            opening()
        except Exception as e:
            if self._required:
                raise
            self._stay_off(f"{type(e).__name__}: {e}")

    def _stay_off(self, why: str) -> None:
        """Before the first request."""
        if self._worker is not None:
            self._worker.switch_off(why, starting=True)
        else:
            self._half.switch_off(why)

    # ---- worker ------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is not None and not self._worker.is_off:
            self._open(lambda: self._worker.register(kv_caches))
            self._guard.run("register_kv_caches", self._watch_leader)

    def _watch_leader(self) -> None:
        cache = self._worker.cache_of_rank_0
        if cache is not None:
            self._watch = LeaderWatch(cache)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._guard.run("get_handshake_metadata", lambda: self._worker.handshake())

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._guard.run("start_load_kv", self._start_load)

    def _start_load(self) -> None:
        meta = self._get_connector_metadata()
        for plan in meta.loads:
            self._loads[plan.request_id] = plan
        self._worker.start_load(meta)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return  # loads are asynchronous: none belongs to this step

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        return  # chunks are copied whole, in wait_for_save

    def wait_for_save(self) -> None:
        self._guard.run("wait_for_save", lambda: self._worker.save(self._get_connector_metadata()))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return None, results.finished_recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self._guard.run(
            "get_transfer_results", lambda: self._with_invalid(self._worker.results(finished_req_ids))
        )
        if results is None:  # what had ended before it failed is reported all the same
            results = self._guard.run("reports", lambda: self._with_invalid(self._worker.take_reports()))
        results = results if results is not None else KVConnectorTransferResults()
        if self._loads:
            for request_id in results.finished_recving:
                self._loads.pop(request_id, None)
            lost = self._guard.run("lost loads", self._lost_loads, set())
            if lost:
                results.finished_recving = results.finished_recving | lost
                results.failed_recving = results.failed_recving | lost
        return results

    def _with_invalid(self, results: KVConnectorTransferResults) -> KVConnectorTransferResults:
        """Takes the pages that were not loaded together with the reports that they belong
        to, so that neither is ever told without the other."""
        try:
            self._invalid |= self._worker.take_invalid_blocks()
        except Exception as e:
            # Which pages are good is not known, so none of these loads counts.
            self._guard.failed("get_block_ids_with_load_errors", e)
            results.failed_recving = results.failed_recving | results.finished_recving
        return results

    def _lost_loads(self) -> set[str]:
        """Loads that nobody will report any more, because the half failed when they were
        handed over or has been switched off, and of which no copy runs."""
        lost = {r for r, plan in self._loads.items() if not self._worker.will_report(plan)}
        for request_id in lost:
            del self._loads[request_id]
        return lost

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def shutdown(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            self._guard.run("stopping the statistics", watch.stop)
        self._guard.run("shutdown", lambda: self._half.close())

    # ---- both ----------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._guard.run("get_kv_connector_stats", self._take_stats)

    def _take_stats(self) -> KVTierStats | None:
        if self._watch is not None:
            self._watch.report(self._half.stats)
        off = int(self._worker.is_off if self._worker is not None else self._scheduler.off)
        if off != self._said_off:
            self._said_off = off
            self._half.stats.show({"off": off})
        return self._half.stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return KVTierStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return metrics.build(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- scheduler -----------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._guard.run("on_new_request", lambda: self._scheduler.on_new_request(request))

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._guard.run(
            "get_num_new_matched_tokens",
            lambda: self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens),
            (0, False),
        )

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        failed = not self._guard.run(
            "update_state_after_alloc",
            lambda: self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens) or True,
        )
        if failed and num_external_tokens:
            # The request waits for a report from now on. Without blocks all of it fails.
            self._unplanned.append(LoadPlan(0, 0, request.request_id, 0, num_external_tokens, [], [], 1))
            self._guard.run("forgetting", lambda: self._scheduler.forget(request.request_id))

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        return self._guard.run(
            "get_external_cache_hit_sources",
            lambda: self._scheduler.get_external_cache_hit_sources(request, num_external_tokens),
            {self._cache_hit_source: num_external_tokens} if num_external_tokens else {},
        )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        meta = KVTierMetadata()
        self._guard.run(
            "build_connector_meta", lambda: self._scheduler.build_connector_meta(scheduler_output, meta)
        )
        self._guard.run("promised loads", lambda: self._add_promised(meta))
        return meta

    def _add_promised(self, meta: KVTierMetadata) -> None:
        """Loads travel in any case: what the half did not take along, and those of
        which it has no plan."""
        meta.loads += self._scheduler.take_planned()
        if self._unplanned:
            have = {plan.request_id for plan in meta.loads}
            meta.loads += [plan for plan in self._unplanned if plan.request_id not in have]
            self._unplanned = []

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._guard.run(
            "update_connector_output",
            lambda: self._scheduler.update_connector_output(connector_output),
        )

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        done = self._guard.run("request_finished", lambda: self._scheduler.request_finished(request) or True)
        if not done:
            self._guard.run("forgetting", lambda: self._scheduler.forget(request.request_id))
        return False, None  # the pages are free: a store never outlives its step

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, tp): m for tp, m in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        if self._scheduler is None:
            return
        # Inside MultiConnector it may be that of another connector.
        ours = [m for m in metadata.values() if isinstance(m, KVTierHandshake)]
        if ours:
            self._open(lambda: self._scheduler.check_handshake(ours))

    def reset_cache(self) -> bool | None:
        """Always succeeds: an engine treats False as an error of its own."""
        done = self._guard.run("reset_cache", lambda: self._scheduler.reset_cache() or True, False)
        if not done:
            self._half.switch_off("a reset failed, so KV of earlier weights might be found")
        return True
