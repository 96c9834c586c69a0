"""How the ranks of an engine without a model share a KV cache, and of what kind it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SparseCacheRole


@dataclass(frozen=True)
class Topology:
    tp: int = 1
    dcp: int = 1
    interleave: int = 1
    pp: int = 1
    block: int = 16
    layout: str = "LBNHC"

    def __str__(self) -> str:
        return f"tp{self.tp} dcp{self.dcp} i{self.interleave} pp{self.pp} {self.layout}"


@dataclass(frozen=True)
class Kind:
    """A model's KV cache."""

    model: str
    layers: int = 2
    heads: int = 0  # KV heads of the whole; 0: a latent
    bytes: int = 1152  # of a token of a latent
    indexer: bool = False
    backend: str = ""  # what the layers name; empty for pages of the CPU attention
    draft_layers: int = 0  # EAGLE's, which vLLM gives the numbers after the target's
    changes: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)

    def specs(self, t: Topology, stage: int) -> dict[str, Any]:
        """Layer -> what vLLM's layer says of its cache, on a rank of this stage."""
        out: dict[str, Any] = {}
        a, b = (stage * self.layers // t.pp, (stage + 1) * self.layers // t.pp)
        numbers = [*range(a, b), *range(self.layers, self.layers + self.draft_layers)]
        for i in numbers:
            name = f"model.layers.{i}.self_attn"
            if self.heads:
                out[f"{name}.attn"] = FullAttentionSpec(
                    block_size=t.block, num_kv_heads=max(1, self.heads // t.tp), head_size=64, dtype=torch.bfloat16
                )
                continue
            out[f"{name}.attn"] = MLAAttentionSpec(
                block_size=t.block, num_kv_heads=1, head_size=self.bytes // 2, dtype=torch.bfloat16, max_tp_shards=1
            )
            if self.indexer:
                out[f"{name}.indexer.k_cache"] = MLAAttentionSpec(
                    block_size=t.block, num_kv_heads=1, head_size=132, dtype=torch.uint8,
                    cache_role=SparseCacheRole.INDEXER, max_tp_shards=1,
                )  # fmt: skip
        return out


LATENT = Kind("deepseek")
SPARSE = Kind("deepseek", bytes=656, indexer=True)
HEADS = Kind("llama", layers=4, heads=2, backend="FLASH_ATTN")
PACKED = Kind("llama", layers=4, heads=2)
DRAFTED = Kind("llama", layers=2, heads=2, backend="FLASH_ATTN", draft_layers=1)
