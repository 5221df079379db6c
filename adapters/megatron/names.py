"""Names of Megatron-Core's tensors with their checkpoint names: one short table a family.

Keys are those of `sharded_state_dict()` of megatron-core 0.19. They are the same for local, fused and Transformer
Engine layers, but for the place of a norm. Checkpoint names are those of the Transformers model. `{layer}` is the
global layer counted from 0, `{expert}` the logical expert, `{part}` one of the rule's parts. A tensor that is in no
table is refused, so a family is added by writing its table down.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from weightcast.adapters.megatron.rows import Fusion

__all__ = ["FAMILIES", "MTP_SHARED", "Rule", "Table"]


class Rule(NamedTuple):
    """The checkpoint name(s) of one Megatron tensor; `parts` are in the order of the rows."""

    name: str
    fusion: Fusion = Fusion.WHOLE
    parts: tuple[str, ...] = ("",)


Table = Mapping[str, Rule]


def _gate_up(name: str, gate: str = "gate_proj", up: str = "up_proj") -> Rule:
    return Rule(name, Fusion.GATE_UP, (gate, up))


def _experts(module: str, gate: str, up: str, down: str) -> Table:
    """Router and experts of a layer whose checkpoint has them in `module`."""
    return {
        "mlp.router.weight": Rule(f"{module}.gate.weight"),
        "mlp.experts.experts.linear_fc1.weight": _gate_up(module + ".experts.{expert}.{part}.weight", gate, up),
        "mlp.experts.experts.linear_fc2.weight": Rule(f"{module}.experts.{{expert}}.{down}.weight"),
    }


def _qkv(name: str) -> Rule:
    return Rule(name, Fusion.QKV, ("q", "k", "v"))


_OUTSIDE: Table = {
    "embedding.word_embeddings.weight": Rule("model.embed_tokens.weight", Fusion.VOCABULARY),
    "output_layer.weight": Rule("lm_head.weight", Fusion.VOCABULARY),
    "decoder.final_layernorm.weight": Rule("model.norm.weight"),
}

# Inside a layer. A norm before a fused projection belongs to the projection with Transformer Engine, and is a module
# of its own without it; both keys are listed.
_NORMS: Table = {
    "input_layernorm.weight": Rule("input_layernorm.weight"),
    "self_attention.linear_qkv.layer_norm_weight": Rule("input_layernorm.weight"),
    "pre_mlp_layernorm.weight": Rule("post_attention_layernorm.weight"),
    "mlp.linear_fc1.layer_norm_weight": Rule("post_attention_layernorm.weight"),
}
_ATTENTION: Table = {
    "self_attention.linear_qkv.weight": _qkv("self_attn.{part}_proj.weight"),
    "self_attention.linear_qkv.bias": _qkv("self_attn.{part}_proj.bias"),
    "self_attention.linear_proj.weight": Rule("self_attn.o_proj.weight"),
}
_QK_NORMS: Table = {
    "self_attention.q_layernorm.weight": Rule("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": Rule("self_attn.k_norm.weight"),
}
_LATENT_ATTENTION: Table = {
    "self_attention.linear_q_proj.weight": Rule("self_attn.q_proj.weight"),
    "self_attention.linear_q_down_proj.weight": Rule("self_attn.q_a_proj.weight"),
    "self_attention.q_layernorm.weight": Rule("self_attn.q_a_layernorm.weight"),
    "self_attention.linear_q_up_proj.layer_norm_weight": Rule("self_attn.q_a_layernorm.weight"),
    "self_attention.linear_q_up_proj.weight": Rule("self_attn.q_b_proj.weight"),
    "self_attention.linear_kv_down_proj.weight": Rule("self_attn.kv_a_proj_with_mqa.weight"),
    "self_attention.kv_layernorm.weight": Rule("self_attn.kv_a_layernorm.weight"),
    "self_attention.linear_kv_up_proj.layer_norm_weight": Rule("self_attn.kv_a_layernorm.weight"),
    "self_attention.linear_kv_up_proj.weight": Rule("self_attn.kv_b_proj.weight"),
    "self_attention.linear_proj.weight": Rule("self_attn.o_proj.weight"),
}
_MLP: Table = {
    "mlp.linear_fc1.weight": _gate_up("mlp.{part}.weight"),
    "mlp.linear_fc2.weight": Rule("mlp.down_proj.weight"),
}
_EXPERTS: Table = _experts("mlp", "gate_proj", "up_proj", "down_proj")
_MIXTRAL_EXPERTS: Table = _experts("block_sparse_moe", "w1", "w3", "w2")
_BIASED_ROUTER: Table = {"mlp.router.expert_bias": Rule("mlp.gate.e_score_correction_bias")}
_SHARED_EXPERTS: Table = {
    "mlp.shared_experts.linear_fc1.weight": _gate_up("mlp.shared_experts.{part}.weight"),
    "mlp.shared_experts.linear_fc2.weight": Rule("mlp.shared_experts.down_proj.weight"),
}
_PREDICTION_HEAD: Table = {
    "enorm.weight": Rule("enorm.weight"),
    "hnorm.weight": Rule("hnorm.weight"),
    "eh_proj.weight": Rule("eh_proj.weight"),
    "final_layernorm.weight": Rule("shared_head.norm.weight"),
}

MTP_SHARED: Mapping[str, str] = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "shared_head.head.weight": "lm_head.weight",
}
"""Tensors of a multi-token-prediction layer of a checkpoint that Megatron has once, in the main model."""


def _under(prefix: str, *tables: Table) -> Table:
    """Tables of a layer with their Megatron keys under `prefix`."""
    return {
        prefix + key: rule._replace(name="model.layers.{layer}." + rule.name)
        for table in tables
        for key, rule in table.items()
    }


def _family(*layer: Table, mtp: bool = False) -> Table:
    table = {**_OUTSIDE, **_under("decoder.layers.{layer}.", _NORMS, *layer)}
    if mtp:
        table |= _under("mtp.layers.{layer}.", _PREDICTION_HEAD)
        table |= _under("mtp.layers.{layer}.transformer_layer.", _NORMS, *layer)
    return table


FAMILIES: Mapping[str, Table] = {
    "llama": _family(_ATTENTION, _MLP),
    "mistral": _family(_ATTENTION, _MLP),
    "qwen2": _family(_ATTENTION, _MLP),
    "qwen3": _family(_ATTENTION, _QK_NORMS, _MLP),
    "qwen3_moe": _family(_ATTENTION, _QK_NORMS, _MLP, _EXPERTS),
    "mixtral": _family(_ATTENTION, _MIXTRAL_EXPERTS),
    "glm4_moe": _family(_ATTENTION, _QK_NORMS, _MLP, _EXPERTS, _BIASED_ROUTER, _SHARED_EXPERTS, mtp=True),
    "deepseek_v3": _family(_LATENT_ATTENTION, _MLP, _EXPERTS, _BIASED_ROUTER, _SHARED_EXPERTS, mtp=True),
}
"""The tables by `model_type` of the Transformers config."""
