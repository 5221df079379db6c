"""Model families for the harness of whole updates: a row each, tiny checkpoints, and what a rank of one does.

A row says which configuration Transformers makes the model from, or writes the checkpoint itself, and what `describe`
answers. Every tensor of the checkpoint is random, norms too: norms of ones hide what is computed from them.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sglang_models
import torch
from safetensors.torch import save_file

from weightcast.adapters.sglang import sink as sglang_sink

Config = dict[str, Any]

TEXT: Config = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
MOE: Config = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
ROUTED: Config = {"moe_intermediate_size": 64, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
GROUPS: Config = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LINEAR: Config = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
MLA: Config = {
    "num_hidden_layers": 3,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
SLIDING: Config = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
VISION: Config = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "out_hidden_size": 64,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
MROPE: Config = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3], "rope_type": "default"}}
MAMBA: Config = {
    "mamba_d_ssm": 128,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}
EXPERTS: Config = {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
GEMMA4: Config = {
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
}
STEP_PARTS = ("self", "input", "post", "share", "moe.gate", "moe.router")
INTERVAL: Config = {"full_attention_interval": 4, "linear_num_key_heads_cpu": 2, "linear_num_value_heads_cpu": 4}


Alter = Callable[[torch.nn.Module], None]


@dataclass(frozen=True, slots=True)
class Family:
    """One class of SGLang: `config` for Transformers' `model_type`, or `write`, which makes the checkpoint in a folder.

    `published` are keys of published configurations that Transformers does not write. `completed` are prefixes of
    parameters that the checkpoint gets under SGLang's own names. `refused` is what `describe` says of it, None where it
    is described. `recomputed` are the keys of tensors that weightcast computes anew, `rewritten` of those that SGLang
    does. `alter` changes the model before anything is loaded, `loaded` says whether a server has loaded it at all, and
    `extra` are tensors of the checkpoint that no model knows. `world` ranks share it.
    """

    model_type: str = ""
    config: Config = field(default_factory=dict)
    published: Config = field(default_factory=dict)
    write: Callable[[Path], None] | None = None
    completed: tuple[str, ...] = ()
    refused: str | None = None
    recomputed: frozenset[str] = frozenset()
    rewritten: frozenset[str] = frozenset()
    alter: Alter | None = None
    loaded: bool = True
    extra: tuple[str, ...] = ()
    world: int = 1
    server: Mapping[str, Any] = field(default_factory=dict)


GEMMA_NORM = frozenset({"gemma_weight"})
ABSORBED = frozenset({"w_kc", "w_vc"})


def of_ours(name: str) -> Callable[[Path], None]:
    """What writes one of the checkpoints of `sglang_models`."""
    return lambda folder: sglang_models.write_checkpoint(name, folder.parent / f"{folder.name}-made").rename(folder)


def kimi_vl(folder: Path) -> None:
    """MLA behind a wrapper that has no `post_load_weights`; the vision tower's names are those of SGLang's modules."""
    text = sglang_models.DEEPSEEK | {"q_lora_rank": None, "num_nextn_predict_layers": 0, "use_mla": True}
    text.pop("torch_dtype")
    vision = {"model_type": "moonvit", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    vision |= {"num_hidden_layers": 2, "patch_size": 4, "init_pos_emb_height": 4, "init_pos_emb_width": 4}
    config = {
        "architectures": ["KimiVLForConditionalGeneration"],
        "model_type": "kimi_vl",
        "torch_dtype": "bfloat16",
        "text_config": text,
        "vision_config": vision | {"merge_kernel_size": [2, 2]},
        "encoder_only": False,
        "language_only": False,
    }
    shapes = {}
    for name, shape in sglang_models.deepseek(text | {"q_lora_rank": 1}):
        if "layers.3." in name or "q_a_" in name:
            continue
        is_query = "q_b_proj" in name
        shapes["language_model." + name.replace("q_b_proj", "q_proj")] = (
            (shape[0], sglang_models.HIDDEN) if is_query else shape
        )
    write(folder, config, shapes)


def step(experts: str) -> Callable[[Path], None]:
    """What writes a checkpoint of Step-3.5 with experts in layers `experts`, all in one tensor each."""
    config = TEXT | {"architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "torch_dtype": "bfloat16"}
    config |= {"num_attention_groups": 2, "share_expert_dims": 64, "moe_layers_enum": experts, "rope_theta": [1e4] * 2}
    config |= {"moe_num_experts": 4, "moe_top_k": 2, "moe_intermediate_size": 64, "layer_types": ["full_attention"] * 2}
    config |= {"need_fp32_gate": False, "moe_router_scaling_factor": 1.0, "use_moe_router_bias": True}
    config |= {"swiglu_limits": [0] * 2, "swiglu_limits_shared": [0] * 2, "use_head_wise_attn_gate": False}
    config |= {
        "partial_rotary_factors": [1.0] * 2,
        "attention_other_setting": {},
        "rms_norm_eps": 1e-6,
        "pad_token_id": 2,
    }
    config |= {"moe_router_activation": "sigmoid", "hidden_act": "silu", "yarn_only_types": []}
    inner = {"gate_proj": (4, 64, 64), "up_proj": (4, 64, 64), "down_proj": (4, 64, 64)}
    shapes = {f"model.layers.{experts}.moe.{name}.weight": shape for name, shape in inner.items()}
    ends = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (200, 64))
    return lambda folder: write(folder, config, ends | (shapes if experts.isdecimal() else {}))


def eagle3(folder: Path) -> None:
    """A draft of EAGLE3, whose loader makes a map of token ids from a tensor of the checkpoint."""
    config = TEXT | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    config |= {"draft_vocab_size": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16"}
    write(folder, config, {"norm.weight": (64,), "lm_head.weight": (128, 64)}, {"d2t": torch.arange(128)})


def write(
    folder: Path,
    config: Config,
    shapes: Mapping[str, tuple[int, ...]],
    others: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """A checkpoint of random tensors, and of `others`."""
    generator = torch.Generator().manual_seed(0)
    tensors = dict(others or {})
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=generator)
        tensors[name] = value if name.endswith("e_score_correction_bias") else value.to(torch.bfloat16)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_checkpoint(family: Family, folder: Path) -> None:
    """The checkpoint of a family, in the names that Transformers writes."""
    if family.write is not None:
        family.write(folder)
        return
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.for_model(family.model_type, **family.config)
    auto = AutoModelForImageTextToText if "text_config" in family.config else AutoModelForCausalLM
    model = auto.from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for t in (*model.parameters(), *model.buffers()):
            if t.is_floating_point():
                t.copy_(torch.randn(t.shape, generator=generator).to(t.dtype))
    model.to(torch.bfloat16).save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    for key, value in family.published.items():
        saved[key] = saved[key] | value if isinstance(value, dict) else value
    (folder / "config.json").write_text(json.dumps(saved))


def in_blocks(model: torch.nn.Module) -> None:
    """Experts in the block layout of FlashInfer's TRT-LLM kernels, with stand-ins for its two functions."""
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    core: Any = types.ModuleType("flashinfer.fused_moe.core")
    core.convert_to_block_layout = lambda t, k: t.reshape(t.shape[0], t.shape[1] // k, k).permute(1, 0, 2).contiguous()
    for name in ("flashinfer", "flashinfer.fused_moe"):
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["flashinfer.fused_moe.core"] = core
    method: Any = UnquantizedFusedMoEMethod
    method._trtllm_bf16_row_permutation = lambda self, layer, name, tile: torch.arange(tile.shape[0]).flip(0)
    for module in model.modules():
        if isinstance(getattr(module, "quant_method", None), UnquantizedFusedMoEMethod):
            module.quant_method.use_flashinfer_trtllm_moe = True  # type: ignore[union-attr]


def in_blocks_unnoticed(model: torch.nn.Module) -> None:
    """The same where nobody looks for it before the loader is traced, which gives such experts another shape."""
    in_blocks(model)
    sglang_sink._rearranged = lambda *_: ""


def interleaved(model: torch.nn.Module) -> None:
    """Gate and up rows of experts interleaved for a fused kernel, as SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED asks for."""
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    def interleave(self: object, layer: Any) -> None:
        rows = layer.w13_weight.shape[1]
        order = torch.arange(rows).view(2, -1).t().reshape(-1)
        for expert in range(layer.w13_weight.shape[0]):
            layer.w13_weight.data[expert] = layer.w13_weight.data[expert][order]

    method: Any = UnquantizedFusedMoEMethod
    method._maybe_interleave_w13_for_fused_swiglu = interleave


def fails_half_way(model: torch.nn.Module) -> None:
    """A loader that raises after it has changed all that it can."""
    load = model.load_weights

    def failing(pairs: Any) -> None:
        pairs = list(pairs)
        load(pairs)
        if not pairs[0][1].is_meta:
            return
        norm = model.model.norm
        model.is_loaded, model.tokens = True, pairs[0][1]
        model.lm_head.quant_method.is_repacked = True
        norm.weight.data = torch.zeros(3)
        norm.register_buffer("scale", norm.weight * 2)
        del model.model.layers[1].self_attn.o_proj
        model.model.layers[0].mlp = torch.nn.Identity()
        raise KeyError("half-way")

    object.__setattr__(model, "load_weights", failing)


FAMILIES: dict[str, Family] = {
    "llama": Family("llama", TEXT),
    "mistral": Family("mistral", TEXT),
    "mixtral": Family("mixtral", TEXT | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi3": Family("phi3", TEXT),
    "olmo2": Family("olmo2", TEXT),
    "qwen2": Family("qwen2", TEXT),
    "qwen3": Family(write=of_ours("qwen3")),
    "qwen3-moe": Family(write=of_ours("qwen3-moe"), world=2, server={"ep_size": 2}),
    "qwen3-next": Family(
        "qwen3_next",
        TEXT | MOE | LINEAR | {"shared_expert_intermediate_size": 64, "partial_rotary_factor": 0.5},
        published=INTERVAL,
        recomputed=GEMMA_NORM,
    ),
    "qwen3.5": Family("qwen3_5_text", TEXT | LINEAR, published=INTERVAL, recomputed=GEMMA_NORM, world=2),
    "qwen3.5-moe-vl": Family(
        "qwen3_5_moe",
        {
            "text_config": TEXT | MOE | LINEAR | {"shared_expert_intermediate_size": 64},
            "vision_config": VISION | {"num_position_embeddings": 16},
            "tie_word_embeddings": False,
        },
        published={"text_config": INTERVAL, "vision_config": {"deepstack_visual_indexes": []}},
        recomputed=GEMMA_NORM,
    ),
    "qwen2.5-vl": Family(
        "qwen2_5_vl",
        {
            "text_config": TEXT | MROPE,
            "vision_config": VISION | {"window_size": 16, "fullatt_block_indexes": [1]},
            "tie_word_embeddings": False,
        },
    ),
    "deepseek-v3": Family(write=of_ours("deepseek"), rewritten=ABSORBED),
    "kimi-vl": Family(write=kimi_vl, completed=("vision_tower.", "multi_modal_projector."), recomputed=ABSORBED),
    "glm-4.5": Family("glm4_moe", TEXT | ROUTED | GROUPS | {"use_qk_norm": True, "partial_rotary_factor": 0.5}),
    "gpt-oss": Family("gpt_oss", TEXT | SLIDING | EXPERTS, server={"attention_backend": "triton"}),
    "granite": Family("granite", TEXT),
    "cohere2": Family("cohere2", TEXT | SLIDING),
    "stablelm": Family("stablelm", TEXT),
    "lfm2": Family("lfm2", TEXT | {"layer_types": ["conv", "full_attention"]}),
    "dots1": Family("dots1", TEXT | ROUTED | GROUPS),
    "qwen2-moe": Family(
        "qwen2_moe",
        TEXT | MOE | {"shared_expert_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "minimax-m2": Family("minimax_m2", TEXT | EXPERTS | {"rotary_dim": 8}, published={"scoring_func": "sigmoid"}),
    "gemma2": Family(
        "gemma2",
        TEXT | {"query_pre_attn_scalar": 16, "sliding_window": 64, "tie_word_embeddings": True},
        published={"hidden_act": "gelu_pytorch_tanh"},
        recomputed=GEMMA_NORM,
        world=2,
    ),
    "gemma3": Family("gemma3_text", TEXT | SLIDING | {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}),
    "step-3.5-dense": Family(write=step("-1"), completed=("model.",), recomputed=GEMMA_NORM),
    # Refused, and left as they were.
    "gemma": Family(
        "gemma", TEXT, refused=r"'model\..*layernorm.weight': the loader writes .* computed from the check"
    ),
    "gemma4": Family(
        "gemma4_text",
        TEXT | SLIDING | GEMMA4,
        server={"attention_backend": "triton"},
        refused=r"reads values of checkpoint tensor '.*layer_scalar'",
    ),
    "falcon-h1": Family("falcon_h1", TEXT | MAMBA, refused=r"'model.layers.0.mamba.A': the loader writes"),
    "step-3.5": Family(
        write=step("1"),
        completed=("model.norm", "model.layers.0.", *(f"model.layers.1.{p}" for p in STEP_PARTS)),
        refused=r"'model.layers.1.moe.experts.w13_weight': the loader writes no expert",
    ),
    "minicpm3": Family("minicpm3", TEXT | MLA, refused=r"KeyError: '.*kv_b_proj.weight'"),
    "minicpm3-not-loaded": Family("minicpm3", TEXT | MLA, loaded=False, refused=r"deletes module '.*attn.kv_b_proj'"),
    "eagle3": Family(write=eagle3, refused=r"tensor 'hot_token_id' is loaded or computed from checkpoint tensor 'd2t'"),
    "experts-in-blocks": Family(write=of_ours("qwen3-moe"), alter=in_blocks, refused=r"keep its experts in blocks"),
    "experts-in-blocks-unnoticed": Family(
        write=of_ours("qwen3-moe"),
        alter=in_blocks_unnoticed,
        refused=r"gives parameter '.*experts.w13_weight' other memory",
    ),
    "experts-interleaved": Family(
        write=of_ours("qwen3-moe"),
        alter=interleaved,
        refused=r"'.*w13_weight': the engine writes it at the end of an update session",
    ),
    "unknown-tensor": Family(
        write=kimi_vl,
        completed=("vision_tower.", "multi_modal_projector."),
        extra=("language_model.model.nobody.weight",),
        refused=r"failed while it was traced, at checkpoint tensor .*KeyError: .*nobody.weight",
    ),
    "fails-half-way": Family(write=of_ours("deepseek"), alter=fails_half_way, refused=r"KeyError: 'half-way'"),
}
