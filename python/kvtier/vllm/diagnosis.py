"""Why a cache that is filled is never hit.

Every request is put into one class at its first answered lookup, by comparing its
beginning with those of earlier requests. When a lot was stored since the last hit,
the class that is largest names the likely cause. All of it is bounded: what is
remembered of a request are three numbers, of the latest ``MEMORY`` requests.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from .settings import Settings

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from .keychain import KeyChain

#: Chunks stored without a hit before the first warning; each further one needs twice
#: as many.
MUCH = 10_000
#: Requests whose beginnings are remembered.
MEMORY = 8192
#: A shared beginning of so many tokens, but not of a chunk, shows that chunks are too
#: long. Shorter ones are what a chat template begins with.
LEAST_SHARED = 64


class Recent:
    """The newest ``MEMORY`` numbers seen."""

    def __init__(self) -> None:
        self._seen: dict[int, None] = {}

    def seen(self, x: int) -> bool:
        """Whether x was seen; from now on it is."""
        was = self._seen.pop(x, 0) is None
        self._seen[x] = None
        if len(self._seen) > MEMORY:
            del self._seen[next(iter(self._seen))]
        return was


class Diagnosis:
    """Belongs to the scheduler's half and its thread."""

    def __init__(self, settings: Settings, much: int = MUCH) -> None:
        self._least = max(settings.min_load_tokens, 1)
        self._much = much
        self._stored = 0  # chunks since the last hit
        self._ever = 0  # chunks since the start
        self._warn_at = much
        self._classes: Counter[str] = Counter()
        self._shares: dict[str, str] = {}  # by request, until its first answer
        self._keys, self._texts, self._heads = Recent(), Recent(), Recent()

    # ---- what happens

    def arrived(self, request: Request, chain: KeyChain | None, chunk: int) -> None:
        """A request begins. Remembers its beginning and what it has in common with
        earlier ones: the ``key`` of the first chunk, its ``text`` alone, the ``head`` of
        it, or ``nothing``."""
        tokens = request.all_token_ids
        if chunk <= 0 or chain is None or len(tokens) < chunk:
            return
        first = tuple(tokens[:chunk])
        head = self._heads.seen(hash(first[:LEAST_SHARED])) and chunk > LEAST_SHARED
        text = self._texts.seen(hash(first))
        key = self._keys.seen(hash(chain.lookup(1).tobytes()))
        self._shares[request.request_id] = "key" if key else "text" if text else "head" if head else "nothing"

    def looked_up(self, request_id: str, held: int, local: int, chunk: int) -> None:
        """An answer: ``held`` tokens are there, of which the engine has ``local`` itself.
        The first one of a request counts."""
        if held > local and held - local >= self._least:
            self._put(request_id, "hit")
        elif local >= chunk:
            self._put(request_id, "engine")  # its own cache has all, or nearly
        else:
            self._put(request_id, "small" if held > local else "gone")

    def unanswered(self, request_id: str) -> None:
        self._put(request_id, "unanswered")

    def refuses(self, request_id: str) -> None:
        """The request asks not to load."""
        self._put(request_id, "refuses")

    def ended(self, request_id: str) -> None:
        self._shares.pop(request_id, None)

    def _put(self, request_id: str, verdict: str) -> None:
        """``verdict`` is about requests whose first chunk came before."""
        shares = self._shares.pop(request_id, None)
        if shares is not None:
            self._classes[verdict if shares == "key" else shares] += 1

    def loaded(self) -> None:
        """A load came back whole."""
        self._stored, self._warn_at = 0, self._much
        self._classes.clear()

    def failed(self) -> None:
        """A load did not."""
        self._classes["failed"] += 1

    def stored(self, chunks: int, chunk: int, capacity: int) -> str | None:
        """``chunks`` more got a slot. Returns a warning when it is time for one.
        ``capacity``: tokens that fit into DRAM and disk."""
        self._stored += chunks
        self._ever += chunks
        if self._stored < self._warn_at:
            return None
        self._warn_at = 2 * self._stored
        cause = self._cause(chunk, capacity)
        if cause is None:
            return None
        return f"{self._stored} chunks were stored since a prefix was last loaded: {cause}"

    # ---- the verdict

    def _cause(self, chunk: int, capacity: int) -> str | None:
        """None: there is nothing to warn of."""
        c = self._classes
        total = sum(c.values()) - c["failed"]  # requests
        found = {k: n for k, n in c.items() if k not in ("nothing", "hit")}
        if not found:
            least = min(chunk, LEAST_SHARED)
            return f"no two of {total} prompts began with the same {least} tokens, so there was nothing to find"
        largest = max(found, key=lambda k: found[k])
        n = found[largest]
        of = f"{n} of {total} requests"
        if largest == "engine":
            return None  # vLLM's own prefix cache serves all that comes back
        return {
            "text": f"{of} began with the tokens of an earlier one but under another cache salt, LoRA, "
            "multimodal input or epoch, which keeps them apart: use the same where sharing is wanted",
            "head": f"{of} shared the first {LEAST_SHARED} tokens with an earlier one but not the first "
            f"{chunk}: lower chunk_tokens",
            "small": f"{of} found a prefix of less than {self._least} tokens besides what vLLM had: "
            "lower min_load_tokens",
            "gone": self._gone(of, chunk, capacity),
            "failed": f"{n} loads were begun and all of them failed: the failures in vLLM's log line, or the metric "
            "kvtier_load_failures_total, say why",
            "unanswered": f"{of} got no answer from the leader in time: see its log, or raise lookup_wait_s",
            "refuses": f"{of} came back for a prefix but asked not to load it (kv_transfer_params, "
            "prompt_logprobs or skip_reading_prefix_cache)",
        }[largest]

    def _gone(self, of: str, chunk: int, capacity: int) -> str:
        if self._ever * chunk > capacity:
            return (
                f"{of} came back for a prefix that was not held any more; {capacity} tokens fit in DRAM and "
                f"disk and {self._stored * chunk} were stored: raise dram_gib or disk_gib"
            )
        return (
            f"{of} came back for a prefix that was not held, though {capacity} tokens fit in DRAM and disk "
            f"and only {self._ever * chunk} were stored: they came before it was stored, or it was lost "
            "(kvtier_evicted_total, kvtier_disk_corrupt_total and kvtier_disk_dropped_total count how)"
        )
