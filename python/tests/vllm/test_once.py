"""Every load is reported once by its rank, nobody else is reported, and what failed once
is not tried for ever. vLLM asserts that it knows every request that is reported."""

import dataclasses
import os
import random
from collections import Counter

import pytest
from situations import DOC, attempts, document, held, step_until_loading, warm
from vllm.v1.request import RequestStatus

import kvtier

SEED = int(os.environ.get("KVTIER_ONCE_SEED", random.SystemRandom().randrange(1 << 30)))


class Reports:
    """Planned and reported loads of an engine, by operation and by request."""

    def __init__(self, e) -> None:
        self.planned: dict[int, str] = {}
        self.ended: Counter[int] = Counter()
        self.requests: Counter[str] = Counter()
        report, results = e.worker_half._report, e.worker.get_transfer_results

        def watched_report(op, *how):
            self.ended[op] += 1
            report(op, *how)

        def watched_results(finished):
            got = results(finished)
            self.requests.update(got.finished_recving)
            return got

        e.worker_half._report, e.worker.get_transfer_results = watched_report, watched_results

    def plan(self, output) -> None:
        self.planned |= {p.op: p.request_id for p in output.kv_connector_metadata.loads}

    def check(self) -> None:
        assert self.ended == Counter(dict.fromkeys(self.planned, 1))
        assert self.requests == Counter(self.planned.values())


def run(e, reports, spoil=lambda output: None):
    for _ in attempts(0):
        if not e.scheduler.has_requests() and not e.scheduler.requests:
            return
        output, todo = e.schedule()
        reports.plan(output)
        spoil(output)
        e.update(output, e.execute(output, todo))
    raise AssertionError(f"does not end: {[r.status.name for r in e.scheduler.requests.values()]}")


def test_each_load_is_reported_once(make):
    """Good ones, failed ones, ones that never began, and ones whose request was aborted."""
    rng = random.Random(SEED)
    print(f"KVTIER_ONCE_SEED={SEED}")
    e = make(slots=288)
    warm(e)
    reports = Reports(e)

    def spoil(output):
        for load in output.kv_connector_metadata.loads:
            what = rng.randrange(6)
            if what == 0:
                load.session ^= 1
            elif what == 1:
                load.verdicts = []
            elif what == 2:
                k = rng.randrange(len(load.verdicts))
                code, slot, generation = load.verdicts[k]
                load.verdicts[k] = (code, slot, generation + 1)
            elif what == 3:
                e.abort(e.sequences[load.request_id])

    for _ in range(40):
        e.scheduler.reset_prefix_cache()
        for _ in range(rng.choice([1, 3])):
            e.add(DOC[: rng.choice([200, 400, 600])] + document(rng.randrange(1000), 20), 3)
        run(e, reports, spoil)
    reports.check()
    assert len(reports.planned) >= 40 and e.counts["loads_failed"] > 5


def test_late_and_repeated_completions_are_swallowed(make, monkeypatch):
    """Each event comes twice at once and once more later, and some are nobody's."""
    e = make()
    warm(e)
    reports = Reports(e)
    poll, late = kvtier.Cache.poll, []

    def noisy(cache, n=64):
        events = poll(cache, n)
        again, late[:] = list(late), events
        strange = [dataclasses.replace(x, op=x.op + (1 << 40)) for x in events]
        return [*events, *events, *again, *strange]

    monkeypatch.setattr(kvtier.Cache, "poll", noisy)
    for k in range(5):
        e.scheduler.reset_prefix_cache()
        gone = e.add(DOC + [7])
        output, todo = step_until_loading(e, gone)
        reports.plan(output)
        if k % 2:
            e.abort(gone)
        e.update(output, e.execute(output, todo))
        e.add(DOC)  # the same again, while late events of the one before come
        run(e, reports)
    reports.check()
    assert not e.counts["errors"]


