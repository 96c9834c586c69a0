"""kvtier as a KV connector of vLLM.

Name it in the engine's configuration::

    {"kv_connector": "KVTierConnector", "kv_connector_module_path": "kvtier.vllm",
     "kv_role": "kv_both", "kv_connector_extra_config": {"dram_gib": 16}}

Importing this package loads vLLM's connector interface but not libkvtier: the
API server and other processes without a cache import it too.
"""

from kvtier._plugin import register

from .connector import KVTierConnector

# MultiConnector looks its children up by name, also where only a module path was
# configured and no plugin is installed.
register()

__all__ = ["KVTierConnector"]
