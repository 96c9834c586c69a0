"""vLLM's real scheduler and this connector's two halves over the real library, in
one process, without a model.

A page holds, per layer and token, one 64-bit hash of the whole prefix up to that
token. Before a forward every computed token of every scheduled request is
compared; so KV of other tokens, of other weights, or from given-away pages is
seen at once.
"""

from __future__ import annotations

import json
import struct
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import models
import numpy as np
import torch
from schedulers import block_hasher, make_scheduler, settle_blocks
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_configs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.utils import allocate_kv_cache

from kvtier.vllm import KVTierConnector

torch.set_num_threads(1)

LAYERS = 2
TOKEN_BYTES = 8  # of one layer: one hash
ROW_STRIDE = 64  # a row of 16 bytes, rounded up
MAX_LEN = 1024
STOCK = 64  # free slots that an arena keeps allocated, if it is as large
M64 = (1 << 64) - 1


def mix(x: int) -> int:
    """A bijection of 64 bits with good diffusion."""
    x = (x + 0x9E3779B97F4A7C15) & M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
    return x ^ (x >> 31)


def prefix_hashes(tokens: list[int], world: int = 0, at: int = 0) -> np.ndarray:
    out, v = [], 7
    for i, t in enumerate(tokens):
        if world and i == at:
            v ^= mix(world)
        v = mix(v ^ (t * 0x1000193 & M64))
        out.append(v)
    return np.array(out, np.uint64)


def next_token(hash_of_prefix: int) -> int:
    """What the "model" samples."""
    return int(hash_of_prefix) % 997 + 3


def slot_bytes(chunk_tokens: int) -> int:
    return -(-chunk_tokens * ROW_STRIDE // 4096) * 4096


_configs: dict[tuple, VllmConfig] = {}
_home = tempfile.TemporaryDirectory(prefix="kvtier-test-")


def _model(recognisable: bool, max_len: int) -> Path:
    path = models.write(Path(_home.name) / f"{'w' if recognisable else 'n'}{max_len}", "deepseek")
    if max_len != MAX_LEN:
        content = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(content | {"max_position_embeddings": max_len}))
    if recognisable:
        header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
        (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\1\2\3\4")
    return path


def _config(block: int, recognisable: bool, max_len: int) -> VllmConfig:
    """Built once per shape: it takes seconds. Fields that tests vary are set anew."""
    key = (block, recognisable, max_len)
    if key not in _configs:
        cfg = VllmConfig(
            model_config=ModelConfig(
                model=str(_model(recognisable, max_len)),
                skip_tokenizer_init=True,
                dtype="bfloat16",
                max_model_len=max_len,
                enforce_eager=True,
            ),
            parallel_config=ParallelConfig(),
            cache_config=CacheConfig(block_size=block, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=16,
                max_num_batched_tokens=8192,
                max_model_len=max_len,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
            ),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVTierConnector", kv_connector_module_path="kvtier.vllm", kv_role="kv_both"
            ),
        )
        # The CPU platform has ideas of its own about MLA.
        cfg.cache_config.block_size = block
        cfg.cache_config.enable_prefix_caching = True
        cfg.cache_config.kv_cache_layout = "LBNHC"
        _configs[key] = cfg
    return _configs[key]


class Sequence:
    """What a request should be: its tokens, with those the model will sample.

    ``world`` stands for what its KV depends on besides the tokens (an image, an
    adapter) from position ``at`` on: no two worlds have KV in common there. ``luck``
    tells apart the sampling of requests with the same prompt."""

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        max_new: int,
        world: int = 0,
        at: int = 0,
        luck: int = 0,
    ) -> None:
        self.id = request_id
        self.prompt_len, self.max_new = len(prompt), max_new
        tokens = list(prompt)
        v = prefix_hashes(tokens, world, at).tolist()
        for _ in range(max_new + 8):
            t = next_token(mix(v[-1] ^ luck) if luck else v[-1])
            tokens.append(t)
            v.append(mix(v[-1] ^ (t * 0x1000193 & M64)))
        self.tokens, self.hashes = tokens, np.array(v, np.uint64)
        self.born = 0
        self.request: Request | None = None


