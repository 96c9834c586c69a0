"""The main job: a restart keeps the cache, and what comes back is bit for bit what
the engine's own prefix cache would have given."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from stage import CHUNK, outputs, prompts, wait_until

MODEL = "llama"

#: Name of a prompt pair -> chunks that its prompts share.
SHARED = {"two": 2, "seven": 7, "thirteen": 13}


@pytest.fixture(scope="module")
def story(stage):
    """Life one is killed, life two is terminated, life three runs in one process."""
    told: dict = {"own": {}, "dram": {}, "killed": {}, "one_process": {}, "flipped": {}}
    pairs = {name: prompts(seed, chunks) for seed, (name, chunks) in enumerate(SHARED.items())}
    with stage.live() as life:
        told["small"] = [life.ask(p) for p in prompts(99, 1)]
        for name, (first, second) in pairs.items():
            told["cold " + name] = life.ask(first)
            told["own"][name] = life.ask(second)
        life.forget()
        told["small again"] = life.ask(prompts(99, 1)[1])
        for name, (_, second) in pairs.items():
            told["dram"][name] = life.ask(second)
        whole = 1 + sum(SHARED.values())
        wait_until(lambda: len(stage.chunk_files()) == whole, f"writing {whole} chunks to disk")
        life.kill()
    told["after the kill"] = sorted(p.name for p in (stage.root / "run").iterdir())
    told["in /dev/shm"] = [n for n in os.listdir("/dev/shm") if "kvtier" in n]
    stale = stage.chunk_files()[0].parents[1] / "ab" / f"{'ab' * 32}.{'0' * 15}1.1.tmp"
    stale.parent.mkdir(exist_ok=True)
    stale.write_bytes(b"x" * 4096)
    told["stale"] = stale
    with stage.live() as life:
        for name, (_, second) in pairs.items():
            told["killed"][name] = life.ask(second)
        told["exit code"] = life.terminate()
    with stage.live(one_process=True) as life:
        for name, (_, second) in pairs.items():
            told["one_process"][name] = life.ask(second)
        life.call("inside:flip_byte", on=True)
        life.forget()
        for name, (_, second) in pairs.items():
            told["flipped"][name] = life.ask(second)
    return told


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("run, tier", [("dram", "dram"), ("killed", "disk"), ("one_process", "disk")])
def test_loads_exactly_the_shared_chunks(story, run, tier, name):
    answer = story[run][name]
    expected = {"dram": 0, "disk": 0} | {tier: SHARED[name] * CHUNK}
    assert answer["loaded"] == expected
    assert answer["local"] == 0


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("run", ["dram", "killed", "one_process"])
def test_answers_as_the_engine_itself_at_the_same_boundary(story, run, name):
    assert story["own"][name]["local"] == SHARED[name] * CHUNK, "the reference must be a prefix hit"
    assert outputs(story[run][name]) == outputs(story["own"][name])


@pytest.mark.parametrize("name", SHARED)
def test_one_flipped_byte_changes_the_answer(story, name):
    assert story["flipped"][name]["loaded"]["dram"] == SHARED[name] * CHUNK
    assert outputs(story["flipped"][name]) != outputs(story["own"][name])


def test_a_hit_below_the_minimum_is_computed(story):
    assert story["small again"]["loaded"] == {"dram": 0, "disk": 0}


def test_a_killed_engine_leaves_nothing_that_disturbs(story):
    assert story["in /dev/shm"] == []
    stale: Path = story["stale"]
    assert not stale.exists(), "temp files of a dead engine are swept at the next start"


def test_ends_on_sigterm(story):
    # vLLM's main process ends by the signal or turns it into an exit of its own.
    assert story["exit code"] in (0, -15, 143)
