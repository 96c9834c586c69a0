"""Every wait of the scheduler's half ends by its own bound when the leader stops: no
clock is read here, the counters say which bound it was. And none throws."""

import threading
import time

import pytest
from engine import Engine, slot_bytes
from leaders import LeaderProcess, attached
from situations import DOC, attempts, begin_load, document, held, step_until_loading, until, warm
from vllm.v1.request import RequestStatus

from kvtier.vllm.leases import Patience

SLOTS = 128


@pytest.fixture
def outside(tmp_path):
    """Starts leaders and engines that are members of them. Everything is let go on,
    checked for leftovers and ended, also after a failing test."""
    settings = {
        "name": "bounds",
        "runtime_dir": str(tmp_path),
        "dram_gib": SLOTS * slot_bytes(64) / (1 << 30),
        "close_timeout_s": 2.0,
        "load_window_deadline_s": 1.0,
        "lease_ttl_s": 3600,  # a lease that is left over must not end by itself
    }
    leaders, engines = [], []

    def start(**kw):
        extra = settings | {"role": "member", "lookup_wait_s": 0.3} | kw.pop("extra", {})
        if not leaders:
            shared = {k: v for k, v in extra.items() if k.startswith(("disk", "free", "dirty", "dram"))}
            leaders.append(LeaderProcess(settings | shared))
        e = Engine(extra=extra, **kw)
        engines.append(e)
        attached(e)
        return e, leaders[0]

    try:
        yield start
        for leader in leaders:
            leader.go_on()
        for e in engines:
            assert not e.problems and not e.counts["errors"]
            assert e.worker_half._cache is None or not e.settled()
        for leader in leaders:
            assert not leader.alive or not leader.settled()
    finally:
        for leader in leaders:
            leader.go_on()
        for e in engines:
            e.close()
        for leader in leaders:
            leader.close()


def works_again(e, doc=DOC):
    """After the leader goes on, and has read what was sent meanwhile, the cache is what
    it was."""
    attached(e)
    for _ in attempts():  # the bounds are milliseconds, and a busy machine may miss one
        warm(e, doc)
        e.add(doc)
        e.run()
        if e.counts["load_tokens"] == len(doc) // 64 * 64 and not e.counts["loads_failed"]:
            return
    raise AssertionError("nothing is loaded")


def test_lookups_end_in_misses(outside):
    e, leader = outside()
    warm(e)
    leader.stop()
    few = [e.add(DOC), e.add(document(2, 200)), e.add(document(5, 100))]
    e.run()
    assert all(len(q.request.output_token_ids) == 4 for q in few)
    assert e.counts["wait_timeouts"] == 3 and e.counts["load_tokens"] == 0
    assert e.counts["store_timeouts"] >= 1 and e.counts["chunks_granted"] == 0
    leader.go_on()
    works_again(e)


def test_a_long_step_waits_longer_for_its_offers(outside):
    """The last step of a prompt is the only one that can offer its chunks."""
    e, leader = outside()
    e.half._patience = Patience(3000.0, 0.0)
    for at, tokens in (0.0, 1000), (10_000.0, 0):
        e.half._patience.measure(at, tokens)
    no_load = {"extra_args": {"kv_transfer_params": {"kvtier": {"load": False}}}}
    e.add(DOC, 1, sampling=no_load)
    leader.stop()
    later = threading.Timer(0.3, leader.go_on)
    later.start()
    e.run()
    later.join()
    assert e.counts["chunks_granted"] == 9 and not e.counts["store_timeouts"]
    works_again(e)


def test_more_requests_than_the_ring_has_room_for(outside):
    """Busy is an answer: nobody waits for room."""
    e, leader = outside(slots=SLOTS)
    leader.stop()
    many = [e.add(document(100 + k, 80), 2) for k in range(200)]
    e.run()
    assert all(len(q.request.output_token_ids) == 2 for q in many)
    assert 0 < e.counts["wait_timeouts"] < 200, "the others were not even sent"
    assert e.counts["load_tokens"] == 0
    leader.go_on()
    works_again(e)


def test_begin_of_a_load(outside):
    e, leader = outside()
    warm(e)
    q = e.add(DOC)
    i = e.half._tracked[q.id].incarnation
    assert e.half._coordinator.lease_result(i.lease, 0, 60.0).leased == 9
    leader.stop()
    output, todo = step_until_loading(e, q)
    (load,) = output.kv_connector_metadata.loads
    assert load.session == 0 and load.verdicts == []
    e.update(output, e.execute(output, todo))
    e.run()
    assert (e.counts["loads_unbegun"], e.counts["loads_failed"]) == (1, 1)
    assert e.counts["wait_timeouts"] <= 1, "asked again after the failed load"
    assert len(q.request.output_token_ids) == 4
    leader.go_on()
    works_again(e)


