"""From vLLM's KV cache to regions: which bytes of which page are what.

vLLM places all layers in one allocation and says where: page (layer l, block b)
of a KVCacheTensor lies at ``offset + l * layer_stride + b * block_stride``. The
place of a token inside a page follows from the strides of the registered
``[block, head, token, content]`` view. Both are used and must agree; what is not
understood is refused by name, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

import kvtier

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec, KVCacheTensor

#: Ranks of one engine: what libkvtier joins to a group.
MAX_RANKS = 64

#: Speculative methods whose draft layers have a KV cache of which the last row of a
#: prefix depends on one more token, and no other row on any.
DRAFTS_WITH_KV = frozenset({"eagle", "eagle3", "mtp", "draft_model"})

#: Page formats whose tokens are packed by the kernel and cannot be told apart.
_OPAQUE_BACKENDS = frozenset({"CPU_ATTN"})

#: Quantisations whose pages hold nothing but the values, scales being static.
_PLAIN_QUANTISATION = frozenset({KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR})

_INDEXER_VALUES, _INDEXER_SCALE = 128, 4


class Unsupported(Exception):
    """A model, layout or topology that is not handled; the text names it."""


@dataclass(frozen=True)
class Geometry:
    """Where tokens lie, in the words of the design."""

    block_tokens: int  # B
    num_blocks: int
    dcp: int  # D
    dcp_rank: int
    interleave: int  # I


@dataclass(frozen=True)
class Shards:
    """How tensor parallelism spreads KV heads, and which layers are of a draft."""

    tp: int = 1
    tp_rank: int = 0
    heads: int = 0  # KV heads of the target model over all ranks
    draft_heads: int = 0
    #: Layers with this number and above belong to a draft; None: there is none.
    first_draft_layer: int | None = None

    def component(self, name: str, number: int) -> str:
        if self.first_draft_layer is None:
            return "target"
        own = name.startswith("draft_model.") or number >= self.first_draft_layer
        return "draft" if own else "target"

    def place(self, name: str, component: str, here: int) -> tuple[int, int]:
        """The global number of this rank's first KV head, and how many ranks have the
        same heads. ``here``: KV heads of the layer on this rank."""
        if self.tp == 1:
            return 0, 1
        total = self.draft_heads if component == "draft" else self.heads
        if here != max(1, total // self.tp) or (total % self.tp and self.tp % max(1, total)):
            raise Unsupported(
                f"layer {name}: {here} KV heads on one of {self.tp} ranks do not fit the {total} of the model"
            )
        replicas = max(1, self.tp // total)
        return self.tp_rank // replicas * here, replicas


@dataclass
class PageMap:
    """This rank's pages."""

    geometry: Geometry
    #: ``rows``, or the name of the page format with everything its bytes depend on.
    encoding: str
    tokens_per_row: int
    regions: list[kvtier.Region]
    #: Keeps the memory alive that the regions point into.
    tensors: list[torch.Tensor] = field(repr=False, default_factory=list)

    def chunk_tokens(self, wanted: int) -> int:
        """The chunk size: whole rows. It does not depend on the topology, so that any
        other one finds the chunks."""
        return -(-wanted // self.tokens_per_row) * self.tokens_per_row


def check_topology(vllm_config: VllmConfig) -> None:
    """Refuses what no layout can help with."""
    p = vllm_config.parallel_config
    if p.prefill_context_parallel_size > 1:
        raise Unsupported("prefill context parallelism is not supported")
    if p.nnodes > 1:
        raise Unsupported("an engine over several hosts is not supported: its ranks cannot share memory")
    if p.world_size > MAX_RANKS:
        raise Unsupported(
            f"{p.world_size} ranks (tensor parallelism {p.tensor_parallel_size}, pipeline stages "
            f"{p.pipeline_parallel_size}) are not supported, at most {MAX_RANKS}"
        )
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is not None and speculative.uses_draft_kv_cache():
        _check_draft(speculative, p)
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise Unsupported("KV scales that are computed at run time are not supported: give static ones")
    if getattr(vllm_config.model_config, "is_diffusion", False):
        raise Unsupported("diffusion models are not supported")


def _check_draft(speculative: Any, parallel: Any) -> None:
    """Refuses drafts whose KV rows depend on more than the next token."""
    if speculative.method not in DRAFTS_WITH_KV:
        raise Unsupported(f"speculative decoding with {speculative.method} is not supported")
    if parallel.pipeline_parallel_size > 1:
        raise Unsupported("draft layers with pipeline parallelism are not supported")
    if parallel.decode_context_parallel_size > 1 and parallel.cp_kv_cache_interleave_size > 1:
        raise Unsupported(
            "speculative decoding with draft layers under decode context parallelism needs an interleave of 1, "
            f"not {parallel.cp_kv_cache_interleave_size}: set --cp-kv-cache-interleave-size 1"
        )


def shards(vllm_config: VllmConfig) -> Shards:
    """What this worker's place in its engine says about heads and draft layers."""
    p, model = vllm_config.parallel_config, vllm_config.model_config
    draft = vllm_config.speculative_config
    if draft is not None and not draft.uses_draft_kv_cache():
        draft = None
    return Shards(
        tp=p.tensor_parallel_size,
        tp_rank=p.rank % p.tensor_parallel_size,  # ranks of a stage follow each other
        heads=model.get_total_num_kv_heads(),
        draft_heads=draft.draft_model_config.get_total_num_kv_heads() if draft is not None else 0,
        first_draft_layer=model.get_total_num_hidden_layers() if draft is not None else None,
    )


def geometry(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, dcp_rank: int) -> Geometry:
    """Takes D and I from this worker's configuration: the engine adjusts I in the
    workers only."""
    p = vllm_config.parallel_config
    spec = _group(kv_cache_config).kv_cache_spec
    dcp = context_ranks(p.decode_context_parallel_size, spec)
    g = Geometry(
        block_tokens=spec.block_size,
        num_blocks=kv_cache_config.num_blocks,
        dcp=dcp,
        dcp_rank=dcp_rank if dcp > 1 else 0,
        interleave=p.cp_kv_cache_interleave_size if dcp > 1 else 1,
    )
    if g.block_tokens % g.interleave:
        raise Unsupported(
            f"an interleave of {g.interleave} does not divide blocks of {g.block_tokens} tokens"
        )
    return g


def page_map(
    kv_caches: Mapping[str, torch.Tensor],
    kv_cache_config: KVCacheConfig,
    geometry: Geometry,
    backends: Mapping[str, str],
    kv_dtype: str,
    shards: Shards = Shards(),
) -> PageMap:
    """Describes the registered caches. ``backends``: attention backend by layer,
    may be empty."""
    group = _group(kv_cache_config)
    specs = _layer_specs(group)
    for name, spec in specs.items():
        _check_spec(name, spec)
    regions: list[kvtier.Region] = []
    tensors: list[torch.Tensor] = []
    encodings: set[str] = set()
    numbers = _layer_numbers(list(specs))
    for placed in kv_cache_config.kv_cache_tensors:
        if placed.host_resident:
            raise Unsupported("KV caches that vLLM itself keeps in host memory are not supported")
        for l, name in enumerate(placed.layers):
            if name not in specs:
                raise Unsupported(f"layer {name} belongs to no group")
            if name not in kv_caches:
                raise Unsupported(f"layer {name} was not registered")
            spec, cache = specs[name], kv_caches[name]
            if spec.dcp_sharded != group.kv_cache_spec.dcp_sharded:
                raise Unsupported(f"layer {name} is not split between ranks as the others are")
            base = _check_address(name, cache, placed, l, kv_cache_config.num_blocks)
            layer = _Layer(name, numbers[name], spec, cache, placed, base, geometry, shards)
            backend = backends.get(name, "")
            if backend in _OPAQUE_BACKENDS or (not backend and _packed_by_cpu(cache, spec)):
                more, encoding = layer.opaque(kv_dtype)
            elif spec_role(spec) is SparseCacheRole.INDEXER:
                more, encoding = layer.indexer(), "rows"
            else:
                more, encoding = layer.rows(), "rows"
            regions += more
            encodings.add(encoding)
            tensors.append(cache)
    if not regions:
        raise Unsupported("the engine has no KV cache")
    if len(encodings) > 1:
        raise Unsupported(f"layers with several page formats: {', '.join(sorted(encodings))}")
    encoding = encodings.pop()
    seen = {(r.component, r.layer, r.name, r.head) for r in regions}
    if len(seen) != len(regions):
        raise Unsupported("two caches of one layer cannot be told apart")
    opaque = encoding != "rows"
    if opaque and geometry.dcp > 1 and geometry.interleave != geometry.block_tokens:
        raise Unsupported(
            f"pages of {encoding} cannot be split between tokens: set the DCP interleave to {geometry.block_tokens}"
        )
    return PageMap(geometry, encoding, geometry.block_tokens if opaque else 1, regions, tensors)


def context_ranks(dcp: int, spec: KVCacheSpec) -> int:
    """D of a KV group: a cache that DCP does not split is as without DCP."""
    return dcp if spec.dcp_sharded else 1


def spec_role(spec: AttentionSpec) -> SparseCacheRole | None:
    return spec.cache_role if isinstance(spec, MLAAttentionSpec) else None


def _group(kv_cache_config: KVCacheConfig):
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(g.kv_cache_spec).__name__ for g in groups})) or "none"
        raise Unsupported(
            f"a model with {len(groups)} KV cache groups ({kinds}) is not supported, only with one"
        )
    group = groups[0]
    if group.host_resident:
        raise Unsupported("KV caches that vLLM itself keeps in host memory are not supported")
    if not group.enable_kv_transfer:
        raise Unsupported("the engine excludes its KV cache from transfer")
    return group


