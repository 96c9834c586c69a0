"""Rank 0 leads when nobody else does, so an engine's own worker is its leader: that one
is stopped or killed in the middle of a step, while the scheduler goes ahead."""

from __future__ import annotations

import contextlib
import pickle
import signal
import threading
import time
from collections import Counter
from unittest import mock

import numpy as np
import pytest
from cluster import Cluster, RankDied
from rank_process import Work
from rank_situations import serve, step_until, until, warm
from situations import document
from topology import LATENT, Topology

from kvtier.vllm import loading, storing

pytestmark = pytest.mark.usefixtures("rank_server")

DOC = document(1, 600)  # 9 chunks of 64 tokens and 24 more; 18 blocks of 2 x 16
LONG = document(1, 900)  # 14 chunks
SLOT = 64 * 2 * 1152 + 4096  # what a chunk takes in DRAM, and a little more
TWO = Topology(2, 2, 1)
#: The bounds that an engine has, which ``patience`` makes longer.
BOUNDS = {loading: ("LOAD_WAIT_S", loading.LOAD_WAIT_S), storing: ("STORE_WAIT_S", storing.STORE_WAIT_S)}
#: How long lookups may hold a request back meanwhile: a stop is longer than SHORT.
LOOKUP_S = 1.2
SHORT = {"part_deadline_s": 1, "part_first_done_deadline_s": 1}
#: Whoever waits without a bound gets an answer then, and the counters show it.
RESCUE_S = 60.0
HOOKS = {"store": "wait_for_save", "load": "start_load_kv"}


@pytest.fixture
def live(tmp_path):
    """Engines of two ranks on one root, the leader in rank 0."""
    running = []

    root = {"disk_path": str(tmp_path / "kv"), "disk_gib": 1, "free_floor_gib": 0}
    root["lease_ttl_s"] = 3600  # a lease that is left over must not end by itself

    def run(**extra):
        c = Cluster(LATENT, TWO, root | extra, home=tmp_path)
        running.append(c)
        assert c.ranks[0].call("state")[0] == "leader"
        return c

    yield run
    for c in running:
        c.close()


@contextlib.contextmanager
def stopped(c):
    """Rank 0 is stopped, or will be in the step that it is sent next; on leaving it goes
    on. The scheduler half waits as long as in an engine."""
    rescue = threading.Timer(RESCUE_S, c.ranks[0].signal, (signal.SIGCONT,))
    with contextlib.ExitStack() as stack:
        for module, (name, bound) in BOUNDS.items():
            stack.enter_context(mock.patch.object(module, name, bound))
        stack.enter_context(mock.patch.object(c.half._patience, "_most_s", LOOKUP_S))
        rescue.start()
        try:
            yield
        finally:
            rescue.cancel()
            rescue.join()
            c.ranks[0].signal(signal.SIGCONT)


def ahead(c, requests):
    """Schedules until all these requests have begun, without an output of any step;
    returns the steps, which the ranks have been sent."""
    steps, begun = [], set()
    end = time.monotonic() + 2 * RESCUE_S
    while not begun >= {q.id for q in requests}:
        assert time.monotonic() < end, "a request is held back"
        time.sleep(0.05)
        steps.append(c.schedule())
        begun |= steps[-1][0].num_scheduled_tokens.keys()
        c.send(steps[-1])
    return steps


def stop_and_go_on(c, what, after, q, step):
    """Rank 0 is stopped in a step, before or after its part of it, and goes on when the
    scheduler has come to the end of all its waits. Checks that all of them ended by
    their bounds, and that all requests do."""
    found = c.add([*DOC, 7])
    lease = c.half._tracked[found.id].incarnation.lease
    assert c.half._coordinator.lease_result(lease, 0, 60.0).leased == 9, "found before the leader stops"
    c.ranks[0].call("signal_in", HOOKS[what], after, signal.SIGSTOP)
    before = Counter(c.half.stats.data)
    with stopped(c):
        c.send(step)
        c.ranks[0].wait_stopped()
        c.take(1)
        lost = [c.add(document(20, 200)), c.add([*DOC[:300], 8]), c.add(document(21, 100))]
        steps = ahead(c, lost)
        done = Counter(c.half.stats.data)
    done.subtract(before)
    assert done["wait_timeouts"] == done["store_timeouts"] == len(lost)
    assert done["loads"] == done["loads_unbegun"] == 1, "of what had been found"
    assert not done["load_tokens"] and not done["chunks_granted"]
    for s in (step, *steps):
        c.collect(s)
    c.run()
    assert not c.problems and all(len(r.request.output_token_ids) == 2 for r in (q, found, *lost))
    assert not c.counts["errors"] and not c.settled()


