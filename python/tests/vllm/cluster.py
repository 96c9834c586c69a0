"""An engine of several ranks without a model: vLLM's real scheduler and the connector's
scheduler half in this process, every rank in a process of its own (rank_process.py),
metadata and outputs pickled between them as vLLM's executor does, outputs put together
by vLLM's own aggregator.

Ranks are forked from a server that has imported vLLM once and has never loaded the
library."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import struct
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import models
import numpy as np
import rank_process
from engine import Sequence, library_leftovers
from rank_process import Job, Work
from schedulers import block_hasher, make_scheduler, settle_blocks
from topology import Kind, Topology
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_configs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

import kvtier.vllm.loading as loading
import kvtier.vllm.storing as storing

HERE = Path(__file__).resolve().parent
MAX_LEN = 1024
ANSWER_S = 120.0
NO_DRAFT = 1 << 30


_model_configs: dict[tuple, ModelConfig] = {}
_server: Any = None


def context() -> Any:
    """Processes that are forked from one which has imported everything."""
    global _server
    if _server is None:
        paths = [str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")]
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
        os.environ["TRITON_INTERPRET"] = "1"
        _server = multiprocessing.get_context("forkserver")
        _server.set_forkserver_preload(["rank_process"])
        multiprocessing.forkserver.ensure_running()
        os.environ.pop("TRITON_INTERPRET")
        if before is None:
            os.environ.pop("PYTHONPATH")
        else:
            os.environ["PYTHONPATH"] = before
    return _server


def end_server() -> None:
    global _server
    if _server is not None:
        server = multiprocessing.forkserver._forkserver
        os.kill(server._forkserver_pid, signal.SIGKILL)  # its ordinary end takes seconds
        server._stop()
        _server = None


@contextlib.contextmanager
def patience() -> Iterator[None]:
    """The scheduler half waits milliseconds for its leader, and a miss follows; on a
    busy machine a test would see misses that it does not ask for."""
    with (
        mock.patch.object(loading, "LOAD_WAIT_S", 30.0),
        mock.patch.object(storing, "STORE_WAIT_S", 30.0),
    ):
        yield


class RankDied(Exception):
    pass


class RankHandle:
    """The other end of one rank's process."""

    def __init__(self, job: Job) -> None:
        ctx = context()
        self.pipe, theirs = ctx.Pipe()
        self.process = ctx.Process(target=rank_process.main, args=(theirs, job), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, method: str, *args: Any) -> None:
        self.pipe.send((method, args))

    def receive(self, timeout_s: float = ANSWER_S) -> Any:
        """The answer of the last call; raises RankDied, and what the call raised."""
        end = time.monotonic() + timeout_s
        try:
            while not self.pipe.poll(0.1):
                if not self.process.is_alive() and not self.pipe.poll(0):
                    raise RankDied(f"rank process {self.process.pid} is gone")
                if time.monotonic() > end:
                    raise TimeoutError(f"rank process {self.process.pid} does not answer")
            answer = self.pipe.recv()
        except (EOFError, ConnectionResetError) as e:
            raise RankDied(f"rank process {self.process.pid} is gone") from e
        if isinstance(answer, Exception):
            raise answer
        return answer

    def call(self, method: str, *args: Any, timeout_s: float = ANSWER_S) -> Any:
        self.send(method, *args)
        return self.receive(timeout_s)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def wait_stopped(self, timeout_s: float = ANSWER_S) -> None:
        """Returns when a signal has stopped the process, which is a child of another."""
        end = time.monotonic() + timeout_s
        stat = Path(f"/proc/{self.process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            if time.monotonic() > end:
                raise TimeoutError(f"rank process {self.process.pid} does not stop")
            time.sleep(0.005)

    def end(self) -> None:
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGCONT)
            with contextlib.suppress(OSError):
                self.pipe.close()
            self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10)
        self.process.close()


