"""What Megatron-Core 0.19 and Megatron-Bridge 0.6 lack on a machine without a GPU. For test processes alone.

Call `install()` before anything of Megatron is imported, or give this file to `weightcast demo --trainer-prelude`.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.metadata
import sys
import types
import typing
from typing import Any

import torch

__all__ = ["LatentAttention", "install", "install_bridge", "pretend_transformer_engine"]

_VERSION = "2.14.0"
"""Of a Transformer Engine that Megatron takes for new enough."""


class _AnyClass(type):
    """A class that has every attribute, each of them such a class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        made = _AnyClass(name, (object,), {})
        setattr(cls, name, made)
        return made


class _AnyModule(types.ModuleType):
    """A module that has every class one asks for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _AnyClass(name, (torch.nn.Module,), {})
        setattr(self, name, made)
        return made


class _CudaIsCpu(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to and len(args) > 1 and str(args[1]).startswith("cuda"):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs)


class _TransformerEngine:
    """Finds every module below `transformer_engine`, each with every class one asks for."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "transformer_engine":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _AnyModule(spec.name)
        module.__version__ = _VERSION
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _pretend_version() -> None:
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: (  # type: ignore[assignment]
        _VERSION if name.replace("_", "-") == "transformer-engine" else version(name)
    )


def pretend_transformer_engine() -> None:
    """Before Megatron-Core is imported: its classes over Transformer Engine then exist. Nothing of them computes."""
    import typing_extensions

    typing.override = typing_extensions.override  # type: ignore[attr-defined]
    _pretend_version()
    sys.meta_path.insert(0, _TransformerEngine())  # type: ignore[arg-type]


def install() -> None:
    """Once in a process that is for Megatron alone."""
    import megatron.core.tensor_parallel.random as tensor_random
    import megatron.core.transformer.torch_norm as torch_norm

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.current_stream = lambda *args, **kwargs: None  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *args, **kwargs: None  # type: ignore[assignment]
    # The optimizer sorts parameters by the names of CUDA types.
    tensor_type = torch.Tensor.type
    torch.Tensor.type = lambda self, *args, **kwargs: (  # type: ignore[assignment,method-assign]
        tensor_type(self, *args, **kwargs) if args or kwargs else f"torch.cuda.{tensor_type(self).rpartition('.')[2]}"
    )
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment,method-assign]
    tensor_random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    torch_norm.WrappedTorchNorm.__new__ = staticmethod(_rms_norm)
    _CudaIsCpu().__enter__()


def install_bridge() -> None:
    """After `install()`: what Megatron-Bridge needs besides."""
    # Megatron-Core finds no Transformer Engine, and keeps to its own layers; the bridge then finds the pretended one.
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401

    pretend_transformer_engine()
    _bridge_sequential_glm()


def _bridge_sequential_glm() -> None:
    """The bridge of GLM-4-MoE maps grouped experts alone; give it the same mappings for sequential ones."""
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping
    from megatron.bridge.models.glm.glm45_bridge import GLM45Bridge

    original = GLM45Bridge.mapping_registry

    def mapping_registry(self: Any) -> Any:
        mappings = list(original(self).mappings)
        for mapping in tuple(mappings):
            name = mapping.megatron_param
            if ".mlp.experts.linear_fc" not in name:
                continue
            sequential = name.replace(".experts.linear", ".experts.local_experts.*.linear").replace("weight*", "weight")
            if isinstance(mapping, GatedMLPMapping):
                mappings.append(GatedMLPMapping(sequential, mapping.hf_param["gate"], mapping.hf_param["up"]))
            else:
                mappings.append(AutoMapping(sequential, mapping.hf_param))
        return MegatronMappingRegistry(*mappings)

    GLM45Bridge.mapping_registry = mapping_registry


def _rms_norm(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
    norm = torch.nn.RMSNorm(hidden_size, eps=eps)
    norm.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


class LatentAttention(torch.nn.Module):
    """Attention without parameters whose keys and values have different widths, which only Transformer Engine has."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        """[tokens, batch, heads, width] each; the heads come back joined."""
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, ~mask, scale=self.scale)
        return mixed.permute(2, 0, 1, 3).flatten(2)


if __name__ == "weightcast_prelude":
    install()
