"""Regions against vLLM's own allocator: every byte of every page is named once,
and where a region says it is, the tensor has it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvtier.vllm import mapping

BLOCKS = 5
GQA = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
MLA = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
DSA_MAIN = MLAAttentionSpec(
    block_size=64, num_kv_heads=1, head_size=656, dtype=torch.uint8, cache_dtype_str="fp8_ds_mla"
)
DSA_INDEXER = MLAAttentionSpec(
    block_size=64, num_kv_heads=1, head_size=132, dtype=torch.uint8, cache_role=SparseCacheRole.INDEXER
)


def names(n):
    return [f"model.layers.{i}.self_attn.attn" for i in range(n)]


def allocate(groups, layout, kernel_blocks=None):
    """vLLM's configuration and tensors for these groups, with its own code."""
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: layout,
        prefix_cache_retention_interval=0,
        num_gpu_blocks_override=BLOCKS,
    )
    config = SimpleNamespace(
        cache_config=cache, attention_config=SimpleNamespace(hisparse_config=None), model_config=None
    )
    kv = get_kv_cache_config_from_groups(config, groups, 1 << 24)
    return kv, allocate_kv_cache(kv, torch.device("cpu"), layout, kernel_blocks)


def geometry(kv, dcp=1, interleave=1):
    block = kv.kv_cache_groups[0].kv_cache_spec.block_size
    return mapping.Geometry(block, kv.num_blocks, dcp, 0, interleave)


def mapped(groups, layout, kernel_blocks=None, backend="FLASH_ATTN", shards=mapping.Shards(), **kw):
    kv, tensors = allocate(groups, layout, kernel_blocks)
    backends = dict.fromkeys(tensors, backend)
    return mapping.page_map(tensors, kv, geometry(kv, **kw), backends, "auto", shards), kv, tensors


def bytes_at(address, n):
    import ctypes

    return np.frombuffer((ctypes.c_uint8 * n).from_address(address), np.uint8)


def addresses(pages, rows):
    """All byte addresses of all regions, as one array."""
    out = []
    for r in pages.regions:
        tokens = np.arange(rows) if r.token_stride else np.zeros(1, np.int64)
        at = (
            r.base
            + np.arange(pages.geometry.num_blocks)[:, None, None] * r.block_stride
            + tokens[None, :, None] * r.token_stride
            + np.arange(r.bytes)[None, None, :]
        )
        out.append(at.ravel())
    return np.concatenate(out)


def covers_everything(pages, tensors):
    """Regions tile the allocation: no byte twice, none left out."""
    storage = next(iter(tensors.values())).untyped_storage()
    at = addresses(pages, pages.geometry.block_tokens) - storage.data_ptr()
    assert len(at) == storage.nbytes()
    assert (np.sort(at) == np.arange(storage.nbytes())).all()


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda x: x.name)
def test_gqa_rows(layout):
    pages, _, tensors = mapped([KVCacheGroupSpec(names(3), GQA)], layout)
    assert pages.encoding == "rows" and pages.tokens_per_row == 1
    token_major = layout in (KVCacheLayout.LBNHC, KVCacheLayout.BLNHC)
    # The same columns whatever the layout is, so that any layout loads any other's.
    assert [(r.layer, r.head, r.bytes) for r in sorted(pages.regions, key=lambda r: (r.layer, r.head))] == [
        (l, h, 512) for l in range(3) for h in range(8)
    ]
    assert {r.token_stride for r in pages.regions} == {8 * 512 if token_major else 512}
    covers_everything(pages, tensors)
    # One token of one head, seen through vLLM's view and through the region.
    t = tensors[names(3)[1]]
    t[3, 5, 7, :] = torch.arange(256).to(torch.bfloat16)
    r = next(r for r in pages.regions if r.layer == 1 and r.head == 5)
    at = r.base + 3 * r.block_stride + 7 * r.token_stride
    assert (bytes_at(at, 512) == t[3, 5, 7].clone().view(torch.uint8).numpy()).all()


@pytest.mark.parametrize(
    "layout", [KVCacheLayout.LBNHC, KVCacheLayout.LBHNC, KVCacheLayout.BLNHC], ids=lambda x: x.name
)
def test_mla_rows(layout):
    pages, _, tensors = mapped([KVCacheGroupSpec(names(3), MLA)], layout, backend="CPU_MLA")
    assert [(r.layer, r.head, r.bytes, r.token_stride) for r in pages.regions] == [
        (i, -1, 1152, 1152) for i in range(3)
    ]
    covers_everything(pages, tensors)
    assert pages.chunk_tokens(256) == 256 and pages.chunk_tokens(100) == 100


