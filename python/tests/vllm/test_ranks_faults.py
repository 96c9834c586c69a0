"""Engines of several ranks in trouble: ranks that are stopped or killed, loads that
fail at different places, halves that disagree, pages that are not where a rank says."""

from __future__ import annotations

import logging
import signal
import time
from dataclasses import replace

import cluster
import pytest
from cluster import Cluster
from rank_process import FILL
from rank_situations import serve, step_until, until, warm
from situations import document
from topology import DRAFTED, LATENT, Topology

import kvtier

pytestmark = pytest.mark.usefixtures("rank_server")

DOC = document(1, 900)
CHUNK = 64
TWO = Topology(2, 2, 1)
SHORT = {"part_deadline_s": 1, "part_first_done_deadline_s": 1}


@pytest.fixture
def live(tmp_path):
    """Engines on one root in memory of their own; each ends without anything wrong."""
    running = []

    def run(kind=LATENT, topology=TWO, **kw):
        extra = {"disk_path": str(tmp_path / "kv"), "disk_gib": 1, "free_floor_gib": 0} | kw.pop("extra", {})
        c = Cluster(kind, topology, extra, home=tmp_path, **kw)
        running.append(c)
        return c

    yield run
    for c in running:
        c.close()


def groups(stats):
    return (stats["leader"] or {}).get("groups") or []


def test_a_stopped_rank_misses_the_deadline_of_a_store(live):
    """Nothing partial becomes visible, and the slot waits for the slow rank."""
    c = live(extra=SHORT)
    q = c.add(DOC[:400])
    step = step_until(c, lambda m: m.stores)
    c.ranks[1].signal(signal.SIGSTOP)
    c.send(step)
    c.take(0)

    def states():
        (n,) = c.ranks[0].call("stats")["leader"]["namespaces"]
        return {k.lower(): v for k, v in n["slots"].items()}

    until(lambda: states().get("draining"), "giving the chunks up")
    assert not states().get("ready") and not states().get("sealing")
    c.ranks[1].signal(signal.SIGCONT)
    c.collect(step)
    c.run()
    assert not c.problems and len(q.request.output_token_ids) == 2
    assert not c.settled(), "every slot is free or holds a whole chunk"
    c.forget()
    warm(c, DOC[:400])
    assert serve(c, DOC[:400]) == 384
    assert not c.counts["loads_failed"] and not c.counts["errors"]


def test_a_rank_is_stopped_during_a_load(live):
    c = live()
    warm(c, DOC[:600])
    q = c.add(DOC[:600])
    step = step_until(c, lambda m: m.loads)
    c.ranks[1].signal(signal.SIGSTOP)
    c.send(step)
    c.take(0)
    time.sleep(0.3)
    c.ranks[1].signal(signal.SIGCONT)
    c.collect(step)
    c.run()
    assert not c.problems and len(q.request.output_token_ids) == 2
    assert c.counts["loads_done"] == 2 and not c.counts["loads_failed"]
    assert not c.settled()


@pytest.mark.parametrize("when", ["store", "load"])
def test_a_rank_is_killed(live, tmp_path, when):
    """Its engine ends, as vLLM does; the leader lives on and serves the next one."""
    root = {"disk_path": str(tmp_path / "kv"), "disk_gib": 1, "free_floor_gib": 0, "dram_gib": 0.0625}
    with kvtier.Cache.open(root | {"role": "leader"}) as leader:
        assert leader.wait_open(30)
        c = live(extra={"role": "member"})
        if when == "load":
            warm(c, DOC[:600])
        c.add(DOC[:600])
        step = step_until(c, lambda m: m.loads if when == "load" else m.stores)
        c.ranks[1].signal(signal.SIGSTOP)
        c.send(step)
        c.take(0)
        c.ranks[1].signal(signal.SIGKILL)
        with pytest.raises(cluster.RankDied):
            c.collect(step)
        c.close()
        until(lambda: not groups(leader.stats()), "the end of the group")
        left = cluster.library_leftovers(leader.stats())
        assert not left, left
        with live(extra={"role": "member"}, topology=Topology(1)) as d:
            # Of a killed store nothing is to be seen, of a killed load all is there.
            assert serve(d, DOC[:600]) == (576 if when == "load" else 0)
            warm(d, DOC[:600])
            assert serve(d, DOC[:600]) == 576
            assert not d.settled()