def _layer_specs(group) -> dict[str, AttentionSpec]:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        missing = set(group.layer_names) - set(spec.kv_cache_specs)
        if missing:
            raise Unsupported(f"layer {sorted(missing)[0]} has no description")
        return {name: spec.kv_cache_specs[name] for name in group.layer_names}
    return dict.fromkeys(group.layer_names, spec)


def _check_spec(name: str, spec: AttentionSpec) -> None:
    # Exact types: a subclass changes the meaning of a page.
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        raise Unsupported(f"layer {name}: {_words(type(spec).__name__)} is not supported")
    if spec.sliding_window is not None:
        raise Unsupported(f"layer {name}: sliding window attention is not supported")
    if spec.attention_chunk_size is not None:
        raise Unsupported(f"layer {name}: chunked local attention is not supported")
    if spec.non_causal:
        raise Unsupported(f"layer {name}: attention that is not causal is not supported")
    if spec.tokens_per_state != 1:
        raise Unsupported(
            f"layer {name}: caches with {spec.tokens_per_state} tokens per state are not supported"
        )
    if spec.kv_quant_mode not in _PLAIN_QUANTISATION:
        raise Unsupported(f"layer {name}: KV cache quantisation {spec.kv_quant_mode.name} is not supported")
    if isinstance(spec, MLAAttentionSpec) and spec.model_version is not None:
        raise Unsupported(f"layer {name}: MLA caches of {spec.model_version} are not supported")


