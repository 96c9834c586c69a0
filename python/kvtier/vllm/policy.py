"""What the engine does with a request whose load failed: vLLM's kv_load_failure_policy."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .stats import logger

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

#: Frames between the making of a MultiConnector and that of a connector inside it.
_DEPTH = 12


def settle_failure_policy(config: KVTransferConfig, wanted: str) -> None:
    """Makes ``wanted``, "recompute" or "fail", the engine's policy. Called while the
    connector is made: the scheduler reads the policy right after that. Inside a
    MultiConnector the outer configuration counts, which is the user's and is about
    other connectors too; there a warning tells what to set."""
    outer = _outer()
    if outer is None:
        if config.kv_load_failure_policy != wanted:
            config.kv_load_failure_policy = wanted
            logger.info("kvtier: kv_load_failure_policy is %s", wanted)
    elif outer.kv_load_failure_policy != wanted:
        logger.warning(
            "kvtier: the MultiConnector has kv_load_failure_policy %r, so that a load that fails %s; set "
            '"kv_load_failure_policy": "%s" in the outer kv-transfer-config',
            outer.kv_load_failure_policy,
            "ends its request" if wanted == "recompute" else "does not end its request",
            wanted,
        )


def _outer() -> KVTransferConfig | None:
    """The configuration of the MultiConnector that is making us. It does not tell its
    children that it is there, so it is looked for among the callers."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame is None:
            return None
        maker = frame.f_locals.get("self")
        if isinstance(maker, MultiConnector):
            return getattr(maker, "_kv_transfer_config", None)
        frame = frame.f_back
    return None
