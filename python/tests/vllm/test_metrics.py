"""Statistics on their whole way: counted in the halves, added up by vLLM, shown in its
log line and by its Prometheus logger."""

import re
from pathlib import Path

import pytest
from engine import Engine
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from sink import Sink
from situations import DOC, document, step_until_loading, warm
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.v1.metrics.loggers import LoggingStatLogger, PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from kvtier.vllm import leaderwatch, metrics
from kvtier.vllm.stats import COUNTERS, FAMILIES, STATE, KVTierStats

LABELS = ["model_name", "engine"]


def value(name, **labels):
    """A sample of the real registry; None when there is no such series."""
    return REGISTRY.get_sample_value(name, {"model_name": "m", "engine": "0"} | labels)


def prom(e, engines=(0,)):
    return KVConnectorProm(e.config, LABELS, {i: ["m", str(i)] for i in engines})


@pytest.fixture
def disk(tmp_path):
    return {"disk_path": str(tmp_path / "kv"), "disk_gib": 0.01, "free_floor_gib": 0, "dirty_gib": 0.01}


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(leaderwatch, "ASK_S", 0.02)
    monkeypatch.setattr(leaderwatch.LeaderWatch.__init__, "__defaults__", (0.02,))
    engines = []

    def build(**kw):
        engines.append(Engine(**kw))
        return engines[-1]

    yield build
    for e in engines:
        e.close()


@pytest.mark.parametrize("multi", [False, True])
def test_figures_reach_prometheus(make, disk, multi):
    e = make(extra=disk, recognisable=True, multi=multi)
    warm(e)
    sink, shown = Sink(e), prom(e)
    e.add(DOC)
    e.add(document(7, 600))
    e.run()
    sink.until(e, "now/disk_used_bytes")
    sink.until(e, "disk_bytes/written")
    for data in sink.sent:
        shown.observe(data, 0)
    assert value("kvtier_hits_total") == 1 and value("kvtier_hit_tokens_total") == 576
    assert value("kvtier_tier_tokens_total", tier="dram") == 576
    assert value("kvtier_tier_tokens_total", tier="disk") is None, "nothing came from there"
    assert value("kvtier_tier_bytes_total", tier="dram") == 576 * 64
    assert value("kvtier_loaded_bytes_total") == 576 * 16
    assert value("kvtier_chunks_granted_total") == 9
    assert value("kvtier_lookup_wait_seconds_count") == value("kvtier_lookups_total") > 0
    assert value("kvtier_disk_bytes_total", direction="written") > 0
    assert value("kvtier_disk_used_bytes") > 0
    assert value("kvtier_disk_cap_bytes") == pytest.approx(0.01 * 2**30, abs=1)
    assert value("kvtier_dram_cap_bytes") >= value("kvtier_dram_bytes") > 0
    assert value("kvtier_disk_state", state="on") == 1 and value("kvtier_disk_state", state="off") == 0
    assert value("kvtier_off") in (None, 0)


def test_tokens_from_disk_and_damage_have_a_cause(make, disk):
    e = make(extra=disk, recognisable=True)
    warm(e)
    assert e.cache.flush(30)
    e.close()
    files = sorted(Path(disk["disk_path"]).rglob("*.kvc"))
    for f in files:
        content = bytearray(f.read_bytes())
        if int.from_bytes(content[-4096 + 100 : -4096 + 104], "little") == 8:  # the last chunk
            content[0] ^= 1
            f.write_bytes(content)
    e = make(extra=disk, recognisable=True)
    sink, shown = Sink(e), prom(e)
    e.add(DOC)
    e.run()
    sink.until(e, "disk_corrupt/payload")
    for data in sink.sent:
        shown.observe(data, 0)
    assert value("kvtier_tier_tokens_total", tier="disk") in (512, 576)
    assert value("kvtier_disk_corrupt_total", cause="payload") == 1
    assert value("kvtier_disk_misses_total", cause="corrupt") >= 1
    failed = value("kvtier_load_failures_total", cause="missing")
    assert (failed == 1) == (value("kvtier_tier_tokens_total", tier="disk") == 576)


def test_failed_loads_say_why(make):
    e = make()
    warm(e)
    sink, shown = Sink(e), prom(e)
    output, todo = step_until_loading(e, e.add(DOC))
    output.kv_connector_metadata.loads[0].session ^= 1
    e.update(output, e.execute(output, todo))
    e.run()
    e.scheduler.reset_prefix_cache()
    output, todo = step_until_loading(e, e.add(DOC))
    output.kv_connector_metadata.loads[0].verdicts = []
    e.update(output, e.execute(output, todo))
    e.run()
    for data in sink.sent:
        shown.observe(data, 0)
    assert value("kvtier_load_failures_total", cause="stale") == 1
    assert value("kvtier_load_failures_total", cause="unbegun") == 1
    assert value("kvtier_loads_failed_total") == 2


