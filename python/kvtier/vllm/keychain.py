"""From a request of vLLM to the keys of its chunks.

Everything that changes KV besides the tokens must be in a key; what cannot be
identified is not cached. vLLM's own block hashes are not used: they depend on
the block size, the interpreter and the engine's configuration.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier import keys

if TYPE_CHECKING:
    import numpy.typing as npt
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

#: A lease and a load name at most this many chunks (one message of the ring).
MAX_KEYS = 8189

# What vLLM's processor gives an item whose content it hashed, with the name of a
# LoRA adapter before it where that changes the encoder. Anything else was chosen
# by the caller, who may use it for another item after a restart.
_CONTENT_IDENTIFIER = re.compile(r"(?:.*:)?[0-9a-f]{32,128}", re.DOTALL)

_ADAPTER_FILES = re.compile(r"adapter_config\.json|.*\.(?:safetensors|bin|pt|pth)", re.DOTALL)


class NotIdentified(Exception):
    """A request whose KV cannot be named; the text says why."""


class LoRADigests:
    """SHA-256 over the content of adapters.

    Files are read once per (path, mtime, size), by a thread of their own: an
    adapter may be a gigabyte and the caller is the scheduler's loop. Until the
    digest is there, requests of that adapter are not cached.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._digests: dict[tuple, bytes | str | None] = {}  # None: being read; str: why not
        self._loaded: dict[tuple[int, str], bytes] = {}

    def get(self, lora: LoRARequest) -> bytes:
        """Returns the digest, or raises NotIdentified. Never reads content."""
        path = Path(os.path.expanduser(lora.lora_path))
        files = self._files(path)
        signature = (str(path), *((name, st.st_mtime_ns, st.st_size) for name, st in files))
        with self._lock:
            if signature not in self._digests:
                self._digests[signature] = None
                threading.Thread(
                    target=self._read,
                    args=(signature, path, [name for name, _ in files]),
                    name="kvtier-lora-digest",
                    daemon=True,
                ).start()
            digest = self._digests[signature]
            if digest is None:
                raise NotIdentified("the LoRA adapter is still being read")
            if isinstance(digest, str):
                raise NotIdentified(digest)
            # The engine reads an adapter when it is first used and may not read
            # it again when the files change; which weights are in use is then
            # not known, unless the request itself says that they are reloaded.
            slot = (lora.lora_int_id, str(path))
            if lora.load_inplace:
                self._loaded[slot] = digest
            if self._loaded.setdefault(slot, digest) != digest:
                raise NotIdentified("the files of the LoRA adapter changed after it was first used")
            return digest

    def wait(self, timeout_s: float) -> bool:
        """Waits until nothing is being read; for tests and warm-up."""
        import time

        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            with self._lock:
                if None not in self._digests.values():
                    return True
            time.sleep(0.005)
        return False

    @staticmethod
    def _files(path: Path) -> list[tuple[str, os.stat_result]]:
        try:
            if not path.is_dir():
                raise NotIdentified(f"the LoRA adapter {path} is not a local directory")
            names = sorted(p.name for p in path.iterdir() if _ADAPTER_FILES.fullmatch(p.name))
            files = [(name, (path / name).stat()) for name in names]
        except OSError as e:
            raise NotIdentified(f"the LoRA adapter cannot be read ({e})") from e
        if not any(name != "adapter_config.json" for name, _ in files):
            raise NotIdentified(f"the LoRA adapter {path} has no weight files")
        return files

    def _read(self, signature: tuple, path: Path, names: list[str]) -> None:
        result: bytes | str
        try:
            h = hashlib.sha256()
            for name in names:
                with open(path / name, "rb") as f:
                    content = hashlib.file_digest(f, "sha256")
                    h.update(struct.pack("<IQ", len(name.encode()), f.tell()))
                h.update(name.encode() + content.digest())
            # What changed while it was read is some mixture of two adapters.
            after = self._files(path)
            now = (str(path), *((name, st.st_mtime_ns, st.st_size) for name, st in after))
            result = h.digest() if now == signature else "the files of the LoRA adapter are changing"
        except (OSError, NotIdentified) as e:
            result = f"the LoRA adapter cannot be read ({e})"
        with self._lock:
            self._digests[signature] = result


def multimodal_digest(modality: str, identifier: str, length: int) -> bytes:
    """SHA-256 of (modality, identifier, length), each text with its length before it."""
    a, b = modality.encode(), identifier.encode()
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
            extras.append(keys.Extra(keys.LORA, self._loras.get(request.lora_request)))
        if request.cache_salt:
            extras.append(keys.Extra(keys.SALT, keys.digest(request.cache_salt)))
        return keys.root(self.fingerprint, extras)

    def _common(self, epoch: bytes) -> list[keys.Extra]:
        extras = list(self._tag)
        if epoch:
            extras.append(keys.Extra(keys.EPOCH, epoch))
        return extras


def check_identifiable(request: Request, chunk_tokens: int = 1, ahead: int = 0) -> None:
    """Raises NotIdentified for a request that no keys can describe. ``ahead``: as for
    :class:`KeyChain`."""
    if request.prompt_embeds is not None:
        raise NotIdentified("the prompt holds embeddings")
    if request.pooling_params is not None:
        raise NotIdentified("pooling requests are not cached")
    if not request.cache_salt:
        for feature in request.mm_features:
            if not _CONTENT_IDENTIFIER.fullmatch(feature.identifier):
                raise NotIdentified("a multimodal item has an identifier of the caller's and no cache salt")
    starts = [f.mm_position.offset for f in request.mm_features]
    if ahead and any(at > 0 and at % chunk_tokens == 0 for at in starts):
        # The token after a chunk says nothing of the item that it stands for.
        raise NotIdentified("a multimodal item begins where a chunk ends, and draft layers look ahead")


class KeyChain:
    """Keys of one request, under one root.

    Kept keys cover only tokens that were computed when they were made. A key of
    a lookup is made over the tokens known then, is not kept, and must not be
    used to store: a streaming session may replace its last sampled token later,
    and tells nobody.
    """

    __slots__ = ("root", "_chunk", "_ahead", "_keys", "_n", "_request", "_items")

    def __init__(self, request: Request, root: bytes, chunk_tokens: int, ahead: int = 0) -> None:
        """``ahead``: 1 when a key also names the token after its chunk, which must
        then be known."""
        self.root = root
        self._request = request
        self._chunk = chunk_tokens
        self._ahead = ahead
        self._keys = np.empty((8, 32), np.uint8)
        self._n = 0
        self._items: list[tuple[int, int, bytes]] | None = None

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
        if not self._request.mm_features:
            return []
        if self._items is None or len(self._items) != len(self._request.mm_features):
            self._items = [_item(f) for f in self._request.mm_features]
        extras = []
        c = self._chunk
        for start, length, digest in self._items:
            lo, hi = max(first, start // c), min(end, -(-(start + length) // c))
            for j in range(lo, hi):
                extras.append(keys.Extra(keys.MULTIMODAL, digest, chunk=j - first, offset=start - j * c))
        return extras


def _item(feature: Any) -> tuple[int, int, bytes]:
    start, length = feature.mm_position.offset, feature.mm_position.length
    return start, length, multimodal_digest(feature.modality, feature.identifier, length)
