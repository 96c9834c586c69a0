"""From a request of vLLM to the keys of its chunks.

Everything that changes KV besides the tokens must be in a key; what cannot be
identified is not cached. vLLM's own block hashes are not used: they depend on
the block size, the interpreter and the engine's configuration.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

import numpy as np

from kvtier import keys

from .content import LoRADigests, MediaDigests, NotIdentified

if TYPE_CHECKING:
    import numpy.typing as npt
    from vllm.v1.request import Request

#: A lease and a load name at most this many chunks (one message of the ring).
MAX_KEYS = 8189


def multimodal_digest(modality: str, content: bytes, length: int) -> bytes:
    """SHA-256 of (modality, content in hexadecimal, length), each text with its length
    before it. ``content``: digest of the item, ``length``: tokens that stand for it."""
    a, b = modality.encode(), content.hex().encode()
    return hashlib.sha256(
        struct.pack("<I", len(a)) + a + struct.pack("<I", len(b)) + b + struct.pack("<I", length)
    ).digest()


class Roots:
    """Root keys of prefixes under one fingerprint."""

    def __init__(self, fingerprint: bytes, tag: str, loras: LoRADigests) -> None:
        self.fingerprint = fingerprint
        self._tag = [keys.Extra(keys.TAG, keys.digest(tag))] if tag else []
        self._loras = loras
        self._plain: dict[bytes, bytes] = {}

    def root(self, request: Request, epoch: bytes) -> bytes:
        """Returns the root of a request; raises NotIdentified."""
        if request.lora_request is None and not request.cache_salt:
            root = self._plain.get(epoch)
            if root is None:
                root = keys.root(self.fingerprint, self._common(epoch))
                self._plain = {epoch: root}
            return root
        extras = self._common(epoch)
        if request.lora_request is not None:
            extras.append(keys.Extra(keys.LORA, self._loras.get(request.lora_request, request)))
        if request.cache_salt:
            extras.append(keys.Extra(keys.SALT, keys.digest(request.cache_salt)))
        return keys.root(self.fingerprint, extras)

    def _common(self, epoch: bytes) -> list[keys.Extra]:
        extras = list(self._tag)
        if epoch:
            extras.append(keys.Extra(keys.EPOCH, epoch))
        return extras


def check_identifiable(request: Request) -> None:
    """Raises NotIdentified for a request of a kind that no keys can describe."""
    if request.prompt_embeds is not None:
        raise NotIdentified("the prompt holds embeddings")
    if request.pooling_params is not None:
        raise NotIdentified("pooling requests are not cached")


class KeyChain:
    """Keys of one request, under one root.

    Kept keys cover only tokens that were computed when they were made. A key of
    a lookup is made over the tokens known then, is not kept, and must not be
    used to store: a streaming session may replace its last sampled token later,
    and tells nobody. Nor does it say when it brings more multimodal items, so
    whatever makes keys may raise NotIdentified.
    """

    __slots__ = ("root", "_chunk", "_ahead", "_keys", "_n", "_request", "_media", "_items")

    def __init__(
        self, request: Request, root: bytes, chunk_tokens: int, media: MediaDigests, ahead: int = 0
    ) -> None:
        """``ahead``: 1 when a key also names the token after its chunk, which must
        then be known. Raises NotIdentified."""
        self.root = root
        self._request = request
        self._chunk = chunk_tokens
        self._ahead = ahead
        self._keys = np.empty((8, 32), np.uint8)
        self._n = 0
        self._media = media
        self._items: list[tuple[int, int, bytes]] = []  # first token, tokens, digest
        self._take_items()

    def __len__(self) -> int:
        return self._n

    def truncate(self, n: int) -> None:
        """Keeps at most n keys."""
        self._n = min(self._n, n)

    def extend(self, n: int) -> None:
        """Makes and keeps keys up to n, over tokens that will not change."""
        if n <= self._n:
            return
        new = self._make(self._n, n)
        if n > len(self._keys):
            grown = np.empty((max(n, 2 * len(self._keys)), 32), np.uint8)
            grown[: self._n] = self._keys[: self._n]
            self._keys = grown
        self._keys[self._n : n] = new
        self._n = n

    def kept(self, first: int, end: int) -> npt.NDArray[np.uint8]:
        """Kept keys first..end, as a copy that later truncation does not touch."""
        if end > self._n:
            raise IndexError(f"{end} keys asked for, {self._n} are kept")
        return self._keys[first:end].copy()

    def parent(self, ordinal: int) -> bytes:
        """The key before ``ordinal``, which is kept or the root."""
        if ordinal == 0:
            return self.root
        if ordinal > self._n:
            raise IndexError(f"the parent of chunk {ordinal} is not kept")
        return self._keys[ordinal - 1].tobytes()

    def lookup(self, n: int) -> npt.NDArray[np.uint8]:
        """Keys 0..n over the tokens known now; nothing is kept."""
        known = min(self._n, n)
        if known == n:
            return self._keys[:n].copy()
        return np.concatenate([self._keys[:known], self._make(known, n)])

    def _make(self, first: int, end: int) -> npt.NDArray[np.uint8]:
        c = self._chunk
        known = np.array(self._request.all_token_ids[first * c : end * c + self._ahead], np.uint32)
        if len(known) != (end - first) * c + self._ahead:
            raise IndexError(f"chunks {first}..{end} reach beyond the known tokens")
        extras = self._items_in(first, end)
        if self._ahead:
            after = known[c::c].astype("<u4")
            extras += [
                keys.Extra(keys.SUCCESSOR, t.tobytes(), chunk=j, offset=c) for j, t in enumerate(after)
            ]
        return keys.chain(self.parent(first), c, known[: (end - first) * c], extras)

    def _items_in(self, first: int, end: int) -> list[keys.Extra]:
        if len(self._items) != len(self._request.mm_features):
            self._take_items()  # a streaming session went on; no hook says so
        extras = []
        c = self._chunk
        for start, length, digest in self._items:
            lo, hi = max(first, start // c), min(end, -(-(start + length) // c))
            for j in range(lo, hi):
                extras.append(keys.Extra(keys.MULTIMODAL, digest, chunk=j - first, offset=start - j * c))
        return extras

    def _take_items(self) -> None:
        features = self._request.mm_features
        starts = [f.mm_position.offset for f in features]
        if self._ahead and any(at > 0 and at % self._chunk == 0 for at in starts):
            # The token after a chunk says nothing of the item that it stands for.
            raise NotIdentified("a multimodal item begins where a chunk ends, and draft layers look ahead")
        self._items = [
            (at, n := f.mm_position.length, multimodal_digest(f.modality, content, n))
            for at, f, content in zip(starts, features, self._media.get(features), strict=True)
        ]
