"""Bytes of a real engine's pages, for ranks and engines that are compared with it."""

from __future__ import annotations

from typing import Any

import inside
import numpy as np
import torch


def save(llm: Any, path: str, prompt_tokens: int, tokens: int) -> None:
    """Writes what inside.page_digests looks at, as [layer, block, head, token, byte].
    (In packed pages the last two mean nothing, but their bytes are the head's.)"""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    blocks = inside._blocks[prompt_tokens][: tokens // runner.cache_config.block_size]
    layers = [
        np.stack([layer[b].contiguous().view(torch.uint8).numpy() for b in blocks])
        for layer in runner.kv_caches
    ]
    np.save(path, np.stack(layers))
