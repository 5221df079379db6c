"""The weights of a Transformers Qwen3-MoE as Megatron-Core holds them, into its ranks and back.

This is the demo's own way, so that its expectation owes nothing to weightcast. It knows one family, goes by what
Megatron's parameters say of themselves (`partition_dim`), and gathers whole tensors. A mistake made in both directions
would show in the loss, which the demo compares between both models.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weightcast.transfer.errors import InputError

__all__ = ["gather_weights", "load_weights"]

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.linear_(fc1|fc2)\.weight$")
_QKV = "self_attention.linear_qkv.weight"
_OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_INSIDE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
_FUSED = {"fc1": "mlp.experts.gate_up_proj", "fc2": "mlp.experts.down_proj"}

Tensors = Mapping[str, torch.Tensor]


class _Part(NamedTuple):
    """One rank's part of a tensor.

    `layer` and `expert` are numbers in the whole model, -1 where there is none. `place` is the number of the part along
    dimension `dim`; `dim` -1 means the whole tensor.
    """

    layer: int
    expert: int
    name: str
    dim: int
    place: int
    data: torch.Tensor


def load_weights(model: Any, source: Tensors) -> None:
    """Fills this rank's parameters from the parameters of the Transformers model. `model` is a `GPTModel`."""
    with torch.no_grad():
        for part in _parts(model):
            rows = torch.cat(_rows(part, source, model.config.num_query_groups))
            part.data.copy_(torch.cat(_split(part, rows)))


def gather_weights(model: Any, target: Tensors) -> None:
    """Copies the parameters of all ranks into those of the Transformers model on rank 0. Collective."""
    groups = model.config.num_query_groups
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(list(_parts(model)), everyone)
    if everyone is None:
        return
    with torch.no_grad():
        for tensor in target.values():
            tensor.fill_(torch.nan)
        for part in itertools.chain(*everyone):
            views = _rows(part, target, groups)
            rows = torch.cat(views)
            pieces = _split(part, rows)
            for piece, content in zip(pieces, part.data.chunk(len(pieces)), strict=True):
                piece.copy_(content)
            for view, content in zip(views, rows.split([len(view) for view in views]), strict=True):
                view.copy_(content)
    holes = [name for name, tensor in target.items() if tensor.isnan().any()]
    if holes:
        raise InputError(f"{len(holes)} parameters have values that are no number, or are on no rank: {holes[0]!r}")


def _parts(model: Any) -> list[_Part]:
    """The parts of all tensors that this rank holds."""
    from megatron.core import parallel_state

    parts = []
    experts = model.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    first = experts * parallel_state.get_expert_model_parallel_rank()
    for path, parameter in model.named_parameters():
        layer, expert, name = -1, -1, path
        number = parallel_state.get_tensor_model_parallel_rank()
        if layer_match := _LAYER.match(path):
            layer = model.decoder.layers[int(layer_match[1])].layer_number - 1
            name = layer_match[2]
        if expert_match := _EXPERT.match(name):
            expert, name = first + int(expert_match[1]), expert_match[2]
            number = parallel_state.get_expert_tensor_parallel_rank()
        split = getattr(parameter, "tensor_model_parallel", False)
        dim = int(parameter.partition_dim) if split else -1
        parts.append(_Part(layer, expert, name, dim, number if split else 0, parameter.detach()))
    return parts


def _rows(part: _Part, tensors: Tensors, groups: int) -> list[torch.Tensor]:
    """Views of Transformers parameters; one below the other they are the rows of the whole Megatron tensor."""
    prefix = f"model.layers.{part.layer}."
    if part.expert >= 0:
        return [tensors[prefix + _FUSED[part.name]][part.expert]]
    if part.layer >= 0 and part.name == _QKV:
        heads = [tensors[f"{prefix}self_attn.{x}_proj.weight"].chunk(groups) for x in "qkv"]
        return [head[group] for group in range(groups) for head in heads]
    name = prefix + _INSIDE.get(part.name, "") if part.layer >= 0 else _OUTSIDE.get(part.name, "")
    if name not in tensors:
        raise InputError(f"the demo's Megatron trainer has no Transformers name for {part.name!r}; use a Qwen3-MoE")
    return [tensors[name]]


def _split(part: _Part, rows: torch.Tensor) -> list[torch.Tensor]:
    """Views of this part of the whole tensor: of gate and up rows the part of each, one below the other in Megatron."""
    if part.dim < 0:
        return [rows]
    count = rows.shape[part.dim] // part.data.shape[part.dim]
    halves = rows.chunk(2) if part.name == "fc1" else (rows,)
    return [half.chunk(count, part.dim)[part.place] for half in halves]
