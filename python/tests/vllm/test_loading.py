"""Loads under vLLM's real scheduler, over the real library: which tokens, into which
pages, and what follows when one fails or its request ends before."""

import json
import pickle

import pytest
from situations import (
    DOC,
    attempts,
    document,
    held,
    step_until_computing,
    step_until_loading,
    until,
    wait_for_load,
    warm,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus


def test_external_load(make):
    e = make()
    warm(e)
    q = e.add(DOC + [5, 6, 7])
    output, todo = step_until_loading(e, q)
    (load,) = output.kv_connector_metadata.loads
    assert (load.first_token, load.tokens, load.chunks, len(load.blocks)) == (0, 576, 9, 36)
    e.update(output, e.execute(output, todo))
    assert step_until_computing(e).num_scheduled_tokens == {q.id: 603 - 576}
    e.run()
    assert e.counts["loads_done"] == 1 and not e.counts["loads_failed"] and not e.counts["errors"]
    assert e.counts["loaded_bytes"] == 576 * 16


def test_full_prompt_hit_computes_one_token(make):
    e = make()
    doc = DOC[:512]
    warm(e, doc)
    q = e.add(doc)
    assert step_until_computing(e).num_scheduled_tokens == {q.id: 1}
    e.run()
    assert e.counts["load_tokens"] == 512


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
    wait_for_load(e, q, result)
    assert all((page[shared] == 0xDEAD).all() for page in e.pages), "pages of the shared prefix were written"
    for page, values in zip(e.pages, before, strict=True):
        page[shared] = values
    e.update(output, result)
    e.run()
    assert e.counts["loads_done"] == 2 and not e.counts["loads_failed"]


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


def test_what_was_stored_while_a_request_waited_does_not_come_from_disk(make, tmp_path):
    e = make(
        extra={"disk_path": str(tmp_path / "d"), "disk_gib": 0.01, "free_floor_gib": 0, "dirty_gib": 0.01},
        recognisable=True,
        sequences=1,
    )
    warm(e, document(7, 600))  # there are slots
    first, q = e.add(DOC), e.add(DOC + [5])  # who asks at its arrival, and finds nothing
    until(e, lambda: first.request.is_finished())
    for _ in attempts():
        if held(e, DOC) == 9:
            break
    assert e.scheduler.reset_prefix_cache()
    step = step_until_loading(e, q)
    assert e.connector.get_external_cache_hit_sources(q.request, 576) == {CacheHitSource.HOST: 576}
    e.update(step[0], e.execute(*step))
    e.run()
    assert e.counts["tier_tokens/dram"] == 576 and not e.counts["tier_tokens/disk"]


def test_metadata_is_small_and_plain(make):
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
    wait_for_load(e, q, result)
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
    for name in ("load_tokens", "loaded_tokens", "tier_tokens/dram", "tier_bytes/dram"):
        assert not e.counts[name], name


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
            wait_for_load(e, q, result)
        e.abort(q)
    e.update(output, result)
    e.run()
    assert e.counts["loads_done"] == 1
    e.add(DOC)
    e.run()
    assert e.counts["loads_done"] == 2


def test_reset_while_loading(make):
    e = make()
    warm(e)
    q = e.add(DOC)
    output, todo = step_until_loading(e, q)
    e.scheduler.reset_prefix_cache(reset_connector=True)
    e.update(output, e.execute(output, todo))
    e.run()
    assert len(q.request.output_token_ids) == 4
