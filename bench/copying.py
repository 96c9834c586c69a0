"""Pages to arena and back, against a plain copy of the same bytes."""

from __future__ import annotations

import select
import time

import numpy as np

import kvtier
from figure import Figure

CHUNK, BLOCK, LAYERS, ROW = 256, 16, 32, 1152
CHUNKS = 40
#: The first rounds touch fresh memory, which is the price of the first use only.
FRESH, ROUNDS = 5, 9


class Pages:
    """Pages of an MLA-like model in ordinary memory: LAYERS layers, one row of
    ROW bytes per token, BLOCK tokens per block."""

    def __init__(self, blocks: int):
        self.blocks = blocks
        self.memory = np.zeros((LAYERS, blocks, BLOCK, ROW), np.uint8)
        self.memory[:] = np.random.default_rng(1).integers(0, 256, ROW, dtype=np.uint8)

    def regions(self) -> list[kvtier.Region]:
        return [
            kvtier.Region(
                group=0, name="kv", component="target", layer=i, head=-1, bytes=ROW, replicated=False,
                base=self.memory[i].ctypes.data, block_stride=BLOCK * ROW, token_stride=ROW,
            )
            for i in range(LAYERS)
        ]  # fmt: skip


def description(group: str, blocks: int) -> dict:
    return {
        "group": group, "ranks": 1, "rank": 0, "model": "bench", "chunk_tokens": CHUNK, "block_tokens": BLOCK,
        "num_blocks": blocks, "dcp": 1, "dcp_rank": 0, "interleave": 1, "encoding": "rows", "kv_dtype": "bfloat16",
        "weights": "00" * 32, "groups": [{"kind": "full", "tokens_per_row": 1}],
    }  # fmt: skip


def wait_for_load(cache: kvtier.Cache) -> None:
    while True:
        events = cache.poll()
        if events:
            if events[0].status != 0:
                raise RuntimeError(f"load failed with status {events[0].status}")
            return
        select.select([cache.eventfd()], [], [], 10.0)


def measure() -> list[Figure]:
    blocks = CHUNKS * CHUNK // BLOCK
    pages = Pages(blocks)
    total = pages.memory.nbytes
    # A member may lease a quarter of the slots.
    budget = total * 4.4 / 2**30
    stores, loads, copies = [], [], []
    with kvtier.Cache.open({"name": f"bench-copy-{time.time_ns()}", "dram_gib": budget}) as cache:
        if not cache.wait_open(10.0):
            raise RuntimeError(f"the cache did not open: {cache.state()}")
        rank = cache.register(description("bench", blocks), pages.regions())
        coordinator = cache.coordinate("bench", ranks=1)
        accepted = coordinator.ready(10.0)
        ids = np.arange(blocks, dtype=np.uint32)
        other = np.empty_like(pages.memory)
        for round_number in range(FRESH + ROUNDS):
            tokens = np.full(CHUNKS * CHUNK, round_number, np.uint32)
            root = kvtier.keys.root(accepted.fingerprint)
            keys = kvtier.keys.chain(root, CHUNK, tokens)
            op, session, grants = granted(coordinator, 1000 * (round_number + 1), root, keys)
            start = time.perf_counter()
            rank.store(op, session, 0, grants, ids)
            stores.append(total / (time.perf_counter() - start) / 1e9)
            resident(coordinator, op, keys)
            session, verdicts = coordinator.load_begin(op + 500, op, 0, keys, 10.0)
            start = time.perf_counter()
            rank.load(op + 500, session, 0, CHUNKS * CHUNK, ids, verdicts[verdicts[:, 0] == kvtier.READY], CHUNKS)
            wait_for_load(cache)
            loads.append(total / (time.perf_counter() - start) / 1e9)
            start = time.perf_counter()
            np.copyto(other, pages.memory)
            copies.append(total / (time.perf_counter() - start) / 1e9)
        rank.close(10.0)
        coordinator.close()
    against = sorted(copies[FRESH:])[len(copies[FRESH:]) // 2]
    return [
        Figure("pages to arena", "GB/s", "memcpy of the same bytes", tuple(stores[FRESH:]), against, False, 0.5),
        Figure("arena to pages", "GB/s", "memcpy of the same bytes", tuple(loads[FRESH:]), against, False, 0.4),
    ]


def granted(
    coordinator: kvtier.Coordinator, op: int, root: bytes, keys: np.ndarray
) -> tuple[int, int, np.ndarray]:
    """Operation, session and grants (index, slot, generation) for all keys. A fresh arena is
    still growing, so it is asked again for a while."""
    for attempt in range(500):
        session, (verdicts,) = coordinator.store_begin([kvtier.StoreRequest(op + attempt, 0, root, keys)], 10.0)
        if (verdicts[:, 0] == kvtier.GRANTED).all():
            index = np.arange(len(keys), dtype=np.uint32)
            return op + attempt, session, np.column_stack([index, verdicts[:, 1], verdicts[:, 2]])
        coordinator.cancel(op + attempt, unsent=True)
        time.sleep(0.01)
    raise RuntimeError("the arena did not get room for all chunks")


def resident(coordinator: kvtier.Coordinator, lease: int, keys: np.ndarray) -> None:
    """Waits until all keys are verified in DRAM and leased."""
    end = time.monotonic() + 30
    answer = 0
    while time.monotonic() < end:
        coordinator.lease(lease, keys, kvtier.LEASE_PIN)
        hits = coordinator.lease_result(lease, after=answer, timeout_s=1.0)
        if hits is not None:
            answer = hits.answer
            if hits.leased == len(keys):
                return
        time.sleep(0.005)
    raise RuntimeError("the stored chunks did not become available")
