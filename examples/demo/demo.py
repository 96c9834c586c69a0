"""The main job of kvtier on a real engine: a restart that keeps its cache.

Two lives of a vLLM engine over one cache directory. The first computes a long
prompt cold, and answers a second prompt with the same prefix from DRAM after
the engine's own prefix cache was emptied. The second life is a new process and
has only the disk. Every answer is compared, tokens and logprobs bit for bit,
to what the engine itself answers for the same prompt at the same boundary.

Then an engine of several processes, in C++, shows the other half: what one
topology stored, others load (reshard.py).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import reshard
from life import EngineFailed, Life
from model import Shape, write_model

CHUNK = 256
PREFIX_CHUNKS = 31
SUFFIX = 64
OUTPUT_TOKENS = 16
DRAM_GIB = 0.5
DISK_GIB = 1
MAX_MODEL_LEN = 8704


@dataclass
class Run:
    """One row of the result."""

    name: str
    answer: dict[str, Any]
    reference: dict[str, Any]
    expected: dict[str, int]

    @property
    def outputs_equal(self) -> bool:
        return all(self.answer[k] == self.reference[k] for k in ("tokens", "logprobs"))

    @property
    def hit(self) -> bool:
        return self.answer["loaded"] == self.expected and self.answer["local"] == 0

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "prompt_tokens": self.answer["prompt_tokens"],
            "loaded_tokens": self.answer["loaded"],
            "ttft_s": round(self.answer["ttft_s"], 4),
            "outputs_equal": self.outputs_equal,
        }


def allocated_bytes(root: Path) -> int:
    return sum(p.lstat().st_blocks * 512 for p in root.rglob("*"))


def prompts(seed: int) -> tuple[list[int], list[int], list[int]]:
    """A warm-up prompt and two prompts that share exactly PREFIX_CHUNKS chunks."""
    rng = random.Random(seed)

    def words(n: int) -> list[int]:
        return [rng.randrange(3, Shape.vocabulary) for _ in range(n)]

    prefix = words(PREFIX_CHUNKS * CHUNK)
    one, two = words(SUFFIX), words(SUFFIX)
    two[0] = one[0] % (Shape.vocabulary - 4) + 4
    return words(200), prefix + one, prefix + two


def main() -> int:
    parser = argparse.ArgumentParser(description="kvtier's main job on a real vLLM engine")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result there as JSON")
    parser.add_argument("--keep", metavar="DIR", type=Path, help="use this directory (emptied first) and keep it")
    parser.add_argument("--only", choices=("vllm", "reshard"), help="only this half of the demo")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (default 1)")
    args = parser.parse_args()
    # Ended from outside, the engine's processes shall not outlive the demo.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console(highlight=False)
    work = args.keep or Path(tempfile.mkdtemp(prefix="kvtier-demo-"))
    if args.keep:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
    result: dict[str, Any] = {}
    wrong: list[str] = []
    try:
        if args.only != "reshard":
            runs, disk = demonstrate(work, args.seed, console)
            show(runs, disk, console)
            result |= {"runs": [r.as_json() for r in runs], "disk": disk}
            wrong += complaints(runs, disk)
        if args.only != "vllm":
            passages = reshard.run(work, console)
            result["reshard"] = passages["reshard"]
            wrong += passages["complaints"]
    except (EngineFailed, reshard.ReshardFailed) as e:
        console.print(f"[red]{e}[/red]")
        return 2
    finally:
        if not args.keep:
            shutil.rmtree(work, ignore_errors=True)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    for line in wrong:
        console.print(f"[red]{line}[/red]")
    return 1 if wrong else 0


class Stage:
    """One life of the engine with its progress on the console."""

    def __init__(self, name: str, model: Path, root: Path, work: Path, console: Console):
        self._name, self._console = name, console
        kvtier = {"dram_gib": DRAM_GIB, "disk_path": str(root), "disk_gib": DISK_GIB}
        with console.status(f"{name}: starting the engine (about a minute)"):
            self._life = Life(model, kvtier, work / f"{name}.log", {"max_model_len": MAX_MODEL_LEN})
        console.print(f"  {name}: engine ready")

    def warm_up(self, prompt: list[int]) -> None:
        """The first prompt pays for what an engine compiles at first use."""
        with self._console.status(f"{self._name}: warming up"):
            self._life.ask(prompt, OUTPUT_TOKENS, opt_out=True)
            self._life.forget()

    def ask(self, what: str, prompt: list[int], opt_out: bool = False) -> dict[str, Any]:
        with self._console.status(f"{self._name}: {what}"):
            answer = self._life.ask(prompt, OUTPUT_TOKENS, opt_out)
        self._console.print(f"  {self._name}: {what}: first token after {answer['ttft_s']:.2f} s")
        return answer

    def forget(self) -> None:
        self._life.forget()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *error: Any) -> None:
        with self._console.status(f"{self._name}: stopping the engine"):
            self._life.__exit__(*error)


def demonstrate(work: Path, seed: int, console: Console) -> tuple[list[Run], dict[str, int]]:
    console.print("Writing a model with random weights")
    model, root = write_model(work / "model"), work / "cache"
    warm_up, first, second = prompts(seed)
    with Stage("first life", model, root, work, console) as stage:
        stage.warm_up(warm_up)
        cold = stage.ask("cold", first)
        own_hit = stage.ask("the engine's own prefix hit", second)
        stage.forget()
        plain = stage.ask("cold, without kvtier", first, opt_out=True)
        stage.forget()
        dram = stage.ask("from DRAM", second)
    with Stage("second life", model, root, work, console) as stage:
        stage.warm_up(warm_up)
        disk = stage.ask("from disk", second)
    prefix = PREFIX_CHUNKS * CHUNK
    if own_hit["local"] != prefix:
        raise EngineFailed(f"the reference is none: the engine's own hit was {own_hit['local']} tokens")
    runs = [
        Run("cold", cold, plain, {"dram": 0, "disk": 0}),
        Run("dram", dram, own_hit, {"dram": prefix, "disk": 0}),
        Run("disk", disk, own_hit, {"dram": 0, "disk": prefix}),
    ]
    return runs, {"bytes": allocated_bytes(root), "cap": DISK_GIB << 30}


def show(runs: list[Run], disk: dict[str, int], console: Console) -> None:
    table = Table(title="A restart that keeps its cache")
    heads = ("run", "prompt", "DRAM", "disk", "first token", "speed-up", "output")
    for column in heads:
        table.add_column(column, justify="left" if column == "run" else "right")
    cold = runs[0].answer["ttft_s"]
    for r in runs:
        table.add_row(
            r.name,
            f"{r.answer['prompt_tokens']:,}",
            f"{r.answer['loaded']['dram']:,}",
            f"{r.answer['loaded']['disk']:,}",
            f"{r.answer['ttft_s']:.2f} s",
            f"{cold / r.answer['ttft_s']:.1f} x",
            "as the engine's" if r.outputs_equal else "[red]DIFFERENT[/red]",
        )
    console.print(table)
    share = 100 * disk["bytes"] / disk["cap"]
    console.print(f"on disk: {disk['bytes'] / 2**20:.1f} MiB of {disk['cap'] / 2**20:.0f} MiB allowed ({share:.1f} %)")


def complaints(runs: list[Run], disk: dict[str, int]) -> list[str]:
    wrong = [f"{r.name}: the output differs" for r in runs if not r.outputs_equal]
    wrong += [f"{r.name}: loaded {r.answer['loaded']}, expected {r.expected}" for r in runs if not r.hit]
    if disk["bytes"] > disk["cap"]:
        wrong.append("the disk holds more than its cap")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
