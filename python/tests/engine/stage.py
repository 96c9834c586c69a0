"""A model, a cache directory and the engines that live on them one by one."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import models
import pytest
from life import Life

HERE = Path(__file__).resolve().parent
PYTHON = HERE.parents[1]

CHUNK = 256


def prompts(seed: int, chunks: int, suffix: int = 50) -> tuple[list[int], list[int]]:
    """Two prompts that share exactly `chunks` chunks and then differ at once."""
    rng = random.Random(seed)

    def words(n: int) -> list[int]:
        return [rng.randrange(3, 1000) for _ in range(n)]

    prefix = words(chunks * CHUNK)
    return prefix + [1001] + words(suffix), prefix + [1002] + words(suffix)


class Stage:
    """A model, a cache directory and the engines that live on them one by one."""

    def __init__(self, directory: Path, model: str):
        self.model = models.write(directory, model, weights=True)
        self.root = directory / "cache"
        self._logs = directory

    def live(
        self,
        *,
        one_process: bool = False,
        options: dict | None = None,
        environment: dict[str, str] | None = None,
        wait: bool = True,
        **kvtier: object,
    ) -> Life:
        settings, engine = self.engine(options, **kvtier)
        environment = {"PYTHONPATH": f"{PYTHON}:{HERE}"} | (environment or {})
        if one_process:
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        return Life(self.model, settings, self._logs / "engine.log", engine, environment, wait)

    def engine(self, options: dict | None = None, **kvtier: object) -> tuple[dict, dict]:
        """Settings of the connector and options of the engine, as Life.again takes them."""
        settings = {"disk_path": str(self.root), "dram_gib": 0.25, "disk_gib": 1} | kvtier
        return settings, {"max_model_len": 4096} | (options or {})

    def chunk_files(self) -> list[Path]:
        return sorted(self.root.glob("*@*/??/*.kvc"))


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"{what} did not happen within {timeout_s:.0f} s")
        time.sleep(0.05)


def outputs(answer: dict) -> tuple:
    return answer["tokens"], answer["logprobs"]