def _words(type_name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type_name.removesuffix("Spec")).lower()


def _check_address(
    name: str,
    cache: torch.Tensor,
    placed: KVCacheTensor,
    l: int,
    num_blocks: int,
) -> int:
    """Returns the address of the layer's block 0, found in both ways."""
    if cache.device.type != "cpu":
        raise Unsupported(f"KV cache in {cache.device.type} memory is not supported by this version")
    if cache.dim() != 4:
        raise Unsupported(
            f"layer {name}: a cache of shape {tuple(cache.shape)} is not [block, head, token, content]"
        )
    storage = cache.untyped_storage()
    begin = placed.offset + l * placed.layer_stride
    base = storage.data_ptr() + begin
    if base != cache.data_ptr():
        raise Unsupported(f"layer {name}: the cache does not lie where the engine says")
    ratio, rest = divmod(cache.shape[0], num_blocks)
    if rest or ratio < 1 or cache.stride(0) * cache.element_size() * ratio != placed.block_stride:
        raise Unsupported(f"layer {name}: blocks are not {placed.block_stride} bytes apart")
    return base


def _packed_by_cpu(cache: torch.Tensor, spec: AttentionSpec) -> bool:
    """vLLM's CPU attention is the only one for such layers in host memory."""
    return cache.device.type == "cpu" and not isinstance(spec, MLAAttentionSpec)


