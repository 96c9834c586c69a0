"""Digests of what a request brings besides tokens: its media and its LoRA adapter.

Names say nothing: a caller may give another image the id of an earlier one, and train
an adapter again into the same directory. So both are read, on threads of their own:
they may be large and lie on a file system that does not answer, and the caller is the
scheduler's loop. It waits at most WAIT_S and asks again.
"""

from __future__ import annotations

import hashlib
import os
import queue
import re
import struct
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .identity import hash_text

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec

#: How long a caller waits for all that it asks for at once.
WAIT_S = 0.001
#: A file system that has not answered for so long is not waited for.
STUCK_S = 1.0
#: Identifiers of media whose content is remembered: far more than an encoder cache or
#: the engine's prefix cache hold at a time.
REMEMBERED = 1 << 16

_ADAPTER_FILES = re.compile(r"adapter_config\.json|.*\.(?:safetensors|bin|pt|pth)", re.DOTALL)


class NotIdentified(Exception):
    """A request whose KV cannot be named; the text says why."""


class NotYet(NotIdentified):
    """What a request brings is still being read. Ask again soon."""


class _Look:
    """At the files of one adapter: what they were when they were last looked at."""

    def __init__(self) -> None:
        self.began = -1.0  # of the last one that ended; -1: none has
        self.running = 0.0  # when the present one began; 0: none
        self.signature: tuple | str = ""  # str: why not


class LoRADigests:
    """SHA-256 over the content of adapters.

    Their files are looked at anew for every request, because the engine reads an
    adapter again when it had to put it aside, and read once per (path, mtime, size).
    Until the digest is there, requests of that adapter are not cached.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._looks: dict[str, _Look] = {}  # by path as in the request
        self._since: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
        self._digests: dict[tuple, bytes | str | None] = {}  # None: being read; str: why not
        self._loaded: dict[tuple[int, str], bytes] = {}

    def get(self, lora: LoRARequest, asker: Any = None) -> bytes:
        """Returns the digest, or raises NotIdentified. Touches no file.

        ``asker``: who asks, the same object when it asks again after NotYet. It gets
        what the files were at some time after it asked first."""
        with self._changed:
            signature = self._signature(lora.lora_path, asker)
            if isinstance(signature, str):
                raise NotIdentified(signature)
            if signature not in self._digests:
                self._digests[signature] = None
                _start("kvtier-lora-digest", self._read, signature)
            digest = self._digests[signature]
            if digest is None:
                raise NotIdentified("the LoRA adapter is still being read")
            if isinstance(digest, str):
                raise NotIdentified(digest)
            # The engine reads an adapter when it is first used and may not read
            # it again when the files change; which weights are in use is then
            # not known, unless the request itself says that they are reloaded.
            slot = (lora.lora_int_id, signature[0])
            if lora.load_inplace:
                self._loaded[slot] = digest
            if self._loaded.setdefault(slot, digest) != digest:
                raise NotIdentified("the files of the LoRA adapter changed after it was first used")
            return digest

    def wait(self, timeout_s: float) -> bool:
        """Waits until nothing is being read; for tests and warm-up."""

        def idle() -> bool:
            looking = any(look.running for look in self._looks.values())
            return not looking and None not in self._digests.values()

        with self._changed:
            return self._changed.wait_for(idle, timeout_s)

    def _signature(self, path: str, asker: Any) -> tuple | str:
        now = time.monotonic()
        since = now if asker is None else self._since.setdefault(asker, now)
        look = self._looks.setdefault(path, _Look())
        if look.began < since and not look.running:
            look.running = now
            _start("kvtier-lora-look", self._look, path, look)
            self._changed.wait_for(lambda: look.began >= since, WAIT_S)
        if look.began < since:
            if look.running and now - look.running > STUCK_S:
                return f"the file system of the LoRA adapter {path} does not answer"
            raise NotYet("the files of the LoRA adapter are being looked at")
        if asker is not None:
            del self._since[asker]
        return look.signature

    def _look(self, path: str, look: _Look) -> None:
        began = time.monotonic()
        signature: tuple | str
        try:
            signature = _adapter(path)
        except NotIdentified as e:
            signature = str(e)
        except Exception as e:
            signature = f"the LoRA adapter cannot be read ({type(e).__name__}: {e})"
        with self._changed:
            look.began, look.running, look.signature = began, 0.0, signature
            self._changed.notify_all()

    def _read(self, signature: tuple) -> None:
        result: bytes | str
        path, *files = signature
        try:
            h = hashlib.sha256()
            for name, _, _ in files:
                with open(Path(path) / name, "rb") as f:
                    content = hashlib.file_digest(f, "sha256")
                    h.update(struct.pack("<IQ", len(name.encode()), f.tell()))
                h.update(name.encode() + content.digest())
            # What changed while it was read is some mixture of two adapters.
            same = _adapter(path) == signature
            result = h.digest() if same else "the files of the LoRA adapter are changing"
        except (OSError, NotIdentified) as e:
            result = f"the LoRA adapter cannot be read ({e})"
        with self._changed:
            self._digests[signature] = result
            self._changed.notify_all()


def _adapter(path: str) -> tuple:
    """Path and (name, mtime in ns, bytes) of each file of an adapter. Raises
    NotIdentified."""
    directory = Path(os.path.expanduser(path))
    try:
        if not directory.is_dir():
            raise NotIdentified(f"the LoRA adapter {path} is not a local directory")
        names = sorted(p.name for p in directory.iterdir() if _ADAPTER_FILES.fullmatch(p.name))
        stats = [(directory / name).stat() for name in names]
    except OSError as e:
        raise NotIdentified(f"the LoRA adapter cannot be read ({e})") from e
    if not any(name != "adapter_config.json" for name in names):
        raise NotIdentified(f"the LoRA adapter {path} has no weight files")
    return (str(directory), *((n, st.st_mtime_ns, st.st_size) for n, st in zip(names, stats, strict=True)))


def _start(name: str, target: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=target, args=args, name=name, daemon=True).start()


class MediaDigests:
    """SHA-256 over what the engine's encoder is given for an item: the processed
    tensors, not the file they came from.

    vLLM's own identifier of an item is no help. It is a hash of the content, or what
    the caller chose, or a hash of what the caller chose, and nothing tells which. But
    vLLM finds an encoder's output by it, so an identifier that came with two contents
    says nothing any more of what either request got.

    Each item is read once, while the engine keeps it, in the order of the calls.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # By id of the item, which lives as long as its weak reference says.
        self._items: dict[int, tuple[weakref.ref, bytes | str | None]] = {}  # str: why not
        self._contents: OrderedDict[str, bytes] = OrderedDict()  # b"": more than one
        self._jobs: queue.SimpleQueue[tuple[MultiModalFeatureSpec, Any]] = queue.SimpleQueue()
        self._started = False

    def see(self, features: Sequence[MultiModalFeatureSpec]) -> bool:
        """Begins to read what has not been read yet, and returns whether there was
        such. Also for requests that are not cached: others may get the output of the
        encoder for one of their items."""
        with self._changed:
            return any([self._see(f) for f in features])

    def get(self, features: Sequence[MultiModalFeatureSpec]) -> list[bytes]:
        """The digests of all items of a request. Raises NotIdentified; waits only when
        it is the first to ask."""
        if not features:
            return []
        new = self.see(features)
        with self._changed:
            if new:
                self._changed.wait_for(lambda: None not in map(self._known, features), WAIT_S)
            found = [self._known(f) for f in features]
            for digest in found:
                if isinstance(digest, str):
                    raise NotIdentified(digest)
            if None in found:
                raise NotYet("its multimodal items are still being read")
            for f, digest in zip(features, found, strict=True):
                self._note(f.identifier, digest)
            if any(not self._contents[f.identifier] for f in features):
                raise NotIdentified("a multimodal item has an identifier that another one had before")
            return found

    def _see(self, feature: MultiModalFeatureSpec) -> bool:
        if _elsewhere(feature):
            return False
        item = feature.data
        at = id(item)
        known = self._items.get(at)
        if known is not None and known[0]() is item:
            return False
        self._items[at] = (weakref.ref(item, lambda _: self._forget(at)), None)
        if not self._started:
            self._started = True
            _start("kvtier-media-digest", self._run)
        self._jobs.put((feature, item))
        return True

    def _known(self, feature: MultiModalFeatureSpec) -> bytes | str | None:
        return _elsewhere(feature) or self._items[id(feature.data)][1]

    def _forget(self, at: int) -> None:
        # Runs wherever the last reference ends, so it must not take the lock.
        known = self._items.get(at)
        if known is not None and known[0]() is None:
            del self._items[at]

    def _note(self, identifier: str, digest: bytes) -> None:
        if self._contents.setdefault(identifier, digest) != digest:
            self._contents[identifier] = b""
        self._contents.move_to_end(identifier)
        if len(self._contents) > REMEMBERED:
            self._contents.popitem(last=False)

    def _run(self) -> None:
        while True:
            feature, item = self._jobs.get()
            result: bytes | str
            try:
                result = item_digest(feature.modality, item)
            except NotIdentified as e:
                result = str(e)
            except Exception as e:  # whatever it is, the next item is another one
                result = f"a multimodal item cannot be read ({type(e).__name__}: {e})"
            with self._changed:
                self._items[id(item)] = (self._items[id(item)][0], result)
                if isinstance(result, bytes):
                    self._note(feature.identifier, result)
                self._changed.notify_all()
            del feature, item


