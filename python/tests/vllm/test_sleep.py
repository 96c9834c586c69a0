"""Sleep and weight updates: vLLM's own pause and reset cascade, with the real scheduler
and the real engine core's methods over it. The executor here stands for the device:
what sleeps loses its pages."""

import queue

import pytest
from engine import Engine
from situations import DOC, attempts, document, held, step_until_loading, warm
from vllm.v1.engine.core import EngineCoreProc


class Device:
    """What the engine core asks of its executor around a sleep."""

    is_sleeping = False

    def __init__(self, e: Engine) -> None:
        self._engine = e

    def collective_rpc(self, method):
        assert method == "synchronize_device"

    def reset_mm_cache(self):
        pass

    def reset_encoder_cache(self):
        pass

    def sleep(self, level):
        self.is_sleeping = True
        for page in self._engine.pages:
            page[:] = 0xDEAD

    def wake_up(self, tags):
        self.is_sleeping = False


class Core(EngineCoreProc):
    """An engine core without processes around it."""

    def __init__(self, e: Engine) -> None:
        self.engine = e
        self.scheduler = e.scheduler
        self.model_executor = Device(e)
        self.mm_receiver_cache = None
        self.output_queue = queue.Queue()
        self.batch_queue = None
        self.engines_running = False
        self._idle_state_callbacks = []

    def until_idle(self):
        """The busy loop: steps while there is work, then tells who waits for idleness."""
        for _ in attempts(0):
            if not self.has_work():
                self._notify_idle_state_callbacks()
                return
            self.engine.step()
        raise AssertionError("never idle")


def test_sleep_with_requests_in_every_state(make):
    e = make(sequences=2)
    warm(e)
    core = Core(e)
    running = [e.add(document(90 + k, 100), 300) for k in range(1)]
    for _ in range(5):
        e.step()
    loading, waiting = e.add(DOC), e.add(document(92, 200))
    output, todo = step_until_loading(e, loading)
    slept = core.sleep(level=2, mode="abort")
    assert slept is not None, "the load has to end first"
    e.update(output, e.execute(output, todo))
    core.until_idle()
    slept.result(timeout=0)
    assert core.model_executor.is_sleeping and e.counts["resets"] + e.half.stats.data.get("resets", 0) == 1
    for q in (*running, loading, waiting):
        assert q.request.is_finished()
    e.weights += 1  # level 2 throws the weights away, others are brought
    assert core.wake_up()
    assert held(e, DOC) == 0
    e.add(DOC)
    e.run()
    assert e.counts["load_tokens"] == 576, "the load before the sleep and none after"
    warm(e)
    e.add(DOC)
    e.run()
    assert e.counts["load_tokens"] == 576, "the new weights' own"


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_pause_for_new_weights(make, mode):
    e = make(slots=256)
    warm(e)
    core = Core(e)
    kept = e.add(document(93, 300), 200)
    for _ in range(20):
        e.step()
    paused = core.pause_scheduler(mode=mode, clear_cache=True)
    late = e.add(DOC)  # while paused
    if paused is not None:
        core.until_idle()
        paused.result(timeout=0)
    done = len(kept.request.output_token_ids)
    assert (done == 200) == (mode == "wait")
    e.weights += 1
    core.resume_scheduler()
    e.run()
    assert e.counts["load_tokens"] == 0, "nothing of the old weights"
    assert len(kept.request.output_token_ids) == 200 and len(late.request.output_token_ids) == 4
    assert e.counts["resets"] == 1 and not e.counts["errors"]
    warm(e)
    e.add(DOC)
    e.run()
    assert e.counts["load_tokens"] == 576


def test_pause_without_clearing_keeps_everything(make):
    e = make()
    warm(e)
    core = Core(e)
    assert core.sleep(level=0, mode="keep") is None
    q = e.add(DOC)
    for _ in range(5):
        e.step()
    assert not q.request.output_token_ids
    assert core.wake_up(tags=["scheduling"])
    e.run()
    assert e.counts["load_tokens"] == 576 and not e.counts["resets"]


def test_many_resets_in_a_row(make):
    """A training loop that updates weights all the time: every epoch finds its own and
    nothing else, and old epochs leave nothing pinned."""
    e = make(slots=256)
    warm(e)
    core = Core(e)
    for step in range(12):
        core._reset_caches()
        e.weights += 1
        e.counts.clear()
        e.add(DOC)
        e.run()
        assert e.counts["load_tokens"] == 0, step
        e.scheduler.reset_prefix_cache()
        e.add(DOC)
        e.run()
        assert e.counts["load_tokens"] == 576, step
        assert not e.settled()