def test_the_lowest_failed_block_wins(live):
    """Ranks end at different chunks; what lies beyond is overwritten in their pages."""
    c = live()
    warm(c, DOC[:600])
    for at, expected in (((5, 3), 3), ((2, 7), 2), ((9, 4), 4), ((0, 9), 0)):
        for r, chunks in zip(c.ranks, at, strict=True):
            if chunks < 9:
                r.call("fail_at", chunks)
        q = c.add(DOC[:600])
        step = step_until(c, lambda m: m.loads)
        c.send(step)
        c.collect(step)
        while not (output := c.step()).num_scheduled_tokens:
            time.sleep(0.001)
        span = c.span
        assert output.num_scheduled_tokens[q.id] == 600 - expected * CHUNK // span * span
        c.run()
        assert not c.problems and len(q.request.output_token_ids) == 2
        c.forget()
    assert c.counts["loads_done"] == 8 and c.counts["loads_failed"] == 6
    assert not c.settled()


def test_a_damaged_chunk_is_the_same_for_all_ranks(live, tmp_path):
    """The prefix is larger than what may be pinned, so the damage is met when the load
    is under way."""
    with live() as c:
        warm(c, DOC)
    files = sorted(tmp_path.glob("kv/*@*/??/*.kvc"))
    assert len(files) == len(DOC) // CHUNK
    for f in files:
        content = bytearray(f.read_bytes())
        if int.from_bytes(content[-4096 + 100 : -4096 + 104], "little") == 10:
            content[12345] ^= 1
            f.write_bytes(content)
    slot = 9.5 * (CHUNK * 2304 + 4096)
    c = live(topology=Topology(4, 4, 4), extra={"dram_gib": 2 * slot / (1 << 30)})
    q = c.add(DOC)
    c.run()
    assert not c.problems and len(q.request.output_token_ids) == 2
    failed = c.counts["loads_failed"]
    assert failed in (0, 4), "all ranks or none"
    assert c.counts["load_tokens"] >= 640
    assert not c.settled()


def test_the_interleave_of_the_workers_counts(live, caplog):
    """vLLM applies the older name of the setting in the workers only."""

    def older_name(config):
        config.parallel_config.dcp_kv_cache_interleave_size = 16

    logging.getLogger("vllm.kvtier").propagate = True
    with caplog.at_level("WARNING", logger="vllm.kvtier"), live(adjust=older_name) as c:
        assert any("workers interleave by 16 tokens, the scheduler is configured for 1" in m for m in caplog.messages)
        assert {h.interleave for h in c.handshakes} == {16}
        warm(c, DOC[:600])
        assert serve(c, DOC[:600]) == 576
    with live(topology=Topology(2, 2, 4)) as c:
        assert serve(c, DOC[:600]) == 576


def test_a_scheduler_with_other_blocks_stays_out(live, caplog):
    def twice(config, kv):
        group = kv.kv_cache_groups[0]
        group.kv_cache_spec = replace(group.kv_cache_spec, block_size=32)
        config.cache_config.block_size = 32

    with live() as c:
        warm(c, DOC[:600])
    with caplog.at_level("ERROR", logger="vllm.kvtier"), live(scheduler_adjust=twice, extra={"required": False}) as c:
        assert c.half.off
        (line,) = [m for m in caplog.messages if "the cache is off" in m]
        assert "blocks of 16 tokens on 2 ranks, the scheduler has 32 on 2" in line
        c.add(DOC[:600])
        output, _, _ = c.schedule()
        assert output.num_scheduled_tokens and not output.kv_connector_metadata.loads
        assert not output.kv_connector_metadata.stores


