"""The connector's two halves for an engine of many ranks in one process, over the real
library: the scheduler half, and a worker half for each rank with pages of eight bytes a
token. Real vLLM objects go in and come out; what calls the hooks is the test.

Left out is only what needs a process for each rank: process groups and registration by
the connector (ranks are registered with the library as it would do it)."""

from __future__ import annotations

import copy
import functools
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine import slot_bytes
from situations import attempts
from vllm.config import DeviceConfig, KVTransferConfig, ParallelConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec
from vllm.v1.request import Request

import kvtier
from kvtier.vllm import mapping, worker
from kvtier.vllm.metadata import KVTierMetadata, LoadPlan
from kvtier.vllm.scheduler import SchedulerHalf
from kvtier.vllm.settings import Settings

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Shape:
    block: int  # B, tokens of a page of one rank
    dcp: int  # D
    interleave: int  # I
    chunk: int  # C


@functools.cache
def _config(dcp: int) -> VllmConfig:
    return VllmConfig(
        parallel_config=ParallelConfig(
            tensor_parallel_size=dcp, decode_context_parallel_size=dcp, distributed_executor_backend="mp"
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVTierConnector", kv_connector_module_path="kvtier.vllm", kv_role="kv_both"
        ),
    )


def request(tokens: list[int], number: int) -> Request:
    return Request(f"q{number}", list(tokens), SamplingParams(max_tokens=4), None)


def scheduled(r: Request, n: int, table: list[int]) -> SchedulerOutput:
    """A step that computes n tokens of a request with these blocks."""
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens, output.total_num_scheduled_tokens = {r.request_id: n}, n
    output.kv_connector_block_state = KVConnectorBlockState({r.request_id}, lambda _: (list(table),), {})
    return output


def allocated(table: list[int]) -> KVCacheBlocks:
    return KVCacheBlocks(([KVCacheBlock(b) for b in table],))


class Worker(worker.WorkerHalf):
    """A worker half that keeps what the library told of each load."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.told: dict[int, kvtier.LoadEvent] = {}

    def _ended(self, e: kvtier.LoadEvent) -> None:
        self.told[e.op] = e
        super()._ended(e)


class Group:
    """``blocks``: ids that there are. ``pages[rank][block, row]`` is a token's value."""

    def __init__(self, shape: Shape, blocks: int, home: Path) -> None:
        self.shape, self.chunk = shape, shape.chunk
        library = {
            "name": f"group-{next(_numbers)}",
            "runtime_dir": str(home),
            "dram_gib": 512 * slot_bytes(shape.chunk) / (1 << 30),
        }
        settings = Settings.parse(
            library | {"chunk_tokens": shape.chunk, "min_load_tokens": 1, "lookup_wait_s": 60.0}
        )
        cfg = copy.deepcopy(_config(shape.dcp))
        cfg.parallel_config.cp_kv_cache_interleave_size = shape.interleave
        cfg.kv_transfer_config.engine_id = library["name"]
        spec = MLAAttentionSpec(
            block_size=shape.block, num_kv_heads=1, head_size=4, dtype=torch.bfloat16, max_tp_shards=1
        )
        kv = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["model.layers.0.self_attn.attn"], spec)])
        self.pages = [np.zeros((blocks, shape.block), np.uint64) for _ in range(shape.dcp)]
        self.workers: list[Worker] = []
        self.cache = kvtier.Cache.open(library)
        self.half = SchedulerHalf(cfg, kv, settings)
        try:
            assert self.cache.wait_open(60)
            for number in range(shape.dcp):
                self.workers.append(self._worker(copy.deepcopy(cfg), kv, settings, number))
            self.half.open()
        except BaseException:
            self.close()
            raise

    def _worker(self, cfg: VllmConfig, kv: KVCacheConfig, settings: Settings, number: int) -> Worker:
        s, pages = self.shape, self.pages[number]
        cfg.parallel_config.rank = number
        w = Worker(cfg, kv, settings)
        geometry = mapping.Geometry(s.block, kv.num_blocks, s.dcp, number, s.interleave)
        region = kvtier.Region(
            group=0, name="kv", component="target", layer=0, head=-1, bytes=8, replicated=False,
            base=pages.ctypes.data, block_stride=pages[0].nbytes, token_stride=8,
        )  # fmt: skip
        description = {
            "group": w._group, "ranks": s.dcp, "rank": number, "model": "made up", "kv_dtype": "u8", "weights": "00",
            "chunk_tokens": s.chunk, "block_tokens": s.block, "num_blocks": kv.num_blocks, "dcp": s.dcp,
            "dcp_rank": number, "interleave": s.interleave,
        }  # fmt: skip
        w._cache, w._chunk = self.cache, s.chunk
        w._pages = mapping.PageMap(geometry, "rows", 1, [region])
        w._rank = self.cache.register(description, w._pages.regions)
        worker._inbox.open(w._rank.handle)
        return w

    def close(self) -> None:
        for w in self.workers:
            w._rank.close()
            worker._inbox.close(w._rank.handle)
        self.half.close()
        self.cache.close()

    # ---- what an engine does

    def plan(self, output: SchedulerOutput | None = None) -> KVTierMetadata:
        """The metadata of a step."""
        meta = KVTierMetadata()
        self.half.build_connector_meta(output or SchedulerOutput.make_empty(), meta)
        return meta

    def save(self, meta: KVTierMetadata) -> None:
        for w in self.workers:
            w.save(meta)

    def look_up(self, r: Request, local: int) -> int:
        """What the scheduler half promises, once it has an answer."""
        for _ in attempts():
            n, asynchronous = self.half.get_num_new_matched_tokens(r, local)
            if n is not None:
                assert asynchronous == (n > 0)
                return n
        raise AssertionError("no answer")

    def load(self, plans: list[LoadPlan]) -> list[set[int]]:
        """Each rank's plan of one load, and the blocks that each of them reports as bad."""
        invalid = []
        for w, plan in zip(self.workers, plans, strict=True):
            w.start_load(KVTierMetadata(loads=[plan]))
        for w, plan in zip(self.workers, plans, strict=True):
            for _ in attempts():
                results = w.results(set())
                if results.finished_recving:
                    break
            assert results.finished_recving == {plan.request_id} and not results.failed_recving
            invalid.append(w.take_invalid_blocks())
        return invalid
