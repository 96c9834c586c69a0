"""What the tests do inside an engine that runs in one process."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections import Counter
from collections.abc import Callable
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
    _before_the_next_load(llm, lambda: damage(Path(path), how))


def write_between_hit_and_load(llm: Any, path: str, text: str) -> None:
    """Writes a file of the system at that moment."""
    _before_the_next_load(llm, lambda: Path(path).write_text(text))


def _before_the_next_load(llm: Any, act: Callable[[], object]) -> None:
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    original = connector.update_state_after_alloc

    def allocated(request: Any, blocks: Any, n: int) -> None:
        if n:
            connector.update_state_after_alloc = original
            act()
        original(request, blocks, n)

    connector.update_state_after_alloc = allocated


def counters(llm: Any) -> dict[str, int]:
    """What the connector has counted in this engine, as /metrics shows it."""
    from prometheus_client import REGISTRY

    out: Counter[str] = Counter()
    for family in REGISTRY.collect():
        if family.name.startswith("kvtier_") and family.type == "counter":
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    out[family.name.removeprefix("kvtier_")] += int(sample.value)
    return out


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
