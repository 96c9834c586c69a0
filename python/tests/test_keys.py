"""Keys: the published vectors, and a second implementation with hashlib."""

from __future__ import annotations

import array
import hashlib
import struct

import numpy as np
import pytest
from binding import ROOT
from hypothesis import given
from hypothesis import strategies as st

import kvtier
from kvtier import keys
from kvtier.keys import Extra

VECTORS = ROOT / "internal" / "chunk" / "testdata" / "keys.txt"


def encode(extras: list[Extra]) -> bytes:
    out = struct.pack("<I", len(extras))
    for x in extras:
        out += struct.pack("<HHi", x.kind, len(x.bytes), x.offset) + x.bytes
    return out


def model_root(fingerprint: bytes, extras: list[Extra]) -> bytes:
    ordered = sorted(extras, key=lambda x: x.kind)
    return hashlib.sha256(b"kvtier-key-1\0" + fingerprint + encode(ordered)).digest()


def model_chain(parent: bytes, c: int, tokens: list[int], extras: list[Extra]) -> list[bytes]:
    out = []
    for i in range(len(tokens) // c):
        part = struct.pack(f"<I{c}I", c, *tokens[i * c : (i + 1) * c])
        mine = sorted((x for x in extras if x.chunk == i), key=lambda x: (x.offset, x.kind, x.bytes))
        parent = hashlib.sha256(b"kvtier-chunk-1\0" + parent + part + encode(mine)).digest()
        out.append(parent)
    return out


def vectors() -> list[dict[str, list[str]]]:
    cases = []
    for block in VECTORS.read_text().split("\n\n"):
        case: dict[str, list[str]] = {}
        for line in block.splitlines():
            name, _, value = line.partition(" ")
            case.setdefault(name, []).append(value)
        cases.append(case)
    return cases


CHAINS = [c for c in vectors() if "case" in c]
DIGESTS = [c for c in vectors() if "digest" in c]


@pytest.mark.parametrize("case", CHAINS, ids=lambda c: c["case"][0])
def test_vectors(case: dict[str, list[str]]) -> None:
    fingerprint = bytes.fromhex(case["fingerprint"][0])
    prefix = []
    for line in case.get("prefix", []):
        kind, offset, data = line.split()
        prefix.append(Extra(int(kind), bytes.fromhex(data), offset=int(offset)))
    extras = []
    for line in case.get("extra", []):
        chunk, kind, offset, data = line.split()
        extras.append(Extra(int(kind), bytes.fromhex(data), int(chunk), int(offset)))
    tokens = [int(t) for line in case.get("tokens", []) for t in line.split()]
    c = int(case["chunk_tokens"][0])
    want = [bytes.fromhex(k) for k in case.get("key", [])]

    root = keys.root(fingerprint, prefix)
    assert root.hex() == case["root"][0]
    assert root == model_root(fingerprint, prefix)
    got = keys.chain(root, c, np.array(tokens, np.uint32), extras)
    assert [bytes(k) for k in got] == want == model_chain(root, c, tokens, extras)


def test_there_are_vectors() -> None:
    assert len(CHAINS) >= 10 and len(DIGESTS) >= 3


@pytest.mark.parametrize("case", DIGESTS, ids=lambda c: c["digest"][0])
def test_digests(case: dict[str, list[str]]) -> None:
    assert keys.digest(bytes.fromhex(case["text"][0]).decode()).hex() == case["sha256"][0]


hash32 = st.binary(min_size=32, max_size=32)
items = st.builds(
    Extra, st.just(keys.MULTIMODAL), hash32, st.integers(0, 3), st.integers(-(1 << 31), 3)
)


@given(
    fingerprint=hash32,
    prefix=st.dictionaries(st.sampled_from([keys.LORA, keys.SALT, keys.TAG]), hash32),
    c=st.integers(4, 9),
    tokens=st.lists(st.integers(0, (1 << 32) - 1), min_size=40, max_size=60),
    extras=st.lists(items, max_size=6),
    cut=st.integers(0, 4),
)
def test_as_hashlib_says(
    fingerprint: bytes, prefix: dict[int, bytes], c: int, tokens: list[int], extras: list[Extra], cut: int
) -> None:
    fixed = [Extra(k, v) for k, v in prefix.items()]
    root = keys.root(fingerprint, fixed)
    assert root == model_root(fingerprint, fixed)
    vector = np.array(tokens, np.uint32)
    whole = keys.chain(root, c, vector, extras)
    assert [bytes(k) for k in whole] == model_chain(root, c, tokens, extras)
    # A chain may be continued anywhere.
    head = keys.chain(root, c, vector[: cut * c], [x for x in extras if x.chunk < cut])
    parent = bytes(head[-1]) if cut else root
    rest = [Extra(x.kind, x.bytes, x.chunk - cut, x.offset) for x in extras if x.chunk >= cut]
    tail = keys.chain(parent, c, vector[cut * c :], rest)
    assert np.array_equal(np.concatenate([head, tail]), whole)


def test_what_tokens_may_be() -> None:
    root = keys.root(bytes(32))
    want = keys.chain(root, 4, np.arange(8, dtype=np.uint32))
    assert np.array_equal(keys.chain(root, 4, list(range(8))), want)
    assert np.array_equal(keys.chain(root, 4, range(8)), want)
    assert np.array_equal(keys.chain(root, 4, array.array("I", range(8))), want)
    assert np.array_equal(keys.chain(root, 4, memoryview(array.array("I", range(8)))), want)
    assert keys.chain(root, 4, []).shape == (0, 32)
    for wrong in (
        np.arange(8),  # 64 bits
        np.arange(8, dtype=np.int32),
        np.arange(16, dtype=np.uint32)[::2],  # gaps: would have to be copied
        np.zeros((2, 4), np.uint32),
        [-1, 0, 0, 0],
        [1 << 32, 0, 0, 0],
        array.array("q", range(8)),
    ):
        with pytest.raises(TypeError):
            keys.chain(root, 4, wrong)


def test_refusals() -> None:
    with pytest.raises(kvtier.Error, match="31 bytes"):
        keys.root(bytes(32), [Extra(keys.SALT, bytes(31))])
    with pytest.raises(kvtier.Error, match="twice"):
        keys.root(bytes(32), [Extra(keys.SALT, bytes(32))] * 2)
    with pytest.raises(ValueError, match="33 bytes"):
        keys.root(bytes(32), [Extra(keys.SALT, bytes(33))])
    with pytest.raises(TypeError):
        keys.root(b"short")
    with pytest.raises(TypeError):
        keys.chain(b"short", 4, [1, 2, 3, 4])
    with pytest.raises(ValueError):
        keys.chain(bytes(32), 0, [1, 2, 3, 4])
