"""What the tests do inside an engine that runs in one process."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Any

_blocks: dict[int, list[int]] = {}


def _worker() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker


def flip_byte(llm: Any, on: bool) -> None:
    """Damages one byte of every load from here on."""
    worker = _worker()
    worker._settings = dataclasses.replace(worker._settings, test_flip_byte=on)


def reload_weights(llm: Any) -> None:
    """The weights at the engine's own path, in place, as vLLM does it."""
    llm.collective_rpc("reload_weights")


def flush(llm: Any) -> None:
    """Waits until everything stored so far is on disk."""
    assert _worker()._cache.flush(60.0)


def leader(llm: Any) -> dict[str, Any]:
    """Statistics of the leader, which is this process."""
    return _worker()._cache.stats()["leader"]


def damage_between_hit_and_load(llm: Any, path: str, how: str) -> None:
    """Damages a file when the next load is allocated: the hit has been promised and
    nothing has been copied yet. ``how``: delete, or flip a bit."""
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    original = connector.update_state_after_alloc

    def allocated(request: Any, blocks: Any, n: int) -> None:
        if n:
            connector.update_state_after_alloc = original
            damage(Path(path), how)
        original(request, blocks, n)

    connector.update_state_after_alloc = allocated


def damage(path: Path, how: str) -> None:
    if how == "delete":
        path.unlink()
    elif how == "truncate":
        os.truncate(path, path.stat().st_size - 4096)
    elif how == "flip":
        with open(path, "r+b") as f:
            f.seek(path.stat().st_size // 3)
            byte = f.read(1)[0]
            f.seek(-1, os.SEEK_CUR)
            f.write(bytes([byte ^ 0x10]))
    else:
        raise ValueError(how)


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
