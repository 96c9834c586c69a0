"""Tests on real vLLM engines. A start costs about a minute, so each module tells
one story with few engines, and its tests look at what the story brought."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
for path in (HERE.parents[2] / "examples" / "demo", HERE.parent / "vllm", HERE):
    sys.path.insert(0, str(path))

pytest.importorskip("vllm")

from stage import Stage  # noqa: E402

SHARED = Path("/dev/shm")


@pytest.fixture(scope="module", autouse=True)
def shared_memory():
    """vLLM's shared memory and semaphores outlive an engine that is killed. What nobody
    has mapped is removed; kvtier has no names there."""
    before = set(os.listdir(SHARED))
    yield
    new = {n for n in os.listdir(SHARED) if n.startswith(("psm_", "sem.mp-"))} - before
    for name in new - mapped():
        (SHARED / name).unlink(missing_ok=True)


def mapped() -> set[str]:
    """Names in shared memory that some process uses."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        found.update(Path(line.split()[-1]).name for line in lines if f"{SHARED}/" in line)
    return found


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Stage:
    return Stage(tmp_path_factory.mktemp("engine"), request.module.MODEL)
