"""An engine in processes of their own, which are born fast: vLLM's real scheduler in
one, two ranks under decode context parallelism in two more, without a model.

Run as a program it imports vLLM once, loads no kvtier, and forks a life for every
line on its standard input: JSON with the settings of the connector and the work.
It answers with the process ids. It ends, and so do all lives, with its input.

The ranks hold in their pages one hash of the prefix per token, as engine.py does;
each compares every computed token of its share before every forward.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import struct
import sys
import tempfile
import time
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

RANKS = 2
BLOCK = 16  # tokens on one rank
SPAN = BLOCK * RANKS  # of one block id
CHUNK = 64
BLOCKS = 96
DOCUMENTS = 48
ENGINE_ID = "lives"
_PR_SET_PDEATHSIG = 1


def document(n: int) -> list[int]:
    """The n-th text: 3 to 8 chunks and some more."""
    rng = random.Random(n)
    return [rng.randrange(3, 1000) for _ in range(rng.randrange(3, 9) * CHUNK + rng.randrange(1, 30))]


def build_config(model: Path) -> Any:
    """Takes seconds, so it is made once, before the forks."""
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
    )

    cfg = VllmConfig(
        model_config=ModelConfig(
            model=str(model), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024, enforce_eager=True
        ),
        parallel_config=ParallelConfig(
            tensor_parallel_size=RANKS,
            decode_context_parallel_size=RANKS,
            cp_kv_cache_interleave_size=1,
            distributed_executor_backend="mp",
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=2048,
            max_model_len=1024,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVTierConnector",
            kv_connector_module_path="kvtier.vllm",
            kv_role="kv_both",
            engine_id=ENGINE_ID,
        ),
    )
    # The CPU platform has ideas of its own about MLA.
    cfg.cache_config.block_size = BLOCK
    cfg.cache_config.enable_prefix_caching = True
    cfg.cache_config.kv_cache_layout = "LBNHC"
    cfg.scheduler_config.async_scheduling = False
    return cfg


def kv_cache_configs(cfg: Any) -> tuple[Any, list[Any]]:
    """The scheduler's and those of the ranks."""
    import torch
    from engine import LAYERS, TOKEN_BYTES
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_configs
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    spec = MLAAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=TOKEN_BYTES // 2, dtype=torch.bfloat16
    )
    specs = {f"model.layers.{i}.self_attn.attn": spec for i in range(LAYERS)}
    each = get_kv_cache_configs(cfg, [specs] * RANKS, [BLOCKS * LAYERS * spec.page_size_bytes] * RANKS)
    return generate_scheduler_kv_cache_config(each), each


