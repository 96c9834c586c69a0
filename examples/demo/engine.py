"""A real vLLM engine with kvtier behind it, in a process of its own.

Takes commands as JSON lines on standard input and answers each with one JSON
line on the descriptor given by --report, so that the engine's log cannot get in
between. life.py is the other end.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from typing import Any

#: The metric by which vLLM itself says where cached prompt tokens came from.
CACHED_BY_SOURCE = "vllm:prompt_tokens_cached_by_source"
#: What vLLM calls the tiers.
TIER_OF_SOURCE = {"host": "dram", "disk": "disk"}

#: A request that neither stores nor loads: what the engine does by itself.
WITHOUT_KVTIER = {"kv_transfer_params": {"kvtier": {"store": False, "load": False}}}


@dataclass
class Answer:
    """One prompt answered. loaded: tokens that kvtier brought, by tier; local:
    tokens found in the engine's own prefix cache. logprobs are written as hex
    floats, so that equal means equal in every bit."""

    prompt_tokens: int
    loaded: dict[str, int]
    local: int
    ttft_s: float
    tokens: list[int]
    logprobs: list[str]


class Engine:
    """The engine and what can be asked of it; every public method is a command."""

    def __init__(self, model: str, kvtier: dict[str, Any] | None, options: dict[str, Any]):
        self._model = model
        self._start(kvtier, options)

    def _start(self, kvtier: dict[str, Any] | None, options: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = None
        if kvtier is not None:
            transfer = KVTransferConfig(
                kv_connector="KVTierConnector",
                kv_connector_module_path="kvtier.vllm",
                kv_role="kv_both",
                kv_connector_extra_config=kvtier,
            )
        settings = {"dtype": "bfloat16", "enforce_eager": True, "disable_log_stats": False} | options
        self.llm = LLM(model=self._model, skip_tokenizer_init=True, kv_transfer_config=transfer, **settings)

    def again(self, kvtier: dict[str, Any] | None, options: dict[str, Any]) -> None:
        """Ends the engine in the ordinary way and makes another in this process,
        which saves the imports of a new one."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        self._start(kvtier, options)

    def ask(
        self, prompt: list[int], max_tokens: int, opt_out: bool = False, salt: str | None = None
    ) -> dict[str, Any]:
        from vllm import SamplingParams

        before = self._cached()
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            logprobs=1,
            detokenize=False,
            ignore_eos=True,
            extra_args=WITHOUT_KVTIER if opt_out else None,
        )
        request: dict[str, Any] = {"prompt_token_ids": prompt}
        if salt is not None:
            request["cache_salt"] = salt
        (out,) = self.llm.generate(request, params, use_tqdm=False)
        gained = {k: v - before.get(k, 0) for k, v in self._cached().items()}
        loaded = {tier: gained.get(source, 0) for source, tier in TIER_OF_SOURCE.items()}
        choice = out.outputs[0]
        answer = Answer(
            prompt_tokens=len(prompt),
            loaded=loaded,
            local=(out.num_cached_tokens or 0) - sum(loaded.values()),
            ttft_s=out.metrics.first_token_latency,
            tokens=list(choice.token_ids),
            logprobs=[step[t].logprob.hex() for t, step in zip(choice.token_ids, choice.logprobs)],
        )
        return asdict(answer)

    def forget(self, connector: bool = False) -> bool:
        """Empties the engine's own prefix cache; kvtier keeps what it has,
        unless connector asks it to begin a new epoch."""
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    def call(self, function: str, **arguments: Any) -> Any:
        """Calls "module:function" with the LLM object."""
        module, _, name = function.partition(":")
        return getattr(importlib.import_module(module), name)(self.llm, **arguments)

    def _cached(self) -> dict[str, int]:
        return {
            m.labels["source"]: int(m.value)
            for m in self.llm.get_metrics()
            if m.name == CACHED_BY_SOURCE
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=int, required=True, help="descriptor for the answers")
    parser.add_argument("--start", required=True, help="JSON: model, kvtier, options")
    args = parser.parse_args()
    # As vLLM's server does: an exit, so that the engine's processes are ended in order.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with os.fdopen(args.report, "w", buffering=1) as report:

        def say(value: Any) -> None:
            report.write(json.dumps(value) + "\n")

        engine = Engine(**json.loads(args.start))
        say({"ready": os.getpid()})
        for line in sys.stdin:
            command = json.loads(line)
            say({"result": getattr(engine, command.pop("do"))(**command)})


if __name__ == "__main__":
    main()
