"""What vLLM offers besides plain requests, on its real scheduler: wishes of a request,
several samples of a prompt, priorities, asynchronous scheduling, drafts."""

import os
import random
from collections import deque

import numpy as np
import pytest
from engine import MAX_LEN, Sequence
from kvtier.vllm import wishes
from situations import DOC, attempts, document, held, keys_of, until, warm
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.outputs import DraftTokenIds

SEED = int(os.environ.get("KVTIER_FEATURES_SEED", random.SystemRandom().randrange(1 << 30)))


@pytest.fixture
def rng():
    print(f"KVTIER_FEATURES_SEED={SEED}")
    return random.Random(SEED)


def asking(**wishes):
    return {"extra_args": {"kv_transfer_params": {"kvtier": wishes}}}


def chunks_granted(e):
    return e.counts["chunks_granted"] + e.half.stats.data.get("chunks_granted", 0)


# ---- wishes of a request


@pytest.fixture
def on_disk(make, tmp_path):
    extra = {"disk_path": str(tmp_path / "d"), "disk_gib": 0.02, "free_floor_gib": 0, "dirty_gib": 0.02}

    def files(e):
        assert e.cache.flush(30)
        for _ in attempts():  # those of the self-test go in the background
            if not e.cache.stats()["leader"]["disk"]["queued_unlinks"]:
                break
        return len(list((tmp_path / "d").rglob("*.kvc")))

    return lambda: make(extra=extra, recognisable=True), files


def test_memory_only(on_disk):
    start, files = on_disk
    e = start()
    warm(e, sampling=asking(disk=False))
    assert files(e) == 0
    e.add(DOC, sampling=asking(disk=False))
    e.run()
    assert e.counts["load_tokens"] == 576, "memory serves it"
    # Others who share a prefix with it have no such wish: what they bring is written.
    e.add(DOC[:320])
    e.run()
    assert files(e) == 5
    e.close()
    e = start()
    assert held(e, DOC) == 5
    e.add(DOC, sampling=asking(disk=False))
    e.run()
    assert e.counts["load_tokens"] == 320, "reading from disk is no writing"
    assert files(e) == 5


def test_requests_that_are_not_loaded_are_stored(make):
    """Prompt log-probabilities need the whole prompt computed, and so do requests that
    skip the prefix cache."""
    for sampling in ({"prompt_logprobs": 1}, {"skip_reading_prefix_cache": True}, asking(load=False)):
        e = make()
        for _ in attempts():
            e.add(DOC, sampling=sampling)
            e.run()
            assert not e.counts["load_tokens"] and not e.counts["lookups"] and not e.counts["waits"]
            e.scheduler.reset_prefix_cache()
            if held(e, DOC) == 9:
                break
        assert held(e, DOC) == 9
        e.add(DOC, sampling=sampling)
        e.run()
        assert not e.counts["load_tokens"], sampling
        e.add(DOC)
        e.scheduler.reset_prefix_cache()
        e.run()
        assert e.counts["load_tokens"] == 576


@pytest.mark.parametrize(
    "params", [None, {}, {"kvtier": None}, {"kvtier": {}}, {"do_remote_prefill": False, "remote_engine_id": "x"}]
)
def test_parameters_that_say_nothing(make, params):
    e = make()
    warm(e)
    e.add(DOC, sampling={"extra_args": {"kv_transfer_params": params}})
    e.run()
    assert e.counts["load_tokens"] == 576 and not e.counts["errors"]


@pytest.mark.parametrize(
    ("mine", "warning"),
    [
        ("off", "is 'off', not an object"),
        (False, "is False, not an object"),
        ([], "is [], not an object"),
        ({"store": 0, "load": "no"}, "has 'load': 'no', which is neither true nor false"),
        ({"stores": False}, "has the unknown key 'stores'; the nearest one is 'store'"),
        ({1: False}, "has the unknown key 1"),
    ],
)
def test_wishes_that_are_not_understood(make, mine, warning, caplog):
    """A prompt that somebody wants to keep out of the cache stays out, though they
    misspelt it. One warning says what is wrong."""
    wishes._warn.cache_clear()
    e = make()
    warm(e)
    for n in range(2):
        e.scheduler.reset_prefix_cache()
        e.add([*DOC[:-1], n], sampling={"extra_args": {"kv_transfer_params": {"kvtier": mine}}})
        e.run()
    assert e.counts["load_tokens"] == 0 and not e.counts["errors"]
    assert sum(warning in r.getMessage() for r in caplog.records) == 1
    e.scheduler.reset_prefix_cache()
    e.add(DOC)
    e.run()
    assert e.counts["load_tokens"] == 576


