"""Tiny random checkpoints in the layout of real ones, for SGLang's own loaders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

EXPERTS = 4
HIDDEN = 64
HEADS = 4
HEAD_DIM = 16
MOE_INTERMEDIATE = 64
INTERMEDIATE = 128
VOCAB = 200  # Padded by SGLang to a multiple of 64, so that every model has padding.

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "intermediate_size": INTERMEDIATE,
}
QWEN3 = COMMON | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
}
QWEN3_MOE = COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "head_dim": HEAD_DIM,
    "moe_intermediate_size": MOE_INTERMEDIATE,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
DEEPSEEK = COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "moe_intermediate_size": MOE_INTERMEDIATE,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "ep_size": 1,
    "num_nextn_predict_layers": 1,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 128,
    },
}
FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [32, 32],
    "modules_to_not_convert": [],
}

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def mlp(prefix: str, intermediate: int) -> Shapes:
    yield f"{prefix}.gate_proj.weight", (intermediate, HIDDEN)
    yield f"{prefix}.up_proj.weight", (intermediate, HIDDEN)
    yield f"{prefix}.down_proj.weight", (HIDDEN, intermediate)


def ends(config: dict[str, Any]) -> Shapes:
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (VOCAB, HIDDEN)


def qwen(config: dict[str, Any]) -> Shapes:
    """Names and shapes of Qwen3ForCausalLM and Qwen3MoeForCausalLM checkpoints."""
    yield from ends(config)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, heads in (("q", HEADS), ("k", config["num_key_value_heads"]), ("v", config["num_key_value_heads"])):
            yield f"{prefix}.self_attn.{name}_proj.weight", (heads * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
        yield f"{prefix}.self_attn.q_norm.weight", (HEAD_DIM,)
        yield f"{prefix}.self_attn.k_norm.weight", (HEAD_DIM,)
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
        if "num_experts" in config:
            yield f"{prefix}.mlp.gate.weight", (config["num_experts"], HIDDEN)
            for expert in range(config["num_experts"]):
                yield from mlp(f"{prefix}.mlp.experts.{expert}", config["moe_intermediate_size"])
        else:
            yield from mlp(f"{prefix}.mlp", config["intermediate_size"])


def deepseek(config: dict[str, Any]) -> Shapes:
    """Names and shapes of a DeepseekV3ForCausalLM checkpoint with one MTP layer, as the published ones have."""
    yield from ends(config)
    layers = config["num_hidden_layers"]
    for layer in range(layers + 1):
        prefix, attention = f"model.layers.{layer}", f"model.layers.{layer}.self_attn"
        qk = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        yield f"{attention}.q_a_proj.weight", (config["q_lora_rank"], HIDDEN)
        yield f"{attention}.q_a_layernorm.weight", (config["q_lora_rank"],)
        yield f"{attention}.q_b_proj.weight", (HEADS * qk, config["q_lora_rank"])
        yield f"{attention}.kv_a_proj_with_mqa.weight", (config["kv_lora_rank"] + config["qk_rope_head_dim"], HIDDEN)
        yield f"{attention}.kv_a_layernorm.weight", (config["kv_lora_rank"],)
        both = config["qk_nope_head_dim"] + config["v_head_dim"]
        yield f"{attention}.kv_b_proj.weight", (HEADS * both, config["kv_lora_rank"])
        yield f"{attention}.o_proj.weight", (HIDDEN, HEADS * config["v_head_dim"])
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
        if layer < config["first_k_dense_replace"]:
            yield from mlp(f"{prefix}.mlp", config["intermediate_size"])
            continue
        yield f"{prefix}.mlp.gate.weight", (config["n_routed_experts"], HIDDEN)
        yield f"{prefix}.mlp.gate.e_score_correction_bias", (config["n_routed_experts"],)
        if "experts_in_one_tensor" in config:
            experts, intermediate = config["n_routed_experts"], config["moe_intermediate_size"]
            yield f"{prefix}.mlp.experts.gate_up_proj", (experts, 2 * intermediate, HIDDEN)
            yield f"{prefix}.mlp.experts.down_proj", (experts, HIDDEN, intermediate)
        for expert in range(0 if "experts_in_one_tensor" in config else config["n_routed_experts"]):
            yield from mlp(f"{prefix}.mlp.experts.{expert}", config["moe_intermediate_size"])
        yield from mlp(f"{prefix}.mlp.shared_experts", config["moe_intermediate_size"])
    yield f"model.layers.{layers}.eh_proj.weight", (HIDDEN, 2 * HIDDEN)
    yield f"model.layers.{layers}.enorm.weight", (HIDDEN,)
    yield f"model.layers.{layers}.hnorm.weight", (HIDDEN,)


def tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Random weights; linear layers in block-fp8 with scales when the config is quantised."""
    generator = torch.Generator().manual_seed(0)
    shapes = deepseek(config) if config["model_type"] == "deepseek_v3" else qwen(config)
    made: dict[str, torch.Tensor] = {}
    for name, shape in shapes:
        value = torch.randn(shape, generator=generator)
        quantised = "quantization_config" in config and "proj" in name
        if quantised:
            made[name] = value.to(torch.float8_e4m3fn)
            made[f"{name}_scale_inv"] = torch.rand([-(-n // 32) for n in shape], generator=generator)
        else:
            made[name] = value if name.endswith("e_score_correction_bias") else value.to(torch.bfloat16)
    return made


CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": QWEN3,
    "qwen3-tied": QWEN3 | {"tie_word_embeddings": True},
    "qwen3-moe": QWEN3_MOE,
    "qwen3-moe-fp8": QWEN3_MOE | {"quantization_config": FP8},
    "deepseek": DEEPSEEK,
    "deepseek-experts-in-one-tensor": DEEPSEEK | {"experts_in_one_tensor": True},
}


def write_checkpoint(name: str, root: Path) -> Path:
    """The folder of checkpoint `name` under `root`, made on first use, its tensors in two files with an index."""
    folder = root / name
    if not folder.exists():
        folder.mkdir(parents=True)
        config = CONFIGS[name]
        (folder / "config.json").write_text(json.dumps(config))
        made = tensors(config)
        names = list(made)
        where: dict[str, str] = {}
        for i, part in enumerate((names[::2], names[1::2])):
            file = f"model-{i + 1:05}-of-00002.safetensors"
            save_file({n: made[n] for n in part}, folder / file)
            where |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def read_tensors(folder: Path | str) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    from safetensors.torch import load_file

    return {name: t for file in sorted(Path(folder).glob("*.safetensors")) for name, t in load_file(file).items()}