class RankProcess:
    """One rank: its pages and the connector's worker half, driven over a pipe."""

    def __init__(self, cfg: Any, rank: int, pipe: Connection) -> None:
        import torch
        from engine import TOKEN_BYTES
        from vllm.distributed import parallel_state
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.v1.kv_cache_layout import KVCacheLayout
        from vllm.v1.worker.utils import allocate_kv_cache

        self._rank, self._pipe = rank, pipe
        cfg.parallel_config.rank = rank
        # Its place is all that is asked of the group; no tensor travels here.
        parallel_state._DCP = SimpleNamespace(rank_in_group=rank, world_size=RANKS)
        kv = kv_cache_configs(cfg)[1][rank]
        caches = allocate_kv_cache(kv, torch.device("cpu"), KVCacheLayout.LBNHC, [BLOCK])
        self._pages = [
            t.view(torch.uint8).reshape(BLOCKS, BLOCK, TOKEN_BYTES).numpy().view(np.uint64)[:, :, 0]
            for t in caches.values()
        ]
        self._caches = caches
        self._hashes: dict[str, np.ndarray] = {}
        self._connector = KVConnectorFactory.create_connector(cfg, KVConnectorRole.WORKER, kv)
        self._connector.register_kv_caches(caches)

    def serve(self) -> None:
        """Until the core ends, in whatever way."""
        self._pipe.send(self._connector.get_handshake_metadata())
        while True:
            try:
                output, texts, todo = self._pipe.recv()
            except (EOFError, ConnectionResetError):
                break
            try:
                self._pipe.send(self._step(output, texts, todo))
            except (BrokenPipeError, ConnectionResetError):
                break
        self._connector.shutdown()

    def _step(self, output: Any, texts: dict[str, list[int]], todo: dict[str, tuple]) -> tuple[Any, list[str]]:
        from engine import prefix_hashes
        from vllm.v1.outputs import KVConnectorOutput

        self._hashes.update({rid: prefix_hashes(tokens) for rid, tokens in texts.items()})
        problems = [p for rid, (start, n, table) in todo.items() if (p := self._forward(rid, start, n, table))]
        c = self._connector
        c.handle_preemptions(output.kv_connector_metadata)
        c.bind_connector_metadata(output.kv_connector_metadata)
        c.start_load_kv(None)
        c.wait_for_save()
        results = c.get_transfer_results(output.finished_req_ids)
        kv = KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=c.get_block_ids_with_load_errors(),
        )
        kv.kv_connector_stats = c.get_kv_connector_stats()
        c.clear_connector_metadata()
        for rid in output.finished_req_ids:
            self._hashes.pop(rid, None)
        return kv, problems

    def _forward(self, rid: str, start: int, n: int, table: np.ndarray) -> str:
        """Checks this rank's computed tokens and writes its new ones."""
        from engine import mix

        want = self._hashes[rid]
        p = np.arange(start + n)
        p = p[p % RANKS == self._rank]
        block, at = table[p // SPAN], p % SPAN // RANKS
        old = p < start
        for l, page in enumerate(self._pages):
            have = page[block[old], at[old]] ^ np.uint64(mix(l))
            wrong = np.flatnonzero(have != want[p[old]])
            if len(wrong):
                return f"rank {self._rank} layer {l} request {rid}: token {p[old][wrong[0]]} of {start} is wrong"
            page[block[~old], at[~old]] = want[p[~old]] ^ np.uint64(mix(l))
        return ""


class Core:
    """The scheduler's process. Writes one JSON line to the report for every answer,
    so that a reader can tell what happened up to a kill."""

    def __init__(self, cfg: Any, pipes: list[Connection], report: Path) -> None:
        from schedulers import block_hasher, make_scheduler, settle_blocks
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

        self._pipes = pipes
        self._report = open(report, "a", buffering=1)
        kv = kv_cache_configs(cfg)[0]
        block = settle_blocks(cfg, kv)
        handshakes = [pipe.recv() for pipe in pipes]  # all ranks have registered
        self.scheduler = make_scheduler(cfg, kv, block)
        self._connector = self.scheduler.connector
        # This engine computes so fast that no wait would be worth while.
        self._connector._scheduler._patience.measure = lambda now, scheduled: None
        self._connector.set_xfer_handshake_metadata_pp_aware({(0, r): h for r, h in enumerate(handshakes)})
        self._aggregator = KVOutputAggregator.from_connector(self._connector, RANKS)
        self._hasher = block_hasher(cfg)
        self._texts: dict[str, list[int]] = {}  # complete, of requests that the ranks do not know yet
        self._all: dict[str, list[int]] = {}
        self._requests: dict[str, Any] = {}
        self._number = 0

    def say(self, **what: Any) -> None:
        self._report.write(json.dumps(what) + "\n")

    def ask(self, documents: list[int], rng: random.Random) -> None:
        """Answers the documents together, each with a few tokens more."""
        from engine import Sequence
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        for n in documents:
            rid = f"{n}-{self._number}"
            self._number += 1
            new = rng.randrange(1, 80)
            tokens = Sequence(rid, document(n), new).tokens
            request = Request(rid, document(n), SamplingParams(max_tokens=new, ignore_eos=True), None,
                              block_hasher=self._hasher)  # fmt: skip
            self._texts[rid] = self._all[rid] = tokens
            self._requests[rid] = request
            self.scheduler.add_request(request)
        loaded: dict[str, int] = {}
        while self.scheduler.requests:
            idle = not self._step(loaded)
            if idle:
                time.sleep(0.001)  # as vLLM's core does
        for rid in list(self._requests):
            request = self._requests.pop(rid)
            right = list(request.all_token_ids) == self._all.pop(rid)[: request.num_tokens]
            self.say(answer=rid, loaded=loaded.get(rid, 0), right=right)
        # The ranks hear of what has finished, and the engine forgets.
        self._step(loaded)
        assert self.scheduler.reset_prefix_cache()

    def _step(self, loaded: dict[str, int]) -> int:
        from vllm.v1.outputs import ModelRunnerOutput

        output = self.scheduler.schedule()
        for plan in output.kv_connector_metadata.loads:
            loaded[plan.request_id] = loaded.get(plan.request_id, 0) + plan.tokens
        start = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        start.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        todo, sampled = {}, []
        for rid, n in output.num_scheduled_tokens.items():
            table = np.array(self.scheduler.kv_cache_manager.get_block_ids(rid)[0])
            todo[rid] = (start[rid], n, table)
            request = self.scheduler.requests[rid]
            sampled.append([] if request.is_prefill_chunk else [self._all[rid][start[rid] + n]])
        texts, self._texts = self._texts, {}
        for pipe in self._pipes:
            pipe.send((output, texts, todo))
        results = []
        for pipe in self._pipes:
            kv, problems = pipe.recv()
            for p in problems:
                self.say(problem=p)
            results.append(
                ModelRunnerOutput(
                    req_ids=list(todo),
                    req_id_to_index={r: i for i, r in enumerate(todo)},
                    sampled_token_ids=sampled,
                    logprobs=None,
                    prompt_logprobs_dict={},
                    pooler_output=[],
                    kv_connector_output=kv,
                )
            )
        self.scheduler.update_from_output(output, self._aggregator.aggregate(results))
        return output.total_num_scheduled_tokens

    def work(self, seed: int, once: bool) -> None:
        """Answers documents at random without end, or every one once, with all the
        patience that a cache may need to be found at work."""
        rng = random.Random(seed)
        self.say(open=True)
        if once:
            self._wait_for_the_cache()
            every = rng.sample(range(DOCUMENTS), DOCUMENTS)
            for i in range(0, DOCUMENTS, 4):
                self.ask(every[i : i + 4], rng)
        while not once:
            self.ask(rng.sample(range(DOCUMENTS), rng.randrange(1, 5)), rng)
        self.say(done=True)

    def _wait_for_the_cache(self, limit_s: float = 60.0) -> None:
        from kvtier.vllm import loading

        loading.LOAD_WAIT_S = limit_s
        end = time.monotonic() + limit_s
        while not self._connector._scheduler._attached(time.monotonic()):
            assert time.monotonic() < end, "no leader has accepted the ranks"
            time.sleep(0.01)

    def close(self) -> None:
        """As vLLM's core does: the ranks end first, then the scheduler."""
        for pipe in self._pipes:
            pipe.close()
        self.scheduler.shutdown()


def _child(run: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        # Whoever kills the test leaves nothing behind.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(3)  # the other side has died
    except BaseException as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr, flush=True)
        os._exit(4)
    os._exit(0)


def give_birth(cfg: Any, life: dict[str, Any]) -> dict[str, Any]:
    """Forks one life."""
    cfg.kv_transfer_config.kv_connector_extra_config = life["settings"]
    pairs = [Pipe() for _ in range(RANKS)]

    def rank(r: int) -> None:
        keep = pairs[r][1]
        _close([end for pair in pairs for end in pair if end is not keep])
        RankProcess(cfg, r, keep).serve()

    def core() -> None:
        _close([theirs for _, theirs in pairs])
        c = Core(cfg, [ours for ours, _ in pairs], Path(life["report"]))
        c.work(life["seed"], life["once"])
        c.close()

    ranks = [_child(lambda r=r: rank(r)) for r in range(RANKS)]
    pids = {"ranks": ranks, "core": _child(core)}
    _close([end for pair in pairs for end in pair])
    return pids


def _close(ends: list[Connection]) -> None:
    for end in ends:
        end.close()


def main() -> None:
    os.environ["VLLM_LOGGING_LEVEL"] = os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory(prefix="kvtier-lives-") as home:
        import engine  # noqa: F401: so that no life has to
        import models

        path = models.write(Path(home), "deepseek")
        # Something to be recognised by; else nothing would go to disk.
        header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
        (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"life")
        cfg = build_config(path)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the dead
        print("ready", flush=True)
        for line in sys.stdin:
            print(json.dumps(give_birth(cfg, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
