"""The same tokens under other weights, another rope, another KV dtype or another
salt: never a hit, now or after a restart. What does not matter: process, hash seed,
and the hash by which vLLM finds its own blocks."""

from __future__ import annotations

import os

import models
import pytest
from stage import CHUNK, outputs, prompts

MODEL = "llama"
CHUNKS = 4
NOTHING = {"dram": 0, "disk": 0}
DRAM = NOTHING | {"dram": CHUNKS * CHUNK}
DISK = NOTHING | {"disk": CHUNKS * CHUNK}


def put_weights(stage, seed: int) -> None:
    """Other weights at the same path. By a rename: the engine may have mapped the file."""
    other = models.write(stage.model.parent / f"weights-{seed}", MODEL, weights=True, seed=seed)
    os.replace(other / "model.safetensors", stage.model / "model.safetensors")


@pytest.fixture(scope="module")
def story(stage):
    first, second = prompts(21, CHUNKS)
    told = {}
    with stage.live(one_process=True, environment={"PYTHONHASHSEED": "1"}) as life:
        life.ask(first)
        told["own"] = life.ask(second)
        life.ask(first, salt="red")
        life.forget()
        told["other salt"] = life.ask(second, salt="blue")
        life.forget()
        told["same salt"] = life.ask(second, salt="red")
        life.call("inside:flush")
        told["files"] = len(stage.chunk_files())

        # Weights replaced in a running engine.
        put_weights(stage, seed=1)
        life.call("inside:reload_weights")
        life.forget(connector=True)
        told["replaced cold"] = life.ask(first)
        told["replaced own"] = life.ask(second)
        life.forget()
        told["replaced dram"] = life.ask(second)

    # The same weights after a restart: what was stored above is of other weights, or of
    # an engine that could not say which. In another process: an engine in the one in
    # which they were replaced could not be sure either.
    with stage.live(one_process=True, environment={"PYTHONHASHSEED": "1"}) as life:
        told["restarted files"] = len(stage.chunk_files())
        told["restarted cold"] = life.ask(first)
        told["restarted own"] = life.ask(second)
        told["restarted salt"] = life.ask(second, salt="red")
        life.call("inside:flush")
        told["all files"] = len(stage.chunk_files())

        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}}
        life.again(*stage.engine({"hf_overrides": rope}))
        told["rope"] = life.ask(second)
        # The other KV dtype that vLLM's CPU attention has on every machine.
        life.again(*stage.engine({"dtype": "float32"}))
        told["float32"] = life.ask(second)

    put_weights(stage, seed=0)
    other = {"prefix_caching_hash_algo": "sha256_cbor"}
    with stage.live(options=other, environment={"PYTHONHASHSEED": "2"}) as life:
        told["all again"] = life.ask(second)
        told["all again, red"] = life.ask(second, salt="red")
        told["all again, green"] = life.ask(second, salt="green")
    return told


@pytest.mark.parametrize(
    "case",
    ["other salt", "replaced cold", "restarted cold", "restarted salt", "rope", "float32", "all again, green"],
)
def test_no_hit_across(story, case):
    assert story[case]["loaded"] == NOTHING
    assert story[case]["local"] == 0


@pytest.mark.parametrize("case, where", [("same salt", DRAM), ("all again", DISK), ("all again, red", DISK)])
def test_hit_of_ones_own(story, case, where):
    assert story["own"]["local"] == CHUNKS * CHUNK, "the reference must be a prefix hit"
    assert story[case]["loaded"] == where
    assert outputs(story[case]) == outputs(story["own"])


@pytest.mark.parametrize("case", ["replaced own", "rope", "float32"])
def test_the_other_one_really_is_another(story, case):
    assert outputs(story[case]) != outputs(story["own"])


def test_replaced_weights_are_cached_in_dram_only(story):
    assert story["replaced own"]["local"] == CHUNKS * CHUNK
    assert story["replaced dram"]["loaded"] == DRAM
    assert outputs(story["replaced dram"]) == outputs(story["replaced own"])
    assert story["files"] == 3 * CHUNKS  # without a salt, red, blue
    assert story["restarted files"] == story["files"]
    assert story["all files"] == story["files"] + 2 * CHUNKS


def test_replaced_weights_answer_the_same_after_a_restart(story):
    assert outputs(story["restarted cold"]) == outputs(story["replaced cold"])
    assert outputs(story["restarted own"]) == outputs(story["replaced own"])
