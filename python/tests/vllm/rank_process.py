"""One rank of an engine without a model, as a process of its own: vLLM's real process
groups (gloo), its real allocation of the KV cache, its own slot mapping, and the
connector's worker half, driven in the order of the model runner.

A page holds for every token bytes that depend on the prefix up to it, the layer and
the global number of the head. Before each forward every computed token is compared,
byte for byte. Where a token lies is taken from vLLM's kernel and the registered
tensors alone, never from kvtier."""

from __future__ import annotations

import dataclasses
import os
import pickle
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
import vllm.v1.worker.block_table as block_table
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import ensure_kv_transfer_initialized, get_kv_transfer_group
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    MLAAttentionSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.utils import allocate_kv_cache

import kvtier.vllm.worker

M64 = (1 << 64) - 1
FILL = 0xA5  # of all pages, before they are registered


def mix(x: int) -> int:
    """A bijection of 64 bits with good diffusion."""
    x = (x + 0x9E3779B97F4A7C15) & M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
    return x ^ (x >> 31)


def rows(hashes: np.ndarray, layer: int, head: int, width: int) -> np.ndarray:
    """What tokens with these prefixes have in one head of a layer: [n, width] bytes."""
    words = -(-width // 8)
    x = hashes[:, None] ^ np.uint64(mix(layer * 1000 + head))
    x = x + np.arange(1, words + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    return x.view(np.uint8)[:, :width]


@dataclass
class Job:
    """What a rank is born with; pickled, as vLLM's executor does."""

    config: VllmConfig
    kv: KVCacheConfig
    rank: int
    layout: str
    backend: str  # the attention backend that the layers name; empty: none
    init: str  # where the process groups meet
    first_draft_layer: int
    late_s: float = 0.0  # how long this rank holds its registration back
    patience_s: float = 5.0  # how long registration waits for the group
    blunder: str = ""  # what the connector is made to take wrong about this rank's pages


@dataclass
class Work:
    """Tokens start..start+n of a request, whose earlier ones are computed. ``hashes``
    has one more than start+n where draft layers look ahead."""

    request_id: str
    start: int
    n: int
    table: np.ndarray
    hashes: np.ndarray


class _Layer:
    """What vLLM's own layers tell about themselves."""

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def get_attn_backend(self) -> _Layer:
        return self

    def get_name(self) -> str:
        return self._backend


class Pages:
    """The registered tensors, and where a token lies in them."""

    def __init__(self, caches: dict[str, torch.Tensor], job: Job, dcp_rank: int) -> None:
        p = job.config.parallel_config
        group = job.kv.kv_cache_groups[0].kv_cache_spec
        self.block = group.block_size
        self.dcp = p.decode_context_parallel_size if group.dcp_sharded else 1
        self.dcp_rank, self.interleave = dcp_rank, p.cp_kv_cache_interleave_size
        os.environ["TRITON_INTERPRET"] = "1"
        block_table.tl = tl
        self._kernel = triton.jit(block_table.ComputeSlotMappingKernel.kernel)
        self.rows: np.ndarray | None = None  # [layer, token, byte] of the first tokens, instead
        self._layers = []
        for name, cache in caches.items():
            number = int(name.split(".layers.")[1].split(".")[0])
            spec = group.kv_cache_specs[name] if isinstance(group, UniformTypeKVCacheSpecs) else group
            self._layers.append((number, spec, cache, self._heads(job, spec), number >= job.first_draft_layer))

    @staticmethod
    def _heads(job: Job, spec: Any) -> list[int]:
        """Global numbers of this rank's KV heads, as vLLM's parallel layers give them."""
        if isinstance(spec, MLAAttentionSpec):
            return [500 if spec.cache_role is SparseCacheRole.INDEXER else 0]
        tp = job.config.parallel_config.tensor_parallel_size
        total = job.config.model_config.get_total_num_kv_heads()
        tp_rank = parallel_state.get_tp_group().rank_in_group
        if tp > total:
            return [tp_rank // (tp // total)]
        return [tp_rank * (total // tp) + i for i in range(total // tp)]

    def places(self, w: Work, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Which of the tokens first..end are here, and their slots."""
        n = end - first
        slots = torch.full((n,), -7, dtype=torch.int64)
        table = torch.from_numpy(w.table.astype(np.int32))[None]
        self._kernel[(2,)](
            n, n, torch.tensor([0, n], dtype=torch.int32), torch.arange(first, end), table, table.shape[1],
            slots, KV_CACHE_BLOCK_SIZE=self.block, TOTAL_CP_WORLD_SIZE=self.dcp, TOTAL_CP_RANK=self.dcp_rank,
            CP_KV_CACHE_INTERLEAVE_SIZE=self.interleave, PAD_ID=-1, BLOCK_SIZE=1024,
        )  # fmt: skip
        here = np.flatnonzero(slots.numpy() >= 0)
        return here + first, slots.numpy()[here]

    def _parts(self, w: Work, first: int, end: int):
        """For every layer and head: views of the tokens' bytes, and what they should be."""
        tokens, slots = self.places(w, first, end)
        block, at = slots // self.block, slots % self.block
        for number, spec, cache, heads, draft in self._layers:
            pages = cache.view(torch.uint8).numpy()  # [block, head, token, byte]
            want = w.hashes[tokens + 1] if draft else w.hashes[tokens]
            for i, head in enumerate(heads):
                width = pages.shape[3]
                values = rows(want, number, head, width)
                if self.rows is not None:
                    given = tokens < self.rows.shape[1]
                    values = np.concatenate([self.rows[number, tokens[given]], values[~given]])
                if isinstance(spec, MLAAttentionSpec) and spec.cache_role is SparseCacheRole.INDEXER:
                    # All values of a block, then all scales.
                    flat = pages[:, 0].reshape(len(pages), -1)
                    columns = np.concatenate(
                        [at[:, None] * 128 + np.arange(128), self.block * 128 + at[:, None] * 4 + np.arange(4)], axis=1
                    )
                    yield number, head, flat, (block[:, None], columns), values, tokens
                else:
                    yield number, head, pages, (block, i, at), values, tokens

    def write(self, w: Work) -> None:
        for _, _, pages, where, values, _ in self._parts(w, w.start, w.start + w.n):
            pages[where] = values

    def check(self, w: Work) -> str:
        """Says which of the computed tokens is wrong, empty when none is."""
        if w.start == 0:
            return ""
        for number, head, pages, where, values, tokens in self._parts(w, 0, w.start):
            bad = np.argwhere(pages[where] != values)
            if len(bad):
                t, byte = bad[0]
                return (
                    f"request {w.request_id}: layer {number} head {head} token {tokens[t]} byte {byte} is wrong, "
                    f"{len(bad)} bytes of {values.size} in all, {w.start} tokens computed"
                )
        return ""


class Rank:
    def __init__(self, job: Job) -> None:
        self.job, cfg = job, job.config
        p = cfg.parallel_config
        p.rank = job.rank
        os.environ["VLLM_DIST_IDENT"] = os.path.basename(job.init)  # as CPUWorker does
        parallel_state.init_distributed_environment(
            world_size=p.world_size, rank=job.rank, distributed_init_method=job.init,
            local_rank=job.rank, backend="gloo",
        )  # fmt: skip
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=p.tensor_parallel_size,
            pipeline_model_parallel_size=p.pipeline_parallel_size,
            decode_context_model_parallel_size=p.decode_context_parallel_size,
            backend="gloo",
        )
        kv = job.kv
        self.caches = allocate_kv_cache(
            kv, torch.device("cpu"), KVCacheLayout[job.layout], [kv.kv_cache_groups[0].kv_cache_spec.block_size]
        )
        if job.backend:
            cfg.compilation_config.static_forward_context.update(
                {name: _Layer(job.backend) for name in self.caches}
            )
        ensure_kv_transfer_initialized(cfg, kv)
        self.connector = get_kv_transfer_group()
        dcp = p.decode_context_parallel_size
        dcp_rank = parallel_state.get_dcp_group().rank_in_group if dcp > 1 else 0
        self.fill(FILL)
        if job.blunder:
            self._blunder(job.blunder)
        kvtier.vllm.worker.READY_S = job.patience_s
        time.sleep(job.late_s)
        self.connector.register_kv_caches(self.caches)
        self.pages = Pages(self.caches, job, dcp_rank)

    @property
    def half(self) -> Any:
        return self.connector._worker

    def _blunder(self, what: str) -> None:
        """Makes the connector take this rank's pages for something else."""
        from kvtier.vllm import mapping

        if what == "interleave":
            geometry = mapping.geometry
            mapping.geometry = lambda *args: dataclasses.replace(geometry(*args), interleave=1)
            return
        original = mapping.page_map

        def wrong(*args: Any, **kw: Any) -> mapping.PageMap:
            pages = original(*args, **kw)
            first, last = pages.regions[0], pages.regions[-1]
            changes = {"stride": {"block_stride": 4 * last.block_stride}, "base": {"base": first.base}}[what]
            pages.regions[-1] = dataclasses.replace(last, **changes)
            return pages

        mapping.page_map = wrong

    def step(self, metadata: bytes, finished: set[str], work: list[Work], req_ids: list[str]) -> bytes:
        problems = [wrong for w in work if (wrong := self.pages.check(w))]
        c, meta = self.connector, pickle.loads(metadata)
        c.handle_preemptions(meta)
        c.bind_connector_metadata(meta)
        for w in work:
            self.pages.write(w)
        c.start_load_kv(None)
        c.wait_for_save()
        results = c.get_transfer_results(finished)
        out = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=c.get_block_ids_with_load_errors(),
            kv_connector_stats=c.get_kv_connector_stats(),
        )
        c.clear_connector_metadata()
        result = ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={r: i for i, r in enumerate(req_ids)},
            kv_connector_output=out,
        )
        return pickle.dumps((result, problems))

    def state(self) -> tuple[str, str]:
        return self.half._cache.state() if self.half._cache is not None else ("closed", self.half._why_off)

    def stats(self) -> dict:
        return self.half._cache.stats()

    def left(self) -> dict[str, int]:
        h = self.half
        return {k: n for k, n in (("running", len(h._running)), ("finished", len(h._finished))) if n}

    def fingerprint(self) -> str:
        return self.half._rank.ready(5.0).fingerprint.hex()

    def fill(self, value: int) -> None:
        """All bytes of all pages."""
        for cache in self.caches.values():
            cache.view(torch.uint8).fill_(value)

    def only(self, value: int) -> bool:
        return all(bool((cache.view(torch.uint8) == value).all()) for cache in self.caches.values())

    def use_rows(self, path: str) -> None:
        """Bytes of a file, [layer, block, 1, token, byte], instead of made ones for the
        first tokens of every request."""
        pages = np.load(path)
        layers, blocks, _, tokens, width = pages.shape
        self.pages.rows = pages.reshape(layers, blocks * tokens, width)

    def fail_at(self, chunks: int) -> None:
        """The next load of this rank ends after so many chunks: what it brought beyond
        them counts for nothing and is overwritten."""
        half, original = self.half, self.half._ended

        def ended(e: Any) -> None:
            half._ended = original
            plan = half._running[e.op]
            first = (plan.first_token // half._chunk + chunks) * half._chunk
            span = self.pages.block * self.pages.dcp
            for b in plan.blocks[(first - plan.first_token) // span :]:
                for cache in self.caches.values():
                    cache.view(torch.uint8)[b].fill_(0xEE)
            original(dataclasses.replace(e, status=-1, failed_chunk=chunks))

        half._ended = ended

    def signal_in(self, hook: str, after: bool, number: int) -> None:
        """The next call of a hook of the connector sends this process a signal, before
        the hook does its work or after it."""
        connector, original = self.connector, getattr(self.connector, hook)

        def once(*args: Any) -> Any:
            delattr(connector, hook)
            if not after:
                os.kill(os.getpid(), number)
            result = original(*args)
            if after:
                os.kill(os.getpid(), number)
            return result

        setattr(connector, hook, once)

    def check(self, w: Work) -> str:
        """As before a forward that begins at w.start."""
        return self.pages.check(w)

    def flush(self) -> bool:
        """Whether all that is stored is on disk."""
        return self.half._cache.flush(30)

    def close(self) -> None:
        self.connector.shutdown()
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def main(pipe: Connection, job: Job) -> None:
    """Answers calls of Rank's methods until the other end is closed."""
    torch.set_num_threads(1)
    with set_current_vllm_config(job.config):
        try:
            rank = Rank(job)
        except Exception as e:
            pipe.send(e)
            return
        pipe.send(rank.connector.get_handshake_metadata())
        while True:
            try:
                method, args = pipe.recv()
            except EOFError:
                return
            try:
                answer: Any = getattr(rank, method)(*args)
            except Exception as e:
                answer = e
            pipe.send(answer)
            if method == "close":
                return


def meeting_point() -> str:
    return f"file://{tempfile.mktemp(prefix='kvtier-test-')}"
