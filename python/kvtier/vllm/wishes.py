"""What a request asks of the cache, in its ``kv_transfer_params``."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from .settings import nearest
from .stats import logger

if TYPE_CHECKING:
    from vllm.v1.request import Request

#: Different mistakes that are written down; each is once.
MAX_WARNINGS = 64


class Wishes(NamedTuple):
    load: bool = True
    store: bool = True
    disk: bool = True  # what it stores may be written to disk on its behalf


NOTHING = Wishes(False, False, False)


def wishes(request: Request) -> Wishes:
    """Reads ``{"kvtier": {"load": bool, "store": bool, "disk": bool}}``. These are how a
    prompt is kept out of the cache, so what is not understood keeps it out: a value that
    is not a bool counts as false, a key that is not known as a wish for nothing at all.
    One warning tells of each such mistake."""
    params = request.kv_transfer_params
    mine = params.get("kvtier") if isinstance(params, dict) else None
    asked = Wishes() if mine is None else _read(mine)
    sampling = request.sampling_params
    if request.skip_reading_prefix_cache or (sampling is not None and sampling.prompt_logprobs is not None):
        asked = asked._replace(load=False)
    return asked


def _read(mine: Any) -> Wishes:
    if not isinstance(mine, dict):
        return _not_understood(f"is {mine!r:.80}, not an object")
    known = Wishes._fields
    for key in mine:
        if key not in known:
            return _not_understood(f"has the unknown key {key!r:.80}; the nearest one is {nearest(key, known)!r}")
    asked = Wishes()
    for key, value in mine.items():
        if not isinstance(value, bool):
            _warn(f"has {key!r}: {value!r:.80}, which is neither true nor false and counts as false")
        asked = asked._replace(**{key: value is True})
    return asked


def _not_understood(text: str) -> Wishes:
    _warn(f"{text}: the request is neither loaded nor stored")
    return NOTHING


@functools.lru_cache(MAX_WARNINGS)
def _warn(text: str) -> None:
    logger.warning('kvtier: "kvtier" in the kv_transfer_params of a request %s', text)