@pytest.mark.parametrize("layout", [KVCacheLayout.LBNHC, KVCacheLayout.BLNHC], ids=lambda x: x.name)
def test_sparse_attention_has_three_regions_a_layer(layout):
    layers = {
        "layers.0": DSA_MAIN,
        "layers.1": DSA_MAIN,
        "layers.0.idx": DSA_INDEXER,
        "layers.1.idx": DSA_INDEXER,
    }
    spec = UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs=layers)
    pages, _, tensors = mapped([KVCacheGroupSpec(list(layers), spec)], layout, backend="FLASHMLA_SPARSE")
    found = {(r.layer, r.name, r.bytes) for r in pages.regions}
    assert found == {
        (l, n, b) for l in (0, 1) for n, b in (("kv", 656), ("indexer", 128), ("indexer.scale", 4))
    }
    covers_everything(pages, tensors)


def test_kernel_blocks_change_nothing_for_token_major_pages():
    spec = FullAttentionSpec(block_size=64, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    groups = [KVCacheGroupSpec(names(2), spec)]
    whole, _, _ = mapped(groups, KVCacheLayout.LBNHC)
    split, _, tensors = mapped(groups, KVCacheLayout.LBNHC, kernel_blocks=[16])
    assert next(iter(tensors.values())).shape[0] == BLOCKS * 4
    covers_everything(split, tensors)
    assert [(r.bytes, r.block_stride, r.token_stride) for r in whole.regions] == [
        (r.bytes, r.block_stride, r.token_stride) for r in split.regions
    ]
    with pytest.raises(mapping.Unsupported, match="kernel blocks"):
        mapped(groups, KVCacheLayout.LBHNC, kernel_blocks=[16])


def test_cpu_attention_is_opaque():
    spec = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    for backend in ("CPU_ATTN", ""):
        pages, _, tensors = mapped([KVCacheGroupSpec(names(2), spec)], KVCacheLayout.LBHNC, backend=backend)
        assert pages.tokens_per_row == 128
        assert [(r.layer, r.head, r.bytes, r.token_stride) for r in pages.regions] == [
            (l, h, 128 * 256, 0) for l in (0, 1) for h in (0, 1)
        ]
        covers_everything(pages, tensors)
        for part in ("cpu_attn", "isa=", "dtype=bfloat16", "kv=auto", "block=128", "head=64+64"):
            assert part in pages.encoding
    assert (
        pages.chunk_tokens(256) == 256 and pages.chunk_tokens(100) == 128 and pages.chunk_tokens(300) == 384
    )


def test_opaque_encoding_names_what_the_bytes_depend_on():
    base = dict(block_size=128, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    seen = set()
    for change in ({}, {"block_size": 64}, {"head_size": 128}, {"dtype": torch.float16}, {"head_size": 80}):
        spec = FullAttentionSpec(**(base | change))
        seen.add(
            mapped([KVCacheGroupSpec(names(1), spec)], KVCacheLayout.LBHNC, backend="CPU_ATTN")[0].encoding
        )
    assert len(seen) == 5


def test_opaque_pages_under_dcp_need_whole_blocks():
    spec = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    groups = [KVCacheGroupSpec(names(1), spec)]
    with pytest.raises(mapping.Unsupported, match="interleave to 128"):
        mapped(groups, KVCacheLayout.LBHNC, backend="CPU_ATTN", dcp=2, interleave=1)
    pages, _, _ = mapped(groups, KVCacheLayout.LBHNC, backend="CPU_ATTN", dcp=2, interleave=128)
    assert pages.chunk_tokens(200) == 256


def heads(pages):
    return sorted({r.head for r in pages.regions}), {r.replicated for r in pages.regions}


@pytest.mark.parametrize(
    "total, tp, dcp, here, expected, replicated",
    [
        (8, 2, 1, 4, [[0, 1, 2, 3], [4, 5, 6, 7]], False),
        (8, 8, 1, 1, [[h] for h in range(8)], False),
        (2, 4, 1, 1, [[0], [0], [1], [1]], True),
        (2, 4, 2, 1, [[0], [0], [1], [1]], False),  # each pair shares the tokens
        (2, 8, 2, 1, [[0]] * 4 + [[1]] * 4, True),
        (1, 4, 2, 1, [[0]] * 4, True),
    ],
)
def test_kv_heads_have_global_numbers(total, tp, dcp, here, expected, replicated):
    spec = FullAttentionSpec(block_size=16, num_kv_heads=here, head_size=64, dtype=torch.bfloat16)
    for layout, backend in ((KVCacheLayout.LBNHC, "FLASH_ATTN"), (KVCacheLayout.LBHNC, "CPU_ATTN")):
        for rank in range(tp):
            pages, _, _ = mapped(
                [KVCacheGroupSpec(names(2), spec)],
                layout,
                backend=backend,
                shards=mapping.Shards(tp, rank, total),
                dcp=dcp,
                interleave=16,
            )
            assert heads(pages) == (expected[rank], {replicated})


@pytest.mark.parametrize("total, tp, here", [(8, 2, 8), (8, 3, 2), (2, 3, 1), (8, 4, 4)])
def test_kv_heads_that_do_not_fit_are_refused(total, tp, here):
    spec = FullAttentionSpec(block_size=16, num_kv_heads=here, head_size=64, dtype=torch.bfloat16)
    with pytest.raises(mapping.Unsupported, match=f"{here} KV heads on one of {tp} ranks do not fit the {total}"):
        mapped([KVCacheGroupSpec(names(1), spec)], KVCacheLayout.LBNHC, shards=mapping.Shards(tp, 0, total))


def test_separate_planes_for_keys_and_values_are_refused():
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=4, head_size=64, dtype=torch.bfloat16, num_head_slots=2,
        state_content_bytes=4 * 64 * 2,
    )  # fmt: skip
    with pytest.raises(mapping.Unsupported, match="keys and values apart"):
        mapped([KVCacheGroupSpec(names(1), spec)], KVCacheLayout.LBNHC)


@pytest.mark.parametrize("tp, dcp, replicated", [(1, 1, False), (2, 1, True), (4, 4, False), (4, 2, True)])
def test_a_latent_is_replicated_where_tp_is_larger_than_dcp(tp, dcp, replicated):
    layers = {"layers.0": DSA_MAIN, "layers.0.idx": DSA_INDEXER}
    spec = UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs=layers)
    for groups in ([KVCacheGroupSpec(names(2), MLA)], [KVCacheGroupSpec(list(layers), spec)]):
        pages, _, _ = mapped(
            groups, KVCacheLayout.LBNHC, backend="FLASHMLA", dcp=dcp, shards=mapping.Shards(tp, tp - 1, 1)
        )
        assert heads(pages) == ([-1], {replicated})


