"""Tests on real vLLM engines. A start costs about a minute, so each module tells
one story with few engines, and its tests look at what the story brought."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
for path in (HERE.parents[2] / "examples" / "demo", HERE.parent / "vllm", HERE):
    sys.path.insert(0, str(path))

pytest.importorskip("vllm")

from stage import Stage  # noqa: E402


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Stage:
    return Stage(tmp_path_factory.mktemp("engine"), request.module.MODEL)
