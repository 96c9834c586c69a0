"""The shell around the halves: whatever raises inside, the engine goes on, what it was
promised is kept, and the log stays readable."""

import logging

import pytest
from engine import Engine
from sink import Sink
from situations import DOC, document, step_until_loading, until, warm
from vllm.v1.request import RequestStatus

from kvtier.vllm import connector
from kvtier.vllm.scheduler import SchedulerHalf
from kvtier.vllm.worker import WorkerHalf

#: Hook -> what it calls in its half.
SCHEDULER = {
    "on_new_request": "on_new_request",
    "get_num_new_matched_tokens": "get_num_new_matched_tokens",
    "update_state_after_alloc": "update_state_after_alloc",
    "get_external_cache_hit_sources": "get_external_cache_hit_sources",
    "build_connector_meta": "build_connector_meta",
    "update_connector_output": "update_connector_output",
    "request_finished": "request_finished",
    "reset_cache": "reset_cache",
}
WORKER = {
    "start_load_kv": "start_load",
    "wait_for_save": "save",
    "get_transfer_results": "results",
    "get_block_ids_with_load_errors": "take_invalid_blocks",
}


class Broken:
    """Raises in its first ``times`` calls; None: always."""

    def __init__(self, method, times):
        self.method, self.left, self.raised = method, times, 0

    def __call__(self, *args, **kw):
        if self.left is None or self.left > 0:
            self.raised += 1
            self.left = self.left if self.left is None else self.left - 1
            raise RuntimeError("broken on purpose")
        return self.method(*args, **kw)


def broken(monkeypatch, half, name, times):
    b = Broken(getattr(half, name), times)
    monkeypatch.setattr(half, name, b)
    return b


def traffic(e):
    """Cold and warm requests, an abort while loading, preemption, a reset."""
    for n in range(3):
        e.add(DOC, 2)
        e.add(document(n, 300), 2)
        e.run()
        e.scheduler.reset_prefix_cache()
    q = e.add(DOC, 2)
    for _ in range(3):
        e.step()
    if not q.request.is_finished():
        e.abort(q)
    e.run()
    e.add(document(50, 500), 60)
    e.add(document(51, 500), 60)
    e.run()
    e.scheduler.reset_prefix_cache(reset_connector=True)
    e.add(DOC, 2)
    e.run()


@pytest.fixture
def engine():
    # Small enough that the two long requests preempt each other.
    e = Engine(blocks=66, slots=256)
    yield e
    problems = e.problems
    e.close()
    assert not problems


@pytest.mark.parametrize("times", [1, None], ids=["once", "always"])
@pytest.mark.parametrize("hook", [*SCHEDULER, *WORKER])
def test_half_that_raises(engine, monkeypatch, caplog, hook, times):
    e = engine
    warm(e, DOC, 2)
    half = e.half if hook in SCHEDULER else e.worker_half
    sink = Sink(e)
    b = broken(monkeypatch, half, (SCHEDULER | WORKER)[hook], times)
    with caplog.at_level("ERROR", logger="vllm.kvtier"):
        traffic(e)
        if hook == "get_external_cache_hit_sources":  # vLLM asks only when it logs
            for _ in range(6):
                assert e.connector.get_external_cache_hit_sources(next(iter(e.sequences.values())).request, 0) == {}
    # Every request ended, with right KV (the fixture looks), and by itself.
    for q in e.sequences.values():
        assert q.request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_ABORTED)
    assert b.raised >= 1, "the hook is not called"
    e.step()
    counted = [*sink.sent, e.half.stats.data, e.worker_half.stats.data]
    errors = sum(d.get("errors", 0) for d in counted)
    assert errors == b.raised, "each failure is counted"
    lines = [m for m in caplog.messages if "broken on purpose" in m and "counts as a miss" in m]
    assert 1 <= len(lines) <= 1 + len(str(b.raised)), "equal failures do not flood the log"
    assert hook.removesuffix("_kv") in lines[0].replace("_kv", "") or hook in lines[0]
    off = e.half.off or e.worker_half.is_off
    if hook == "reset_cache":
        assert e.half.off, "KV of earlier weights must not be found"
    elif b.raised >= connector.MAX_FAILURES and times is None:
        assert off, "the cache is switched off"
    elif times == 1:
        assert not off
    free = e.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert free == e.blocks - 1, "no page is lost"