@pytest.mark.parametrize(("mine", "written"), [({"store": "false"}, 0), ({"disk": None}, 0), ({"disc": False}, 0), ({}, 9)])
def test_wishes_that_are_not_understood_keep_off_the_disk(on_disk, mine, written):
    start, files = on_disk
    e = start()
    for _ in range(4) if not written else attempts(0.05):
        e.add(DOC, sampling=asking(**mine))
        e.run()
        e.scheduler.reset_prefix_cache()
        if written and held(e, DOC) == 9:
            break
    assert files(e) == written


def test_opting_out_for_storing_leaves_nothing_behind(make):
    e = make()
    warm(e)
    held_before = chunks_granted(e)
    long = DOC + document(8, 200)
    q = e.add(long, max_new=100, sampling=asking(store=False))
    e.run()
    assert e.counts["load_tokens"] == 576, "it may load"
    assert chunks_granted(e) == held_before and held(e, q.tokens[:896]) == 9


# ---- several samples of one prompt


def siblings(e, prompt, n, max_new):
    """What the front end makes of one request with n samples."""
    params = SamplingParams(
        n=n, max_tokens=max_new, ignore_eos=True, seed=5, output_kind=RequestOutputKind.FINAL_ONLY
    )
    parent = ParentRequest(
        EngineCoreRequest(
            request_id="parent",
            external_req_id="parent",
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
    )
    out = []
    for k in range(n):
        child, sampling = parent.get_child_info(k)
        assert (sampling.n, sampling.seed) == (1, 5 + k)
        out.append(e.add(prompt, max_new, request_id=child, luck=k + 1))
    return out


def test_samples_of_one_prompt(make):
    e = make(blocks=400, slots=256)
    warm(e, document(2, 500))  # so that there are slots
    e.add(document(3, 64 * 16))  # more than will be needed
    e.run()
    e.counts.clear()
    four = siblings(e, DOC, 4, 150)
    e.run()
    assert len({tuple(q.tokens) for q in four}) == 4
    assert e.counts["load_tokens"] == 0
    # The prompt once, and two chunks of generated tokens of each: the first begins in
    # the prompt, whose last 24 tokens are in it.
    assert e.counts["chunks_granted"] == 9 + 4 * 2
    for q in four:
        e.scheduler.reset_prefix_cache()
        e.counts.clear()
        e.add(q.tokens[:750], 2)
        e.run()
        assert e.counts["load_tokens"] == 11 * 64, "each sample finds its own"
    # All four at once, now from the cache; and aborted in the middle.
    e.scheduler.reset_prefix_cache()
    e.counts.clear()
    for q in siblings_again(e, 4):
        e.abort(q) if q.id.startswith("2") else None
    e.run()
    assert e.counts["loads_done"] == e.counts["loads"] >= 1 and not e.counts["loads_failed"]


def siblings_again(e, n):
    for k in range(n):
        e.sequences.pop(f"{k}_parent", None)
    return siblings(e, DOC, n, 20)


# ---- priorities


def test_priority_and_preemption(make):
    """Who is preempted has lost its pages and gets them from the cache."""
    e = make(blocks=MAX_LEN // 16 + 2, slots=256, policy="priority")
    warm(e, document(30, 300))
    low = [e.add(document(31 + k, 260), 300, priority=5) for k in range(2)]
    until(e, lambda: all(len(q.request.output_token_ids) > 10 for q in low))
    e.rest()
    # Its prefix is held; with it the three need more pages than there are.
    high = e.add(document(30, 300) + document(40, 40), 100, priority=0)
    finished = []
    for _ in attempts(0):
        e.step()
        finished += [q.id for q in (*low, high) if q.request.is_finished() and q.id not in finished]
        if len(finished) == 3:
            break
    assert finished[0] == high.id
    assert sum(q.request.num_preemptions for q in low) > 0 and high.request.num_preemptions == 0
    assert e.counts["loads"] >= 2, "the high one's and a preempted one's"
    assert e.counts["loads_failed"] == 0
    e.run()


# ---- asynchronous scheduling


def pipelined(e, events=lambda step: None):
    """Runs to the end with two steps in flight, as an engine with asynchronous
    scheduling does: a step is executed before the output of the one before is known to
    the scheduler."""
    flight = deque()
    for step, _ in enumerate(attempts(0)):
        events(step)
        more = e.scheduler.has_requests()
        if not more and not flight:
            assert not e.scheduler.requests
            return
        if more:
            output, todo = e.schedule()
            flight.append((output, e.execute(output, todo)))
        if len(flight) == 2 or not more:
            e.update(*flight.popleft())
    raise AssertionError("does not end")


def test_asynchronous_scheduling(make):
    e = make(async_scheduling=True, slots=256, blocks=300)
    for _ in attempts():
        q = e.add(DOC, 200)
        pipelined(e)
        e.scheduler.reset_prefix_cache()
        # The chunk whose last token was the last one sampled may be lost.
        if held(e, q.tokens[:768]) == 12:
            break
    assert held(e, q.tokens[:768]) == 12 and not e.counts["errors"]
    e.counts.clear()
    again = e.add(q.tokens[:750], 50)
    pipelined(e)
    assert e.counts["load_tokens"] == 704 and len(again.request.output_token_ids) == 50
    # An abort while a load and a step are in flight.
    e.scheduler.reset_prefix_cache()
    aborted = e.add(q.tokens[:750], 50)
    other = e.add(document(50, 300), 60)
    pipelined(e, events=lambda step: e.abort(aborted) if step == 2 else None)
    assert len(other.request.output_token_ids) == 60
    assert e.counts["loads_done"] == e.counts["loads"] == 2 and not e.counts["errors"]


# ---- drafts


def test_drafts_are_never_stored(make, rng):
    """Tokens that a draft guessed lie in pages before they are accepted. What is offered
    has the keys of the tokens that came out, and never reaches beyond them."""
    e = make(slots=256, sequences=4, blocks=300)
    warm(e)
    e.scheduler.num_spec_tokens = 3
    offered = []
    begin = e.half._coordinator.store_begin

    class Watch:
        def __getattr__(self, name):
            return getattr(coordinator, name)

        def store_begin(self, requests, timeout):
            offered.extend((r.first_ordinal, r.keys.copy()) for r in requests)
            return begin(requests, timeout)

    coordinator, e.half._coordinator = e.half._coordinator, Watch()
    try:
        running = [e.add(document(60 + k, 8 + 64 * k), 300) for k in range(3)]
        while e.scheduler.requests:
            e.step()
            draft(e, rng)
    finally:
        e.half._coordinator = coordinator
    e.rest()
    assert offered and e.counts["errors"] == 0
    # An offer without an answer in time is made again in the next step; on a machine that
    # is too slow for that the last chunk is lost.
    lost = 1 if e.counts["store_timeouts"] else 0
    true = {}
    for q in running:
        r = Sequence("true", q.tokens[: q.prompt_len + 300], 1)
        keys = keys_of(e, r.tokens[: r.prompt_len])
        true |= {(k, keys[k].tobytes()): q.id for k in range(len(keys))}
    for first, keys in offered:
        for k, key in enumerate(np.asarray(keys)):
            assert (first + k, key.tobytes()) in true, "the key of tokens that never came out"
    for q in running:
        e.scheduler.reset_prefix_cache()
        full = (q.prompt_len + 299) // 64  # the last token is not computed
        e.counts.clear()
        e.add(q.tokens[: q.prompt_len + 300], 2)
        e.run()
        assert (full - lost) * 64 <= e.counts["load_tokens"] <= full * 64


def draft(e, rng):
    """Guesses of a draft model, of which some are right."""
    ids, guesses = [], []
    for r in e.scheduler.running:
        q, n = e.sequences[r.request_id], r.num_tokens
        k = min(3, len(q.tokens) - n - 1, MAX_LEN - n - 4)
        ids.append(r.request_id)
        guesses.append([q.tokens[n + i] if rng.random() < 0.7 else 1 for i in range(k)])
    e.scheduler.update_draft_token_ids(DraftTokenIds(ids, guesses))
