"""The connector under vLLM's real scheduler, over the real library."""

import json
import time
from pathlib import Path

import engine as engine_module
import pytest
from engine import Engine, mix, slot_bytes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from kvtier.vllm import mapping
from kvtier.vllm.settings import SettingsError
from kvtier.vllm.stats import KVTierStats


def document(seed, n):
    out, x = [], seed
    for _ in range(n):
        x = mix(x)
        out.append(x % 997 + 3)
    return out


DOC = document(1, 600)


@pytest.fixture
def make():
    """Engines that end without anything wrong or left."""
    engines = []

    def build(**kw):
        e = Engine(**kw)
        engines.append(e)
        return e

    yield build
    for e in engines:
        problems, left = e.problems, e.settled()
        e.close()
        assert not problems
        assert not left


def warm(e, doc=None, max_new=4):
    """Computes a document, stores it, and empties the engine's own cache. Slots come
    in the background, so it may take a second offer."""
    doc = DOC if doc is None else doc
    for _ in range(20):
        e.add(doc, max_new)
        e.run()
        e.scheduler.reset_prefix_cache()
        if held(e, doc) == len(doc) // e.chunk:
            e.counts.clear()
            return
        time.sleep(0.05)
    raise AssertionError("the document is not held")


def held(e, doc):
    """Chunks of a document that a lookup would find."""
    q = engine_module.Sequence("probe", doc, 1)
    from kvtier.vllm.keychain import KeyChain
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    r = Request("probe", q.tokens[: q.prompt_len], SamplingParams(max_tokens=1), None)
    chain = KeyChain(r, e.half._roots.root(r, e.half._epoch), e.chunk)
    k = e.half._coordinator
    k.lease(1 << 60, chain.lookup(len(doc) // e.chunk), 0)
    h = k.lease_result(1 << 60, 0, 2.0)
    k.release(1 << 60)
    return h.held


def step_until_loading(e, q, limit=200):
    """Schedules until the load of q is planned; returns what was not executed yet."""
    for _ in range(limit):
        output, todo = e.schedule()
        if q.request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            return output, todo
        e.update(output, e.execute(output, todo))
    raise AssertionError("no load")


def until(e, condition, limit=1000):
    for _ in range(limit):
        if condition():
            return
        e.step()
    raise AssertionError("the condition never holds")


def test_external_load(make):
    e = make()
    warm(e)
    q = e.add(DOC + [5, 6, 7])
    output, todo = step_until_loading(e, q)
    (load,) = output.kv_connector_metadata.loads
    assert (load.first_token, load.tokens, load.chunks, len(load.blocks)) == (0, 576, 9, 36)
    e.update(output, e.execute(output, todo))
    for _ in range(500):
        output = e.step()
        if output.num_scheduled_tokens:
            break
    assert output.num_scheduled_tokens == {q.id: 603 - 576}
    e.run()
    assert e.counts["loads_done"] == 1 and not e.counts["loads_failed"] and not e.counts["errors"]
    assert e.counts["loaded_bytes"] == 576 * 16


def test_full_prompt_hit_computes_one_token(make):
    e = make()
    doc = DOC[:512]
    warm(e, doc)
    q = e.add(doc)
    step_until = 0
    while not (output := e.step()).num_scheduled_tokens:
        step_until += 1
        assert step_until < 500
    assert output.num_scheduled_tokens == {q.id: 1}
    e.run()
    assert e.counts["load_tokens"] == 512


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


def test_load_is_clipped_to_its_range(make):
    """The local hit ends inside a chunk, in pages that another request uses."""
    e = make()
    warm(e)
    sharer = e.add(DOC[:90], max_new=300)
    until(e, lambda: sharer.request.status == RequestStatus.RUNNING)
    q = e.add(DOC)
    output, todo = step_until_loading(e, q)
    (load,) = output.kv_connector_metadata.loads
    assert (load.first_token, load.tokens) == (80, 496), (
        "5 blocks of the engine's own, in the middle of chunk 1"
    )
    result = e.execute(output, todo)
    # What the load would write there is what is there; so put something else.
    shared = e.scheduler.kv_cache_manager.get_block_ids(q.id)[0][:5]
    before = [page[shared].copy() for page in e.pages]
    for page in e.pages:
        page[shared] = 0xDEAD
    wait_for_load(e, q, [result])
    assert all((page[shared] == 0xDEAD).all() for page in e.pages), "pages of the shared prefix were written"
    for page, values in zip(e.pages, before, strict=True):
        page[shared] = values
    e.update(output, result)
    e.run()
    assert e.counts["loads_done"] == 2 and not e.counts["loads_failed"]


def wait_for_load(e, q, results):
    """Polls the worker half alone until it reports q; adds to the last result."""
    kv = results[-1].kv_connector_output
    for _ in range(2000):
        if q.id in (kv.finished_recving or ()):
            return
        got = e.worker.get_transfer_results(set())
        kv.finished_recving = (kv.finished_recving or set()) | got.finished_recving
        kv.invalid_block_ids |= e.worker.get_block_ids_with_load_errors()
        time.sleep(0.001)
    raise AssertionError("the load is not reported")


@pytest.mark.parametrize("bad", [0, 3, 8])
def test_chunk_that_cannot_be_loaded(make, bad):
    """A slot that was used anew meanwhile: its generation differs."""
    e = make(slots=288)
    warm(e)
    q = e.add(DOC)
    output, todo = step_until_loading(e, q)
    (load,) = output.kv_connector_metadata.loads
    code, slot, generation = load.verdicts[bad]
    load.verdicts[bad] = (code, slot, generation + 1)
    result = e.execute(output, todo)
    wait_for_load(e, q, [result])
    assert result.kv_connector_output.invalid_block_ids == set(load.blocks[bad * 4 :])
    e.update(output, result)
    assert e.half._tracked[q.id].limit == bad
    e.run()
    assert e.counts["loads_failed"] == 1 and e.counts["loads"] == 1, "what failed once is not asked for again"
    assert len(q.request.output_token_ids) == 4


def test_load_of_another_session_fails_and_is_reported(make):
    e = make()
    warm(e)
    q = e.add(DOC)
    output, todo = step_until_loading(e, q)
    output.kv_connector_metadata.loads[0].session ^= 1
    e.update(output, e.execute(output, todo))
    e.run()
    assert e.counts["loads_failed"] == 1 and len(q.request.output_token_ids) == 4


def test_begin_without_an_answer_still_travels(make, monkeypatch):
    e = make()
    warm(e)
    monkeypatch.setattr(type(e.half._coordinator), "load_begin", lambda *a: None)
    q = e.add(DOC)
    output, todo = step_until_loading(e, q)
    (load,) = output.kv_connector_metadata.loads
    assert load.verdicts == [] and load.session == 0
    e.update(output, e.execute(output, todo))
    e.run()
    assert (e.counts["loads_unbegun"], e.counts["loads_failed"]) == (1, 1)
    assert len(q.request.output_token_ids) == 4


@pytest.mark.parametrize("when", ["planned", "started", "reported"])
def test_abort_while_loading(make, when):
    e = make()
    warm(e)
    q = e.add(DOC)
    output, todo = step_until_loading(e, q)
    if when == "planned":
        e.abort(q)
        result = e.execute(output, todo)
    else:
        result = e.execute(output, todo)
        if when == "reported":
            wait_for_load(e, q, [result])
        e.abort(q)
    e.update(output, result)
    e.run()
    assert e.counts["loads_done"] == 1
    e.add(DOC)
    e.run()
    assert e.counts["loads_done"] == 2


def test_abort_of_waiting_and_running_requests(make):
    e = make(sequences=1)
    warm(e)
    running, waiting = e.add(document(4, 100), 200), e.add(DOC)
    until(e, lambda: running.request.status == RequestStatus.RUNNING)
    assert waiting.id in e.half._tracked and e.half._tracked[waiting.id].incarnation is not None
    e.abort(waiting)
    e.abort(running)
    e.run()


def test_preempted_request_loads_what_it_lost(make):
    e = make(blocks=66, slots=256)
    one, two = e.add(document(5, 400), 200), e.add(document(6, 400), 200)
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


def test_reset_while_loading(make):
    e = make()
    warm(e)
    q = e.add(DOC)
    output, todo = step_until_loading(e, q)
    e.scheduler.reset_prefix_cache(reset_connector=True)
    e.update(output, e.execute(output, todo))
    e.run()
    assert len(q.request.output_token_ids) == 4


def test_salt_and_tag_separate(make):
    e = make()
    warm(e)
    e.add(DOC, cache_salt="mine")
    e.run()
    assert e.counts["load_tokens"] == 0
    for _ in range(10):
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


def test_small_hits_are_not_loaded(make):
    e = make(extra={"min_load_tokens": 500})
    warm(e)
    e.add(DOC[:520])
    e.run()
    e.scheduler.reset_prefix_cache()
    e.add(DOC[:100] + document(3, 400))
    e.run()
    assert e.counts["load_tokens"] == 512


def test_hit_sources(make, tmp_path):
    e = make(
        extra={"disk_path": str(tmp_path / "d"), "disk_gib": 0.01, "free_floor_gib": 0, "dirty_gib": 0.01},
        recognisable=True,
    )
    warm(e)
    q = e.add(DOC)
    step = step_until_loading(e, q)
    assert e.connector.get_external_cache_hit_sources(q.request, 576) == {CacheHitSource.HOST: 576}
    assert e.connector.get_external_cache_hit_sources(q.request, 0) == {}
    e.update(step[0], e.execute(*step))
    e.run()
    assert e.cache.flush(10)
    e.close()
    again = make(extra=e.extra, recognisable=True)
    q = again.add(DOC)
    step = step_until_loading(again, q)
    assert again.connector.get_external_cache_hit_sources(q.request, 576) == {CacheHitSource.DISK: 576}
    again.update(step[0], again.execute(*step))
    again.run()


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


# ---- what must not hurt the engine


def test_hook_that_fails_is_a_miss(make, monkeypatch):
    e = make()
    warm(e)

    def broken(*a):
        raise RuntimeError("broken on purpose")

    for half, method in ((e.half, "get_num_new_matched_tokens"), (e.half._storing, "step")):
        monkeypatch.setattr(half, method, broken)
        e.counts.clear()
        for _ in range(2):
            e.add(DOC[:50], 1)
            e.run()
        assert e.counts["errors"] >= 2 and not e.half.off
        monkeypatch.undo()
    e.scheduler.reset_prefix_cache()
    e.add(DOC)
    e.run()
    assert e.counts["load_tokens"] == 576, "it recovers"


def test_five_failures_in_a_row_switch_off(make, monkeypatch):
    e = make()
    warm(e)
    q = e.add(DOC)
    step = step_until_loading(e, q)  # a load is in flight

    def broken(*a):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(e.half._storing, "step", broken)
    e.update(step[0], e.execute(*step))
    for _ in range(6):
        e.add(document(77, 70), 1)
    e.run()
    assert e.half.off
    assert len(q.request.output_token_ids) == 4 and e.counts["loads_done"] == 1
    monkeypatch.undo()
    e.scheduler.reset_prefix_cache()
    e.add(DOC)
    e.run()
    assert e.counts["loads_done"] == 1


def test_worker_switched_off_reports_running_loads(make, monkeypatch):
    e = make()
    warm(e)
    q = e.add(DOC)
    output, todo = step_until_loading(e, q)
    result = e.execute(output, todo)

    def broken(*a):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr("kvtier.vllm.worker._Inbox.take", broken)
    if not result.kv_connector_output.finished_recving:
        e.update(output, result)
        for _ in range(5):
            e.step()
        assert e.worker_half.is_off
    else:
        e.update(output, result)
    monkeypatch.undo()
    e.run()
    assert e.counts["loads_done"] == 1 and len(q.request.output_token_ids) == 4


def test_loads_for_a_worker_that_is_off_fail(make):
    e = make()
    warm(e)
    q = e.add(DOC)
    output, todo = step_until_loading(e, q)
    e.worker_half.switch_off("test")
    e.update(output, e.execute(output, todo))
    e.run()
    assert e.counts["loads_failed"] == 1 and len(q.request.output_token_ids) == 4


def test_load_whose_blocks_are_not_known_fails_as_a_whole(make):
    e = make()
    warm(e)
    q = e.add(DOC)
    output, todo = step_until_loading(e, q)
    output.kv_connector_metadata.loads[0].blocks = []
    result = e.execute(output, todo)
    assert result.kv_connector_output.failed_recving == {q.id}
    e.update(output, result)
    e.run()
    assert e.counts["loads"] == 1 and len(q.request.output_token_ids) == 4


def test_wrong_settings(make):
    with pytest.raises(SettingsError, match="nearest one is 'dram_gib'"):
        Engine(extra={"dram_gb": 1})
    e = make(extra={"dram_gb": 1, "required": False})
    e.add(DOC)
    e.run()
    assert e.half.off and e.worker_half.is_off and not e.counts["chunks_offered"]


def test_wrong_library_settings(make, tmp_path):
    import kvtier

    (tmp_path / "file").write_text("")
    bad = {"disk_path": str(tmp_path / "file"), "disk_gib": 1}
    with pytest.raises(kvtier.Error):
        Engine(extra=bad)
    e = make(extra=bad | {"required": False})
    e.add(DOC)
    e.run()
    assert e.half.off and not e.counts["chunks_offered"]


def test_unsupported_topology(make, monkeypatch):
    monkeypatch.setattr("kvtier.vllm.mapping.MAX_RANKS", 0)
    with pytest.raises(mapping.Unsupported, match="1 ranks .* are not supported"):
        Engine()
    e = make(extra={"required": False})
    e.add(DOC)
    e.run()
    assert e.worker_half.is_off and e.half.off, "the handshake tells the scheduler"


def test_handshake_is_compared(make):
    e = make()
    mine = e.worker.get_handshake_metadata()
    for field, value, text in (
        ("group", "vllm:other", "group"),
        ("root", "/elsewhere", "root"),
        ("block_tokens", 32, "block size"),
        ("ranks", 2, "ranks"),
    ):
        other = type(mine)(**(vars(mine) | {field: value}))
        with pytest.raises(ValueError, match=text):
            e.connector.set_xfer_handshake_metadata({0: other})
    assert not e.half.off
    e.connector.set_xfer_handshake_metadata({0: mine})


def test_failure_policy_is_set(make):
    e = make()
    assert e.config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert e.scheduler.recompute_kv_load_failures and not e.connector.requires_kv_delivery
    f = make(extra={"load_failure_policy": "fail"})
    assert not f.scheduler.recompute_kv_load_failures
    warm(f)
    q = f.add(DOC)
    output, todo = step_until_loading(f, q)
    output.kv_connector_metadata.loads[0].session ^= 1
    f.update(output, f.execute(output, todo))
    f.run()
    assert q.request.status == RequestStatus.FINISHED_ERROR


def test_metadata_is_small_and_plain(make):
    import pickle

    e = make()
    warm(e)
    q = e.add(DOC)
    output, todo = step_until_loading(e, q)
    again = pickle.loads(pickle.dumps(output.kv_connector_metadata))
    assert again == output.kv_connector_metadata
    assert json.dumps([again.loads[0].verdicts, again.loads[0].blocks, again.loads[0].op])
    e.update(output, e.execute(output, todo))
    e.run()
    empty = SchedulerOutput.make_empty()
    assert len(pickle.dumps(e.connector.build_connector_meta(empty))) < 200


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


def test_request_that_nobody_announced(make):
    """For instance one that was added while the connector was failing."""
    e = make()
    q = e.add(DOC)
    e.half._end_incarnation(e.half._tracked.pop(q.id))
    e.run()
    assert len(q.request.output_token_ids) == 4 and not e.counts["errors"]


def test_busy_leases_are_misses(make, monkeypatch):
    e = make()
    warm(e)
    monkeypatch.setattr(type(e.half._coordinator), "lease", lambda *a: False)
    e.add(DOC)
    e.run()
    assert e.counts["load_tokens"] == 0 and not e.counts["errors"]
    monkeypatch.undo()
    e.scheduler.reset_prefix_cache()
    e.add(DOC)
    e.run()
    assert e.counts["load_tokens"] == 576


def test_lost_replies_end_the_wait(make, monkeypatch):
    e = make(extra={"lookup_wait_s": 0.2})
    warm(e)
    monkeypatch.setattr(type(e.half._coordinator), "lease_result", lambda *a: None)
    begin = time.monotonic()
    e.add(DOC)
    e.run()
    assert 0.15 < time.monotonic() - begin < 20
    assert e.counts["wait_timeouts"] >= 1 and e.counts["load_tokens"] == 0


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
    # Completions of both come through one cache.
    for _ in range(500):
        a.step()
        b.step()
        if qa.request.is_finished() and qb.request.is_finished():
            break
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
