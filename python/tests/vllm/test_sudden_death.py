"""SIGKILL at any moment, on vLLM's real scheduler with processes for the ranks.

KVTIER_DEATHS sets how many lives end so (50); KVTIER_SEED repeats a run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import processes
import pytest
from usage import allocated

DEATHS = int(os.environ.get("KVTIER_DEATHS", "50"))
#: The last moment of a life, in seconds from its fork. Most begin to answer after a
#: third of it on an idle machine.
LONGEST_S = 1.5
CAP_GIB = 3 / 1024
LIMIT_S = 120.0


class Nursery:
    """The program that forks lives, in a session of its own."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "root"
        self._reports = directory
        self._log = open(directory / "log", "a+")
        self._process = subprocess.Popen(
            [sys.executable, processes.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self._lives = 0
        self.pids: list[int] = []
        assert self._process.stdout.readline() == "ready\n", self.log()

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()[-4000:]

    def birth(self, seed: int, once: bool = False) -> Life:
        self._lives += 1
        report = self._reports / f"life-{self._lives}.jsonl"
        settings = {
            "chunk_tokens": processes.CHUNK,
            "min_load_tokens": 1,
            "disk_path": str(self.root),
            "disk_gib": CAP_GIB,
            "dram_gib": 2 / 1024,
            "free_floor_gib": 0,
            "close_timeout_s": 10,
        }
        if once:
            settings["lookup_wait_s"] = 30
        order = {"settings": settings, "report": str(report), "seed": seed, "once": once}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        pids = json.loads(self._process.stdout.readline())
        self.pids += [*pids["ranks"], pids["core"]]
        return Life(report, **pids)

    def close(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(LIMIT_S)
        finally:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)  # also lives of a failed test
            except ProcessLookupError:
                pass
            self._log.close()


class Life:
    def __init__(self, report: Path, ranks: list[int], core: int) -> None:
        self.report, self.ranks, self.core = report, ranks, core

    def kill(self, who: list[int]) -> None:
        for pid in who:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it followed a neighbour of its own accord

    def gone(self) -> bool:
        return not any(alive(pid) for pid in (*self.ranks, self.core))

    def told(self) -> list[dict]:
        if not self.report.exists():
            return []
        lines = self.report.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition, what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {LIMIT_S:.0f} s"
        time.sleep(0.02)


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    n = Nursery(tmp_path)
    yield n
    n.close()


def test_every_answer_after_a_kill_is_right(nursery: Nursery) -> None:
    seed = int(os.environ.get("KVTIER_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"KVTIER_SEED={seed}")
    rng = random.Random(seed)
    root = nursery.root
    answers = hits = 0
    for death in range(DEATHS):
        life = nursery.birth(rng.randrange(1 << 32))
        if death % 5:
            time.sleep(rng.uniform(0, LONGEST_S))
        else:
            # On a slow machine too some have to get somewhere.
            wait_until(lambda life=life: len(life.told()) > 3 and any(root.rglob("*.kvc")), "storing")
        who = rng.choice([[life.core], [life.ranks[0]], [life.ranks[1]], life.ranks, [*life.ranks, life.core]])
        life.kill(who)
        assert not root.exists() or allocated(root) <= CAP_GIB * (1 << 30)
        # The others notice by themselves; half the time the next life does not wait.
        if rng.random() < 0.5:
            wait_until(life.gone, "the end of the survivors")
        told = life.told()
        assert not [t for t in told if "problem" in t], f"seed {seed}: {told}"
        assert all(t["right"] for t in told if "answer" in t), f"seed {seed}"
        answers += sum("answer" in t for t in told)
        hits += sum(t.get("loaded", 0) > 0 for t in told)
    wait_until(lambda: not any(alive(pid) for pid in nursery.pids), "the end of all lives")

    last = nursery.birth(seed, once=True)
    wait_until(last.gone, "the end of the last life")
    told = last.told()
    assert told[-1] == {"done": True}, f"seed {seed}: {nursery.log()}"
    assert not [t for t in told if "problem" in t], f"seed {seed}: {told}"
    # It asked for each document once, so it found what the killed ones had stored.
    assert any(t.get("loaded") for t in told), "what was stored before is found"
    assert all(t["right"] for t in told if "answer" in t)
    assert answers and hits, "the lives before did something"
    assert allocated(root) <= CAP_GIB * (1 << 30)
    left = [str(p) for p in root.rglob("*") if p.name.endswith(".tmp") or p.is_socket()]
    assert not left, "temporary files and sockets are gone after an ordinary end"
    assert not [n for n in os.listdir("/dev/shm") if "kvtier" in n]
    print(f"{answers} answers and {hits} hits in {DEATHS} lives, then {len(told) - 2} answers")