class Engine:
    """One scheduler and one rank.

    ``extra`` is the kv_connector_extra_config. The cache is the leader of a root
    of its own unless ``extra`` names one. ``before`` and ``beside`` are further
    connectors of a MultiConnector, asked before this one and after it."""

    _number = 0

    def __init__(
        self,
        *,
        block: int = 16,
        chunk: int = 64,
        blocks: int = 200,
        slots: int = 64,
        batched_tokens: int = 8192,
        sequences: int = 16,
        async_scheduling: bool = False,
        policy: str = "fcfs",
        extra: dict | None = None,
        recognisable: bool = False,
        home: Path | None = None,
        multi: bool = False,
        measured: bool = False,
        max_len: int = MAX_LEN,
        beside: tuple[dict, ...] = (),
        before: tuple[dict, ...] = (),
        outer_policy: str = "recompute",
    ) -> None:
        Engine._number += 1
        self.block, self.chunk, self.blocks, self.slots = block, chunk, blocks, slots
        self.weights = 0
        self.sequences: dict[str, Sequence] = {}
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self._home = home or Path(_home.name)
        self.extra = {
            "chunk_tokens": chunk,
            "min_load_tokens": 1,
            "lookup_wait_s": 2.0,
            "required": True,
            "name": f"test-{Engine._number}",
            "runtime_dir": str(self._home),
            "dram_gib": slots * slot_bytes(chunk) / (1 << 30),
        } | (extra or {})
        cfg = self.config = _config(block, recognisable, max_len)
        s = cfg.scheduler_config
        s.max_num_seqs, s.max_num_batched_tokens = sequences, batched_tokens
        s.max_num_scheduled_tokens = batched_tokens
        s.enable_chunked_prefill, s.async_scheduling, s.policy = True, async_scheduling, policy
        transfer = cfg.kv_transfer_config
        ours = {"kv_connector": "KVTierConnector", "kv_connector_module_path": "kvtier.vllm"}
        multi = multi or bool(before or beside)
        # MultiConnector wants it while a child cannot tell groups apart.
        s.disable_hybrid_kv_cache_manager = bool(before or beside)
        if multi:
            ours |= {"kv_role": "kv_both", "kv_connector_extra_config": self.extra}
            transfer.kv_connector, transfer.kv_connector_module_path = "MultiConnector", None
            transfer.kv_connector_extra_config = {"connectors": [*before, ours, *beside]}
        else:
            transfer.kv_connector = ours["kv_connector"]
            transfer.kv_connector_module_path = ours["kv_connector_module_path"]
            transfer.kv_connector_extra_config = self.extra
        transfer.engine_id = f"engine-{Engine._number}"
        transfer.kv_load_failure_policy = outer_policy if multi else "fail"

        spec = MLAAttentionSpec(
            block_size=block, num_kv_heads=1, head_size=TOKEN_BYTES // 2, dtype=torch.bfloat16
        )
        specs = {f"model.layers.{i}.self_attn.attn": spec for i in range(LAYERS)}
        memory = blocks * LAYERS * spec.page_size_bytes
        kv = generate_scheduler_kv_cache_config(get_kv_cache_configs(cfg, [specs], [memory]))
        assert kv.num_blocks == blocks
        assert settle_blocks(cfg, kv) == block
        self.caches = allocate_kv_cache(kv, torch.device("cpu"), KVCacheLayout.LBNHC, [block])
        self.pages = [
            t.view(torch.uint8).reshape(blocks, block, TOKEN_BYTES).numpy().view(np.uint64)[:, :, 0]
            for t in self.caches.values()
        ]
        self.forward_context = SimpleNamespace(
            attn_metadata=dict.fromkeys(self.caches),
            no_compile_layers={n: SimpleNamespace(kv_cache=c) for n, c in self.caches.items()},
        )
        # As in an engine: workers first, then the scheduler, then the handshake.
        self.worker = KVConnectorFactory.create_connector(cfg, KVConnectorRole.WORKER, kv)
        self.worker.register_kv_caches(self.caches)
        cls = AsyncScheduler if async_scheduling else Scheduler
        self.scheduler = make_scheduler(cfg, kv, block, cls)
        self.connector = self.scheduler.connector
        if not measured:
            # This engine computes a million tokens a second, and no wait would be
            # worth while.
            self.half._patience.measure = lambda now, scheduled: None
        if async_scheduling:
            self.scheduler.defer_block_free = True  # vLLM derives it from the executor
        if (handshake := self.worker.get_handshake_metadata()) is not None:
            self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake})
        self._hasher = block_hasher(cfg)

    # ---- the connector's insides, for assertions

    @property
    def half(self):
        return _ours(self.connector)._scheduler

    @property
    def worker_half(self):
        return _ours(self.worker)._worker

    @property
    def cache(self):
        return self.worker_half._cache

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    # ---- requests

    def add(
        self,
        prompt: list[int],
        max_new: int = 4,
        request_id: str | None = None,
        world: int = 0,
        at: int = 0,
        luck: int = 0,
        **kw,
    ) -> Sequence:
        q = Sequence(request_id or f"r{len(self.sequences)}", prompt, max_new, world, at, luck)
        params = kw.pop("sampling", {})
        q.request = Request(
            request_id=q.id,
            prompt_token_ids=kw.pop("prompt_token_ids", list(prompt)),
            sampling_params=SamplingParams(max_tokens=max_new, ignore_eos=True, **params),
            pooling_params=None,
            block_hasher=self._hasher,
            **kw,
        )
        self.sequences[q.id] = q
        self.scheduler.add_request(q.request)
        return q

    def abort(self, q: Sequence) -> None:
        self.scheduler.finish_requests(q.id, RequestStatus.FINISHED_ABORTED)

    def values(self, q: Sequence) -> np.ndarray:
        return q.hashes ^ np.uint64(mix(1000 + self.weights))

    # ---- one step, in the order of vLLM's model runner

    def schedule(self):
        """Returns the scheduler's output and what the workers know of it."""
        output = self.scheduler.schedule()
        start = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        start.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        todo = {}
        for rid, n in output.num_scheduled_tokens.items():
            table = np.array(self.scheduler.kv_cache_manager.get_block_ids(rid)[0])
            drafts = list(output.scheduled_spec_decode_tokens.get(rid, ()))
            todo[rid] = (start[rid], n, drafts, table, self.scheduler.requests[rid].is_prefill_chunk)
        return output, todo

    def execute(self, output, todo) -> ModelRunnerOutput:
        self.worker.handle_preemptions(output.kv_connector_metadata)
        self.worker.bind_connector_metadata(output.kv_connector_metadata)
        if output.has_sync_kv_loads:  # of another connector; ours are asynchronous
            self.worker.start_load_kv(self.forward_context)
        sampled = self._forward(todo)
        for name, cache in self.caches.items():
            self.worker.save_kv_layer(name, cache, None)
        if not output.has_sync_kv_loads:
            self.worker.start_load_kv(self.forward_context)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(output.finished_req_ids)
        kv = KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.worker.get_block_ids_with_load_errors(),
        )
        kv.kv_connector_stats = self.worker.get_kv_connector_stats()
        if (stats := kv.kv_connector_stats) is not None:
            self.counts.update(getattr(stats.data.get("KVTierConnector"), "data", stats.data))
        self.worker.clear_connector_metadata()
        ids = list(todo)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={r: i for i, r in enumerate(ids)},
            sampled_token_ids=[sampled[r] for r in ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=kv,
        )

    def update(self, output, result: ModelRunnerOutput) -> None:
        before = self.half.stats.data.copy()
        self.scheduler.update_from_output(output, result)
        self.counts.update({k: v for k, v in before.items()})

    def step(self):
        output, todo = self.schedule()
        self.update(output, self.execute(output, todo))
        return output

    def run(self, limit_s: float = 120.0) -> None:
        """Until all requests are done, and the leader with what they brought."""
        end = time.monotonic() + limit_s
        while self.scheduler.has_requests() or self.scheduler.requests:
            output = self.step()
            if not output.num_scheduled_tokens:
                time.sleep(0.001)  # as the engine core does
            if time.monotonic() > end:
                live = [r.status.name for r in self.scheduler.requests.values()]
                raise AssertionError(f"does not end: {live}")
        self.rest(end - time.monotonic())

    def rest(self, limit_s: float = 60.0) -> None:
        """Waits until the leader, if it answers, is done with what was stored: the next
        request finds it, and free slots for what is new."""
        end = time.monotonic() + limit_s
        while self._behind():
            time.sleep(0.001)
            assert time.monotonic() < end, "the leader does not come to rest"

    def _behind(self) -> bool:
        """Whether the leader still hashes chunks or makes slots."""
        cache = self.worker_half._cache
        leader = cache.stats()["leader"] if cache is not None else None
        for n in (leader or {}).get("namespaces") or ():
            arena, slots = n["arena"], n["slots"]
            wanted = min(arena["slots"], arena["slots"] - slots["free"] + STOCK)
            if slots["sealing"] or (arena["allocated_bytes"] < wanted * arena["slot_bytes"] and not arena["limit"]):
                return True
        return False

    def _forward(self, todo) -> dict[str, list[int]]:
        """Checks the computed tokens, writes the new ones, samples."""
        sampled = {}
        for rid, (start, n, drafts, table, prefill) in todo.items():
            q = self.sequences[rid]
            n = min(n, len(q.tokens) - start)  # async scheduling may run past the end
            want = self.values(q)
            self._check(q, start, table, want)
            new = want[start : start + n].copy()
            accepted, known = 0, start + n - len(drafts)
            for i, d in enumerate(drafts):
                if accepted == i and known + i < len(q.tokens) and d == q.tokens[known + i]:
                    accepted += 1
                elif i < n:
                    new[n - len(drafts) + i] = np.uint64(mix(d + i + 99999))
            p = np.arange(start, start + n)
            for l, page in enumerate(self.pages):
                page[table[p // self.block], p % self.block] = new ^ np.uint64(mix(l))
            sampled[rid] = [] if prefill else [q.tokens[known + i] for i in range(accepted + 1)]
        return sampled

    def _check(self, q: Sequence, end: int, table: np.ndarray, want: np.ndarray) -> None:
        p = np.arange(end)
        for l, page in enumerate(self.pages):
            have = page[table[p // self.block], p % self.block] ^ np.uint64(mix(l))
            wrong = np.flatnonzero(have != want[:end])
            if len(wrong):
                self.problems.append(
                    f"request {q.id} layer {l}: token {wrong[0]} of {end} computed ones is wrong, {len(wrong)} in all"
                )
                return

    # ---- the end

    def settled(self, timeout_s: float = 10.0) -> dict:
        """What is still held once the engine is idle; waits for what ends by itself."""
        end = time.monotonic() + timeout_s
        while True:
            left = self.left()
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.01)

    def left(self) -> dict:
        left = {k: v for k, v in self.half.leftovers().items() if v}
        w = self.worker_half
        left |= {k: v for k, v in {"running": len(w._running), "finished": len(w._finished)}.items() if v}
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        if free != self.blocks - 1:
            left["blocks"] = self.blocks - 1 - free
        if w._cache is not None:
            left |= library_leftovers(w._cache.stats())
        return left


def _ours(connector) -> KVTierConnector:
    """The connector, or the one inside a MultiConnector."""
    each = getattr(connector, "_connectors", [connector])
    return next(c for c in each if isinstance(c, KVTierConnector))


def library_leftovers(stats: dict) -> dict:
    """What the leader holds for engines: nothing once they are idle."""
    leader = stats["leader"] or {}
    left: Counter[str] = Counter()
    for g in leader.get("groups") or ():
        for what in ("leases", "slots_charged", "stores_running", "loads_running"):
            left["leader " + what] += g[what]
    for n in leader.get("namespaces") or ():
        left["disk reads"] += n["disk_reads_running"]
        for state, count in n["slots"].items():
            if state.lower() not in ("free", "ready"):
                left[f"slots {state}"] += count
        arena = n["arena"]
        left["pins"] += arena.get("pins", arena.get("Pins", 0))
    return {k: v for k, v in left.items() if v}
