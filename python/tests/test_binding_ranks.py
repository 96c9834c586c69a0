"""Two ranks with decode context parallelism through the binding, both in this process:
sharded rows, and a region of which every rank has all rows."""

from __future__ import annotations

import select
import time
from pathlib import Path

import numpy as np
from binding import SOON, settings

import kvtier
from kvtier import keys

D, INTERLEAVE, B, C, CHUNKS = 2, 4, 16, 32, 4
TOKENS, V = CHUNKS * C, D * B
BLOCKS = TOKENS // V + 3
WIDTH, INDEX = 24, 12
UNTOUCHED = 0xEE


class Rank:
    """One rank: [BLOCKS, B] tokens of its own, [BLOCKS, D * B] of all ranks."""

    def __init__(self, cache: kvtier.Cache, rank: int) -> None:
        self.number = rank
        self.own = np.full((BLOCKS, B, WIDTH), UNTOUCHED, np.uint8)
        self.all = np.full((BLOCKS, V, INDEX), UNTOUCHED, np.uint8)
        description = {
            "group": "g", "ranks": D, "rank": rank, "model": "ranks", "chunk_tokens": C, "block_tokens": B,
            "num_blocks": BLOCKS, "dcp": D, "dcp_rank": rank, "interleave": INTERLEAVE, "kv_dtype": "u8",
            "weights": "00",
        }  # fmt: skip
        regions = [
            kvtier.Region(
                group=0, name=name, component="target", layer=0, head=-1, bytes=pages.shape[2], replicated=False,
                base=pages.ctypes.data, block_stride=pages[0].nbytes, token_stride=pages.shape[2], all_rows=all_rows,
            )
            for name, pages, all_rows in (("kv", self.own, False), ("index", self.all, True))
        ]  # fmt: skip
        self.rank = cache.register(description, regions)

    def want(
        self, table: np.ndarray, latent: np.ndarray, index: np.ndarray, lo: int, hi: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Pages that hold the tokens [lo, hi) and nothing else."""
        own, everything = np.full_like(self.own, UNTOUCHED), np.full_like(self.all, UNTOUCHED)
        for token in range(lo, hi):
            block, offset = int(table[token // V]), token % V
            everything[block, offset] = index[token]
            if offset // INTERLEAVE % D == self.number:
                own[block, offset // (D * INTERLEAVE) * INTERLEAVE + offset % INTERLEAVE] = latent[token]
        return own, everything


def test_ranks_share_sharded_rows_and_whole_regions(tmp_path: Path) -> None:
    rng = np.random.default_rng(11)
    latent, index = (rng.integers(0, 200, (TOKENS, w), dtype=np.uint8) for w in (WIDTH, INDEX))
    stored_at, loaded_at = (rng.permutation(BLOCKS)[: TOKENS // V].astype(np.uint32) for _ in range(2))
    with kvtier.Cache.open(settings(tmp_path / "kv")) as cache:
        coordinator = cache.coordinate("g", ranks=D)
        ranks = [Rank(cache, r) for r in range(D)]
        accepted = coordinator.ready(SOON)
        assert accepted.dcp == D and accepted.interleave == INTERLEAVE
        root = keys.root(accepted.fingerprint)
        chain = keys.chain(root, C, np.arange(TOKENS, dtype=np.uint32))
        end = time.monotonic() + 3 * SOON

        op = 0
        while True:  # an arena grows behind its use
            op += 1
            session, (verdicts,) = coordinator.store_begin([kvtier.StoreRequest(op, 0, root, chain)], SOON)
            if verdicts is not None and (verdicts[:, 0] == kvtier.GRANTED).all():
                break
            coordinator.cancel(op, unsent=True)
            assert time.monotonic() < end
            time.sleep(0.005)
        grants = verdicts.copy()
        grants[:, 0] = np.arange(CHUNKS)
        for r in ranks:
            r.rank.ready(SOON)
            r.own[:], r.all[:] = r.want(stored_at, latent, index, 0, TOKENS)
            assert r.rank.store(op, session, 0, grants, stored_at)
        answer = 0
        while True:  # until the checksums are taken
            coordinator.lease(1, chain, kvtier.LEASE_PIN)
            hits = coordinator.lease_result(1, after=answer, timeout_s=SOON)
            if hits is not None:
                answer = hits.answer
                if hits.leased == CHUNKS:
                    break
            assert time.monotonic() < end
            time.sleep(0.005)

        lo, hi = 13, TOKENS - 6
        begun = coordinator.load_begin(10_000, 1, 0, chain, SOON)
        assert begun is not None
        session, verdicts = begun
        blocks = loaded_at[lo // V : -(-hi // V)]
        for r in ranks:
            r.own[:], r.all[:] = UNTOUCHED, UNTOUCHED
            r.rank.load(10_000, session, lo, hi - lo, blocks, verdicts, CHUNKS)
        events: list[kvtier.LoadEvent] = []
        while len(events) < D:
            events += cache.poll()
            cache.records()
            assert time.monotonic() < end
            select.select([cache.eventfd()], [], [], 0.1)
        assert {e.rank for e in events} == {r.rank.handle for r in ranks}
        assert all(e.status == 0 and e.tokens == hi - lo for e in events)
        for r in ranks:
            own, everything = r.want(loaded_at, latent, index, lo, hi)
            np.testing.assert_array_equal(r.own, own)
            np.testing.assert_array_equal(r.all, everything)
            r.rank.close()
