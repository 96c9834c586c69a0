"""Whose KV is found: real requests through vLLM's scheduler, with the same tokens and
everything else different, also after a restart.

Each *world* here has KV of its own in the rig, so that a hit across worlds shows in
the counters and as wrong bytes in the pages.
"""

import hashlib
import random
import threading
import time
import uuid
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine import Sequence
from situations import DOC, attempts
from test_keychain import Gate, adapter, image, item, lora
from vllm.multimodal.parse import MultiModalDataParser, parse_mm_uuids
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request, RequestStatus

from kvtier.vllm import content
from kvtier.vllm.content import NotIdentified, NotYet, item_digest
from kvtier.vllm.leases import Patience

STORED = 576  # tokens of DOC in whole chunks
PHOTO, OTHER_PHOTO = "a photo", "another one"  # their content


@pytest.fixture
def root(tmp_path):
    """Settings of one root on disk, which several engines use one after the other."""
    path = tmp_path / "root"
    return {"disk_path": str(path), "disk_gib": 0.05, "free_floor_gib": 0, "dirty_gib": 0.05}


@pytest.fixture
def start(make, root):
    """Starts an engine on the root; the one before has written out and ended."""
    running = []

    def build(**extra):
        stop(running)
        e = make(extra=root | extra, recognisable=True, slots=300)
        # A model without images: the scheduler needs room for what an encoder gives.
        e.scheduler.max_num_encoder_input_tokens = 8192
        e.scheduler.encoder_cache_manager = EncoderCacheManager(8192)
        running.append(e)
        return e

    return build


def stop(engines):
    while engines:
        e = engines.pop()
        assert not e.settled() and e.cache.flush(30)
        e.close()


def ask(e, world=0, **kw) -> Counter:
    """One request for DOC, without help of the engine's own cache; what was counted."""
    if kw.get("mm_features") and not kw.get("cache_salt"):
        kw["at"] = kw["mm_features"][0].mm_position.offset
    e.scheduler.reset_prefix_cache()
    e.scheduler.reset_encoder_cache()
    e.counts.clear()
    q = e.add(DOC, 2, world=world, **kw)
    e.run()
    assert len(q.request.output_token_ids) == 2 and not e.counts["errors"]
    assert not e.problems
    return e.counts.copy()


def learn(e, world=0, **kw):
    """Asks until the document is found. Slots come in the background, so what one
    request brings may not all be taken."""
    for _ in attempts():
        if ask(e, world, **kw)["load_tokens"] == STORED:
            return
    raise AssertionError(f"never found: {kw}")


#: Name -> what tells its requests apart, and how much of the document they share with
#: a plain request: whole chunks of 64 tokens before the image.
WORLDS = {
    "plain": ({}, 0),
    "a salt": ({"cache_salt": "one"}, 0),
    "another salt": ({"cache_salt": "two"}, 0),
    "an image": ({"mm_features": [image(70, 100, PHOTO)]}, 64),
    "another image": ({"mm_features": [image(70, 100, OTHER_PHOTO)]}, 64),
    "the image elsewhere": ({"mm_features": [image(71, 100, PHOTO)]}, 64),
    "as much of another kind": ({"mm_features": [image(70, 100, PHOTO, "video")]}, 64),
    "a shorter image": ({"mm_features": [image(70, 90, PHOTO)]}, 64),
    "a later image": ({"mm_features": [image(400, 10, PHOTO)]}, 384),
    "the image and a salt": ({"mm_features": [image(70, 100, PHOTO)], "cache_salt": "three"}, 0),
    "the image and another salt": ({"mm_features": [image(70, 100, PHOTO)], "cache_salt": "four"}, 0),
}

STRANGERS = (
    ({"cache_salt": "five"}, 0),
    ({"mm_features": [image(70, 100, "a third one")]}, 64),
    ({"mm_features": [image(69, 100, PHOTO)]}, 64),
    ({"mm_features": [image(64, 100, PHOTO)]}, 64),
    ({"mm_features": [image(63, 100, PHOTO)]}, 0),
    ({"mm_features": [image(401, 10, PHOTO)]}, 384),
)


def test_no_world_finds_another_one(start):
    e = start()
    for world, (name, (what, shared)) in enumerate(WORLDS.items()):
        assert ask(e, world, **what)["load_tokens"] == shared, f"{name}, at first"
        learn(e, world, **what)
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"order of seed {seed}")
    for restart in range(2):
        e = start()
        order = list(enumerate(WORLDS.items()))
        random.Random(seed + restart).shuffle(order)
        for world, (name, (what, _)) in order:
            assert ask(e, world, **what)["load_tokens"] == STORED, f"{name}, restarted"
    for world, (what, shared) in enumerate(STRANGERS, 100):
        assert ask(e, world, **what)["load_tokens"] == shared, what


