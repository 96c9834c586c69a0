"""Brings an engine of one process to the point where a test begins: a document is held
and the engine's own cache empty, a load is planned, a load is reported."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
from engine import Engine, Sequence, mix
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

import kvtier
from kvtier.vllm.tracked import Tracked
from kvtier.vllm.wishes import Wishes

#: For what ends by itself in a moment, on a machine that has other things to do.
LIMIT_S = 60.0


def attempts(pause_s: float = 0.001) -> Iterator[None]:
    """Something is tried until it is so: ends when that takes too long."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        yield
        time.sleep(pause_s)


def document(seed: int, n: int) -> list[int]:
    """Tokens of a text; texts of different seeds have no beginning in common."""
    out, x = [], seed
    for _ in range(n):
        x = mix(x)
        out.append(x % 997 + 3)
    return out


#: The text of most tests: 9 chunks of 64 tokens and 24 more.
DOC = document(1, 600)


def warm(e: Engine, doc: list[int] | None = None, max_new: int = 4, **kw) -> None:
    """Computes a document, stores it, and empties the engine's own cache. Slots come
    in the background, so it may take a second offer. ``kw`` is for Engine.add."""
    doc = DOC if doc is None else doc
    for _ in attempts(0.05):
        e.add(doc, max_new, **kw)
        e.run()
        e.scheduler.reset_prefix_cache()
        if held(e, doc) == len(doc) // e.chunk:
            e.counts.clear()
            return
    raise AssertionError("the document is not held")


def held(e: Engine, doc: list[int]) -> int:
    """Chunks of a document that a lookup would find."""
    k = e.half._coordinator
    for _ in attempts():
        try:
            if k.lease(1 << 60, keys_of(e, doc), 0):
                return k.lease_result(1 << 60, 0, LIMIT_S).held
        except kvtier.LeaseLost:
            pass
        finally:
            k.release(1 << 60)
    raise AssertionError("the ring stays full, or leader follows leader")


def keys_of(e: Engine, doc: list[int]) -> npt.NDArray[np.uint8]:
    """Of the whole chunks of a document, as the scheduler's half makes them."""
    r = Request("probe", list(doc), SamplingParams(max_tokens=1), None)
    t = Tracked(r, e.half._epoch, Wishes(store=False))
    e.half._identify(t)
    return t.chain.lookup(len(doc) // e.chunk)


def step_until_loading(e: Engine, q: Sequence) -> tuple[SchedulerOutput, dict]:
    """Schedules until the load of q is planned; returns what was not executed yet."""
    step = _load_of(e, q)
    assert step is not None, "it was computed"
    return step


def begin_load(e: Engine, doc: list[int]) -> tuple[Sequence, SchedulerOutput, dict]:
    """Adds a document that is held until the load of it is planned, which a leader that
    is late once may prevent; returns the request and what was not executed yet."""
    for _ in attempts():
        q = e.add(doc)
        if (step := _load_of(e, q)) is not None:
            return q, *step
        e.scheduler.reset_prefix_cache()
    raise AssertionError("no load")


def _load_of(e: Engine, q: Sequence) -> tuple[SchedulerOutput, dict] | None:
    """The step that plans the load of q; None when q was computed."""
    for _ in attempts():
        output, todo = e.schedule()
        if q.request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            return output, todo
        e.update(output, e.execute(output, todo))
        if q.request.is_finished():
            return None
    raise AssertionError("no load")


def step_until_computing(e: Engine) -> SchedulerOutput:
    """Steps until tokens are computed; returns what the scheduler said in that step."""
    for _ in attempts():
        output = e.step()
        if output.num_scheduled_tokens:
            return output
    raise AssertionError("nothing is computed")


def until(e: Engine, condition: Callable[[], bool]) -> None:
    """Steps the engine until the condition holds."""
    for _ in attempts():
        if condition():
            return
        e.step()
    raise AssertionError("the condition never holds")


def wait_for_load(e: Engine, q: Sequence, result: ModelRunnerOutput) -> None:
    """Polls the worker half alone until it reports q; adds to the result of a step."""
    kv = result.kv_connector_output
    for _ in attempts():
        if q.id in (kv.finished_recving or ()):
            return
        got = e.worker.get_transfer_results(set())
        kv.finished_recving = (kv.finished_recving or set()) | got.finished_recving
        kv.invalid_block_ids |= e.worker.get_block_ids_with_load_errors()
    raise AssertionError("the load is not reported")
