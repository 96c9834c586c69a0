"""One rank process of the comparison in assemble.py.

All ranks of an engine hold a part of each chunk. In turns they put the chunks
together through kvtier (pages to shared slots, in place), by gloo's all-gather of
packed rows and interleaving with torch, and copy as many bytes in one piece. Rank
0 prints the wall times of all rounds of a case as one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import kvtier
from copying import granted, resident

CHUNK, BLOCK = 256, 64


@dataclass(frozen=True)
class Plan:
    """What the parent decides. widths: bytes of a token in each layer."""

    rank: int
    ranks: int
    interleave: int
    widths: list[int]
    chunks: int
    rounds: int
    fresh: int
    name: str


class Pages:
    """This rank's pages, one array a layer."""

    def __init__(self, plan: Plan):
        self.blocks = plan.chunks * CHUNK // (BLOCK * plan.ranks)
        rng = np.random.default_rng(plan.rank)
        self.layers = [rng.integers(0, 256, (self.blocks, BLOCK, w), dtype=np.uint8) for w in plan.widths]
        self.nbytes = sum(a.nbytes for a in self.layers)

    def regions(self) -> list[kvtier.Region]:
        return [
            kvtier.Region(
                group=0, name="kv", component="target", layer=i, head=-1, bytes=a.shape[2], replicated=False,
                base=a.ctypes.data, block_stride=BLOCK * a.shape[2], token_stride=a.shape[2],
            )
            for i, a in enumerate(self.layers)
        ]  # fmt: skip


class Gloo:
    """The shards as packed rows; all-gather, then rank 0 interleaves them into a
    buffer in the order of tokens. Packing the rows is not counted."""

    def __init__(self, plan: Plan):
        width, tokens = sum(plan.widths), plan.chunks * CHUNK
        self.shard = torch.randint(0, 255, (tokens // plan.ranks, width), dtype=torch.uint8)
        self.parts = [torch.zeros_like(self.shard) for _ in range(plan.ranks)]
        self.whole = torch.zeros(tokens // (plan.ranks * plan.interleave), plan.ranks, plan.interleave, width, dtype=torch.uint8)
        self.lead = plan.rank == 0

    def __call__(self) -> None:
        dist.all_gather(self.parts, self.shard)
        if self.lead:
            for r, part in enumerate(self.parts):
                self.whole[:, r].copy_(part.view(self.whole.shape[0], *self.whole.shape[2:]))


class Through:
    """The same through kvtier. Grants travel by gloo, outside of the time."""

    def __init__(self, plan: Plan, pages: Pages):
        self.plan, self.lead = plan, plan.rank == 0
        # A member may lease a quarter of the slots; not many more, so that all of them
        # are in use before the rounds that count.
        budget = 4.4 * pages.nbytes * plan.ranks / 2**30
        settings: dict[str, Any] = {"name": plan.name, "dram_gib": budget} if self.lead else {"name": plan.name}
        self.cache = kvtier.Cache.open(settings | {"role": "auto" if self.lead else "member"})
        if not self.cache.wait_open(60.0):
            raise RuntimeError(f"the cache did not open: {self.cache.state()}")
        self.rank = self.cache.register(
            {
                "group": "bench", "ranks": plan.ranks, "rank": plan.rank, "model": "bench", "chunk_tokens": CHUNK,
                "block_tokens": BLOCK, "num_blocks": pages.blocks, "dcp": plan.ranks, "dcp_rank": plan.rank,
                "interleave": plan.interleave, "kv_dtype": "uint8", "memory_only": True,
                **({"weights": "00"} if self.lead else {}),
            },
            pages.regions(),
        )  # fmt: skip
        self.coordinator = self.cache.coordinate("bench", ranks=plan.ranks) if self.lead else None
        self.accepted = self.rank.ready(60.0)
        self.blocks = np.arange(pages.blocks, dtype=np.uint32)
        self.op = 1

    def prepare(self, number: int) -> None:
        """Slots for chunks that nobody has yet."""
        box: list[Any] = [None]
        if self.coordinator is not None:
            root = kvtier.keys.root(self.accepted.fingerprint)
            tokens = np.full(self.plan.chunks * CHUNK, number, np.uint32)
            self.keys = kvtier.keys.chain(root, CHUNK, tokens)
            box[0] = granted(self.coordinator, 1000 * (number + 1), root, self.keys)
        dist.broadcast_object_list(box)
        self.op, self.session, self.grants = box[0]

    def __call__(self) -> None:
        self.rank.store(self.op, self.session, 0, self.grants, self.blocks)

    def settle(self) -> None:
        if self.coordinator is not None:
            resident(self.coordinator, self.op, self.keys)
            self.coordinator.release(self.op)
        dist.barrier()

    def close(self) -> None:
        dist.barrier()
        if not self.lead:
            self.rank.close(30.0)
            self.cache.close(30.0)
        dist.barrier()
        if self.lead:
            self.rank.close(30.0)
            self.coordinator.close()
            self.cache.close(30.0)


def timed(do: Callable[[], None], ranks: int) -> float:
    """Seconds from the first rank's start to the last one's end. The clock is the
    same for all processes of a machine."""
    dist.barrier()
    start = time.perf_counter()
    do()
    mine = (start, time.perf_counter())
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, mine)
    return max(e for _, e in every) - min(s for s, _ in every)


def main() -> None:
    rank, ranks, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    for case in json.loads(sys.argv[4]):
        run(Plan(rank=rank, ranks=ranks, **case))
    dist.destroy_process_group()


def run(plan: Plan) -> None:
    pages = Pages(plan)
    gloo, through = Gloo(plan), Through(plan, pages)
    source = np.concatenate([a.reshape(-1) for a in pages.layers])
    target = np.zeros_like(source)
    times: dict[str, list[float]] = {"kvtier": [], "gloo": [], "memcpy": []}
    for number in range(plan.fresh + plan.rounds):
        through.prepare(number)
        once = {"kvtier": timed(through, plan.ranks)}
        through.settle()
        once["gloo"] = timed(gloo, plan.ranks)
        once["memcpy"] = timed(lambda: np.copyto(target, source), plan.ranks)
        if number >= plan.fresh:
            for what, seconds in once.items():
                times[what].append(seconds)
    through.close()
    if plan.rank == 0:
        print(json.dumps({"bytes": pages.nbytes * plan.ranks, "times": times}), flush=True)


if __name__ == "__main__":
    main()
