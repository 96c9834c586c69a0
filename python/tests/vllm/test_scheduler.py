"""The connector under vLLM's real scheduler, over the real library: requests from their
arrival to their end, resets, restarts, and engines that share."""

import time
from pathlib import Path

import pytest
from engine import Engine, slot_bytes
from situations import DOC, attempts, document, held, step_until_loading, until, warm
from vllm.v1.request import RequestStatus

import kvtier
from kvtier.vllm.stats import KVTierStats


def test_generated_tokens_are_found_again(make):
    e = make()
    doc = DOC[:200]
    warm(e, doc)
    q = e.add(doc, max_new=150)
    e.run()
    e.scheduler.reset_prefix_cache()
    e.add(q.tokens[:350], 4)
    e.counts.clear()
    e.run()
    assert e.counts["load_tokens"] == 320
    without = make(extra={"save_generated": False})
    warm(without, doc)
    q = without.add(doc, max_new=150)
    without.run()
    without.scheduler.reset_prefix_cache()
    without.add(q.tokens[:350], 4)
    without.counts.clear()
    without.run()
    assert without.counts["load_tokens"] == 192


def test_abort_of_waiting_and_running_requests(make):
    e = make(sequences=1)
    warm(e)
    running, waiting = e.add(document(4, 100), 200), e.add(DOC)
    until(e, lambda: running.request.status == RequestStatus.RUNNING)
    assert waiting.id in e.half._tracked and e.half._tracked[waiting.id].incarnation is not None
    e.abort(waiting)
    e.abort(running)
    e.run()


def test_a_prompt_computed_in_parts_is_stored_in_parts(make):
    e = make(batched_tokens=100)
    warm(e, document(2, 600))  # so that there are slots
    q = e.add(DOC)
    while not q.request.is_finished():
        e.step()
        assert e.counts["chunks_granted"] <= q.request.num_computed_tokens // 64
    assert e.counts["chunks_granted"] and not e.counts["errors"]
    warm(e)
    e.add(DOC)
    e.run()
    assert e.counts["load_tokens"] == 576


def test_leases_of_waiting_requests_are_renewed(make, monkeypatch):
    """Nobody looks up a request that is deep in the queue."""
    e = make(sequences=1)
    warm(e)
    renewed, asked = [], []
    for name, seen in (("renew", renewed), ("lease", asked)):
        call = getattr(kvtier.Coordinator, name)
        monkeypatch.setattr(
            kvtier.Coordinator, name, lambda k, x, *a, call=call, seen=seen: (seen.append(x), call(k, x, *a))[1]
        )
    now = [time.monotonic()]
    e.half._clock = lambda: now[0]
    running, waiting = e.add(document(4, 100), 300), e.add(DOC)
    until(e, lambda: running.request.status == RequestStatus.RUNNING)
    lease = e.half._tracked[waiting.id].incarnation.lease
    renewed.clear()
    for _ in range(4):
        now[0] += 25.0  # a lease lives for 60 s
        e.step()
    assert renewed == [[lease]] * 4 and asked[-1] == lease
    # Nobody stepped the engine for so long that the lease has ended.
    now[0] += 100.0
    e.abort(running)
    until(e, lambda: waiting.request.is_finished())
    assert asked[-1] != lease and e.counts["load_tokens"] == 576


def test_preempted_request_loads_what_it_lost(make):
    e = make(blocks=66, slots=256)
    one, two = e.add(document(5, 400), 200), e.add(document(6, 400), 200)
    until(e, lambda: one.request.output_token_ids and two.request.output_token_ids)
    e.rest()
    e.run()
    assert one.request.num_preemptions + two.request.num_preemptions > 0
    assert e.counts["load_tokens"] > 0
    assert not e.counts["loads_failed"]


