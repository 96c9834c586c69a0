"""Small models with real weights, made from a seed, for tests without a network.

``write`` makes a directory that vLLM and transformers load. Weights are normal
with a deviation of 0.12: with vLLM's generated ones attention hardly matters,
and wrong KV would not change a token.

    python models.py DIRECTORY        # writes all of them, with weights
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "qwen3": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
    },
    # Multi-head latent attention; all layers dense.
    "deepseek": _COMMON
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "moe_intermediate_size": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 2,
        "moe_layer_freq": 1,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
    },
}


def write(directory: Path, name: str, weights: bool = False, seed: int = 0) -> Path:
    """Writes model ``name`` below ``directory`` and returns its path. Without
    weights it is enough for a scheduler."""
    path = directory / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIGS[name], indent=1))
    if weights:
        _write_weights(path, seed)
    return path


def _write_weights(path: Path, seed: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config_text = (path / "config.json").read_text()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, p in sorted(model.named_parameters()):
            if "norm" in parameter_name:
                p.fill_(1.0)
            elif p.dim() >= 2:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.12)
            else:
                p.zero_()
    model.save_pretrained(path)
    # transformers adds fields of its own version, which would tell models apart
    # that are the same.
    (path / "config.json").write_text(config_text)


if __name__ == "__main__":
    for each in CONFIGS:
        print(write(Path(sys.argv[1]), each, weights=True))
