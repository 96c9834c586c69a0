"""Brings an engine of many ranks to the point where a test begins: a document is held and
the engine's own cache empty, a step with a store or a load is planned."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from cluster import Cluster

from kvtier.vllm.metadata import KVTierMetadata


def until(condition: Callable[[], Any], what: str, limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"{what} does not happen"
        time.sleep(0.02)


def serve(c: Cluster, prompt: list[int]) -> int:
    """One request alone; the tokens that were loaded for it."""
    before = c.counts["load_tokens"]
    q = c.add(prompt)
    c.run()
    assert not c.problems and len(q.request.output_token_ids) == q.max_new
    c.forget()
    return c.counts["load_tokens"] - before


def warm(c: Cluster, prompt: list[int]) -> None:
    """Stores all chunks of a prompt. Slots come in the background."""
    for _ in range(20):
        if serve(c, prompt) >= (len(prompt) - 1) // c.chunk * c.chunk // c.span * c.span:
            break
    else:
        raise AssertionError("the prompt is not stored")
    c.counts.clear()


def step_until(c: Cluster, planned: Callable[[KVTierMetadata], Any]) -> Any:
    """Schedules until the metadata has what is asked for; returns the step unsent."""
    for _ in range(500):
        step = c.schedule()
        if planned(step[0].kv_connector_metadata):
            return step
        c.send(step)
        c.collect(step)
        time.sleep(0.001)
    raise AssertionError("nothing is planned")