def test_load_that_waits_for_its_next_window(outside, tmp_path):
    """The copies need no leader, the verdicts of a later window do."""
    disk = {"disk_path": str(tmp_path / "d"), "disk_gib": 0.02, "free_floor_gib": 0, "dirty_gib": 0.01}
    small = {"dram_gib": 16 * slot_bytes(64) / (1 << 30)}
    e, leader = outside(extra=disk | small, recognisable=True)
    long = document(3, 1000)
    e.cache.flush(0)
    warm(e, long, 2)
    q, output, todo = begin_load(e, long)
    leader.stop()
    e.update(output, e.execute(output, todo))
    e.run()
    assert len(q.request.output_token_ids) == 4
    assert e.counts["loads_done"] == 1 and not e.counts["errors"]
    leader.go_on()
    works_again(e, long)


@pytest.mark.parametrize("when", ["waiting", "planned", "started"])
def test_aborts(outside, when):
    e, leader = outside()
    warm(e)
    if when == "waiting":
        q = e.add(DOC)
        leader.stop()
        e.abort(q)
    else:
        q, output, todo = begin_load(e, DOC)
        if when == "planned":
            leader.stop()
            e.abort(q)
            e.update(output, e.execute(output, todo))
        else:
            result = e.execute(output, todo)
            leader.stop()
            e.abort(q)
            e.update(output, result)
    e.run()
    assert e.counts["loads_done"] == (when != "waiting")
    leader.go_on()
    works_again(e)


def test_reset(outside):
    e, leader = outside()
    warm(e)
    waiting, running = e.add(DOC), e.add(document(4, 100), 100)
    until(e, lambda: running.request.status == RequestStatus.RUNNING)
    until(e, lambda: waiting.request.status != RequestStatus.WAITING_FOR_REMOTE_KVS)
    leader.stop()
    before = e.half._epoch
    assert e.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert e.half._epoch != before and len(e.half._epoch) == 16
    e.weights += 1
    e.run()
    e.add(DOC)
    e.run()
    leader.go_on()
    attached(e)
    assert not leader.settled(), "it has not heard of all that ended"
    assert held(e, DOC) == 0
    works_again(e)


def test_start_while_the_leader_is_stopped(outside, monkeypatch):
    monkeypatch.setattr("kvtier.vllm.worker.READY_S", 0.3)
    monkeypatch.setattr("kvtier.vllm.scheduler.OPEN_S", 0.3)
    first, leader = outside()
    leader.stop()
    e = Engine(extra=first.extra)
    try:
        q = e.add(DOC)
        e.run()
        assert len(q.request.output_token_ids) == 4
        assert not e.counts["lookups"] and not e.counts["chunks_offered"] and not e.counts["errors"]
        leader.go_on()
        works_again(e)
        assert not e.problems and not e.settled()
    finally:
        e.close()


def test_end_while_the_leader_is_stopped(outside):
    e, leader = outside()
    warm(e)
    _, output, todo = begin_load(e, DOC)
    e.execute(output, todo)
    leader.stop()
    e.close()
    leader.go_on()
    assert not leader.settled(), "what the engine held ended with it"


def test_one_bound_for_all_leaders_that_come_and_go(outside):
    """Each of them begins a new incarnation of the request, but no new wait."""
    e, first = outside()
    warm(e)
    now = [time.monotonic()]
    e.half._clock = lambda: now[0]

    def scheduled_after(seconds):
        now[0] += seconds
        output, todo = e.schedule()
        e.update(output, e.execute(output, todo))
        return q.id in output.num_scheduled_tokens

    first.stop()
    q = e.add(DOC)
    assert not scheduled_after(0) and not scheduled_after(0.2)
    first.kill()
    with LeaderProcess(first.settings) as second:
        attached(e)
        second.stop()
        session = e.half._session
        assert not scheduled_after(0)
        assert session == e.half._session == e.half._tracked[q.id].incarnation.session
        assert scheduled_after(0.15), "held back for 0.35 s of 0.3"
        e.half._clock = time.monotonic
        e.run()
        second.go_on()
        assert not e.settled() and not second.settled()
        e.close()


def test_hooks_do_not_throw_whatever_the_leader_does(outside):
    """Stops and goes on all the time."""
    e, leader = outside(extra={"lookup_wait_s": 0.02})
    for k in range(30):
        leader.stop() if k % 2 == 0 else leader.go_on()
        e.add(document(k % 5, 400), 20)
        for _ in range(10):
            e.step()
        if k % 7 == 3:
            e.scheduler.reset_prefix_cache(reset_connector=True)
    leader.go_on()
    e.run()
    works_again(e)