def test_a_cache_that_dcp_does_not_split_is_as_without_dcp():
    whole = MLAAttentionSpec(
        block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, dcp_sharded=False
    )
    kv, tensors = allocate([KVCacheGroupSpec(names(1), whole)], KVCacheLayout.LBNHC)
    parallel = SimpleNamespace(decode_context_parallel_size=2, cp_kv_cache_interleave_size=16)
    g = mapping.geometry(SimpleNamespace(parallel_config=parallel), kv, 1)
    assert (g.dcp, g.dcp_rank, g.interleave, g.block_tokens) == (1, 0, 1, 64)
    pages = mapping.page_map(tensors, kv, g, {}, "auto", mapping.Shards(2, 1, 1))
    assert heads(pages) == ([-1], {True})


def test_geometry_of_a_worker():
    kv, _ = allocate([KVCacheGroupSpec(names(1), MLA)], KVCacheLayout.LBNHC)

    def of(dcp, interleave, rank):
        parallel = SimpleNamespace(
            decode_context_parallel_size=dcp, cp_kv_cache_interleave_size=interleave
        )
        return mapping.geometry(SimpleNamespace(parallel_config=parallel), kv, rank)

    assert of(4, 16, 3) == mapping.Geometry(64, kv.num_blocks, 4, 3, 16)
    assert of(1, 48, 0) == mapping.Geometry(64, kv.num_blocks, 1, 0, 1), "means nothing on one rank"
    with pytest.raises(mapping.Unsupported, match="48 does not divide"):
        of(2, 48, 0)


def test_draft_layers_are_a_component_of_their_own():
    layers = names(3)
    shards = mapping.Shards(2, 1, heads=8, draft_heads=2, first_draft_layer=2)
    target = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=64, dtype=torch.bfloat16)
    draft = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    spec = UniformTypeKVCacheSpecs(
        block_size=16, kv_cache_specs={layers[0]: target, layers[1]: target, layers[2]: draft}
    )
    pages, _, _ = mapped([KVCacheGroupSpec(layers, spec)], KVCacheLayout.LBNHC, shards=shards)
    assert [(r.component, r.layer, r.head) for r in pages.regions] == [
        ("target", l, h) for l in (0, 1) for h in (4, 5, 6, 7)
    ] + [("draft", 2, 1)]
    assert shards.component("draft_model.model.layers.0.self_attn.attn", 0) == "draft"


def _spec(kind=FullAttentionSpec, **kw):
    return kind(**(dict(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16) | kw))


