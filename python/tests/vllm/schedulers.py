"""vLLM's real scheduler with the connector in it, as an engine core makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.structured_output import StructuredOutputManager


def settle_blocks(cfg: VllmConfig, kv: KVCacheConfig) -> int:
    """Brings the blocks of the cache into the configuration; returns the tokens of a
    scheduler's block."""
    block, hash_block = resolve_kv_cache_block_sizes(kv, cfg)
    cfg.cache_config.num_gpu_blocks = kv.num_blocks
    cfg.cache_config.hash_block_size = hash_block
    return block


def make_scheduler(
    cfg: VllmConfig, kv: KVCacheConfig, block: int, cls: type[Scheduler] = Scheduler
) -> Scheduler:
    """``block``: of settle_blocks."""
    return cls(
        vllm_config=cfg,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(cfg),
        block_size=block,
        hash_block_size=cfg.cache_config.hash_block_size,
        log_stats=True,
    )


def block_hasher(cfg: VllmConfig) -> Callable[..., Any]:
    """What a request hashes its blocks with, for the engine's own prefix cache."""
    hash_fn = get_hash_fn_by_name(cfg.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_fn)
    return get_request_block_hasher(cfg.cache_config.hash_block_size, hash_fn)