def test_a_worker_that_is_missing_is_named(live):
    c = live()
    with pytest.raises(ValueError, match=r"2 workers are expected, those of ranks \[1\] are here"):
        c.half.check_handshake(c.handshakes[1:])


@pytest.mark.parametrize("blunder", ["base", "stride"])
def test_pages_that_are_elsewhere_are_found_before_the_first_request(live, caplog, blunder):
    with caplog.at_level("ERROR", logger="vllm.kvtier"):
        c = live(jobs={1: {"blunder": blunder}}, extra={"required": False})
    # The leader lives in rank 0 and ends at once, perhaps before rank 1 has heard of it.
    offs = [h.off for h in c.handshakes if h.off]
    assert c.handshakes[0].off and all("SelfTestFailed" in off and "rank 1" in off for off in offs), offs
    assert c.half.off
    (line,) = [m for m in caplog.messages if "the cache is off for this engine" in m]
    assert "does not take part" in line
    assert c.restored == [True, True], "pages are as they were"
    q = c.add(DOC[:300])
    c.run()
    assert not c.problems and len(q.request.output_token_ids) == 2
    with pytest.raises(Exception, match="rank 1"):
        live(jobs={1: {"blunder": blunder}})


LATE = {0: {"patience_s": 0.05}, 1: {"late_s": 1.0}}


def test_a_group_that_is_accepted_late_is_tested_all_the_same(live):
    c = live(jobs=LATE)
    assert not any(h.off for h in c.handshakes)
    until(lambda: c.ranks[0].call("stats")["leader"]["self_tests"]["passed"], "the self-test")
    warm(c, DOC[:300])
    assert serve(c, DOC[:300]) == 256
    assert not c.counts["loads_failed"] and not c.settled()


def test_a_late_self_test_switches_off(live):
    c = live(jobs={**LATE, 1: LATE[1] | {"blunder": "base"}}, extra={"required": False})
    assert "SelfTestFailed" in c.handshakes[1].off and not c.handshakes[0].off
    assert c.half.off
    q = c.add(DOC[:300])
    c.run()
    until(lambda: c.step() and c.ranks[0].call("state")[0] == "closed", "rank 0 switching off")
    assert "rank 1" in c.ranks[0].call("state")[1]
    assert not c.problems and len(q.request.output_token_ids) == 2


def test_the_oracle_notices_a_wrong_interleave(live):
    """What no self-test can find, since storing and loading are wrong in the same way."""
    with live(topology=Topology(2, 2, 16)) as c:
        warm(c, DOC[:300])
    c = live(topology=Topology(2, 2, 16), jobs=dict.fromkeys((0, 1), {"blunder": "interleave"}))
    c.add(DOC[:300])
    c.run()
    assert c.counts["load_tokens"] == 256 and len(c.problems) > 1
    assert "is wrong" in c.problems[0]


def test_the_self_test_restores_all_pages(live):
    for topology in (TWO, Topology(1), Topology(4, 2, 4)):
        with live(topology=topology) as c:
            assert all(c.restored) and FILL
            assert not any(h.off for h in c.handshakes)
            assert not c.settled()


def test_draft_rows_depend_on_the_next_token(live):
    """Equal up to a chunk's border, then different: a draft layer's last row differs."""
    with live(DRAFTED, Topology(2)) as c:
        prompts = [DOC[:192] + [7 + i] + document(50 + i, 60) for i in range(2)]
        warm(c, prompts[0])
        assert serve(c, prompts[1]) == 128, "the third chunk is of another next token"
        assert serve(c, prompts[0]) == 192
        # Without a next token a chunk has no key.
        assert serve(c, DOC[:192]) == 128
    with live(DRAFTED, Topology(4, 2, 1)) as c:
        assert serve(c, prompts[1]) == 192
        assert not c.counts["loads_failed"] and not c.counts["errors"] and not c.settled()
    with pytest.raises(Exception, match="needs an interleave of 1, not 16"):
        live(DRAFTED, Topology(4, 2, 16))
