"""An engine whose leader is another process, which dies."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine import Engine, slot_bytes
from situations import DOC, attempts, document, held, step_until_loading, until, warm

PROGRAM = """
import json, sys, kvtier
cache = kvtier.Cache.open(json.loads(sys.argv[1]))
assert cache.wait_open(20)
print("open", flush=True)
sys.stdin.read()
cache.close()
"""


class Leader:
    def __init__(self, settings):
        import json

        path = str(Path(__file__).parents[2])
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PYTHONPATH": path},
            text=True,
        )
        assert self.process.stdout.readline() == "open\n"

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def close(self):
        if self.process.returncode is None:
            self.process.communicate()


@pytest.fixture
def world(tmp_path):
    """An engine that is a member only, and how to start leaders for it."""
    settings = {"name": "outside", "runtime_dir": str(tmp_path), "dram_gib": 64 * slot_bytes(64) / (1 << 30)}
    leaders = []

    def lead():
        leaders.append(Leader(settings | {"role": "leader"}))
        return leaders[-1]

    first = lead()
    e = Engine(extra=settings | {"role": "member"})
    try:
        yield e, first, lead
        assert not e.problems and not e.counts["errors"]
        assert not e.settled()
    finally:
        e.close()
        for each in leaders:
            each.close()


def attached(e, limit_s=20):
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if e.half._attached(time.monotonic()):
            return e.half._session
        time.sleep(0.01)
    raise AssertionError("not attached")


def test_leader_in_another_process(world):
    e, _, _ = world
    attached(e)
    warm(e)
    e.add(DOC)
    e.run()
    assert e.counts["load_tokens"] == 576 and not e.counts["loads_failed"]


def test_leader_dies_and_another_comes(world):
    e, leader, lead = world
    before = attached(e)
    warm(e)
    going_on = e.add(document(3, 200), 400)
    until(e, lambda: len(going_on.request.output_token_ids) > 20)
    leader.kill()
    e.add(DOC)
    until(e, lambda: e.half._session == 0)
    assert e.counts["loads_done"] == e.counts["loads_failed"]
    lead()
    assert attached(e) != before
    # What the first leader held is gone, and requests that run offer all they have.
    e.run()
    assert len(going_on.request.output_token_ids) == 400
    assert any(held(e, going_on.tokens[:448]) for _ in attempts())
    warm(e)
    e.add(DOC)
    e.run()
    assert e.counts["load_tokens"] == 576


@pytest.mark.parametrize("executed", [False, True])
def test_leader_dies_during_a_load(world, executed):
    e, leader, lead = world
    attached(e)
    warm(e)
    q = e.add(DOC)
    output, todo = step_until_loading(e, q)
    if not executed:
        leader.kill()
        until_detached = time.monotonic() + 10
        while e.half._coordinator.session() and time.monotonic() < until_detached:
            time.sleep(0.01)
        result = e.execute(output, todo)
    else:
        result = e.execute(output, todo)
        leader.kill()
    e.update(output, result)
    e.run()
    assert len(q.request.output_token_ids) == 4
    assert e.counts["loads_done"] == 1 and (executed or e.counts["loads_failed"] == 1)
    lead()
    attached(e)
    warm(e)