def _elsewhere(feature: MultiModalFeatureSpec) -> str:
    """Why the scheduler does not see the content of an item; empty when it does."""
    if feature.data is None:
        return "the engine does not hand over the content of its multimodal items"
    if "address" in feature.data:
        return (
            "multimodal items lie where the scheduler does not see them (mm_processor_cache_type shm); "
            "with the default one, lru, they are cached"
        )
    return ""


def item_digest(modality: str, item: Any) -> bytes:
    """SHA-256 over the modality and the processed content of an item: its fields by
    name, each with type, shape and bytes. Raises NotIdentified for what has no bytes of
    its own."""
    h = hashlib.sha256()
    hash_text(h, modality)
    tensors = 0
    for name in sorted(item):
        hash_text(h, name)
        tensors += _update(h, item[name].data)
    if not tensors:
        raise NotIdentified("a multimodal item holds no tensor")
    return h.digest()


def _update(h: Any, value: Any) -> int:
    """Hashes a value so that no other one has the same bytes; returns how many tensors
    it holds."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise NotIdentified(f"a multimodal item lies on {value.device.type}, not in memory")
        hash_text(h, f"tensor {value.dtype} {tuple(value.shape)}")
        h.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        return int(value.numel() > 0)
    if isinstance(value, (list, tuple)):
        hash_text(h, f"list {len(value)}")
        return sum(_update(h, v) for v in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        hash_text(h, f"{type(value).__name__} {value!r}")
        return 0
    raise NotIdentified(f"a multimodal item holds a {type(value).__name__}")
