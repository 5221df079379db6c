"""Models with PEFT adapters (LoRA and its like): the weights below the adapters under their checkpoint names.

PEFT wraps each layer that it adapts: the weight becomes `q_proj.base_layer.weight` and the adapter's tensors lie beside
it, `q_proj.lora_A.default.weight` (peft 0.21, tuners/tuners_utils.py). An engine gets one of two: weights into which
the trainer has merged the adapter, or plain weights beside the adapter's tensors. The latter have the names that PEFT
saves them by.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from weightcast.adapters.fsdp.transformers_names import clean_name
from weightcast.transfer.errors import DescribeError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Adapted", "LoraMode", "inner_model", "split_adapters"]

LoraMode = Literal["merged", "separate"]

_SAVED_UNDER = "base_model.model."
"""Prefix that PEFT puts before the names of an adapter's tensors when it saves them."""


class Adapted(NamedTuple):
    """The tensors of a model: `base` by the names they have without adapters, `adapter` by those PEFT saves."""

    base: dict[str, torch.Tensor]
    adapter: dict[str, torch.Tensor]


def inner_model(model: nn.Module) -> nn.Module:
    """The model inside a `peft.PeftModel`, any other as it is."""
    peft = sys.modules.get("peft.peft_model")
    return model.get_base_model() if peft is not None and isinstance(model, peft.PeftModel) else model


def split_adapters(model: nn.Module, tensors: Mapping[str, torch.Tensor], mode: LoraMode | None) -> Adapted:
    """Sorts tensors, named by their clean path in `model`, into weights and adapters.

    Raises DescribeError where the model has adapters and `mode` is None or does not fit them, and for modules that are
    trained as copies.
    """
    layers = dict(_adapted_layers(model))
    for layer_path, layer in layers.items():
        _check(layer_path, layer, mode)
    base: dict[str, torch.Tensor] = {}
    adapter: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if (path := _layer_of(name, layers)) is None:
            base[name] = tensor
            continue
        kind, *segments = name.removeprefix(f"{path}.").split(".")
        if kind in layers[path].adapter_layer_names:
            # The first segment after the kind is the adapter's own name, which PEFT does not save. It saves DoRA's
            # vectors as if they were parameters of the layer.
            ending = [] if kind == "lora_magnitude_vector" else segments[1:]
            adapter[_SAVED_UNDER + ".".join([path, kind, *ending])] = tensor
        else:
            base[_without_wrappers(name, layers)] = tensor
    return Adapted(base, adapter)


def _adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Path and module of every layer that PEFT wraps."""
    utils, wrappers = sys.modules.get("peft.tuners.tuners_utils"), sys.modules.get("peft.utils.other")
    if utils is None or wrappers is None:
        return
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, utils.BaseTunerLayer):
            yield clean_name(path), module
        elif isinstance(module, wrappers.AuxiliaryTrainingWrapper):
            raise DescribeError(
                f"module {path!r} is trained as a copy beside the original ({type(module).__name__}): an engine has no "
                f"place for both; train it in place instead of with modules_to_save or trainable_token_indices"
            )


def _check(path: str, layer: Any, mode: LoraMode | None) -> None:
    names = sorted({name for kind in layer.adapter_layer_names for name in getattr(layer, kind, ())})
    active, merged = sorted(set(layer.active_adapters) & set(names)), sorted(layer.merged_adapters)
    if mode is None:
        raise DescribeError(
            f"module {path!r} has the adapters {names}; say what an engine gets: lora='merged' after merge_adapter(), "
            f"or lora='separate' for the weights without them and their tensors beside"
        )
    if mode == "merged" and merged != active:
        raise DescribeError(
            f"module {path!r} has the active adapters {active} and merged ones {merged}; call merge_adapter() before "
            f"connect() and update() and unmerge_adapter() after, or use lora='separate'"
        )
    if mode == "separate" and (merged or len(names) != 1):
        raise DescribeError(
            f"module {path!r} has the adapters {names}, of which {merged} are merged; lora='separate' needs one "
            f"that is not merged"
        )


def _layer_of(name: str, layers: Mapping[str, Any]) -> str | None:
    """The innermost adapted layer that a tensor lies in."""
    path = name
    while "." in path:
        path = path.rpartition(".")[0]
        if path in layers:
            return path
    return None


def _without_wrappers(name: str, layers: Mapping[str, Any]) -> str:
    parts = name.split(".")
    return ".".join(part for i, part in enumerate(parts) if part != "base_layer" or ".".join(parts[:i]) not in layers)
