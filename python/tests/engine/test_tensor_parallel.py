"""Two ranks of a real engine, each with its KV heads: stored by both, loaded by both
after one of them was killed, and loaded by a single one that has all heads."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from life import EngineFailed
from stage import CHUNK, outputs, prompts, wait_until

MODEL = "llama"
CHUNKS = 5


def workers(session: int) -> list[int]:
    """Process ids of the ranks of an engine, whose processes share a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            name = (entry / "comm").read_text()
            if os.getsid(int(entry.name)) == session and name.startswith("VLLM::Worker"):
                found.append(int(entry.name))
        except (OSError, ProcessLookupError):
            continue
    return sorted(found)


@pytest.fixture(scope="module")
def story(stage):
    told: dict = {}
    first, second = prompts(23, CHUNKS)
    later = prompts(24, CHUNKS)[0]
    two = {"tensor_parallel_size": 2}
    with stage.live(options=two) as life:
        told["cold"] = life.ask(first)
        told["own"] = life.ask(second)
        life.forget()
        told["dram"] = life.ask(second)
        wait_until(lambda: len(stage.chunk_files()) == CHUNKS, "writing the chunks to disk")
        told["workers"] = workers(life.pid)
        # Killed while it computes, and so between parts of chunks.
        life.send("ask", prompt=later, max_tokens=64)
        os.kill(told["workers"][-1], signal.SIGKILL)
        with pytest.raises(EngineFailed):
            life.ask(second)
        life.kill()
    with stage.live(options=two) as life:
        told["two"] = life.ask(second)
        told["after the kill"] = life.ask(later)
    with stage.live(one_process=True) as life:

        def pages(name):
            path = stage.root.parent / f"{name}.npy"
            life.call("page_rows:save", path=str(path), prompt_tokens=len(second), tokens=CHUNKS * CHUNK)
            return torch.from_numpy(np.load(path)).view(torch.bfloat16).float()

        life.call("inside:remember_blocks")
        told["one"] = life.ask(second)
        told["pages of two"] = pages("two")
        told["one again"] = life.ask(second)
        life.forget()
        life.ask(first, opt_out=True)
        told["own of one"] = life.ask(second, opt_out=True)
        told["pages of one"] = pages("one")
    return told


@pytest.mark.parametrize("run, tier", [("dram", "dram"), ("two", "disk"), ("one", "disk")])
def test_all_chunks_are_found(story, run, tier):
    assert len(story["workers"]) == 2
    assert story[run]["loaded"] == {"dram": 0, "disk": 0} | {tier: CHUNKS * CHUNK}
    assert story[run]["local"] == 0


@pytest.mark.parametrize("run", ["dram", "two"])
def test_two_ranks_answer_as_their_own_prefix_hit(story, run):
    assert story["own"]["local"] == CHUNKS * CHUNK
    assert outputs(story[run]) == outputs(story["own"])


def test_one_rank_answers_as_from_its_own_prefix_cache(story):
    """Which holds the loaded pages by then."""
    assert story["one again"]["local"] == CHUNKS * CHUNK
    assert story["one again"]["loaded"] == {"dram": 0, "disk": 0}
    assert outputs(story["one"]) == outputs(story["one again"])


def test_what_two_ranks_stored_is_what_one_computes(story):
    """Two ranks add in another order than one, so their KV differs in its last bits, but
    every head of every page is that head. (The answers of a model with random weights
    need not be the same then.)"""
    assert story["own of one"]["local"] == CHUNKS * CHUNK
    two, one = story["pages of two"], story["pages of one"]  # [layer, block, head, ...]
    assert two.shape[:3] == (4, CHUNKS * CHUNK // 128, 2)

    def distance(a, b):
        return ((a - b).flatten(3).norm(dim=3) / b.flatten(3).norm(dim=3)).max()

    assert distance(two, one) < 0.1
    assert distance(two.flip(2), one) > 1, "the other head is no neighbour"


def test_a_killed_rank_leaves_nothing_partial(story):
    """What both had copied may be there, and is right; the rest is computed."""
    loaded = story["after the kill"]["loaded"]
    assert loaded["dram"] == 0 and loaded["disk"] in range(0, CHUNKS * CHUNK + 1, CHUNK)
