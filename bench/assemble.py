"""Chunks put together from the shards of several ranks.

Two comparisons: the copies alone (dcp, one thread a rank) to memcpy by as many
threads, and rank processes through the whole library to gloo's all-gather with
interleaving by torch.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figure import Figure

CHECKOUT = Path(__file__).resolve().parent.parent
RANK = Path(__file__).resolve().parent / "assemble_rank.py"

#: Bytes of a token in each layer.
ROWS = {"656": [656] * 61, "1152": [1152] * 61, "132+432": [128, 4, 432] * 32}
RANKS, INTERLEAVES = (2, 4), (1, 16, 64)
#: The first rounds touch fresh memory, which is the price of the first use only.
FRESH, ROUNDS = 6, 9
#: Bytes of one operation, about.
OPERATION = 20 << 20
TIMEOUT_S = 600


def measure() -> list[Figure]:
    return copies() + processes()


def copies() -> list[Figure]:
    """BenchmarkAssemble of dcp: medians and quartiles of rounds that take turns."""
    command = ["go", "test", "-run", "^$", "-bench", "BenchmarkAssemble", "-benchtime", "1x", "./dcp"]
    out = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    figures = []
    for line in out.stdout.splitlines():
        if not line.startswith("BenchmarkAssemble/"):
            continue
        name, _, *rest = line.split()
        case = dict(part.split("=") for part in name.split("/")[1:])
        case["I"] = case["I"].split("-")[0]  # go adds the number of CPUs
        got = dict(zip(rest[1::2], map(float, rest[::2]), strict=True))
        inside = case["size"] == "inside"
        for what, word in (("gather", "assembled"), ("scatter", "taken apart")):
            figures.append(
                Figure(
                    f"{word}, {case['row']} B, {case['ranks']} threads, I={case['I']}, {case['size']} the caches",
                    "GB/s",
                    "memcpy by as many threads",
                    tuple(got[f"{what}-{q}"] * got["memcpy-GB/s"] for q in ("low", "share", "high")),
                    got["memcpy-GB/s"],
                    False,
                    0.9 if inside else 0.6,
                )
            )
    return figures


def processes() -> list[Figure]:
    figures = []
    cases = [(row, interleave) for row in ROWS for interleave in INTERLEAVES]
    for ranks in RANKS:
        for (row, interleave), result in zip(cases, run(ranks, cases), strict=True):
            rate = {k: tuple(result["bytes"] / s / 1e9 for s in v) for k, v in result["times"].items()}
            name = f"through kvtier, {row} B, {ranks} processes, I={interleave}"
            gloo, memcpy = statistics.median(rate["gloo"]), statistics.median(rate["memcpy"])
            figures += [
                Figure(name, "GB/s", "gloo all-gather and interleaving", rate["kvtier"], gloo, False, 5.0),
                Figure(name, "GB/s", "memcpy by as many processes", rate["kvtier"], memcpy, False, 0.0),
            ]
    return figures


def run(ranks: int, cases: list[tuple[str, int]]) -> list[dict]:
    """Rank processes that go through all cases; what rank 0 measured in each."""
    plans = [
        {
            "interleave": interleave, "widths": ROWS[row], "chunks": max(1, OPERATION // (256 * sum(ROWS[row]))),
            "rounds": ROUNDS, "fresh": FRESH, "name": f"bench-assemble-{time.time_ns()}-{n}",
        }
        for n, (row, interleave) in enumerate(cases)
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as work:
        started = [
            subprocess.Popen(
                [sys.executable, str(RANK), str(rank), str(ranks), f"{work}/rendezvous", json.dumps(plans)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            out = started[0].communicate(timeout=TIMEOUT_S)[0]
            failed = [p.args for p in started if p.wait(60) != 0]
        finally:
            for p in started:
                p.kill()
                p.wait()
                p.stdout.close()
        if failed:
            raise RuntimeError(f"{len(failed)} of {ranks} rank processes failed")
        return [json.loads(line) for line in out.splitlines()]
