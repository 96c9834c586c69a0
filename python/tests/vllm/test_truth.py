"""What the cache says of itself: the line at start, and why it is never hit."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine import Engine, slot_bytes
from situations import DOC, document

import kvtier
from kvtier.vllm import announcement, diagnosis


@pytest.fixture
def make(monkeypatch):
    """Engines that warn after 30 chunks."""
    monkeypatch.setattr(diagnosis.Diagnosis.__init__, "__defaults__", (30,))
    engines = []

    def build(**kw):
        engines.append(Engine(**kw))
        return engines[-1]

    yield build
    for e in engines:
        e.close()


def ask(e, doc, **kw):
    """One request alone, with nothing in the engine's own cache."""
    e.add(doc, 1, **kw)
    e.run()
    e.scheduler.reset_prefix_cache()


def warnings(caplog):
    return [m for m in caplog.messages if "chunks were stored since" in m]


def verdict(make, caplog, requests, count=40, **kw):
    """The warning after requests(engine, n) for many n."""
    e = make(slots=kw.pop("slots", 400), **kw)
    with caplog.at_level("WARNING", logger="vllm.kvtier"):
        for n in range(count):
            requests(e, n)
    assert not e.counts["errors"]
    return warnings(caplog)


def test_prompts_that_share_nothing(make, caplog):
    first, second, *_ = verdict(make, caplog, lambda e, n: ask(e, document(n, 200)))
    assert "30 chunks were stored since a prefix was last loaded" in first
    assert "no two of 10 prompts began with the same 64 tokens" in first
    assert "60 chunks" in second, "not again before twice as many"


def test_another_salt_every_time(make, caplog):
    line, *_ = verdict(make, caplog, lambda e, n: ask(e, DOC[:200], cache_salt=f"user {n}"), 20)
    assert "9 of 10 requests began with the tokens of an earlier one but under another cache salt" in line


def test_chunks_longer_than_what_is_shared(make, caplog):
    requests = lambda e, n: ask(e, DOC[:100] + document(n, 300))
    line, *_ = verdict(make, caplog, requests, 40, chunk=256, slots=100)
    assert "shared the first 64 tokens with an earlier one but not the first 256: lower chunk_tokens" in line


def test_least_load_too_large(make, caplog):
    requests = lambda e, n: ask(e, DOC[:128] + document(n, 200))
    line, *_ = verdict(make, caplog, requests, 20, extra={"min_load_tokens": 200})
    assert "found a prefix of less than 200 tokens" in line and "lower min_load_tokens" in line


def test_evicted_before_they_come_back(make, caplog):
    documents = [document(n, 200) for n in range(12)]
    requests = lambda e, n: ask(e, documents[n % 12])
    lines = verdict(make, caplog, requests, 40, slots=16)
    assert "came back for a prefix that was not held any more; 1024 tokens fit in DRAM and disk" in lines[-1]
    assert "raise dram_gib or disk_gib" in lines[-1]


def test_not_there_though_there_is_room(make, caplog, monkeypatch):
    """More room would not help."""
    monkeypatch.setattr(kvtier.Rank, "store", lambda *a: True)  # grants that nobody fills
    lines = verdict(make, caplog, lambda e, n: ask(e, DOC[:128] + document(n, 200)), 20)
    assert "came back for a prefix that was not held, though 25600 tokens fit in DRAM and disk" in lines[-1]
    assert "raise" not in lines[-1]


def test_requests_that_ask_not_to_load(make, caplog):
    no = {"extra_args": {"kv_transfer_params": {"kvtier": {"load": False}}}}
    documents = [document(n, 200) for n in range(12)]
    requests = lambda e, n: ask(e, documents[n % 12], sampling=dict(no))
    lines = verdict(make, caplog, requests, 40, slots=16)
    assert "asked not to load it" in lines[-1]


def test_what_the_engine_has_itself_is_no_reason_to_warn(make, caplog):
    """All that comes back is served by vLLM's own prefix cache."""

    def requests(e, n):
        e.add(DOC[:128] + document(n, 100), 1)
        e.run()

    assert verdict(make, caplog, requests, 60, blocks=1200) == []


def test_a_hit_ends_it(make, caplog):
    def requests(e, n):
        ask(e, DOC[:128] + document(n, 200))

    assert verdict(make, caplog, requests, 40) == []


def test_loads_that_fail_are_no_hits(make, caplog, monkeypatch):
    """The lookups promise, but nothing ever comes back."""
    monkeypatch.setattr(kvtier.Coordinator, "load_begin", lambda *a: None)
    lines = verdict(make, caplog, lambda e, n: ask(e, DOC[:128] + document(n, 200)), 40)
    assert lines and "loads were begun and all of them failed" in lines[-1]


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(diagnosis, "MEMORY", 3)
    r = diagnosis.Recent()
    assert [r.seen(x) for x in (1, 2, 1, 3, 4, 1, 2)] == [False, False, True, False, False, True, False]
    assert len(r._seen) == 3


