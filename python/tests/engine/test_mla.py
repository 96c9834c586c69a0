"""MLA on CPU: token rows. vLLM's CPU MLA backend disagrees with itself between
prefill and decode, so outputs are no reference; the bytes of the pages are."""

from __future__ import annotations

import pytest
from stage import CHUNK, prompts, wait_until

MODEL = "deepseek"
CHUNKS = 4


@pytest.fixture(scope="module")
def story(stage):
    prompt, _ = prompts(11, CHUNKS)
    told = {}
    with stage.live(one_process=True) as life:
        life.call("inside:remember_blocks")
        told["cold"] = life.ask(prompt)
        told["cold pages"] = life.call("inside:page_digests", prompt_tokens=len(prompt), tokens=CHUNKS * CHUNK)
        wait_until(lambda: len(stage.chunk_files()) == CHUNKS, "writing the chunks to disk")
    with stage.live(one_process=True) as life:
        life.call("inside:remember_blocks")
        told["disk"] = life.ask(prompt)
        told["disk pages"] = life.call("inside:page_digests", prompt_tokens=len(prompt), tokens=CHUNKS * CHUNK)
    return told


def test_pages_come_back_byte_for_byte(story):
    assert story["disk"]["loaded"] == {"dram": 0, "disk": CHUNKS * CHUNK}
    assert len(story["cold pages"]) >= CHUNKS, "a page is not longer than a chunk"
    assert len(set(story["cold pages"])) == len(story["cold pages"]), "pages of different tokens differ"
    assert story["disk pages"] == story["cold pages"]