def test_every_hook_is_covered():
    """A hook that is added to the shell needs a row above, or a reason here."""
    import inspect

    source = inspect.getsource(connector.KVTierConnector)
    guarded = {w.split('"')[0] for w in source.split('self._guard.run("')[1:]}
    guarded |= {w.strip().split('"')[1] for w in source.split("self._guard.run(\n")[1:]}
    inside = {"promised loads", "lost loads", "forgetting", "reports", "stopping the statistics"}
    elsewhere = {"get_handshake_metadata", "register_kv_caches", "shutdown", "get_kv_connector_stats"}
    assert guarded - inside - elsewhere == {*SCHEDULER, *WORKER} - {"get_block_ids_with_load_errors"}


@pytest.mark.parametrize("side", ["scheduler", "worker"])
def test_statistics_that_fail(engine, monkeypatch, side):
    e = engine
    half, c = (e.half, e.connector) if side == "scheduler" else (e.worker_half, e.worker)
    monkeypatch.setattr(type(half.stats), "take", Broken(None, 3))
    for _ in range(3):
        assert c.get_kv_connector_stats() is None
    monkeypatch.undo()
    assert c.get_kv_connector_stats().data["errors"] == 3


def test_handshake_and_shutdown_that_fail(engine, monkeypatch):
    e = engine
    b = broken(monkeypatch, e.worker_half, "handshake", 1)
    assert e.worker.get_handshake_metadata() is None and b.raised == 1
    b = broken(monkeypatch, e.worker_half, "close", 1)
    e.worker.shutdown()
    assert b.raised == 1


def test_pages_of_a_failed_load_are_never_taken_for_good(engine, monkeypatch):
    """Which pages a load did not fill is asked for after its report: when that fails,
    all of the load counts as failed."""
    e = engine
    warm(e, DOC, 2)
    q = e.add(DOC, 2)
    output, todo = step_until_loading(e, q)
    code, slot, generation = output.kv_connector_metadata.loads[0].verdicts[4]
    output.kv_connector_metadata.loads[0].verdicts[4] = (code, slot, generation + 1)
    b = broken(monkeypatch, e.worker_half, "take_invalid_blocks", None)
    e.update(output, e.execute(output, todo))
    until(e, lambda: q.request.is_finished())
    assert b.raised and len(q.request.output_token_ids) == 2
    monkeypatch.undo()


@pytest.mark.parametrize("half", [SchedulerHalf, WorkerHalf])
def test_half_that_cannot_be_made(monkeypatch, caplog, half):
    def fails(self, *args):
        raise TypeError("vLLM changed")

    monkeypatch.setattr(half, "__init__", fails)
    monkeypatch.setattr("kvtier.vllm.scheduler.OPEN_S", 0.2)  # nobody comes
    with pytest.raises(TypeError):
        Engine(extra={"required": True})
    if half is SchedulerHalf:
        return  # the rig itself looks into that half
    with caplog.at_level("ERROR", logger="vllm.kvtier"):
        e = Engine(extra={"required": False})
        e.add(DOC, 2)
        for _ in range(50):
            e.update(*((out := e.schedule())[0], e.execute(*out)))
    assert any("the cache is off: TypeError: vLLM changed" in m for m in caplog.messages)
    assert all(q.request.is_finished() for q in e.sequences.values())
    e.close()


def test_failures_that_differ_are_told_apart_up_to_a_bound(engine, caplog):
    guard = engine.connector._guard
    with caplog.at_level(logging.ERROR, logger="vllm.kvtier"):
        for n in range(1000):
            guard.failed("hook", ValueError(f"number {n}"))
    lines = [m for m in caplog.messages if "counts as a miss" in m]
    assert len(lines) < connector.MAX_KINDS + 5
    assert engine.half.stats.data["errors"] == 1000
    assert sum("cache is off" in m for m in caplog.messages) == 1