def test_reports_of_two_engines_do_not_mix(make):
    """One cache serves both; whoever polls takes the events of both."""
    extra = {"name": "one-cache-two-engines"}
    a, b = make(extra=extra, recognisable=True), make(extra=extra, recognisable=True)
    warm(a)
    both = [(a, Reports(a)), (b, Reports(b))]
    for k in range(10):
        for e, _ in both:
            e.scheduler.reset_prefix_cache()
            e.add(DOC, request_id=f"same-{k}")
        for _ in attempts(0):
            for e, reports in both:
                if e.scheduler.has_requests():
                    output, todo = e.schedule()
                    reports.plan(output)
                    e.update(output, e.execute(output, todo))
            if not a.scheduler.requests and not b.scheduler.requests:
                break
        assert not a.scheduler.requests and not b.scheduler.requests
    for e, reports in both:
        reports.check()
        assert len(reports.planned) == 10


def test_what_failed_is_not_tried_for_ever(make):
    """Every load of the request fails somewhere. It is preempted again and again, so it
    would ask again and again; but never for what failed, so it comes to an end."""
    rng = random.Random(SEED)
    print(f"KVTIER_ONCE_SEED={SEED}")
    e = make(slots=288)
    warm(e)
    for _ in range(15):
        e.scheduler.reset_prefix_cache()
        q = e.add(DOC, 200)
        reach = []  # chunks that each load asked for, and how many of them were good

        def spoil(output):
            for load in output.kv_connector_metadata.loads:
                assert load.first_token == 0
                bad = rng.randrange(len(load.verdicts))
                reach.append((load.chunks, bad))  # noqa: B023
                code, slot, generation = load.verdicts[bad]
                load.verdicts[bad] = (code, slot, generation + 1)

        reports = Reports(e)
        for _ in range(14):
            for _ in attempts():
                output, todo = e.schedule()
                reports.plan(output)
                spoil(output)
                e.update(output, e.execute(output, todo))
                if q.request.status == RequestStatus.RUNNING:
                    break
            assert q.request.status == RequestStatus.RUNNING, q.request.status
            assert e.scheduler.reset_prefix_cache(reset_running_requests=True)
        run(e, reports, spoil)
        assert len(q.request.output_token_ids) == 200
        for (_, good), (asked, _) in zip(reach, reach[1:], strict=False):
            assert asked <= good, reach
        assert 1 <= len(reach) <= 9, "each failure shortens what is asked for"


@pytest.mark.parametrize("damage", ["truncated", "flipped", "gone", "swapped"])
def test_file_that_fails_is_not_asked_for_by_everybody(make, tmp_path, damage):
    """Between restarts the fourth chunk on disk goes bad."""
    root = tmp_path / "d"
    extra = {"disk_path": str(root), "disk_gib": 0.02, "free_floor_gib": 0, "dirty_gib": 0.02}
    e = make(extra=extra, recognisable=True)
    warm(e)
    assert e.cache.flush(30)
    e.close()
    files = {int.from_bytes(f.read_bytes()[-4096 + 100 : -4096 + 104], "little"): f for f in root.rglob("*.kvc")}
    assert sorted(files) == list(range(9))
    content = files[3].read_bytes()
    if damage == "truncated":
        files[3].write_bytes(content[:-5000])
    elif damage == "flipped":
        files[3].write_bytes(content[:200] + bytes([content[200] ^ 4]) + content[201:])
    elif damage == "gone":
        files[3].unlink()
    else:
        files[3].write_bytes(files[4].read_bytes())
    e = make(extra=extra, recognisable=True)
    reports = Reports(e)
    for k in range(6):
        e.scheduler.reset_prefix_cache()
        q = e.add(DOC + document(k, 10))
        run(e, reports)
        assert len(q.request.output_token_ids) == 4
    reports.check()
    assert e.counts["loads_failed"] <= 1, "one request finds out, the others know"
    e.scheduler.reset_prefix_cache()
    if held(e, DOC) < 9:
        warm(e)
    e.counts.clear()
    e.add(DOC)
    run(e, reports)
    assert e.counts["load_tokens"] == 576 and not e.counts["loads_failed"], "it was computed and stored again"
