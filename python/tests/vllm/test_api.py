"""The parts of vLLM that the connector is built on. When another vLLM is installed
and one of them changed, this names it."""

import dataclasses
import inspect

import pytest
import vllm
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvtier.vllm import KVTierConnector

#: Hook -> parameter names, of vLLM 0.32.
HOOKS = {
    "__init__": "vllm_config role kv_cache_config",
    "bind_connector_metadata": "connector_metadata",
    "clear_connector_metadata": "",
    "register_kv_caches": "kv_caches",
    "start_load_kv": "forward_context kwargs",
    "wait_for_layer_load": "layer_name",
    "save_kv_layer": "layer_name kv_layer attn_metadata kwargs",
    "wait_for_save": "",
    "get_finished": "finished_req_ids",
    "get_transfer_results": "finished_req_ids",
    "get_block_ids_with_load_errors": "",
    "shutdown": "",
    "get_kv_connector_stats": "",
    "get_handshake_metadata": "",
    "handle_preemptions": "kv_connector_metadata",
    "get_num_new_matched_tokens": "request num_computed_tokens",
    "get_external_cache_hit_sources": "request num_external_tokens",
    "update_state_after_alloc": "request blocks num_external_tokens",
    "build_connector_meta": "scheduler_output",
    "on_new_request": "request",
    "update_connector_output": "connector_output",
    "request_finished": "request block_ids",
    "set_xfer_handshake_metadata": "metadata",
    "set_xfer_handshake_metadata_pp_aware": "metadata",
    "build_kv_connector_stats": "data",
    "reset_cache": "",
}

#: Hooks of 0.32 that the connector leaves alone. A new hook is neither here nor
#: in HOOKS, and somebody should look at what it wants.
LEFT_ALONE = """
    role requires_kv_delivery supports_divergent_local_hybrid_hits get_mem_pool_context
    has_connector_metadata set_host_xfer_buffer_ops finish_forward reset_capture_state
    get_kv_connector_kv_cache_events build_connector_worker_meta bind_kv_cache_manager
    bind_gpu_block_pool get_loaded_kv_cache_group_ids register_finished_partial_tail
    take_events has_pending_block_frees has_pending_push_work get_required_kvcache_layout
    requires_piecewise_for_cudagraph get_finished_count build_prom_metrics
""".split()

FIELDS = {
    base.KVConnectorTransferResults: "finished_sending finished_recving failed_recving",
    KVConnectorOutput: "finished_sending finished_recving kv_connector_stats kv_cache_events "
    "kv_connector_worker_meta invalid_block_ids failed_recving expected_finished_count",
    KVCacheTensor: "size layers layer_stride block_stride offset host_resident",
    KVConnectorBlockState: "req_ids resolve_block_ids boundary_state_offloads",
}

#: Only these fields of larger classes are used.
USED_FIELDS = {
    SchedulerOutput: "num_scheduled_tokens preempted_req_ids kv_connector_block_state finished_req_ids",
    KVCacheConfig: "num_blocks kv_cache_tensors kv_cache_groups kv_cache_layout",
    KVCacheGroupSpec: "layer_names kv_cache_spec is_eagle_group host_resident enable_kv_transfer",
    KVTransferConfig: "engine_id kv_role kv_connector_extra_config kv_load_failure_policy",
}

REQUEST_ATTRIBUTES = """
    request_id status num_computed_tokens all_token_ids mm_features lora_request cache_salt
    prompt_embeds pooling_params sampling_params kv_transfer_params skip_reading_prefix_cache
    num_prompt_tokens num_tokens num_preemptions
""".split()


def parameters(f):
    return " ".join(p for p in inspect.signature(f).parameters if p not in ("self", "cls"))


def test_hooks_are_those_of_0_32():
    changed = []
    public = {n for n in vars(base.KVConnectorBase_V1) if not n.startswith("_")}
    for name in sorted(public - set(HOOKS) - set(LEFT_ALONE)):
        changed.append(f"new hook: {name}({parameters(getattr(base.KVConnectorBase_V1, name))})")
    for name in sorted((set(HOOKS) | set(LEFT_ALONE)) - public - {"__init__"}):
        changed.append(f"hook is gone: {name}")
    for name, wanted in HOOKS.items():
        hook = getattr(base.KVConnectorBase_V1, name, None)
        if hook is not None and parameters(hook) != wanted:
            changed.append(f"{name} takes ({parameters(hook)}), was ({wanted})")
    if parameters(base.SupportsHMA.request_finished_all_groups) != "request block_ids":
        changed.append("SupportsHMA.request_finished_all_groups")
    assert not changed, f"vLLM {vllm.__version__}: " + "; ".join(changed)


def test_ours_takes_what_vllm_gives():
    for name, wanted in HOOKS.items():
        assert parameters(getattr(KVTierConnector, name)) == wanted, name
    assert not getattr(KVTierConnector, "__abstractmethods__", None)


def test_structures_are_those_of_0_32():
    changed = []
    for cls, wanted in FIELDS.items():
        have = " ".join(f.name for f in dataclasses.fields(cls))
        if have != wanted:
            changed.append(f"{cls.__name__} has ({have}), had ({wanted})")
    for cls, used in USED_FIELDS.items():
        have = {f.name for f in dataclasses.fields(cls)}
        changed += [f"{cls.__name__}.{n} is gone" for n in used.split() if n not in have]
    have = {m.name for m in RequestStatus}
    changed += [
        f"RequestStatus.{n} is gone"
        for n in ("RUNNING", "PREEMPTED", "WAITING_FOR_REMOTE_KVS")
        if n not in have
    ]
    have = {m.name for m in CacheHitSource}
    changed += [f"CacheHitSource.{n} is gone" for n in ("HOST", "DISK") if n not in have]
    source = inspect.getsource(Request)
    changed += [
        f"Request.{n} is gone"
        for n in REQUEST_ATTRIBUTES
        if f"self.{n}" not in source and f"def {n}" not in source
    ]
    assert not changed, f"vLLM {vllm.__version__}: " + "; ".join(changed)


def test_default_failure_policy_is_still_fail():
    """Why the connector sets it."""
    assert KVTransferConfig(kv_connector="x", kv_role="kv_both").kv_load_failure_policy == "fail"


def test_importing_loads_no_library():
    """The API server imports the connector too, and forks."""
    import subprocess
    import sys

    program = (
        "import kvtier.vllm, kvtier;"
        "maps = open('/proc/self/maps').read();"
        "assert 'libkvtier' not in maps, 'libkvtier is loaded'"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=_env()
    )
    assert done.returncode == 0, done.stderr


def _env():
    import os
    from pathlib import Path

    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}


def test_module_path_of_the_documentation():
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    config = KVTransferConfig(
        kv_connector="KVTierConnector", kv_connector_module_path="kvtier.vllm", kv_role="kv_both"
    )
    assert KVConnectorFactory.get_connector_class(config) is KVTierConnector
    assert KVConnectorFactory.supports_hma_config(config)
    assert KVTierConnector.get_required_kvcache_layout(None) is None


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_hooks_of_ours_exist_on_the_class(name):
    assert callable(getattr(KVTierConnector, name))