def test_reset_begins_an_epoch(make):
    e = make()
    warm(e)
    running = e.add(document(9, 100), 300)
    for _ in range(4):
        e.step()
    stored = e.counts["chunks_granted"]
    assert e.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    e.weights += 1
    assert held(e, DOC) == 0
    e.add(DOC)
    e.run()
    assert e.counts["load_tokens"] == 0, "KV of the weights before"
    assert e.counts["chunks_granted"] > stored, "the new epoch is stored"
    assert len(running.request.output_token_ids) == 300
    assert e.counts["resets"] == 1
    warm(e)
    e.add(DOC)
    e.run()
    assert e.counts["load_tokens"] == 576


def test_requests_with_pages_store_nothing_after_a_reset(make):
    """vLLM resets the connector although its own reset failed."""
    e = make()
    q = e.add(document(9, 100), 300)
    for _ in range(4):
        e.step()
    e.scheduler.reset_prefix_cache(reset_connector=True)
    granted = e.counts["chunks_granted"] + e.half.stats.data.get("chunks_granted", 0)
    e.run()
    assert e.counts["chunks_granted"] + e.half.stats.data.get("chunks_granted", 0) == granted
    assert len(q.request.output_token_ids) == 300


def test_salt_and_tag_separate(make):
    e = make()
    warm(e)
    e.add(DOC, cache_salt="mine")
    e.run()
    assert e.counts["load_tokens"] == 0
    for _ in attempts():
        e.scheduler.reset_prefix_cache()
        e.add(DOC, cache_salt="mine")
        e.run()
        if e.counts["load_tokens"]:
            break
    assert e.counts["load_tokens"]


def test_wishes_of_a_request(make):
    e = make()
    params = lambda **kw: {"extra_args": {"kv_transfer_params": {"kvtier": kw}}}
    e.add(DOC, sampling=params(store=False))
    e.run()
    assert not e.counts["chunks_offered"] and not e.half.stats.data
    warm(e)
    e.add(DOC, sampling=params(load=False))
    e.run()
    e.scheduler.reset_prefix_cache()
    e.add(DOC, sampling={"prompt_logprobs": 1})
    e.run()
    e.add(DOC, sampling={"skip_reading_prefix_cache": True})
    e.run()
    assert e.counts["load_tokens"] == 0
    e.scheduler.reset_prefix_cache()
    e.add(DOC, sampling=params(load=True, store=True))
    e.run()
    assert e.counts["load_tokens"] == 576


def test_restart_finds_what_is_on_disk(make, tmp_path):
    """And a damaged chunk is a miss from there on, never wrong KV."""
    extra = {"disk_path": str(tmp_path / "d"), "disk_gib": 0.01, "free_floor_gib": 0, "dirty_gib": 0.01}
    e = make(extra=extra, recognisable=True)
    warm(e)
    assert e.cache.flush(10)
    e.close()
    files = sorted((tmp_path / "d").rglob("*.kvc"))
    assert len(files) == 9
    e = make(extra=extra, recognisable=True)
    e.add(DOC)
    e.run()
    assert e.counts["load_tokens"] == 576 and not e.counts["loads_failed"]
    # A new epoch does not go to disk.
    e.scheduler.reset_prefix_cache(reset_connector=True)
    e.weights += 1
    e.add(DOC)
    e.run()
    assert e.cache.flush(10)
    e.close()
    assert sorted((tmp_path / "d").rglob("*.kvc")) == files
    bad = next(f for f in files if _ordinal(f) == 5)
    content = bytearray(bad.read_bytes())
    content[100] ^= 1
    bad.write_bytes(content)
    e = make(extra=extra, recognisable=True)
    e.add(DOC)
    e.run()
    assert e.counts["load_tokens"] in (320, 576), "promised before or after the damage was found"
    assert (e.counts["loads_failed"] == 1) == (e.counts["load_tokens"] == 576)


def _ordinal(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[-4096 + 100 : -4096 + 104], "little")