@pytest.mark.parametrize("algorithm, seed", [("sha256_cbor", ""), ("sha256", "7")])
def test_hash_algorithm_and_seed_of_the_engine_do_not_matter(start, monkeypatch, algorithm, seed):
    """vLLM's own block hashes change with both."""
    e = start()
    assert e.config.cache_config.prefix_caching_hash_algo == "sha256"
    before = e.add(DOC, 1).request.block_hashes[0]
    e.run()
    learn(e)
    monkeypatch.setattr(e.config.cache_config, "prefix_caching_hash_algo", algorithm)
    if seed:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    e = start()
    assert e.add(DOC, 1).request.block_hashes[0] != before
    e.run()
    assert e.counts["load_tokens"] == STORED


def test_adapter_of_other_content_under_the_same_name_and_path(start, tmp_path, caplog):
    """A LoRA that was trained again into the same directory."""
    path = adapter(tmp_path / "a", b"weights of today")
    e = start()
    with caplog.at_level("INFO", logger="vllm.kvtier"):
        first = ask(e, 1, lora_request=lora(path))
    assert first["not_cached"] == 1 and not first["chunks_offered"], "its digest is not known yet"
    assert any("LoRA adapter is still being read" in m for m in caplog.messages)
    assert e.half._loras.wait(30)
    learn(e, 1, lora_request=lora(path))
    assert not ask(e)["load_tokens"], "the base model finds the adapter's KV"
    learn(e)

    adapter(path, b"weights of later")
    caplog.clear()
    with caplog.at_level("INFO", logger="vllm.kvtier"):
        for _ in range(3):
            try:
                e.half._loras.get(lora(path))
            except NotIdentified:
                assert e.half._loras.wait(30)
            # Which of the two this engine has loaded is not known.
            counts = ask(e, 2, lora_request=lora(path))
            assert not counts["load_tokens"] and not counts["chunks_offered"] and counts["not_cached"]
    assert sum("changed after it was first used" in m for m in caplog.messages) == 1

    e = start()
    for _ in range(2):  # without and with the digest
        assert not ask(e, 2, lora_request=lora(path))["load_tokens"], "KV of the earlier content"
        assert e.half._loras.wait(30)
    learn(e, 2, lora_request=lora(path))
    assert ask(e)["load_tokens"] == STORED, "the base model lost its own"

    adapter(path, b"weights of today")
    e = start()
    ask(e, 1, lora_request=lora(path))
    assert e.half._loras.wait(30)
    found = ask(e, 1, lora_request=lora(adapter(tmp_path / "moved", b"weights of today")))
    assert e.half._loras.wait(30)
    found = ask(e, 1, lora_request=lora(tmp_path / "moved"))
    assert found["load_tokens"] == STORED, "the same content elsewhere is the same adapter"
    assert ask(e, 1, lora_request=lora(path))["load_tokens"] == STORED


def test_adapter_on_a_file_system_that_hangs(start, tmp_path, monkeypatch):
    """The engine goes on, and its request too, without the cache."""
    path = adapter(tmp_path / "a")
    e = start()
    ask(e, 1, lora_request=lora(path))
    assert e.half._loras.wait(30)
    learn(e, 1, lora_request=lora(path))
    gate = Gate(monkeypatch, path)
    gate.open.clear()
    monkeypatch.setattr(e.half, "_patience", Patience(0.2, 0.0))
    e.counts.clear()
    e.add(DOC, 2, world=1, lora_request=lora(path))
    e.add(DOC, 2)
    e.run()
    assert e.counts["not_cached"] == 1 and e.counts["waits"] and not e.problems
    assert e.counts["chunks_offered"], "nor is the other one cached"
    monkeypatch.setattr(e.half, "_patience", Patience(60.0, 0.0))
    e.add(DOC, 2, world=1, lora_request=lora(path))
    assert not e.step().num_scheduled_tokens
    gate.open.set()
    e.scheduler.reset_prefix_cache()
    e.counts.clear()
    e.run()
    assert e.counts["load_tokens"] == STORED and not e.problems
    assert not gate.touched


