"""What must not hurt the engine: a half that fails or is off, settings and ranks that do
not fit, a leader that does not answer."""

import time

import pytest
from engine import Engine
from situations import DOC, document, step_until_loading, warm

import kvtier
from kvtier.vllm import mapping
from kvtier.vllm.settings import SettingsError


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


def test_wrong_settings(make):
    with pytest.raises(SettingsError, match="nearest one is 'dram_gib'"):
        Engine(extra={"dram_gb": 1})
    e = make(extra={"dram_gb": 1, "required": False})
    e.add(DOC)
    e.run()
    assert e.half.off and e.worker_half.is_off and not e.counts["chunks_offered"]


def test_wrong_library_settings(make, tmp_path):
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