def test_unrecognisable_weights_stay_in_memory(make, tmp_path):
    e = make(
        extra={"disk_path": str(tmp_path / "d"), "disk_gib": 0.01, "free_floor_gib": 0, "dirty_gib": 0.01}
    )
    warm(e)
    e.cache.flush(5)
    assert not list((tmp_path / "d").rglob("*.kvc"))


def test_oracle_notices_one_damaged_bit():
    e = Engine(extra={"_test_flip_byte": True})
    warm(e)
    e.add(DOC)
    e.run()
    e.close()
    assert e.problems and "is wrong" in e.problems[0]


def test_statistics_add_up_and_read_well():
    a, b = KVTierStats(), KVTierStats()
    assert a.is_empty() and a.take() is None
    a.add("hits")
    b.add("hits", 2)
    b.add("loads", 1)
    assert a.aggregate(b).data == {"hits": 3, "loads": 1}
    assert a.counters() == {"hits": 3, "loads": 1}
    taken = a.take()
    assert taken.data == {"hits": 3, "loads": 1} and a.is_empty()


def test_two_engines_share_one_leader(make):
    roomy = {"name": "shared-leader", "dram_gib": 4 * 64 * slot_bytes(64) / (1 << 30)}
    a, b = make(extra=roomy), make(extra=roomy)
    warm(a)
    # Each has random weights for all the leader knows, so a namespace of its own.
    b.add(DOC)
    b.run()
    assert b.counts["load_tokens"] == 0
    warm(b)
    b.add(DOC)
    b.run()
    assert b.counts["load_tokens"] == 576


def test_two_engines_share_one_namespace(make, tmp_path):
    extra = {"name": "shared-namespace"}
    a, b = make(extra=extra, recognisable=True), make(extra=extra, recognisable=True)
    warm(a)
    qa, qb = a.add(DOC), b.add(DOC)

    def both_done():
        b.step()
        return qa.request.is_finished() and qb.request.is_finished()

    until(a, both_done)  # completions of both come through one cache
    assert a.counts["load_tokens"] == b.counts["load_tokens"] == 576
    a.run()
    b.run()


def test_nobody_waits_longer_than_computing_takes(make):
    now = [100.0]
    patience = make(extra={"lookup_wait_s": 2.0}, measured=True).half._patience
    assert patience.seconds(600) == 2.0, "nothing is known yet"
    for _ in range(50):
        patience.measure(now[0], 1000)
        now[0] += 0.1
    assert patience._tokens_per_s == pytest.approx(10_000, rel=0.01)
    assert patience.seconds(600) == pytest.approx(0.06, rel=0.01) and patience.seconds(10**6) == 2.0
    patience.measure(now[0], 1)  # a decode step
    now[0] += 10
    patience.measure(now[0], 1)  # and a pause
    assert patience.seconds(600) == pytest.approx(0.06, rel=0.1)


def test_start_up_line_says_what_the_cache_will_do(make, caplog):
    with caplog.at_level("INFO", logger="vllm.kvtier"):
        make()
    (line,) = [m for m in caplog.messages if "bytes a token" in m]
    for part in (
        "kvtier: leader",
        "deepseek, namespace ",
        ", 16 bytes a token",
        "chunks of 64 tokens",
        "4096 tokens fit in",
        "no disk",
    ):
        assert part in line, line
    assert any("nothing of this model goes to disk" in m for m in caplog.messages)


def test_inside_multi_connector(make):
    """The policy for failed loads is then the outer configuration's."""
    e = make(multi=True)
    warm(e)
    q = e.add(DOC)
    step = step_until_loading(e, q)
    e.update(step[0], e.execute(*step))
    e.run()
    assert e.counts["load_tokens"] == 576 and not e.counts["errors"]
    assert e.scheduler.reset_prefix_cache(reset_connector=True)
    e.weights += 1
    e.add(DOC)
    e.run()
    assert e.counts["load_tokens"] == 576
