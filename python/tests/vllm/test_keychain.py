"""Keys of requests, against a second implementation of the published encoding."""

import gc
import hashlib
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvtier.vllm import content, keychain
from kvtier.vllm.content import LoRADigests, MediaDigests, NotIdentified, NotYet, item_digest
from kvtier.vllm.keychain import KeyChain, Roots

FP = bytes(range(32))
C = 8


def request(tokens, **kw):
    if "pooling_params" not in kw:
        kw |= {"sampling_params": SamplingParams(max_tokens=4), "pooling_params": None}
    return Request(request_id="r", prompt_token_ids=tokens, **kw)


def item(**fields):
    """What a processor makes of an image."""
    field = MultiModalSharedField(batch_size=1)
    return MultiModalKwargsItem({k: MultiModalFieldElem(data=v, field=field) for k, v in fields.items()})


def picture(content="a"):
    return item(
        pixel_values=torch.frombuffer(bytearray(content.encode() * 64), dtype=torch.uint8).view(8, -1),
        image_grid_thw=torch.tensor([1, 4, 4]),
    )


def image(offset, length, content="a", modality="image", identifier=None, data=...):
    """``identifier``: as the engine hashed it, when it is not given."""
    return MultiModalFeatureSpec(
        data=picture(content) if data is ... else data,
        modality=modality,
        identifier=identifier or hashlib.sha256(f"{modality} {content}".encode()).hexdigest(),
        mm_position=PlaceholderRange(offset=offset, length=length),
    )


def patiently(ask, *args):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            return ask(*args)
        except NotYet:
            time.sleep(0.01)
    raise AssertionError("never read")


class Media(MediaDigests):
    """Digests that a test waits for."""

    def get(self, features):
        return patiently(MediaDigests.get, self, features)


class Loras(LoRADigests):
    """Digests that a test waits for until the files are looked at, not until they are
    read."""

    def get(self, lora, asker=None):
        return patiently(super().get, lora, asker or Asker())


class Asker:
    """Stands for a request."""


class Gate:
    """Files below a directory do not answer while the gate is shut, nor does anybody
    but the threads of the digests ask for them."""

    def __init__(self, monkeypatch, directory):
        self.open = threading.Event()
        self.open.set()
        self._directory, self._caller = str(directory), threading.current_thread()
        self.touched = False
        for name in ("stat", "iterdir"):
            monkeypatch.setattr(Path, name, self._behind(getattr(Path, name)))

    def _behind(self, real):
        def call(path, *args, **kw):
            if str(path).startswith(self._directory):
                if threading.current_thread() is self._caller:
                    self.touched = True
                    raise OSError("asked where nobody may wait")
                assert self.open.wait(120)
            return real(path, *args, **kw)

        return call


# ---- the encoding, once more


def extra(kind, data, offset=0):
    return struct.pack("<HHi", kind, len(data), offset) + data


def root_of(extras):
    body = b"kvtier-key-1\0" + FP + struct.pack("<I", len(extras)) + b"".join(sorted(extras))
    return hashlib.sha256(body).digest()