@pytest.mark.parametrize(
    "spec, text",
    [
        (_spec(SlidingWindowSpec, sliding_window=64), "sliding window"),
        (_spec(sliding_window=64), "sliding window"),
        (_spec(attention_chunk_size=64), "chunked local"),
        (_spec(non_causal=True), "not causal"),
        (_spec(kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD), "INT8_PER_TOKEN_HEAD"),
        (_spec(MLAAttentionSpec, num_kv_heads=1, tokens_per_state=4), "tokens per state"),
    ],
)
def test_refused_by_name(spec, text):
    kv, tensors = allocate([KVCacheGroupSpec(names(1), GQA)], KVCacheLayout.LBNHC)
    kv.kv_cache_groups[0].kv_cache_spec = spec
    with pytest.raises(mapping.Unsupported, match=text):
        mapping.page_map(tensors, kv, geometry(kv), {}, "auto")


def test_groups_refused_by_name():
    kv, tensors = allocate([KVCacheGroupSpec(names(1), GQA)], KVCacheLayout.LBNHC)
    g = kv.kv_cache_groups[0]
    where = geometry(kv)

    def refuse(text):
        with pytest.raises(mapping.Unsupported, match=text):
            mapping.page_map(tensors, kv, where, {}, "auto")

    for field, text in (
        ("host_resident", "host memory"),
        ("enable_kv_transfer", "excludes"),
    ):
        before = getattr(g, field)
        setattr(g, field, not before)
        refuse(text)
        setattr(g, field, before)
    mamba = MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(torch.float32,))
    kv.kv_cache_groups.append(KVCacheGroupSpec(["model.layers.9.mixer"], mamba))
    refuse("2 KV cache groups .*MambaSpec")
    kv.kv_cache_groups[:] = [KVCacheGroupSpec(["model.layers.9.mixer"], mamba)]
    refuse("mamba")


def test_a_cache_that_lies_elsewhere_is_refused():
    kv, tensors = allocate([KVCacheGroupSpec(names(2), GQA)], KVCacheLayout.LBNHC)
    first, second = names(2)
    with pytest.raises(mapping.Unsupported, match="does not lie where"):
        swapped = {first: tensors[second], second: tensors[first]}
        mapping.page_map(swapped, kv, geometry(kv), dict.fromkeys(tensors, "FLASH_ATTN"), "auto")
    kv.kv_cache_tensors[0].block_stride += 64
    with pytest.raises(mapping.Unsupported, match="bytes apart"):
        mapping.page_map(tensors, kv, geometry(kv), dict.fromkeys(tensors, "FLASH_ATTN"), "auto")


def config(speculative=None, **kw):
    parallel = dict(
        prefill_context_parallel_size=1,
        pipeline_parallel_size=1,
        nnodes=1,
        world_size=1,
        tensor_parallel_size=1,
        decode_context_parallel_size=1,
        cp_kv_cache_interleave_size=1,
    )
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**(parallel | kw)),
        cache_config=SimpleNamespace(),
        model_config=SimpleNamespace(),
        speculative_config=speculative,
    )


def speculative(method, keeps=True):
    return SimpleNamespace(method=method, uses_draft_kv_cache=lambda: keeps)


def test_topology():
    mapping.check_topology(config())
    mapping.check_topology(config(world_size=64, tensor_parallel_size=32, pipeline_parallel_size=2))
    for kw, text in (
        ({"prefill_context_parallel_size": 2}, "prefill context"),
        ({"nnodes": 2}, "hosts"),
        ({"world_size": 128, "tensor_parallel_size": 128}, r"128 ranks \(tensor parallelism 128"),
    ):
        with pytest.raises(mapping.Unsupported, match=text):
            mapping.check_topology(config(**kw))


def test_drafts():
    dcp = {"decode_context_parallel_size": 2, "world_size": 2, "tensor_parallel_size": 2}
    for method in sorted(mapping.DRAFTS_WITH_KV):
        mapping.check_topology(config(speculative(method), **dcp))
        with pytest.raises(mapping.Unsupported, match="interleave of 1, not 16"):
            mapping.check_topology(config(speculative(method), **dcp, cp_kv_cache_interleave_size=16))
    mapping.check_topology(config(speculative("ngram", keeps=False), **dcp, cp_kv_cache_interleave_size=16))
    for kw, text in (({"method": "dflash"}, "with dflash"), ({"method": "mtp"}, "pipeline")):
        with pytest.raises(mapping.Unsupported, match=text):
            mapping.check_topology(config(speculative(**kw), world_size=2, pipeline_parallel_size=2))
