"""SGLang plugin: the CPU expert forward skips experts that live on other ranks.

With EP > 1 the dispatcher gives id -1 to every chosen expert that lives elsewhere. The GPU kernels skip those; the
native forward counts tokens per id and fails with "index -1 is out of bounds" (SGLang 0.5.23,
layers/moe/fused_moe_native.py:77).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

FORWARD = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"


def skip_absent_experts(
    forward: Callable[..., Any], layer: Any, x: Any, topk_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """`forward` over the experts of this rank alone.

    x (tokens, hidden), topk_output.topk_ids and .topk_weights (tokens, k). Each (token, present expert) becomes a row
    of its own with one expert of weight 1: an absent expert is never computed, whatever lies in its place, and
    `forward`, which counts an id once per row, sees none twice. The weighted sum is made as the engine does.
    """
    ids, weights = topk_output.topk_ids, topk_output.topk_weights
    present = ids >= 0
    if present.all():
        return forward(layer, x, topk_output, *args, **kwargs)
    token, choice = present.nonzero(as_tuple=True)
    out = weights.new_zeros(x.shape)
    if len(token):
        weight = weights[token, choice][:, None]
        single = topk_output._replace(topk_ids=ids[token, choice][:, None], topk_weights=weight.new_ones(weight.shape))
        out.index_add_(0, token, forward(layer, x[token], single, *args, **kwargs).to(weight.dtype) * weight)
    return out.to(x.dtype)


def register() -> None:
    """Entry point of group `sglang.srt.plugins`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(FORWARD, skip_absent_experts, HookType.AROUND)
    if not torch.cuda.is_available():
        torch.cuda.set_device = _choose_nothing  # srt/ray/scheduler_actor.py calls it whatever the device is


def _choose_nothing(device: object) -> None:
    """There is none to choose."""
