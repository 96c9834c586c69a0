"""MLA on CPU: token rows. vLLM's CPU MLA backend disagrees with itself between
prefill and decode, so outputs are no reference; the bytes of the pages are.

Between two lives four ranks under decode context parallelism, which this build
cannot run, take the place of the engine: they read what it stored, and store it anew
for it. They are real schedulers and connectors without a model."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before vLLM is imported

import cluster
import pytest
from stage import CHUNK, prompts, wait_until
from topology import LATENT, Topology

MODEL = "deepseek"
CHUNKS = 4


@pytest.fixture(scope="module")
def story(stage):
    prompt, _ = prompts(11, CHUNKS)
    told = {}
    rows, fresh = str(stage.root.parent / "rows.npy"), stage.root.parent / "fresh"
    with stage.live(one_process=True) as life:

        def ask(name):
            life.call("inside:remember_blocks")
            told[name] = life.ask(prompt)
            told[name + " pages"] = life.call(
                "inside:page_digests", prompt_tokens=len(prompt), tokens=CHUNKS * CHUNK
            )

        ask("cold")
        life.call("page_rows:save", path=rows, prompt_tokens=len(prompt), tokens=CHUNKS * CHUNK)
        wait_until(lambda: len(stage.chunk_files()) == CHUNKS, "writing the chunks to disk")
        # The engine lives and leads; the ranks are members beside it.
        try:
            told["read"] = ranks(stage, stage.root, rows, prompt)
            told["stored"] = ranks(stage, fresh, rows, prompt)
        finally:
            cluster.end_server()
        told["files"] = len(list(fresh.glob("*@*/??/*.kvc")))
        life.again(*stage.engine())
        ask("disk")
        life.again(*stage.engine(disk_path=str(fresh)))
        ask("from ranks")
    return told


def ranks(stage, root, rows, prompt):
    """Four ranks on a root: what they loaded of the prompt, and what was wrong about it."""
    settings, _ = stage.engine(disk_path=str(root))
    with (
        cluster.patience(),
        cluster.Cluster(
            LATENT,
            Topology(4, 4, 1),
            settings,
            chunk=CHUNK,
            model=stage.model,
            max_len=2048,
            home=stage.root.parent,
        ) as c,
    ):
        for r in c.ranks:
            r.call("use_rows", rows)
        c.add(prompt)
        c.run()
        return {"tokens": c.counts["load_tokens"], "wrong": c.problems, "errors": c.counts["errors"]}


def test_pages_come_back_byte_for_byte(story):
    assert story["disk"]["loaded"] == {"dram": 0, "disk": CHUNKS * CHUNK}
    assert len(story["cold pages"]) >= CHUNKS, "a page is not longer than a chunk"
    assert len(set(story["cold pages"])) == len(story["cold pages"]), "pages of different tokens differ"
    assert story["disk pages"] == story["cold pages"]


def test_ranks_under_dcp_read_every_slot(story):
    assert story["read"] == {"tokens": CHUNKS * CHUNK, "wrong": [], "errors": 0}


def test_the_engine_restarts_on_what_ranks_under_dcp_stored(story):
    assert story["stored"] == {"tokens": 0, "wrong": [], "errors": 0}
    assert story["files"] == CHUNKS
    assert story["from ranks"]["loaded"] == {"dram": 0, "disk": CHUNKS * CHUNK}
    assert story["from ranks pages"] == story["cold pages"]
