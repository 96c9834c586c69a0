"""A rank: one process's pages of KV cache, and copying them in and out."""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _arrays, _lib, errors
from ._handle import Closing, Handle
from .cache import token_bytes
from .coordinator import Accepted, wait_accepted

if TYPE_CHECKING:
    from .cache import Cache

_REPLICATED, _ALL_ROWS = 1, 2
CLOSE_TIMEOUT_S = 10.0
_SELFTEST_PAGES = 1
SELFTEST_LONGEST_MS = 60_000


@dataclass(frozen=True, slots=True)
class Region:
    """One independently addressable piece of a page. Token t of block b (t: its
    rank-local offset in the block) lies at base + b*block_stride + t*token_stride.
    Pages are not owned: their memory must outlive the rank."""

    group: int  # index of the KV group
    name: str
    component: str  # "target" or "draft"
    layer: int
    head: int  # -1: none
    bytes: int  # per token; per block when pages are opaque
    replicated: bool  # other ranks of the same DCP rank hold the same bytes
    base: int
    block_stride: int
    token_stride: int  # 0 when opaque
    all_rows: bool = False  # not sharded over DCP: a page holds all dcp * block_tokens tokens of its block


class Rank(Closing):
    """One rank of a group; made by :meth:`kvtier.Cache.register`. May be used from
    any thread."""

    def __init__(self, cache: Cache, description: dict[str, Any], regions: list[Region]) -> None:
        lib = self._lib = cache._lib
        self._cache = cache  # is not collected, and so not closed, before this
        array = (_lib.Region * len(regions))()
        for r, g in zip(array, regions, strict=True):
            name, component = g.name.encode(), g.component.encode()
            if len(name) > 31 or len(component) > 15:
                raise ValueError(f"region {g.name!r}: names have at most 31 bytes, components 15")
            r.struct_size = ctypes.sizeof(_lib.Region)
            r.group, r.name, r.component, r.layer, r.head = g.group, name, component, g.layer, g.head
            r.bytes, r.base = g.bytes, g.base
            r.flags = (_REPLICATED if g.replicated else 0) | (_ALL_ROWS if g.all_rows else 0)
            r.block_stride, r.token_stride = g.block_stride, g.token_stride
        text = json.dumps(description).encode()
        out = ctypes.c_uint64()
        lib.check(lib.register(cache._handle.use(), text, len(text), array, len(array), ctypes.byref(out)))
        self.handle = out.value  # names this rank in LoadEvent.rank
        self._handle = Handle(self, lib, out.value, lambda h: _close(lib, h, 1.0))
        token_bytes[out.value] = _token_bytes(description, regions)

    def ready(self, timeout_s: float) -> Accepted:
        """Waits until the group is accepted. Raises Timeout, Refused."""
        handle = self._handle.use()
        return wait_accepted(self._lib, lambda ms, out: self._lib.rank_ready(handle, ms, out), timeout_s)

    def selftest(self, pages: bool, timeout_s: float) -> None:
        """Proves that what the ranks of the group store comes back: a pattern goes
        from the pages of all of them through DRAM and disk and back. All ranks call
        it, once they are ready and before the first request. ``pages``: through this
        rank's own pages, which nobody else may use meanwhile and which are restored
        in every case; else private memory stands for them. Blocks for up to
        ``timeout_s`` (at most 60). All ranks get the same verdict: return;
        :class:`SelfTestFailed`, which names rank, region, token and byte;
        :class:`Timeout`, when not all ranks came to the end: nothing is proven. Besides
        :class:`NoLeader`."""
        ms = min(_lib.milliseconds(timeout_s), SELFTEST_LONGEST_MS)
        self._lib.check(self._lib.selftest(self._handle.use(), _SELFTEST_PAGES if pages else 0, ms))

    def store(self, op: int, session: int, first_ordinal: int, grants: Any, blocks: Any) -> bool:
        """Copies this rank's rows of the granted chunks into their slots, in this
        call. ``grants``: [n, 4] uint32 of (index in the operation, slot, generation,
        0); ``blocks``: ids of the virtual blocks from
        floor(first_ordinal * C / V) on. False: of another leader session, nothing
        was done."""
        g, b = _arrays.quads(grants, "grants"), _arrays.words(blocks, "blocks")
        s = _lib.StoreOp(
            ctypes.sizeof(_lib.StoreOp), first_ordinal, op, session,
            _arrays.address(g), len(g), _arrays.address(b), b.size,
        )  # fmt: skip
        code = self._lib.store(self._handle.use(), ctypes.byref(s))
        if code == errors.E_STALE:
            return False
        self._lib.check(code)
        return True

    def load(
        self, op: int, session: int, first_token: int, tokens: int, blocks: Any, verdicts: Any, nchunks: int
    ) -> None:
        """Starts a load into the range of tokens, clipped at both ends. ``blocks``:
        ids of the virtual blocks of exactly that range; ``verdicts``: [k, 4] uint32
        of the first window, or None for a load that failed already. Exactly one
        :class:`LoadEvent` follows, also then."""
        b = _arrays.words(blocks, "blocks")
        v = _arrays.quads(verdicts, "verdicts") if verdicts is not None else None
        s = _lib.LoadOp(
            ctypes.sizeof(_lib.LoadOp), nchunks, op, session, first_token, tokens, _arrays.address(b), b.size,
            _arrays.address(v) if v is not None else 0, len(v) if v is not None else 0,
        )  # fmt: skip
        self._lib.check(self._lib.load(self._handle.use(), ctypes.byref(s)))

    def cancel_load(self, op: int) -> None:
        """Asks a load to stop early; its event still comes."""
        self._lib.check(self._lib.load_cancel(self._handle.use(), op))

    def fence(self, blocks: Any, timeout_s: float = 1.0) -> None:
        """Waits until these pages may be reused, which for host memory they may."""
        b = _arrays.words(blocks, "blocks")
        self._lib.check(
            self._lib.fence(self._handle.use(), _arrays.address(b), b.size, _lib.milliseconds(timeout_s))
        )

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Ends all copies; afterwards the pages are not touched. Raises Timeout when
        that takes longer: then they may be, and close can be called again."""
        if not self._handle.open:
            return
        handle = self._handle.value
        code = _lib.wait(lambda ms: self._lib.unregister(handle, ms), timeout_s)
        if code != errors.E_HANDLE:  # a closed cache has ended it already
            self._lib.check(code)
        self._handle.end()


def _close(library: _lib.Library, handle: int, timeout_s: float) -> None:
    library.unregister(handle, _lib.milliseconds(timeout_s))


def _token_bytes(description: dict[str, Any], regions: list[Region]) -> float:
    """Bytes that one token of the whole has on this rank, on average."""
    groups = description.get("groups") or [{}]
    dcp = description.get("dcp", 1)
    total = 0.0
    for r in regions:
        per_row = groups[r.group].get("tokens_per_row", 1) or 1
        total += r.bytes / per_row / (1 if r.all_rows else dcp)
    return total
