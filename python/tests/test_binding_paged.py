"""Leases, paged stores and loads through the binding: coordinator and rank here."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from binding import SOON, settings

import kvtier
from kvtier import errors, keys

B, C, BLOCKS = 16, 32, 32
LAYERS, WIDTH = 3, 24
CHUNKS = 4
TOKENS = CHUNKS * C
UNTOUCHED = 0xEE

DESCRIPTION = {
    "group": "g", "model": "paged", "chunk_tokens": C, "block_tokens": B, "num_blocks": BLOCKS,
    "kv_dtype": "u8", "weights": "00", "groups": [{"kind": "full", "tokens_per_row": 1}],
    "provenance": {"test": "binding"},
}  # fmt: skip


class Engine:
    """Stands for an engine: pages, a rank, and a coordinator that plans for it."""

    def __init__(self, cache: kvtier.Cache) -> None:
        self.cache = cache
        self.pages = np.empty((LAYERS, BLOCKS, B, WIDTH), np.uint8)
        self.coordinator = cache.coordinate("g")
        self.rank = cache.register(
            DESCRIPTION,
            [
                kvtier.Region(
                    group=0, name="kv", component="target", layer=i, head=-1, bytes=WIDTH, replicated=False,
                    base=self.pages[i].ctypes.data, block_stride=B * WIDTH, token_stride=WIDTH,
                )
                for i in range(LAYERS)
            ],
        )  # fmt: skip
        self.accepted = self.coordinator.ready(SOON)
        assert self.rank.ready(SOON) == self.accepted
        self.root = keys.root(self.accepted.fingerprint)
        self.keys = keys.chain(self.root, C, np.arange(TOKENS, dtype=np.uint32))
        self.ops = iter(range(1, 1 << 20))
        rng = np.random.default_rng(7)
        self.oracle = rng.integers(0, 200, (LAYERS, TOKENS, WIDTH), dtype=np.uint8)

    def rows(self, table: np.ndarray) -> np.ndarray:
        """All tokens in order, as the pages have them."""
        return self.pages[:, table].reshape(LAYERS, TOKENS, WIDTH)

    def fill(self, table: np.ndarray) -> None:
        self.pages[:] = UNTOUCHED
        self.pages[:, table] = self.oracle.reshape(LAYERS, TOKENS // B, B, WIDTH)

    def begin_store(self) -> tuple[int, int, np.ndarray]:
        """All chunks. An arena grows behind its use: what is declined is tried again."""
        end = time.monotonic() + SOON
        while True:
            op = next(self.ops)
            request = kvtier.StoreRequest(op, 0, self.root, self.keys)
            session, (verdicts,) = self.coordinator.store_begin([request], SOON)
            assert verdicts is not None and verdicts.shape == (CHUNKS, 4)
            if (verdicts[:, 0] == kvtier.GRANTED).all():
                assert session == self.accepted.session
                return op, session, verdicts
            self.coordinator.cancel(op, unsent=True)
            assert time.monotonic() < end
            time.sleep(0.005)

    def store(self, table: np.ndarray) -> None:
        op, session, verdicts = self.begin_store()
        grants = verdicts.copy()
        grants[:, 0] = np.arange(CHUNKS)
        assert not self.rank.store(op, session + 1, 0, grants, table)  # of another leader
        assert self.rank.store(op, session, 0, grants, table)
        self.rank.fence(table)

    def lease(self, lease: int, n: int) -> kvtier.Hits:
        """Until n chunks are resident."""
        end = time.monotonic() + SOON
        answer = 0
        while True:
            assert self.coordinator.lease(lease, self.keys[:n], kvtier.LEASE_PREFETCH | kvtier.LEASE_PIN)
            hits = self.coordinator.lease_result(lease, answer, SOON)
            assert hits is not None and hits.answer > answer
            answer = hits.answer
            if hits.resident == n:
                return hits
            assert time.monotonic() < end, hits
            time.sleep(0.005)

    def event(self) -> kvtier.LoadEvent:
        end = time.monotonic() + SOON
        while time.monotonic() < end:
            select.select([self.cache.eventfd()], [], [], 1)
            if events := self.cache.poll(1):
                return events[0]
            self.cache.records()
        raise AssertionError("no event")

    def load(self, table: np.ndarray, lo: int, hi: int) -> None:
        op = next(self.ops)
        first, n = lo // C, -(-hi // C) - lo // C
        self.lease(op, first + n)
        begun = self.coordinator.load_begin(op, op, first, self.keys[first : first + n], SOON)
        assert begun is not None
        session, verdicts = begun
        assert session == self.accepted.session and verdicts[0, 0] == kvtier.READY
        self.pages[:] = UNTOUCHED
        self.rank.load(op, session, lo, hi - lo, table[lo // B : -(-hi // B)], verdicts, n)
        event = self.event()
        want = (hi - lo) * LAYERS * WIDTH
        assert event == kvtier.LoadEvent(op, errors.OK, self.rank.handle, n, hi - lo, want)
        rows = self.rows(table)
        assert (rows[:, lo:hi] == self.oracle[:, lo:hi]).all()
        assert (rows[:, :lo] == UNTOUCHED).all() and (rows[:, hi:] == UNTOUCHED).all()
        assert int((self.pages != UNTOUCHED).sum()) == want


@pytest.fixture
def engine(leader: kvtier.Cache) -> Iterator[Engine]:
    engine = Engine(leader)
    yield engine
    engine.rank.close()  # before its pages go


def table(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(BLOCKS)[: TOKENS // B].astype(np.uint32)


def test_store_and_load_over_a_restart(tmp_path: Path) -> None:
    for again in (False, True):
        with kvtier.Cache.open(settings(tmp_path / "kv")) as cache:
            assert cache.wait_open(SOON)
            engine = Engine(cache)
            if not again:
                engine.fill(table(1))
                engine.store(table(1))
            engine.load(table(2), 0, TOKENS)
            engine.load(table(3), 13, TOKENS - 5)  # clipped inside chunks and blocks
            engine.load(table(4), 2 * C + 3, 2 * C + 4)
            engine.rank.close()
            engine.rank.close()


def test_what_was_accepted(engine: Engine) -> None:
    a = engine.accepted
    assert (a.chunk_tokens, a.block_tokens, a.dcp, a.interleave) == (C, B, 1, 1)
    assert a.session == engine.coordinator.session() != 0
    assert a.dram_bytes == 1 << 26 and a.disk_bytes == 1 << 28 and a.slots > 0
    assert a.slot_bytes % 4096 == 0 and len(a.fingerprint) == 32


def test_leases(engine: Engine) -> None:
    c = engine.coordinator
    with pytest.raises(kvtier.LeaseLost):
        c.lease_result(4711)
    assert c.lease(1, engine.keys, 0)
    hits = c.lease_result(1, timeout_s=SOON)
    assert hits is not None and hits.held == hits.leased == 0 and hits.answer == 1
    begin = time.monotonic()
    assert c.lease_result(1, after=1, timeout_s=0.2) is None  # nothing newer
    assert time.monotonic() - begin < SOON
    engine.fill(table(1))
    engine.store(table(1))
    hits = engine.lease(1, CHUNKS)
    assert hits.held == hits.leased == CHUNKS and hits.session == engine.accepted.session
    c.renew([1, 2, 3])
    c.release(1)
    c.release(1)
    with pytest.raises(kvtier.LeaseLost):
        c.lease_result(1)


def test_stores_are_answered_each(engine: Engine) -> None:
    engine.fill(table(1))
    engine.store(table(1))
    engine.lease(1, CHUNKS)
    orphan = keys.chain(bytes(32), C, np.arange(C, dtype=np.uint32))
    session, (have, declined) = engine.coordinator.store_begin(
        [
            kvtier.StoreRequest(next(engine.ops), 0, engine.root, engine.keys),
            kvtier.StoreRequest(next(engine.ops), 5, bytes(32), orphan, no_disk=True),
        ],
        SOON,
    )
    assert session == engine.accepted.session
    assert have is not None and (have[:, 0] == kvtier.HAVE).all()
    assert declined is not None and declined[0, 0] == kvtier.DECLINED
    assert engine.coordinator.store_begin([], 1) == (0, [])


def test_failed_loads_report_once(engine: Engine) -> None:
    t = table(1)[: C // B]
    gone = np.array([[kvtier.READY, 1, 99, 0]], np.uint32)
    session = engine.accepted.session
    engine.pages[:] = UNTOUCHED
    for op, s, verdicts, status in (
        (901, 0, None, errors.E_STALE),
        (902, session + 1, gone, errors.E_STALE),
        (903, session, gone, errors.E_MISS),
    ):
        engine.rank.load(op, s, 0, C, t, verdicts, 1)
        event = engine.event()
        assert (event.op, event.status, event.tokens, event.failed_chunk) == (op, status, 0, 0)
    engine.rank.cancel_load(903)
    assert engine.cache.poll() == []
    assert (engine.pages == UNTOUCHED).all()
    engine.coordinator.cancel(904, unsent=True)


def test_wrong_arguments(engine: Engine) -> None:
    t = table(1)
    with pytest.raises(kvtier.Error, match="nchunks"):
        engine.rank.load(1, 1, 0, C, t[: C // B], None, 2)
    with pytest.raises(kvtier.Error, match="blocks"):
        engine.rank.load(1, 1, 0, C, t, None, 1)
    with pytest.raises(kvtier.Error, match="block id"):
        engine.rank.load(1, 1, 0, C, [BLOCKS, 0], None, 1)
    with pytest.raises(TypeError):
        engine.rank.load(1, 1, 0, C, t.astype(np.int64), None, 1)
    with pytest.raises(TypeError):
        engine.rank.store(1, 1, 0, np.zeros((2, 5), np.uint32), t)
    with pytest.raises(kvtier.Error, match="op is 0"):
        engine.rank.store(0, 1, 0, np.zeros((1, 4), np.uint32), t)
    with pytest.raises(kvtier.ConfigError, match="num_block.*nearest one is.*num_blocks"):
        engine.cache.register({"num_block": 3}, [kvtier.Region(0, "kv", "target", 0, -1, 8, False, 4096, 8, 8)])
    with pytest.raises(ValueError, match="31 bytes"):
        engine.cache.register({}, [kvtier.Region(0, "k" * 32, "target", 0, -1, 8, False, 4096, 8, 8)])
    with pytest.raises(kvtier.Error):
        engine.cache.coordinate("")
    with pytest.raises(ValueError):
        engine.cache.coordinate("a\0b")


def test_a_group_that_does_not_fit_is_refused(leader: kvtier.Cache) -> None:
    pages = np.zeros(BLOCKS * B * 8, np.uint8)
    ranks = [
        leader.register(
            {**DESCRIPTION, "group": "two", "ranks": 2, "rank": i, "dcp": 2, "dcp_rank": i, "interleave": 1 + i},
            [kvtier.Region(0, "kv", "target", 0, -1, 8, False, pages.ctypes.data, B * 8, 8)],
        )
        for i in range(2)
    ]
    for rank in ranks:
        with pytest.raises(kvtier.Refused, match="(?i)interleave"):
            rank.ready(SOON)
        rank.close()


def test_reset(engine: Engine) -> None:
    a, b = engine.coordinator.reset(), engine.coordinator.reset()
    assert len(a) == len(b) == 16 and a != b
    keys.root(engine.accepted.fingerprint, [keys.Extra(keys.EPOCH, a)])


def test_selftest_restores_the_pages(engine: Engine) -> None:
    rng = np.random.default_rng(3)
    engine.pages[:] = rng.integers(0, 256, engine.pages.shape, dtype=np.uint8)
    before = engine.pages.copy()
    for pages in (True, False):
        engine.rank.selftest(pages, SOON)
        assert (engine.pages == before).all()
    stats = engine.cache.stats()["leader"]
    assert stats["self_tests"] == {"begun": 2, "passed": 2, "failed": 0, "timed_out": 0}
    assert stats["stores"]["granted"] == 0


def test_selftest_sees_regions_that_overlap(tmp_path: Path) -> None:
    pages = np.full((BLOCKS, B, 2 * WIDTH), UNTOUCHED, np.uint8)
    regions = [
        kvtier.Region(
            group=0, name="kv", component="target", layer=i, head=-1, bytes=WIDTH, replicated=False,
            base=pages.ctypes.data + i * (WIDTH - 1), block_stride=2 * B * WIDTH, token_stride=2 * WIDTH,
        )
        for i in range(2)
    ]  # fmt: skip
    with kvtier.Cache.open(settings(tmp_path / "kv")) as cache:
        rank = cache.register(DESCRIPTION, regions)
        rank.ready(SOON)
        with pytest.raises(kvtier.SelfTestFailed, match=r"rank 0: .*layer 0.*token 0.*byte 23") as failed:
            rank.selftest(True, SOON)
        assert failed.value.code == errors.E_SELFTEST
        assert (pages == UNTOUCHED).all()
        rank.close()


def test_selftest_alone_is_bounded(tmp_path: Path) -> None:
    with kvtier.Cache.open(settings(tmp_path / "kv")) as cache:
        shared = {**DESCRIPTION, "ranks": 2, "dcp": 2, "interleave": B}
        pages = np.full((2, BLOCKS, B, WIDTH), UNTOUCHED, np.uint8)
        ranks = [
            cache.register(
                {**shared, "rank": r, "dcp_rank": r},
                [
                    kvtier.Region(
                        group=0, name="kv", component="target", layer=0, head=-1, bytes=WIDTH, replicated=False,
                        base=pages[r].ctypes.data, block_stride=B * WIDTH, token_stride=WIDTH,
                    )
                ],
            )
            for r in range(2)
        ]  # fmt: skip
        for rank in ranks:
            rank.ready(SOON)
        with pytest.raises(kvtier.Timeout, match=r"ranks \[1\] did not come"):
            ranks[0].selftest(True, 0.2)
        assert (pages == UNTOUCHED).all()
        for rank in ranks:
            rank.close()