def not_identified(n):
    embeddings = torch.Generator().manual_seed(n)
    return (
        (
            "the prompt holds embeddings",
            {"prompt_token_ids": None, "prompt_embeds": torch.rand(len(DOC), 4, generator=embeddings)},
        ),
        (
            "the prompt holds embeddings",
            {
                "prompt_embeds": torch.rand(len(DOC), 4, generator=embeddings),
                "prompt_is_token_ids": [i % 2 == 0 for i in range(len(DOC))],
            },
        ),
        (
            "does not hand over the content of its multimodal items",
            {"mm_features": [image(70, 100, data=None)]},
        ),
        (
            "mm_processor_cache_type shm",
            {
                "mm_features": [image(70, 100, data=item(address=1, monotonic_id=1, signature=[]))],
                "cache_salt": "s",
            },
        ),
        ("is not a local directory", {"lora_request": lora("some-org/adapter")}),
    )


def test_what_cannot_be_identified_is_not_cached_and_says_so_once(start, caplog):
    e = start()
    learn(e)
    with caplog.at_level("INFO", logger="vllm.kvtier"):
        for world in (1, 2, 3):
            for reason, what in not_identified(world):
                counts = ask(e, world, **what)
                assert counts["not_cached"] == 1, reason
                assert not counts["load_tokens"] and not counts["chunks_offered"], reason
                assert not counts["lookups"], reason
                assert not counts["waits"] or "lora_request" in what, reason
    said = Counter(m.split("is not cached: ")[1] for m in caplog.messages if "is not cached: " in m)
    assert len(said) == 4 and set(said.values()) == {1}, said
    for reason, _ in not_identified(0):
        assert any(reason in s for s in said), reason
    assert ask(e)["load_tokens"] == STORED
    e = start()
    for reason, what in not_identified(4):
        assert not ask(e, 4, **what)["load_tokens"], reason


def test_tags_share_nothing(start, make, root):
    for world, tag in enumerate(("", "red", "blue")):
        e = start(tag=tag)
        assert not ask(e, world)["load_tokens"], f"tag {tag!r}"
        learn(e, world)
    for world, tag in enumerate(("", "red", "blue")):
        assert ask(start(tag=tag), world)["load_tokens"] == STORED
    # The same for engines that run side by side, on one leader.
    e = start(tag="red", name="both")
    other = make(extra=root | {"tag": "green", "name": "both"}, recognisable=True, slots=300)
    assert not ask(other, 3)["load_tokens"]
    learn(other, 3)
    assert ask(e, 1)["load_tokens"] == STORED


def callers_ids():
    """What a caller may call an image, or vLLM makes of it."""
    name = "photo-1"
    yield from (name, hashlib.md5(name.encode()).hexdigest(), hashlib.sha1(name.encode()).hexdigest())
    yield from (f"user:{hashlib.md5(name.encode()).hexdigest()}", uuid.uuid4().hex)
    # As of a content: the first one by the caller, the other by vLLM because of what
    # the request says of the processing.
    yield hashlib.sha256(name.encode()).hexdigest()
    pixels = np.zeros((4, 4, 3), np.uint8)
    yield ProcessorInputs(
        prompt=[1],
        mm_data_items=MultiModalDataParser().parse_mm_data({"image": [pixels]}),
        mm_uuid_items=parse_mm_uuids({"image": [name]}),
        hf_processor_mm_kwargs={"num_crops": 4},
    ).get_mm_hashes("model", "blake3")["image"][0]


def test_an_id_of_the_callers_finds_only_the_same_image(start):
    """The caller gives another image the id of an earlier one, in another life of the
    engine and in the same one."""
    ids = list(callers_ids())
    assert {len(i) for i in ids} >= {32, 40, 64}
    for salt in (None, "mine"):
        salted = {"cache_salt": salt, "at": 70}
        e = start()
        for name in ids:
            learn(e, 1, mm_features=[image(70, 100, PHOTO, identifier=name)], **salted)
        e = start()
        for n, name in enumerate(ids):
            found = ask(e, 2 + n, mm_features=[image(70, 100, f"photo {n}", identifier=name)], **salted)
            assert found["load_tokens"] == 64, f"{name}: KV of another image"
            found = ask(e, 1, mm_features=[image(70, 100, PHOTO, identifier=f"new {n}")], **salted)
            assert found["load_tokens"] == STORED, "the same image under another id"
            # Now nothing tells whose output of the encoder the engine uses.
            lost = ask(e, 1, mm_features=[image(70, 100, PHOTO, identifier=name)], **salted)
            assert lost["not_cached"] == 1 and not lost["load_tokens"] and not lost["chunks_offered"]