def test_start_line(make, caplog, tmp_path):
    extra = {"disk_path": str(tmp_path / "kv"), "disk_gib": 0.01, "free_floor_gib": 0, "min_load_tokens": 128}
    with caplog.at_level("INFO", logger="vllm.kvtier"):
        e = make(extra=extra, recognisable=True)
    (line,) = [m for m in caplog.messages if "bytes a token" in m]
    on_disk = int(0.01 * 2**30) // (slot_bytes(64) + 4096) * 64
    for part in (
        f"kvtier: leader (leads {tmp_path / 'kv'}): ",
        "deepseek (weights ",
        f"namespace {e.half._roots.fingerprint.hex()[:16]}, 16 bytes a token, chunks of 64 tokens",
        f"4096 tokens fit in 0.000244 GiB of DRAM, {on_disk} tokens on 0.01 GiB of disk",
        "TP 1, PP 1, DCP 1, blocks of 16 tokens",
        "loads from 128 tokens on, lookups wait at most 2 s",
    ):
        assert part in line, line
    assert announcement.capacity(e.half._coordinator.ready(1)) == on_disk, "what is in DRAM is on disk as well"


def test_start_line_of_a_member(make, caplog, tmp_path):
    settings = {"name": "announced", "runtime_dir": str(tmp_path), "dram_gib": 64 * slot_bytes(64) / (1 << 30)}
    with kvtier.Cache.open(settings | {"role": "leader"}) as other:
        assert other.wait_open(60)
        with caplog.at_level("INFO", logger="vllm.kvtier"):
            # The same process: it shares the leader, and says so.
            make(extra=settings | {"role": "member"})
    assert any("bytes a token" in m and "leads" in m for m in caplog.messages)


def test_self_test_that_comes_to_no_end_is_repeated(make, caplog, monkeypatch):
    """One warning, and another one in the background, which sees what is wrong."""
    monkeypatch.setattr("kvtier.vllm.worker.RETRY_S", 0.01)
    tries = []

    def selftest(rank, pages, timeout_s):
        tries.append(pages)
        raise kvtier.Timeout(0, "not all came") if len(tries) < 3 else kvtier.SelfTestFailed(0, "byte 23")

    monkeypatch.setattr(kvtier.Rank, "selftest", selftest)
    with caplog.at_level("INFO", logger="vllm.kvtier"):
        e = make()
        assert _until(lambda: len(tries) == 3)
    assert tries == [True, False, False], "the pages are in use by then"
    (warning,) = [r for r in caplog.records if r.levelname == "WARNING" and r.name == "vllm.kvtier"]
    assert "self-test of all ranks did not end within 5 s and is repeated" in warning.getMessage()
    e.add(DOC)
    e.run()
    assert e.worker._half.is_off and any("byte 23" in m for m in caplog.messages)


MEMBER = """
import json, sys, kvtier
cache = kvtier.Cache.open(json.loads(sys.argv[1]))
blob = cache.blob("m", 4096, 16)
blob.ready(60)
print("ready", flush=True)
sys.stdin.read()
cache.close()
"""


@pytest.mark.parametrize("orderly", [True, False])
def test_only_a_rank_that_died_is_worth_a_warning(tmp_path, orderly):
    import json
    import os

    settings = {"name": "leaving", "runtime_dir": str(tmp_path), "dram_gib": 0.01}
    with kvtier.Cache.open(settings | {"role": "leader"}) as leader:
        assert leader.wait_open(60)
        member = subprocess.Popen(
            [sys.executable, "-c", MEMBER, json.dumps(settings | {"role": "member"})],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )  # fmt: skip
        try:
            assert member.stdout.readline() == "ready\n"
            if not orderly:
                member.kill()
        finally:
            member.communicate()
        records = []
        end = time.monotonic() + 60
        ends = []
        while not ends and time.monotonic() < end:
            records += leader.records()
            ends = [r for r in records if "a rank has left" in r.text or "lost a rank" in r.text]
            time.sleep(0.01)
    (record,) = ends
    assert record.level == (1 if orderly else 2), record
    assert ("has left" if orderly else "lost a rank") in record.text


def test_records_say_how_many_were_lost(tmp_path):
    """1024 wait at most; the one after a gap has its length."""
    settings = {"name": "chatty", "runtime_dir": str(tmp_path), "dram_gib": 0.01, "log_level": "info"}
    with kvtier.Cache.open(settings) as cache:
        assert cache.wait_open(60)
        for _ in range(700):
            # Two records each: accepted and left.
            with cache.blob("m", 4096, 16) as blob:
                blob.ready(60)
        assert _until(lambda: cache.stats()["process"]["records_dropped"] > 300)
        first, *rest = cache.records(2000)
        dropped = cache.stats()["process"]["records_dropped"]
    assert first.dropped > 300 and first.dropped + sum(r.dropped for r in rest) == dropped


def _until(condition, limit_s=60):
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()
