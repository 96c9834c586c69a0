"""Writes a small Llama-style model with real random weights, from a seed.

The demo needs a model that no registry has to serve, that is slow enough to
prefill for a cache to matter on two CPU cores, and whose attention has a say in
the output. Weights as small as an engine's dummy ones leave attention almost
without effect, and equal outputs would then prove nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. KV cache per token: 2 * kv_heads * head_dim * layers
    values of two bytes."""

    layers: int = 12
    hidden: int = 512
    intermediate: int = 1536
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    vocabulary: int = 2048
    max_tokens: int = 16384


def write_model(directory: Path, shape: Shape = Shape(), seed: int = 0, std: float = 0.08) -> Path:
    """Writes config.json and model.safetensors; the same seed gives the same bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.max_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * std).to(torch.bfloat16)

    ones = torch.ones(shape.hidden, dtype=torch.bfloat16)
    tensors = {"model.embed_tokens.weight": matrix(shape.vocabulary, shape.hidden)}
    for i in range(shape.layers):
        at = f"model.layers.{i}."
        query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        tensors[at + "self_attn.q_proj.weight"] = matrix(query, shape.hidden)
        tensors[at + "self_attn.k_proj.weight"] = matrix(kv, shape.hidden)
        tensors[at + "self_attn.v_proj.weight"] = matrix(kv, shape.hidden)
        tensors[at + "self_attn.o_proj.weight"] = matrix(shape.hidden, query)
        tensors[at + "mlp.gate_proj.weight"] = matrix(shape.intermediate, shape.hidden)
        tensors[at + "mlp.up_proj.weight"] = matrix(shape.intermediate, shape.hidden)
        tensors[at + "mlp.down_proj.weight"] = matrix(shape.hidden, shape.intermediate)
        tensors[at + "input_layernorm.weight"] = ones.clone()
        tensors[at + "post_attention_layernorm.weight"] = ones.clone()
    tensors["model.norm.weight"] = ones.clone()
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    return directory