def chain_of(parent, tokens, extras_of=lambda j: []):
    out = []
    for j in range(len(tokens) // C):
        xs = extras_of(j)
        body = b"kvtier-chunk-1\0" + parent + struct.pack(f"<I{C}I", C, *tokens[j * C : (j + 1) * C])
        parent = hashlib.sha256(body + struct.pack("<I", len(xs)) + b"".join(xs)).digest()
        out.append(parent)
    return out


def made(chain, n):
    return [k.tobytes() for k in chain.lookup(n)]


@pytest.fixture
def roots():
    return Roots(FP, "", LoRADigests())


def test_plain_chain_and_incremental_growth(roots):
    tokens = list(range(100, 100 + 5 * C + 3))
    want = chain_of(root_of([]), tokens)
    r = request(tokens)
    chain = KeyChain(r, roots.root(r, b""), C, Media())
    assert made(chain, 5) == want and len(chain) == 0, "a lookup keeps nothing"
    for n in (1, 2, 5):
        chain.extend(n)
        assert [k.tobytes() for k in chain.kept(0, n)] == want[:n]
        assert chain.parent(n) == want[n - 1]
    assert chain.parent(0) == root_of([])
    chain.truncate(2)
    assert len(chain) == 2 and made(chain, 5) == want
    with pytest.raises(IndexError):
        chain.extend(6)  # the sixth chunk is not full
    with pytest.raises(IndexError):
        chain.kept(0, 3)
    assert chain.lookup(0).shape == (0, 32)


def test_keys_follow_tokens_that_came_later(roots):
    """A streaming session replaces its last token; kept keys end before it."""
    r = request(list(range(C + C - 1)))
    chain = KeyChain(r, roots.root(r, b""), C, Media())
    r.append_output_token_ids(7)
    early = made(chain, 2)
    r._all_token_ids[-1] = 9
    assert made(chain, 2) == chain_of(root_of([]), r._all_token_ids) != early


def test_prefix_extras_separate(roots):
    tokens = list(range(2 * C))
    tagged = Roots(FP, "team-a", LoRADigests())
    seen = set()
    for rs, kw, epoch, extras in (
        (roots, {}, b"", []),
        (roots, {"cache_salt": "s1"}, b"", [extra(2, hashlib.sha256(b"s1").digest())]),
        (roots, {"cache_salt": "s2"}, b"", [extra(2, hashlib.sha256(b"s2").digest())]),
        (roots, {}, b"e" * 16, [extra(3, b"e" * 16)]),
        (tagged, {}, b"", [extra(4, hashlib.sha256(b"team-a").digest())]),
        (
            tagged,
            {"cache_salt": "s1"},
            b"e" * 16,
            [
                extra(2, hashlib.sha256(b"s1").digest()),
                extra(3, b"e" * 16),
                extra(4, hashlib.sha256(b"team-a").digest()),
            ],
        ),
    ):
        r = request(tokens, **kw)
        root = rs.root(r, epoch)
        assert root == root_of(extras)
        seen.add(root)
    assert len(seen) == 6
    # An empty salt is no salt.
    assert roots.root(request(tokens, cache_salt=""), b"") == root_of([])


def test_multimodal_items_are_in_every_chunk_they_touch(roots):
    tokens = list(range(4 * C))
    items = [image(5, 10), image(2 * C + 1, 2, "b", "audio")]
    r = request(tokens, mm_features=items)
    contents = [item_digest("image", picture()), item_digest("audio", picture("b"))]
    digests = [
        keychain.multimodal_digest("image", contents[0], 10),
        keychain.multimodal_digest("audio", contents[1], 2),
    ]
    spelled = struct.pack("<I", 5) + b"image" + struct.pack("<I", 64) + contents[0].hex().encode()
    spelled += struct.pack("<I", 10)
    assert digests[0] == hashlib.sha256(spelled).digest()
    place = {
        0: [extra(16, digests[0], 5)],
        1: [extra(16, digests[0], 5 - C)],
        2: [extra(16, digests[1], 1)],
        3: [],
    }
    want = chain_of(root_of([]), tokens, lambda j: place[j])
    chain = KeyChain(r, roots.root(r, b""), C, Media())
    assert made(chain, 4) == want
    # Piece by piece gives the same: chunk numbers are relative to what is handed over.
    for n in (1, 2, 3, 4):
        chain.extend(n)
    assert [k.tobytes() for k in chain.kept(0, 4)] == want
    for other in (image(6, 10), image(5, 10, "c"), image(5, 9), image(5, 10, modality="video")):
        r = request(tokens, mm_features=[other, items[1]])
        assert not set(want) & set(made(KeyChain(r, roots.root(r, b""), C, Media()), 4)), other
    # The identifier is not part of it.
    r = request(tokens, mm_features=[image(5, 10, identifier="photo-1"), items[1]])
    assert made(KeyChain(r, roots.root(r, b""), C, Media()), 4) == want


def test_what_cannot_be_identified():
    tokens = list(range(2 * C))
    keychain.check_identifiable(request(tokens))
    with pytest.raises(NotIdentified, match="embeddings"):
        keychain.check_identifiable(request(None, prompt_embeds=torch.zeros(C, 4)))
    with pytest.raises(NotIdentified, match="pooling"):
        keychain.check_identifiable(request(tokens, sampling_params=None, pooling_params=PoolingParams()))


# ---- media


def test_an_item_is_its_processed_content():
    same = picture("a")
    assert item_digest("image", same) == item_digest("image", picture("a"))
    pixels, grid = same["pixel_values"].data, same["image_grid_thw"].data
    transposed = item(pixel_values=pixels.t().contiguous().t(), image_grid_thw=grid)
    assert not transposed["pixel_values"].data.is_contiguous()
    assert item_digest("image", transposed) == item_digest("image", same), "strides are no content"
    wide = torch.arange(64, dtype=torch.bfloat16)
    others = [
        ("video", same),
        ("image", picture("b")),
        ("image", item(pixel_values=pixels, image_grid_thw=torch.tensor([1, 2, 8]))),
        ("image", item(pixel_values=pixels.view(16, -1), image_grid_thw=grid)),
        ("image", item(pixel_values=pixels.view(torch.int8), image_grid_thw=grid)),
        ("image", item(pixel_value=pixels, image_grid_thw=grid)),
        ("image", item(pixel_values=pixels)),
        ("image", item(pixel_values=[pixels], image_grid_thw=grid)),
        ("image", item(pixel_values=[pixels[:4], pixels[4:]], image_grid_thw=grid)),
        ("image", item(pixel_values=pixels, image_grid_thw=grid, crops=1)),
        ("image", item(pixel_values=pixels, image_grid_thw=grid, crops=2)),
        ("image", item(pixel_values=pixels, image_grid_thw=grid, crops="1")),
        ("image", item(pixel_values=wide)),
        ("image", item(pixel_values=wide.view(torch.float16))),
        ("image", item(pixel_values=torch.tensor(True))),
    ]
    assert len({item_digest(*o) for o in others} | {item_digest("image", same)}) == len(others) + 1


@pytest.mark.parametrize(
    "data, why",
    [
        (None, "does not hand over"),
        (item(address=1, monotonic_id=2, signature=[]), "mm_processor_cache_type shm"),
        (item(number=1), "no tensor"),
        (item(pixel_values=torch.empty(0)), "no tensor"),
        (item(pixel_values=torch.ones(2, device="meta")), "lies on meta"),
        (item(pixel_values=torch.ones(2), more=object()), "holds a object"),
    ],
)
def test_an_item_without_content_is_not_identified(roots, data, why):
    r = request(list(range(2 * C)), mm_features=[image(1, 4), image(6, 4, data=data)], cache_salt="mine")
    with pytest.raises(NotIdentified, match=why):
        KeyChain(r, roots.root(r, b""), C, Media())


def test_an_identifier_of_two_contents_stands_for_none():
    """vLLM's encoder cache finds the output for the first one by it."""
    media = Media()
    (one,) = media.get([image(0, 4, "a", identifier="photo-1")])
    assert media.get([image(0, 4, "a", identifier="photo-1")]) == [one], "the same content again"
    assert media.get([image(0, 4, "a", identifier="photo-2")]) == [one]
    for content in ("b", "a", "b"):
        with pytest.raises(NotIdentified, match="another one had before"):
            media.get([image(0, 4, content, identifier="photo-1")])
    assert media.get([image(0, 4, "a", identifier="photo-2")]) == [one]
    # Also when nobody ever asked for the content of the first one.
    media.see([image(0, 4, "a", identifier="photo-3")])
    with pytest.raises(NotIdentified, match="another one had before"):
        media.get([image(0, 4, "b", identifier="photo-3")])


def test_media_are_read_once_elsewhere_and_not_kept(monkeypatch):
    readers, gate = [], threading.Event()

    def slow(modality, data):
        readers.append(threading.current_thread())
        assert gate.wait(60)
        return item_digest(modality, data)

    monkeypatch.setattr(content, "item_digest", slow)
    media = MediaDigests()
    features = [image(0, 4), image(5, 4, "b")]
    for _ in range(3):
        with pytest.raises(NotYet):
            media.get(features)
    gate.set()
    found = Media.get(media, features)
    assert found == [item_digest("image", picture(c)) for c in "ab"]
    assert len(readers) == 2 and threading.current_thread() not in readers
    assert media.get(features) == found and len(readers) == 2
    assert len(media._items) == 2
    del features
    Media.get(media, [last := image(0, 4, "c")])
    gc.collect()
    assert list(media._items) == [id(last.data)]


def test_tokens_that_are_no_tokens(roots):
    r = request([-1] * C)
    with pytest.raises((OverflowError, ValueError, TypeError)):
        KeyChain(r, roots.root(r, b""), C, Media()).lookup(1)


# ---- LoRA


def adapter(path, content=b"weights", config=b"{}"):
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_bytes(config)
    (path / "adapter_model.safetensors").write_bytes(content)
    return path


def lora(path, number=1, **kw):
    return LoRARequest(lora_name="a", lora_int_id=number, lora_path=str(path), **kw)


def digest(d, request):
    """As requests see it: the first one only starts the reading."""
    try:
        return d.get(request)
    except NotIdentified as e:
        if "still being read" not in str(e):
            raise
        assert d.wait(10)
        return d.get(request)


def test_lora_is_identified_by_content(tmp_path):
    d = Loras()
    a, b = adapter(tmp_path / "a"), adapter(tmp_path / "b")
    with pytest.raises(NotIdentified, match="still being read"):
        d.get(lora(a))
    assert d.wait(10)
    one = d.get(lora(a))
    assert one == digest(d, lora(b, 2)), "the same content elsewhere is the same adapter"
    assert one != digest(d, lora(adapter(tmp_path / "c", b"other"), 3))
    assert one != digest(d, lora(adapter(tmp_path / "d", config=b'{"r":8}'), 4))
    (a / "README.md").write_text("not part of it")
    assert d.get(lora(a)) == one
    r = request(list(range(C)), lora_request=lora(a))
    assert Roots(FP, "", d).root(r, b"") == root_of([extra(1, one)])


def test_lora_replaced_under_the_same_path(tmp_path):
    import os

    d = Loras()
    a = adapter(tmp_path / "a")
    one = digest(d, lora(a))
    adapter(a, b"weightz")
    os.utime(a / "adapter_model.safetensors", ns=(1, 1))
    # Which of the two the engine uses is not known.
    with pytest.raises(NotIdentified, match="changed"):
        digest(d, lora(a))
    two = digest(d, lora(a, load_inplace=True))
    assert two != one and d.get(lora(a)) == two


def test_lora_that_changes_while_it_is_read(tmp_path, monkeypatch):
    """What was read may be some of both, also when the old files come back later."""
    import os

    d, a = Loras(), adapter(tmp_path / "a")
    before = {p: p.stat().st_mtime_ns for p in a.iterdir()}
    real = content._adapter

    def seen(path):
        if threading.current_thread().name == "kvtier-lora-digest":  # it has read them
            adapter(a, b"longer weights")
        return real(path)

    monkeypatch.setattr(content, "_adapter", seen)
    with pytest.raises(NotIdentified, match="still being read"):
        d.get(lora(a))
    assert d.wait(60)
    monkeypatch.undo()
    adapter(a)
    for path, ns in before.items():
        os.utime(path, ns=(ns, ns))
    with pytest.raises(NotIdentified, match="are changing"):
        d.get(lora(a))


def test_lora_that_is_not_there(tmp_path):
    d = Loras()
    with pytest.raises(NotIdentified, match="not a local directory"):
        d.get(lora("some-org/adapter"))
    (tmp_path / "e").mkdir()
    with pytest.raises(NotIdentified, match="no weight files"):
        d.get(lora(tmp_path / "e"))


def test_adapters_are_looked_at_elsewhere(tmp_path, monkeypatch):
    """An adapter on a file system that hangs stops nobody, and no other adapter."""
    d = LoRADigests()
    a, b = adapter(tmp_path / "a"), adapter(tmp_path / "b")
    gate = Gate(monkeypatch, a)
    gate.open.clear()
    asker, other = Asker(), Asker()
    for _ in range(3):
        with pytest.raises(NotYet):
            d.get(lora(a), asker)
    other_digest = patiently(digest_of, d, lora(b, 2), other)
    with monkeypatch.context() as m:
        m.setattr(content, "STUCK_S", 0.0)
        with pytest.raises(NotIdentified, match=f"{a} does not answer"):
            d.get(lora(a), asker)
    gate.open.set()
    assert patiently(digest_of, d, lora(a), asker) == other_digest
    assert not gate.touched


def digest_of(d, lora, asker):
    """Also reads the adapter."""
    try:
        return d.get(lora, asker)
    except NotIdentified as e:
        if "still being read" in str(e):
            raise NotYet from e
        raise


def test_a_look_before_the_question_is_no_answer(tmp_path, monkeypatch):
    d = LoRADigests()
    a = adapter(tmp_path / "a")
    one = patiently(digest_of, d, lora(a), Asker())
    gate = Gate(monkeypatch, a)
    gate.open.clear()
    first, second = Asker(), Asker()
    with pytest.raises(NotYet):
        d.get(lora(a), first)
    # The look for the first one is under way; what it finds is too old for the second.
    real, looks = content._adapter, []

    def look(path):
        looks.append(path)
        return real(path)

    monkeypatch.setattr(content, "_adapter", look)
    with pytest.raises(NotYet):
        d.get(lora(a), second)
    gate.open.set()
    assert d.wait(60)
    assert not looks and d.get(lora(a), first) == one
    assert patiently(d.get, lora(a), second) == one
    assert looks


def test_kept_keys_are_a_copy(roots):
    r = request(list(range(2 * C)))
    chain = KeyChain(r, roots.root(r, b""), C, Media())
    chain.extend(2)
    kept = chain.kept(0, 2)
    assert kept.dtype == np.uint8 and kept.flags.c_contiguous
    chain._keys[:] = 0
    assert kept.any()


def test_keys_that_name_the_next_token(roots):
    """Draft layers look one token ahead."""
    tokens = list(range(500, 500 + 3 * C + 1))
    photo = image(C - 2, 4)
    digest = keychain.multimodal_digest("image", item_digest("image", picture()), 4)

    def extras_of(j):
        items = {0: [extra(16, digest, C - 2)], 1: [extra(16, digest, -2)]}.get(j, [])
        return [*items, extra(18, struct.pack("<I", tokens[(j + 1) * C]), C)]

    r = request(tokens, mm_features=[photo])
    want = chain_of(root_of([]), tokens, extras_of)
    chain = KeyChain(r, roots.root(r, b""), C, Media(), ahead=1)
    assert made(chain, 3) == want
    for n in (1, 3):
        chain.extend(n)
        assert [k.tobytes() for k in chain.kept(0, n)] == want[:n]
    whole = request(tokens[:-1])
    with pytest.raises(IndexError):  # nobody knows what comes after the third chunk
        KeyChain(whole, roots.root(whole, b""), C, Media(), ahead=1).lookup(3)
    for offset, known in ((0, True), (C - 1, True), (C, False), (2 * C, False)):
        r = request(tokens, mm_features=[image(offset, 2)])
        KeyChain(r, b"r" * 32, C, Media())
        if known:
            KeyChain(r, b"r" * 32, C, Media(), 1)
        else:
            with pytest.raises(NotIdentified, match="begins where a chunk ends"):
                KeyChain(r, b"r" * 32, C, Media(), 1)