def test_several_engines_and_a_second_logger(make):
    e = make()
    first = prom(e, (0, 1))
    first.observe({"hits": 3, "disk_dropped/room": 2, "now/leases": 7}, 0)
    first.observe({"hits": 4, "now/disk_state": 4}, 1)
    assert value("kvtier_hits_total") == 3 and value("kvtier_hits_total", engine="1") == 4
    assert value("kvtier_disk_dropped_total", cause="room") == 2
    assert value("kvtier_disk_dropped_total", cause="room", engine="1") is None
    assert value("kvtier_leases") == 7
    assert value("kvtier_disk_state", engine="1", state="off") == 1
    # A second engine object in this process: its metrics take the place of the first's.
    second = prom(e)
    second.observe({"hits": 1}, 0)
    assert value("kvtier_hits_total") == 1 and value("kvtier_hits_total", engine="1") is None


def test_metrics_never_raise(make, caplog):
    e = make()
    shown = prom(e)
    with caplog.at_level("WARNING", logger="vllm.kvtier"):
        for odd in ({"hits": "x"}, {"hits": -1}, {"lookup_wait/x": 1}, {"unknown": 1, "no/such": 2}):
            shown.observe(odd, 0)
        shown.observe({"hits": 1}, 5)  # an engine that nobody has named
        types = {Gauge: None, Counter: None, Histogram: None}
        assert isinstance(metrics.build(e.config, types, LABELS, {0: ["m", "0"]}), metrics.NoPromMetrics)
    assert "there are no metrics" in caplog.text
    shown = prom(e)
    shown.observe({"hits": 2}, 0)
    assert value("kvtier_hits_total") == 2


@pytest.mark.parametrize("multi", [False, True])
def test_vllms_own_loggers(make, multi, caplog):
    """The objects that an API server has, with what an engine core sends them."""
    e = make(multi=multi)
    warm(e)
    sink = Sink(e)
    e.add(DOC)
    e.run()
    prometheus = PrometheusStatLogger(e.config, [0])
    logging_ = LoggingStatLogger(e.config, 0)
    for data in sink.sent:
        stats = SchedulerStats(kv_connector_stats=data)
        for each in (prometheus, logging_):
            each.record(stats, IterationStats(), engine_idx=0)
    text = generate_latest(REGISTRY).decode()
    assert re.search(r'kvtier_hit_tokens_total\{engine="0",model_name="[^"]+"\} 576\.0', text)
    lines = []
    logging_.kv_connector_logging.log(log_fn=lambda f, *a: lines.append(f % a))
    (line,) = lines
    assert line.startswith("KV Transfer metrics: ")
    for part in ("96.0% of 600 tokens", "tokens from DRAM", "576", "chunks held already"):
        assert part in line, line


def test_log_line_is_readable(make):
    e = make()
    log = KVConnectorLogging(e.config.kv_transfer_config)
    log.observe({"lookups": 4, "lookup_tokens": 4000, "hit_tokens": 4000, "loaded_tokens": 1000, "tier_tokens/dram": 768, "loads": 2})
    log.observe({"tier_tokens/disk": 232, "chunks_granted": 12, "load_failures/late": 1, "loads_failed": 1})
    log.observe({"disk_corrupt/payload": 2, "now/disk_state": 2, "now/disk_used_bytes": 3 << 29})
    log.observe({"now/disk_state": 4, "now/disk_cap_bytes": 2 << 30, "lookup_wait/0.01": 3})
    lines = []
    log.log(log_fn=lambda f, *a: lines.append(f % a))
    assert lines == [
        "KV Transfer metrics: kvtier hit rate=25.0% of 4000 tokens, kvtier tokens from DRAM=768, "
        "kvtier tokens from disk=232, kvtier chunks stored=12, kvtier failures=(1 loads failed, "
        "2 corrupt payload, 1 load late), kvtier disk=1.50 of 2.00 GiB (off)"
    ]
    log.log(log_fn=lambda f, *a: lines.append(f % a))
    assert len(lines) == 1, "nothing new"


def test_leader_of_another_process_is_not_counted_from_its_beginning():
    watch = object.__new__(leaderwatch.LeaderWatch)  # without its thread
    watch._reported, stats = None, KVTierStats()
    watch._newest = ({"disk_bytes/read": 100}, {"leases": 1}, "s", False)
    watch.report(stats)
    assert stats.counters() == {} and stats.now == {"leases": 1}
    watch._newest = ({"disk_bytes/read": 130}, {"leases": 2}, "s", False)
    watch.report(stats)
    watch.report(stats)
    assert stats.counters() == {"disk_bytes/read": 30} and stats.now == {"leases": 2}
    watch._newest = ({"disk_bytes/read": 5}, {}, "t", True)  # a new leader, which is this process
    watch.report(stats)
    assert stats.counters() == {"disk_bytes/read": 35}


def test_documentation_lists_every_metric():
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    listed = dict(re.findall(r"^\| `(kvtier_\w+)` \|(?: `\w+` \|)? (.+) \|$", page, re.MULTILINE))
    assert listed == metrics.names()
    labels = dict(re.findall(r"^\| `kvtier_(\w+)_total` \| `(\w+)` \|", page, re.MULTILINE))
    assert labels == {name: label for name, (label, _) in FAMILIES.items()}
    assert not set(COUNTERS) & set(FAMILIES) and not set(STATE) & set(COUNTERS)