def test_rank_0_is_stopped_in_a_store(live):
    """And longer than the leader gives the ranks for their parts."""
    c = live(**SHORT)
    warm(c, DOC)
    for n, after in enumerate((False, True)):
        text = document(10 + n, 400)
        q = c.add(text)
        stop_and_go_on(c, "store", after, q, step_until(c, lambda m: m.stores))
        assert c.counts["loads_done"] == c.counts["loads_failed"] == 2, "each rank reports what never began"
        c.forget()
        warm(c, text)
        assert serve(c, text) == 384 and serve(c, DOC) == 576
        assert not c.counts["loads_failed"]
        c.counts.clear()


def test_rank_0_is_stopped_in_a_load(live):
    c = live()
    warm(c, DOC)
    for after in (False, True):
        q = c.add(DOC)
        stop_and_go_on(c, "load", after, q, step_until(c, lambda m: m.loads))
        assert (c.counts["loads_done"], c.counts["loads_failed"]) == (4, 2), "the one under way has not failed"
        c.forget()
        assert serve(c, DOC) == 576
        c.counts.clear()


def output_of_rank_1(c):
    result, problems = pickle.loads(c.ranks[1].receive())
    assert not problems
    return result.kv_connector_output


def drain(c, q, output):
    """Steps rank 1 alone, from this output on, until it reports the load of q; the blocks
    that it names as bad."""
    for _ in range(1000):
        if output.finished_recving:
            assert output.finished_recving == {q.id}
            return output.invalid_block_ids
        assert not output.invalid_block_ids, "pages of a load that is not reported"
        time.sleep(0.01)
        c.send(c.schedule(), c.ranks[1:])
        output = output_of_rank_1(c)
    raise AssertionError("the load is not reported")


@pytest.mark.parametrize("what", ["store", "load"])
def test_rank_0_is_killed(live, what):
    """vLLM ends an engine whose worker died. Until it does, the scheduler half and rank 1
    have no leader, and hang nowhere; the next engine finds what was on disk. The load is
    of more than may be pinned, so rank 1 is in the middle of it."""
    small = {"dram_gib": 19 * SLOT / (1 << 30)}
    c = live(**small)
    warm(c, LONG)
    assert c.ranks[0].call("flush")
    text = document(10, 400) if what == "store" else LONG
    q = c.add(text)
    step = step_until(c, lambda m: m.stores if what == "store" else m.loads)
    c.send(step, c.ranks[1:])
    output = output_of_rank_1(c)
    c.ranks[0].call("signal_in", HOOKS[what], False, signal.SIGKILL)
    c.send(step, c.ranks[:1])
    with pytest.raises(RankDied):
        c.ranks[0].receive()
    if what == "load":
        bad = drain(c, q, output)
        table = np.array(c.scheduler.kv_cache_manager.get_block_ids(q.id)[0])
        loaded = table[: 896 // c.span].tolist()
        assert bad, "nobody tells what the later windows are"
        good = next(k for k, b in enumerate(loaded) if b in bad) * c.span
        assert bad == set(loaded[good // c.span :])
        assert not c.ranks[1].call("check", Work(q.id, good, 0, table, c.hashes[q.id])), "a page that is wrong"

    until(lambda: not c.half._coordinator.session(), "noticing the end of the leader")
    before = Counter(c.half.stats.data)
    late = c.add([*LONG[:300], 8])
    alone = c.schedule()
    output = alone[0]
    assert output.num_scheduled_tokens == {late.id: 301}, "computed at once"
    assert not output.kv_connector_metadata.loads and not output.kv_connector_metadata.stores
    assert Counter(c.half.stats.data) == before, "nobody was asked"
    c.send(alone, c.ranks[1:])
    output_of_rank_1(c)
    assert c.ranks[1].call("state")[0] != "leader", "it has not the weights' digest"
    assert c.ranks[1].call("close") is None
    c.close()

    d = live(**small)
    assert serve(d, LONG) == 896
    if what == "store":
        assert serve(d, text) == 0, "nothing of what has not all parts"
    warm(d, text)
    assert serve(d, text) == (len(text) // 64) * 64
    assert not d.counts["errors"] and not d.settled()
