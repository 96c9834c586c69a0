"""Makes the connector's name known to vLLM, so that a configuration needs no module
path. vLLM calls this in each of its processes through the entry point
``vllm.general_plugins``, cache or no cache: nothing is loaded here."""

from __future__ import annotations


def register() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector("KVTierConnector", "kvtier.vllm", "KVTierConnector")
    except ValueError:
        pass  # called before in this process, which vLLM allows itself
