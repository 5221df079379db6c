"""All that a model is, to compare two of them, or one with what it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    return t.detach().contiguous().reshape(-1).view(torch.uint8)


class Tensors(NamedTuple):
    """All tensors that a model computes with, by kind and name."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    attributes: dict[str, torch.Tensor]


def all_tensors(model: torch.nn.Module) -> Tensors:
    """Parameters, buffers (persistent or not) and plain tensor attributes of all modules."""
    found = Tensors(dict(model.named_parameters(remove_duplicate=False)), {}, {})
    for path, module in model.named_modules():
        found.buffers.update({f"{path}.{k}": t for k, t in module._buffers.items() if t is not None})
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                found.attributes[f"{path}.{key}"] = value
    return found


def differences(model: torch.nn.Module, fresh: torch.nn.Module) -> list[str]:
    """Names of tensors of two models that are not equal, byte for byte, or that only one of them has."""
    different = []
    for kind, ours, theirs in zip(Tensors._fields, all_tensors(model), all_tensors(fresh), strict=True):
        different += [f"{kind} {name}" for name in ours.keys() ^ theirs.keys()]
        for name in ours.keys() & theirs.keys():
            a, b = ours[name], theirs[name]
            if (a.shape, a.dtype) != (b.shape, b.dtype) or not torch.equal(as_bytes(a), as_bytes(b)):
                different.append(f"{kind} {name}")
    return sorted(different)


class Everything:
    """A model as it is, to see whether it still is: objects by identity, tensors by place and bytes.

    Of its own, so that it does not share a mistake with what it judges.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._before = dict(self._read())

    def _read(self) -> Iterator[tuple[str, Any]]:
        for path, module in self._model.named_modules():
            yield f"{path} is", (id(module), type(module))
            things = {path: module, f"{path}.quant_method": getattr(module, "quant_method", None)}
            for name, thing in things.items():
                if thing is None or not hasattr(thing, "__dict__"):
                    continue
                for key, value in vars(thing).items():
                    yield from self._facts(f"{name}.{key}", value)

    def _facts(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, torch.Tensor):
            place = (value.data_ptr(), value.storage_offset(), tuple(value.shape), value.stride(), value.dtype)
            content = b"" if value.is_meta else as_bytes(value).numpy().tobytes()
            yield name, (id(value), place, content, value.requires_grad, {k: id(v) for k, v in vars(value).items()})
        elif isinstance(value, (dict, list, tuple, set)):
            items = list(value.items() if isinstance(value, dict) else enumerate(value))
            yield name, (id(value), [(k, id(v)) for k, v in items])
            if name.rpartition(".")[2] != "_modules":
                for key, item in items:
                    yield from self._facts(f"{name}.{key}", item)
        elif isinstance(value, (bool, int, float, str, type(None))):
            yield name, value
        else:
            yield name, id(value)

    def changes(self) -> list[str]:
        """Names of what is no longer as it was."""
        now = dict(self._read())
        names = self._before.keys() | now.keys()
        return sorted(name for name in names if self._before.get(name, self) != now.get(name, self))
