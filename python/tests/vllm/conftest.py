"""Tests of the connector, against the vLLM that is installed."""

import os
import sys
import time
from pathlib import Path

# Before anything imports vLLM.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("vllm")

from engine import Engine  # noqa: E402


@pytest.fixture(autouse=True)
def engines_begin_now(monkeypatch):
    """One process holds many engines here, which all begin when it asks for them, and
    writes their models. (Processes of their own look at their own start.)"""
    from kvtier.vllm import identity

    monkeypatch.setattr(identity, "started_ns", time.time_ns)


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def make():
    """Makes engines, which end without anything wrong or left."""
    engines = []

    def build(**kw):
        e = Engine(**kw)
        engines.append(e)
        return e

    yield build
    ends = []
    for e in engines:
        ends.append((e.problems, e.settled()))
        e.close()
    for problems, left in ends:
        assert not problems
        assert not left


@pytest.fixture(scope="session")
def rank_server():
    """What rank processes are forked from; ends with the session."""
    import cluster  # slow, and few tests need it

    cluster.context()
    yield
    cluster.end_server()


#: Modules whose tests are about the waits of the scheduler's half.
_WAITS = {"test_bounds", "test_driver", "test_pressure"}


@pytest.fixture(autouse=True)
def patience(request):
    """The scheduler's half waits for its leader as long as a busy machine needs: what a
    test expects to be stored and loaded must not depend on milliseconds."""
    if request.module.__name__ in _WAITS:
        yield
        return
    import cluster

    with cluster.patience():
        yield
