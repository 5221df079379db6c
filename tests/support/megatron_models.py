"""Tiny checkpoints of every family, made by Transformers from its own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

__all__ = ["CONFIGS", "save_checkpoint"]

# 250 is not divisible by what vocabularies are padded to; head counts such that TP4 has more ranks than KV groups.
_SIZES: dict[str, Any] = {
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 48, "num_experts_per_tok": 2, "norm_topk_prob": True}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**_SIZES}),
    "llama_tied": ("Llama", {**_SIZES, "tie_word_embeddings": True}),
    "llama_2_groups": ("Llama", {**_SIZES, "num_key_value_heads": 2}),
    "qwen2": ("Qwen2", {k: v for k, v in _SIZES.items() if k != "head_dim"}),
    "qwen3": ("Qwen3", {**_SIZES}),
    "qwen3_moe": ("Qwen3Moe", {**_SIZES, **_EXPERTS, "num_experts": 8}),
    "mixtral": ("Mixtral", {**_SIZES, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "DeepseekV3",
        {**_SIZES, **_EXPERTS, **_LATENT, "n_routed_experts": 8, "n_shared_experts": 2, "n_group": 2, "topk_group": 1,
         "first_k_dense_replace": 1},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {**_SIZES, **_EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
         "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True},
    ),
}  # fmt: skip


def save_checkpoint(name: str, folder: Path) -> None:
    """Random weights everywhere, norms, biases and buffers too, so that no two tensors are alike.

    A name that ends in `_mtp` has one multi-token-prediction layer more, which Transformers' own class leaves out.
    """
    import transformers
    from safetensors.torch import load_file, save_file

    kind, sizes = CONFIGS[name.removesuffix("_mtp")]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    generator = torch.Generator().manual_seed(11)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            tensor.copy_(_noise(key, tensor.shape, generator))
    model.save_pretrained(folder)
    if name.endswith("_mtp"):
        config.num_nextn_predict_layers = 1
        config.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        layers, hidden = sizes["num_hidden_layers"], sizes["hidden_size"]
        last = {key: tensor.shape for key, tensor in tensors.items() if f".layers.{layers - 1}." in key}
        added = {key.replace(f".layers.{layers - 1}.", f".layers.{layers}."): shape for key, shape in last.items()}
        head = {"enorm": (hidden,), "hnorm": (hidden,), "shared_head.norm": (hidden,), "eh_proj": (hidden, 2 * hidden)}
        for key, shape in head.items():
            added[f"model.layers.{layers}.{key}.weight"] = torch.Size(shape)
        tensors |= {key: _noise(key, shape, generator) for key, shape in added.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _noise(key: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    return 1 + 0.1 * noise if "norm" in key else 0.1 * noise
