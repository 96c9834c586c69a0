"""The one line at start that says what the cache will do for an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .settings import Settings

if TYPE_CHECKING:
    import kvtier

GIB = 1 << 30
#: Bytes of a chunk file besides the chunk: its footer.
DISK_OVERHEAD = 4096


@dataclass(frozen=True)
class Announcement:
    """What rank 0 knows of its engine once the leader has accepted it."""

    state: str  # leader or member
    detail: str  # of which root
    model: str
    weights: str  # digest; empty when it is not known
    bytes_per_token: int  # over all ranks
    tensor: int
    pipeline: int

    def line(self, a: kvtier.Accepted, settings: Settings) -> str:
        fits = f"{a.slots * a.chunk_tokens} tokens fit in {a.slots * a.slot_bytes / GIB:.3g} GiB of DRAM"
        disk = "no disk"
        if a.disk_bytes:
            disk = f"{tokens_on_disk(a)} tokens on {a.disk_bytes / GIB:.3g} GiB of disk"
        ranks = f"TP {self.tensor}, PP {self.pipeline}, DCP {a.dcp}"
        if a.dcp > 1:
            ranks += f" interleaved by {a.interleave}"
        weights = f" (weights {self.weights[:12]})" if self.weights else ""
        return (
            f"{self.state} ({self.detail}): {self.model}{weights}, namespace {a.fingerprint.hex()[:16]}, "
            f"{self.bytes_per_token} bytes a token, chunks of {a.chunk_tokens} tokens; {fits}, {disk}; "
            f"{ranks}, blocks of {a.block_tokens} tokens; loads from {settings.min_load_tokens} tokens on, "
            f"lookups wait at most {settings.lookup_wait_s:g} s"
        )


def tokens_on_disk(a: kvtier.Accepted) -> int:
    return a.disk_bytes // (a.slot_bytes + DISK_OVERHEAD) * a.chunk_tokens


def capacity(a: kvtier.Accepted) -> int:
    """Tokens that a leader can hold for a namespace: what DRAM takes, and, since most
    of that is on disk as well, what the disk takes if that is more."""
    return max(a.slots * a.chunk_tokens, tokens_on_disk(a))
