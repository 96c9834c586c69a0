"""Another architecture with opaque pages: Qwen3, DRAM and a restart."""

from __future__ import annotations

import pytest
from stage import CHUNK, outputs, prompts, wait_until

MODEL = "qwen3"
CHUNKS = 5


@pytest.fixture(scope="module")
def story(stage):
    first, second = prompts(7, CHUNKS)
    told = {}
    with stage.live(one_process=True) as life:
        life.ask(first)
        told["own"] = life.ask(second)
        life.forget()
        told["dram"] = life.ask(second)
        wait_until(lambda: len(stage.chunk_files()) == CHUNKS, "writing the chunks to disk")
    with stage.live(one_process=True) as life:
        told["disk"] = life.ask(second)
    return told


@pytest.mark.parametrize("tier", ["dram", "disk"])
def test_answers_as_the_engine_itself(story, tier):
    assert story["own"]["local"] == CHUNKS * CHUNK
    assert story[tier]["loaded"] == {"dram": 0, "disk": 0} | {tier: CHUNKS * CHUNK}
    assert outputs(story[tier]) == outputs(story["own"])