class Cluster:
    """One engine. ``extra`` is the kv_connector_extra_config; ``adjust`` changes the
    configuration that the ranks are born with, after the scheduler's copy was made;
    ``jobs`` has further fields of Job by rank."""

    _number = 0

    def __init__(
        self,
        kind: Kind,
        topology: Topology,
        extra: dict[str, Any],
        *,
        chunk: int = 64,
        blocks: int = 80,
        adjust: Any = None,
        scheduler_adjust: Any = None,
        jobs: dict[int, dict[str, Any]] | None = None,
        model: Path | None = None,
        max_len: int = MAX_LEN,
        home: Path,
    ) -> None:
        Cluster._number += 1
        self.kind, self.topology, self.chunk = kind, topology, chunk
        self.span = topology.block * topology.dcp
        self.problems: list[str] = []
        self.early: dict[int, bytes] = {}  # outputs of ranks that were taken before collect
        self.counts: Counter[str] = Counter()
        self.sequences: dict[str, Sequence] = {}
        self.hashes: dict[str, np.ndarray] = {}
        self.ranks: list[RankHandle] = []
        self._block_count = blocks
        self.scheduler: Scheduler | None = None
        cfg = self.config = self._configure(extra, model or self._model(home), max_len)
        world = cfg.parallel_config.world_size
        t = topology
        if kind.draft_layers:
            self._speculate(home)
        specs = [kind.specs(t, rank // t.tp) for rank in range(world)]
        most = max(range(world), key=lambda r: sum(s.page_size_bytes for s in specs[r].values()))
        memory = [blocks * sum(s.page_size_bytes for s in specs[most].values())] * world
        kvs = get_kv_cache_configs(cfg, specs, memory)
        kv = generate_scheduler_kv_cache_config(kvs)
        theirs = pickle.loads(pickle.dumps((cfg, kvs)))
        if scheduler_adjust is not None:
            scheduler_adjust(cfg, kv)
        scheduler_block = settle_blocks(cfg, kv)
        assert scheduler_block == self.span or scheduler_adjust is not None
        self._block_count = kv.num_blocks
        theirs, kvs = theirs
        theirs.cache_config.num_gpu_blocks, theirs.cache_config.hash_block_size = kv.num_blocks, self.span
        for each, size in [*((k, self.span) for k in kvs), (kv, cfg.cache_config.hash_block_size)]:
            each.kv_cache_layout, each.hash_block_size = t.layout, size
        if adjust is not None:
            adjust(theirs)
        init = rank_process.meeting_point()
        self._init = Path(init.removeprefix("file://"))
        draft_from = kind.layers if kind.draft_layers else NO_DRAFT
        try:
            for rank in range(world):
                self.ranks.append(
                    RankHandle(
                        Job(
                            theirs, kvs[rank], rank, t.layout, kind.backend, init, draft_from,
                            **(jobs or {}).get(rank, {}),
                        )  # fmt: skip
                    )
                )
            self.handshakes = [r.receive() for r in self.ranks]
            self.restored = [r.call("only", rank_process.FILL) for r in self.ranks]
            self.scheduler = make_scheduler(cfg, kv, scheduler_block)
            self.connector = self.scheduler.connector
            self.half._patience.measure = lambda now, scheduled: None
            self.connector.set_xfer_handshake_metadata_pp_aware(
                {(r // t.tp, r % t.tp): pickle.loads(pickle.dumps(h)) for r, h in enumerate(self.handshakes)}
            )
        except BaseException:
            self.close()
            raise
        self.aggregator = KVOutputAggregator.from_connector(self.connector, world)
        self._hasher = block_hasher(cfg)

    def _model(self, home: Path) -> Path:
        """The directory of a checkpoint whose content can be told from others."""
        path = models.write(home, self.kind.model)
        if not (path / "model.safetensors").exists():
            header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
            (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\1\2\3\4")
            config = json.loads((path / "config.json").read_text())
            config |= {"num_hidden_layers": self.kind.layers} | self.kind.changes
            (path / "config.json").write_text(json.dumps(config))
        return path

    def _speculate(self, home: Path) -> None:
        """EAGLE with a draft of the model's own shape."""
        path = home / "draft"
        path.mkdir(exist_ok=True)
        target = Path(self.config.model_config.model)
        config = json.loads((target / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": self.kind.draft_layers}))
        weights = path / "model.safetensors"
        if not weights.exists():
            weights.write_bytes((target / "model.safetensors").read_bytes())
        self.config.speculative_config = SpeculativeConfig(
            method="eagle",
            model=str(path),
            num_speculative_tokens=1,
            target_model_config=self.config.model_config,
            target_parallel_config=self.config.parallel_config,
        )

    def _configure(self, extra: dict[str, Any], model: Path, max_len: int) -> VllmConfig:
        t = self.topology
        if model not in _model_configs:  # takes seconds
            _model_configs[model] = ModelConfig(
                model=str(model), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=max_len, enforce_eager=True
            )
        cfg = VllmConfig(
            model_config=_model_configs[model],
            parallel_config=ParallelConfig(
                tensor_parallel_size=t.tp,
                pipeline_parallel_size=t.pp,
                decode_context_parallel_size=t.dcp,
                cp_kv_cache_interleave_size=t.interleave,
                distributed_executor_backend="mp",
            ),
            cache_config=CacheConfig(block_size=t.block, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=16,
                max_num_batched_tokens=8192,
                max_model_len=max_len,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
            ),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVTierConnector",
                kv_connector_module_path="kvtier.vllm",
                kv_role="kv_both",
                engine_id=f"cluster-{os.getpid()}-{Cluster._number}",
                kv_connector_extra_config={
                    "chunk_tokens": self.chunk,
                    "min_load_tokens": 1,
                    "lookup_wait_s": 30,
                    "required": True,
                    "dram_gib": 0.0625,
                }
                | extra,
            ),
        )
        # The CPU platform has ideas of its own about some of this.
        cfg.cache_config.block_size = t.block
        cfg.cache_config.enable_prefix_caching = True
        cfg.cache_config.kv_cache_layout = t.layout
        cfg.scheduler_config.async_scheduling = False
        cfg.scheduler_config.enable_chunked_prefill = True
        return cfg

    @property
    def half(self) -> Any:
        return self.connector._scheduler

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Workers before the scheduler, as in an engine."""
        for r in self.ranks:
            try:
                r.send("close")
            except (OSError, ValueError):
                pass
        for r in self.ranks:
            try:
                r.receive(30)
            except Exception:  # it is gone, or says why it never began
                pass
        if self.scheduler is not None:
            self.scheduler.shutdown()
            self.scheduler = None
        for r in self.ranks:
            r.end()
        self.ranks = []
        self._init.unlink(missing_ok=True)

    # ---- requests

    def add(self, prompt: list[int], max_new: int = 2, request_id: str | None = None, hashes: Any = None) -> Sequence:
        """``hashes``: instead of those of the prefixes."""
        q = Sequence(request_id or f"r{len(self.sequences)}", prompt, max_new)
        q.request = Request(
            request_id=q.id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=max_new, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self.sequences[q.id] = q
        self.hashes[q.id] = q.hashes if hashes is None else hashes
        self.scheduler.add_request(q.request)
        return q

    # ---- a step

    def schedule(self) -> tuple[Any, list[Work], dict[str, list[int]]]:
        output = self.scheduler.schedule()
        start = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        start.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        work, sampled = [], {}
        ahead = 1 if self.kind.draft_layers else 0
        for rid, n in output.num_scheduled_tokens.items():
            q, first = self.sequences[rid], start[rid]
            table = np.array(self.scheduler.kv_cache_manager.get_block_ids(rid)[0])
            work.append(Work(rid, first, n, table, self.hashes[rid][: first + n + ahead]))
            sampled[rid] = [] if self.scheduler.requests[rid].is_prefill_chunk else [q.tokens[first + n]]
        return output, work, sampled

    def send(self, step: tuple[Any, list[Work], dict[str, list[int]]], ranks: Any = None) -> None:
        output, work, sampled = step
        metadata = pickle.dumps(output.kv_connector_metadata)
        for r in self.ranks if ranks is None else ranks:
            r.send("step", metadata, output.finished_req_ids, work, list(sampled))

    def collect(self, step: tuple[Any, list[Work], dict[str, list[int]]]) -> None:
        """Takes the outputs of all ranks and hands them to the scheduler."""
        output, _, sampled = step
        results = []
        for i, r in enumerate(self.ranks):
            result, problems = pickle.loads(self.early.pop(i, None) or r.receive())
            self.problems += problems
            results.append(result)
        result = self.aggregator.aggregate(results, 0)
        result.sampled_token_ids = [sampled[r] for r in result.req_ids]
        if (stats := result.kv_connector_output.kv_connector_stats) is not None:
            self._count(stats.data)
        before = dict(self.half.stats.data)
        self.scheduler.update_from_output(output, result)
        self._count(before)

    def take(self, rank: int) -> bytes:
        """The output of one rank, before those of others. It can be called again then."""
        self.early[rank] = self.ranks[rank].receive()
        return self.early[rank]

    def _count(self, data: dict[str, Any]) -> None:
        self.counts.update({k: v for k, v in data.items() if isinstance(v, int)})

    def step(self) -> Any:
        step = self.schedule()
        self.send(step)
        self.collect(step)
        return step[0]

    def run(self, limit_s: float = 120.0) -> None:
        end = time.monotonic() + limit_s
        while self.scheduler.has_requests() or self.scheduler.requests:
            output = self.step()
            if not output.num_scheduled_tokens:
                time.sleep(0.001)
            assert time.monotonic() < end, "does not end"

    def forget(self) -> None:
        assert self.scheduler.reset_prefix_cache()

    # ---- the end

    def settled(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """What is still held once the engine is idle."""
        end = time.monotonic() + timeout_s
        while left := self.left():
            if time.monotonic() > end:
                break
            time.sleep(0.02)
        return left

    def left(self) -> dict[str, Any]:
        left = {k: v for k, v in self.half.leftovers().items() if v}
        for i, r in enumerate(self.ranks):
            left |= {f"rank {i} {k}": v for k, v in r.call("left").items()}
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        if free != self._block_count - 1:
            left["blocks"] = self._block_count - 1 - free
        return left | library_leftovers(self.ranks[0].call("stats"))
