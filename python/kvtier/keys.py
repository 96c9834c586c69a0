"""Keys of chunks: a hash chain over namespace, extras and tokens.

Pure functions; they load the library but need no cache. The encoding is fixed and
published with test vectors, so any other implementation gets the same keys.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _arrays, _lib

LORA = 1  # prefix, 32 bytes: SHA-256 over the adapter's content
SALT = 2  # prefix, 32 bytes: digest() of the salt; none for an empty salt
EPOCH = 3  # prefix, 16 bytes: from Coordinator.reset
TAG = 4  # prefix, 32 bytes: digest() of the tag
MULTIMODAL = 16  # chunk, 32 bytes: SHA-256 of modality, identifier, length
PROMPT_EMBEDS = 17  # chunk, 32 bytes
SUCCESSOR = 18  # chunk, 4 bytes: the token after the chunk, offset = chunk_tokens


@dataclass(frozen=True, slots=True)
class Extra:
    """Something besides tokens that KV bytes depend on. ``chunk``: index of the
    chunk within the tokens handed over; ``offset``: where the item starts, relative
    to the chunk's start, in tokens. Both are 0 for prefix extras."""

    kind: int
    bytes: bytes
    chunk: int = 0
    offset: int = 0


def digest(text: str) -> bytes:
    """SHA-256 of the UTF-8 of a text: salts and tags."""
    return hashlib.sha256(text.encode()).digest()


def root(fingerprint: bytes, extras: Iterable[Extra] = ()) -> bytes:
    """The parent of the first chunk of all prefixes with these extras."""
    if len(fingerprint) != 32:
        raise TypeError("a fingerprint is 32 bytes")
    lib = _lib.load()
    array, n = _pack(extras)
    out = ctypes.create_string_buffer(32)
    lib.check(lib.key_root(fingerprint, array, n, out))
    return out.raw


def chain(
    parent: bytes, chunk_tokens: int, tokens: Any, extras: Iterable[Extra] = ()
) -> _arrays.Keys:
    """The keys of all full chunks of ``tokens``, the first of which follows
    ``parent`` (the root, or the key of the chunk before). ``tokens``: an array or
    buffer of uint32, or a list. Returns [n, 32] bytes."""
    if not 0 < chunk_tokens <= 1 << 20:
        raise ValueError("chunk_tokens must be 1 to 1048576")
    lib = _lib.load()
    vector = _arrays.words(tokens, "tokens")
    array, nextras = _pack(extras)
    n = vector.size // chunk_tokens
    out = np.empty((n, 32), np.uint8)
    done = ctypes.c_size_t()
    lib.check(
        lib.keys(
            _arrays.key(parent), chunk_tokens, _arrays.address(vector), vector.size,
            array, nextras, _arrays.address(out), n, ctypes.byref(done),
        )
    )  # fmt: skip
    return out[: done.value]


def _pack(extras: Iterable[Extra]) -> tuple[ctypes.Array[_lib.Extra] | None, int]:
    some = list(extras)
    if not some:
        return None, 0
    array = (_lib.Extra * len(some))()
    for place, x in zip(array, some, strict=True):
        if len(x.bytes) > 32:
            raise ValueError(f"an extra of kind {x.kind} has {len(x.bytes)} bytes, at most 32 are allowed")
        if not (0 <= x.chunk < 1 << 32 and 0 <= x.kind < 1 << 16 and -(1 << 31) <= x.offset < 1 << 31):
            raise ValueError(f"an extra of kind {x.kind} has a number out of range")
        place.chunk, place.kind, place.length, place.offset = x.chunk, x.kind, len(x.bytes), x.offset
        ctypes.memmove(place.bytes, x.bytes, len(x.bytes))
    return array, len(some)
