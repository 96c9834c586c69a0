"""What the tests do inside an engine that runs in one process."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

_blocks: dict[int, list[int]] = {}


def _worker() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker


def flip_byte(llm: Any, on: bool) -> None:
    """Damages one byte of every load from here on."""
    worker = _worker()
    worker._settings = dataclasses.replace(worker._settings, test_flip_byte=on)


def remember_blocks(llm: Any) -> None:
    """Keeps the block table of every finished request, by its number of prompt tokens."""
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    original = connector.request_finished_all_groups

    def finished(request: Any, block_ids: tuple[list[int], ...]) -> Any:
        _blocks[request.num_prompt_tokens] = list(block_ids[0])
        return original(request, block_ids)

    connector.request_finished_all_groups = finished


def page_digests(llm: Any, prompt_tokens: int, tokens: int) -> list[str]:
    """Digests of the pages, all layers, that held the first `tokens` tokens of the
    last request with that many prompt tokens. The pages are free by now, but
    nothing has run since that could have written them."""
    import torch

    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    digests: list[str] = []
    block_tokens = runner.cache_config.block_size
    for block in _blocks[prompt_tokens][: tokens // block_tokens]:
        h = hashlib.sha256()
        for layer in runner.kv_caches:
            h.update(layer[block].contiguous().view(torch.uint8).numpy().tobytes())
        digests.append(h.hexdigest())
    return digests