def _layer_numbers(names: list[str]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for name in names:
        found = re.search(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)", name) or re.search(r"(\d+)", name)
        if not found:
            raise Unsupported(f"layer {name} has no number in its name")
        numbers[name] = int(found.group(1))
    return numbers


class _Layer:
    """One layer's cache, being turned into regions."""

    def __init__(self, name, number, spec, cache, placed, base, geometry, shards) -> None:
        self.name, self.number, self.spec = name, number, spec
        self.component = shards.component(name, number)
        if isinstance(spec, MLAAttentionSpec):
            self.first_head, replicas = 0, shards.tp  # every rank has the whole latent
        else:
            self.first_head, replicas = shards.place(name, self.component, spec.num_kv_heads)
        # More ranks than DCP has parts: some hold the same rows.
        self.replicated = replicas > geometry.dcp
        self.base = base
        self.block_stride = placed.block_stride
        unit = cache.element_size()
        self.ratio = cache.shape[0] // geometry.num_blocks
        _, self.heads, self.tokens, content = cache.shape
        self.content = content * unit
        _, head, token, inner = cache.stride()
        self.head_stride, self.token_stride = head * unit, token * unit
        if inner != 1 and content > 1:
            raise Unsupported(f"layer {name}: the bytes of a token do not lie together")
        if self.tokens * self.ratio != geometry.block_tokens or self.content != spec.state_content_size_bytes:
            raise Unsupported(f"layer {name}: shape {tuple(cache.shape)} does not fit its description")

    def _region(self, name: str, head: int, bytes_: int, at: int, token_stride: int) -> kvtier.Region:
        return kvtier.Region(
            group=0,
            name=name,
            component=self.component,
            layer=self.number,
            head=head,
            bytes=bytes_,
            replicated=self.replicated,
            base=self.base + at,
            block_stride=self.block_stride,
            token_stride=token_stride,
        )

    def rows(self) -> list[kvtier.Region]:
        """Pages whose tokens lie a constant distance apart: a region a head, whether
        the heads of a token lie together or the tokens of a head."""
        c, h = self.content, self.heads
        if isinstance(self.spec, MLAAttentionSpec):
            if h != 1 or self.token_stride != c:
                raise Unsupported(f"layer {self.name}: tokens are {self.token_stride} bytes apart, not {c}")
            return [self._region("kv", -1, c, 0, c)]
        if h != self.spec.num_kv_heads:
            raise Unsupported(f"layer {self.name}: pages that keep keys and values apart are not supported")
        # Kernel blocks of token-major pages follow each other without a gap, so
        # splitting a block changes nothing.
        token_major = self.token_stride == h * c and (h == 1 or self.head_stride == c)
        if not token_major and self.token_stride != c:
            raise Unsupported(f"layer {self.name}: strides that are neither token-major nor head-major")
        if not token_major and self.ratio > 1:
            raise Unsupported(
                f"layer {self.name}: head-major pages that are split into kernel blocks are not supported; "
                f"set the block size to {self.tokens}"
            )
        head_stride = c if token_major else self.head_stride
        return [
            self._region("kv", self.first_head + i, c, i * head_stride, self.token_stride) for i in range(h)
        ]

    def indexer(self) -> list[kvtier.Region]:
        """A sparse indexer's page: all values of the block, then all scales."""
        values, scale = _INDEXER_VALUES, _INDEXER_SCALE
        if self.heads != 1 or self.ratio != 1 or self.content != values + scale:
            raise Unsupported(
                f"layer {self.name}: an indexer cache of {self.content} bytes a token is not supported, "
                f"only of {values + scale}"
            )
        after_values = self.tokens * values
        return [
            self._region("indexer", -1, values, 0, values),
            self._region("indexer.scale", -1, scale, after_values, scale),
        ]

    def opaque(self, kv_dtype: str) -> tuple[list[kvtier.Region], str]:
        """Pages of vLLM's CPU attention: per head, keys transposed or packed into
        tiles as the instruction set likes it, then values."""
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        spec, block = self.spec, self.tokens * self.content
        if self.ratio > 1:
            raise Unsupported(f"layer {self.name}: packed pages that are split into kernel blocks")
        if self.token_stride != self.content or (self.heads > 1 and self.head_stride != block):
            raise Unsupported(f"layer {self.name}: packed pages must be head-major")
        isa = _get_attn_isa(spec.dtype, spec.block_size, spec.head_size, kv_dtype)
        element = str(spec.dtype).removeprefix("torch.")
        encoding = (
            f"cpu_attn-1 isa={isa} dtype={element} kv={kv_dtype} block={spec.block_size} "
            f"head={spec.head_size}+{spec.head_size_v}"
        )
        regions = [self._region("kv", self.first_head + i, block, i * block, 0) for i in range(self.heads)]
        return regions, encoding