def test_an_image_that_takes_long_to_read_is_waited_for(start, monkeypatch):
    """The request is held back, and cached all the same; the scheduler never reads."""
    e = start()
    gate, readers = threading.Event(), []

    def slow(modality, data):
        readers.append(threading.current_thread())
        assert gate.wait(120)
        return item_digest(modality, data)

    monkeypatch.setattr(content, "item_digest", slow)
    q = e.add(DOC, 2, world=1, at=70, mm_features=[image(70, 100, PHOTO)])
    for _ in range(5):
        assert not e.step().num_scheduled_tokens, "not held back"
    assert q.request.status == RequestStatus.WAITING and e.half.leftovers()["requests"] == 1
    gate.set()
    e.run()
    assert e.counts["chunks_offered"] and not e.counts["not_cached"]
    assert readers and threading.current_thread() not in readers
    learn(e, 1, mm_features=[image(70, 100, PHOTO)])

    # One that is never read costs what a lookup may cost.
    gate.clear()
    monkeypatch.setattr(e.half, "_patience", Patience(0.05, 0.0))
    counts = ask(e, 2, mm_features=[image(70, 100, OTHER_PHOTO)])
    assert counts["not_cached"] == 1 and not counts["load_tokens"] and not counts["chunks_offered"]
    # What needs no lookup is not held back, and stored once it is known what it is.
    monkeypatch.setattr(e.half, "_patience", Patience(60.0, 0.0))
    no_load = {"extra_args": {"kv_transfer_params": {"kvtier": {"load": False}}}}
    third = image(70, 100, "third")
    e.add(DOC, 30, world=3, at=70, mm_features=[third], sampling=no_load)
    assert e.step().num_scheduled_tokens
    offered = e.counts["chunks_offered"]
    gate.set()
    settle(e, third)
    e.run()
    assert e.counts["chunks_offered"] >= offered + 9
    assert not e.half._unread


def talk(e, world, photo):
    """A streaming session: DOC is said in parts of 200 tokens, the second one with
    an image, whose place is in the whole."""
    e.scheduler.reset_prefix_cache()
    e.scheduler.reset_encoder_cache()
    e.counts.clear()
    q = e.add(DOC[:200], 1, resumable=True)
    for part in (1, 2):
        while q.request.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
            e.step()
        said = q.request.num_computed_tokens
        assert said == 200 * part
        again = Sequence(q.id, DOC[: said + 200], 1, world, photo.mm_position.offset)
        again.request, e.sequences[q.id] = q.request, again
        new = replace(photo, mm_position=replace(photo.mm_position, offset=photo.mm_position.offset - said))
        e.scheduler.add_request(
            Request(
                request_id=q.id,
                resumable=True,
                prompt_token_ids=DOC[said : said + 200],
                mm_features=[new] if part == 1 else None,
                sampling_params=SamplingParams(max_tokens=1, ignore_eos=True),
                pooling_params=None,
                block_hasher=e._hasher,
            )
        )
        q = again
        e.step()
    while q.request.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
        e.step()
    e.abort(q)
    e.run()
    assert not e.problems and not e.counts["errors"]
    return e.counts.copy()


def settle(e, feature):
    """Waits until an item is read, if it can be."""
    for _ in attempts():
        try:
            return e.half._media.get([feature])
        except NotYet:
            time.sleep(0.005)
        except NotIdentified:
            return None
    raise AssertionError("never read")


def test_what_a_session_brings_later_is_identified_too(start):
    """vLLM hands the next input of a session to the request itself; the connector
    hears nothing of it."""
    e = start()
    for _ in attempts():
        assert not talk(e, 1, image(230, 20, PHOTO))["not_cached"]
        if ask(e, 1, mm_features=[image(230, 20, PHOTO)])["load_tokens"] == STORED:
            break
    else:
        raise AssertionError("never found")
    assert ask(e, 2, mm_features=[image(230, 20, OTHER_PHOTO)])["load_tokens"] == 192

    unknown = item(address=1, monotonic_id=1, signature=[])
    for world, strange in (
        (3, image(230, 20, data=unknown, identifier="new")),
        (4, image(230, 20, data=None, identifier="newer")),
        (5, image(230, 20, "a third one", identifier=image(230, 20, PHOTO).identifier)),
    ):
        e = start()
        ask(e, 1, mm_features=[image(230, 20, PHOTO)])
        settle(e, strange)
        counts = talk(e, world, strange)
        assert counts["not_cached"] == 1 and counts["chunks_offered"] == 192 // 64, strange
        assert not e.half.leftovers()["requests"]
    e = start()
    assert ask(e, 1, mm_features=[image(230, 20, PHOTO)])["load_tokens"] == STORED
