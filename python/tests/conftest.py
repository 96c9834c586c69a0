"""Fixtures of the tests of the binding, and where vLLM's sockets lie in all tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from binding import PYTHON, SOON, Script, settings

import kvtier

#: vLLM leaves the sockets of its process groups and engines lying.
SOCKETS = tempfile.mkdtemp(prefix="kvtier-tests-")
os.environ["VLLM_RPC_BASE_PATH"] = SOCKETS


def pytest_unconfigure() -> None:
    shutil.rmtree(SOCKETS, ignore_errors=True)


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[kvtier.Cache]:
    with kvtier.Cache.open(settings(tmp_path / "kv")) as cache:
        assert cache.wait_open(SOON)
        yield cache


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Runs Python code in a process of its own, with DIR and settings() defined."""

    def run(code: str, timeout: float = 60, check: bool = True) -> subprocess.CompletedProcess[str]:
        head = f"""
            import sys
            DIR = {str(tmp_path)!r}
            def settings(**more):
                return {{"disk_path": DIR + "/kv", "dram_gib": 0.0625, "disk_gib": 0.25, "free_floor_gib": 0, **more}}
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(code)],
            env={**os.environ, "PYTHONPATH": str(PYTHON)},
            capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done

    return run
