"""The connector as vLLM sees it: a thin shell around the two halves.

Every hook catches every exception and answers with a miss or with nothing, one
log line and a counter: vLLM calls connectors without protection, and an error in
a cache must not end an engine. A hook that fails five times in a row switches
the cache off for its process; loads that are in flight are still reported.
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

from .metadata import KVTierMetadata
from .scheduler import SchedulerHalf
from .settings import Settings, SettingsError
from .stats import KVTierStats, logger
from .worker import WorkerHalf

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

#: A hook that fails so often in a row switches the cache off.
MAX_FAILURES = 5


class _Guard:
    """Counts failures of hooks."""

    def __init__(self, half: SchedulerHalf | WorkerHalf) -> None:
        self._half = half
        self._in_a_row: dict[str, int] = {}

    def run(self, hook: str, call: Callable[[], Any], default: Any = None) -> Any:
        """Returns what ``call`` returns, or ``default`` after an exception."""
        try:
            result = call()
        except Exception as e:
            self._failed(hook, e)
            return default
        if self._in_a_row:
            self._in_a_row.pop(hook, None)
        return result

    def _failed(self, hook: str, e: Exception) -> None:
        n = self._in_a_row[hook] = self._in_a_row.get(hook, 0) + 1
        self._half.stats.add("errors")
        logger.error("kvtier: %s failed, which counts as a miss: %s: %s", hook, type(e).__name__, e)
        logger.debug("kvtier: %s failed", hook, exc_info=e)
        if n < MAX_FAILURES:
            return
        try:
            self._half.switch_off(f"{hook} failed {n} times in a row")
        except Exception as again:
            logger.error("kvtier: switching off failed: %s: %s", type(again).__name__, again)


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
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(vllm_config, kv_cache_config, settings)
            self._guard = _Guard(self._scheduler)
            self._set_failure_policy(settings)
            if wrong is None:
                self._open(self._scheduler.open)
        else:
            self._worker = WorkerHalf(vllm_config, kv_cache_config, settings)
            self._guard = _Guard(self._worker)
        if wrong is not None:
            self._half.switch_off(str(wrong))

    @property
    def _half(self) -> SchedulerHalf | WorkerHalf:
        return self._scheduler or self._worker

    def _set_failure_policy(self, settings: Settings) -> None:
        """The scheduler reads the policy right after it made this object. vLLM's
        own default fails a request whose load failed."""
        config = self._kv_transfer_config
        if config.kv_load_failure_policy != settings.load_failure_policy:
            config.kv_load_failure_policy = settings.load_failure_policy
            logger.info("kvtier: kv_load_failure_policy is %s", settings.load_failure_policy)

    def _open(self, opening: Callable[[], None]) -> None:
        """Runs what may fail at start: it stops the engine only when it must."""
        try:
            opening()
        except Exception as e:
            if self._required:
                raise
            self._half.switch_off(f"{type(e).__name__}: {e}")

    # ---- worker ------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is not None and not self._worker.is_off:
            self._open(lambda: self._worker.register(kv_caches))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._guard.run("get_handshake_metadata", self._worker.handshake)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._guard.run("start_load_kv", lambda: self._worker.start_load(self._get_connector_metadata()))

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
        results = self._guard.run("get_transfer_results", lambda: self._worker.results(finished_req_ids))
        return results if results is not None else KVConnectorTransferResults()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._guard.run("get_block_ids_with_load_errors", self._worker.take_invalid_blocks, set())

    def shutdown(self) -> None:
        self._guard.run("shutdown", self._half.close)

    # ---- both ----------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._half.stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return KVTierStats(data=data or {})

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
        self._guard.run(
            "update_state_after_alloc",
            lambda: self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens),
        )

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
        return meta

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
        self._guard.run("request_finished", lambda: self._scheduler.request_finished(request))
        return False, None  # the pages are free: a store never outlives its step

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, tp): m for tp, m in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._open(lambda: self._scheduler.check_handshake(list(metadata.values())))

    def reset_cache(self) -> bool | None:
        """Always succeeds: an engine treats False as an error of its own."""
        done = self._guard.run("reset_cache", lambda: self._scheduler.reset_cache() or True, False)
        if not done:
            self._half.switch_off("a reset failed, so KV of earlier weights might be found")
        return True
