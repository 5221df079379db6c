"""A snapshot of all that a model's own code can change about it while it is traced, to see changes and undo them.

    with Snapshot(model) as snapshot:
        ...                         # code that binds attributes, deletes modules, gives parameters other memory
        snapshot.rebound()          # which tensors it bound
    # all is as it was, or an error says what is not

Values are not copied: whoever runs code here makes sure that it writes no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from weightcast.adapters.tracing.provenance import storage_id
from weightcast.transfer.errors import DescribeError

__all__ = ["Binding", "Snapshot"]

_CONTAINERS = (dict, list, set)
_MEMBERS = ("_parameters", "_buffers", "_modules")
"""The dicts of a module whose entries have names in the module itself."""


class Binding(NamedTuple):
    """A tensor that a module holds as a buffer or attribute where it held another one before, or none."""

    module: torch.nn.Module
    key: str
    before: torch.Tensor | None
    after: torch.Tensor


class _Memory(NamedTuple):
    """The memory of a tensor, and its layout there."""

    storage: int
    nbytes: int
    address: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class _Tensor(NamedTuple):
    name: str
    tensor: torch.Tensor
    alias: torch.Tensor
    """The same memory, in an object of its own."""
    memory: _Memory


class _Names(NamedTuple):
    """A namespace or container, and what was in it."""

    name: str
    live: Any
    content: Any


class Snapshot:
    """A model and, with `others`, objects beside its modules, as they are now; put back at the end of the context."""

    def __init__(self, model: torch.nn.Module, others: Iterable[tuple[str, object]] = ()) -> None:
        """`others` are objects with attributes, by name."""
        self._model = model
        self._names: list[_Names] = []
        self._tensors: list[_Tensor] = []
        self._seen: set[int] = set()
        self._modules = dict(model.named_modules())
        self._paths = {id(module): path for path, module in self._modules.items()}
        self._attributes = {path: dict(vars(module)) for path, module in self._modules.items()}
        self._members = {
            path: {kind: dict(vars(module)[kind]) for kind in _MEMBERS} for path, module in self._modules.items()
        }
        for path, module in self._modules.items():
            self._visit(path, module)
        for name, owner in others:
            self._namespace(name, owner)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        damage = self._restore()
        if damage:
            raise DescribeError(
                f"THE ENGINE IS DAMAGED, restart it: its own code changed {damage[0]} while it was traced, and that "
                f"could not be put back ({len(damage)} such changes)"
            ) from error

    def rebound(self) -> list[Binding]:
        """Buffers and attributes of modules that hold another tensor than before; without those that hold none now."""
        bindings = []
        for path, module in self._modules.items():
            for namespace, content in (
                (vars(module), self._attributes[path]),
                (module._buffers, self._members[path]["_buffers"]),
            ):
                for key, value in namespace.items():
                    original = content.get(key)
                    if isinstance(value, torch.Tensor) and value is not original:
                        before = original if isinstance(original, torch.Tensor) else None
                        bindings.append(Binding(module, key, before, value))
        return bindings

    def surgery(self) -> str | None:
        """One change in words: a module, parameter or buffer is gone, is new, or has other memory. None without one."""
        for path, module in self._modules.items():
            for kind, content in self._members[path].items():
                members = vars(module).get(kind, {})
                for key in content.keys() ^ members.keys():
                    verb = "deletes" if key in content else "adds"
                    return f"{verb} {kind.strip('_').removesuffix('s')} {joined(path, key)!r}"
                for key in content.keys() if kind == "_modules" else ():
                    if content[key] is not members[key]:
                        return f"replaces module {joined(path, key)!r}"
        for name, tensor, _, memory in self._tensors:
            if isinstance(tensor, torch.nn.Parameter) and _memory(tensor) != memory:
                return (
                    f"gives parameter {name!r} other memory (was {_told(memory)}, is {_told(_memory(tensor))}); "
                    "regions over its old memory would be lost"
                )
        for path, module in self._modules.items():
            for key, original in self._members[path]["_parameters"].items():
                parameter = module._parameters[key]
                if original is not parameter and (
                    original is None or parameter is None or _memory(original)[:-1] != _memory(parameter)[:-1]
                ):
                    return f"replaces parameter {joined(path, key)!r}"
        return None

    def holders(self) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor]]:
        """Every buffer and tensor attribute that was there: its name, module, key and tensor."""
        for path, module in self._modules.items():
            for key, value in [*self._members[path]["_buffers"].items(), *self._attributes[path].items()]:
                if isinstance(value, torch.Tensor):
                    yield joined(path, key), module, key, value

    def name_of(self, module: torch.nn.Module, key: str) -> str:
        """The name of an attribute of a module."""
        return joined(self._paths[id(module)], key)

    # Taking

    def _visit(self, name: str, value: object) -> None:
        """Notes what can be changed about a value: modules, tensors, and containers of them."""
        if not isinstance(value, (torch.nn.Module, torch.Tensor, *_CONTAINERS, tuple)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            self._namespace(name, value)
        elif isinstance(value, torch.Tensor):
            if value.layout != torch.strided:
                return
            self._tensors.append(_Tensor(name, value, value.detach(), _memory(value)))
            self._names.append(_Names(name, vars(value), dict(vars(value))))
        else:
            if not isinstance(value, tuple):
                self._names.append(_Names(name, value, value.copy()))
            inner = value.items() if isinstance(value, dict) else enumerate(value) if not isinstance(value, set) else ()
            for key, item in list(inner):
                self._visit(joined(name, str(key)), item)

    def _namespace(self, name: str, thing: object) -> None:
        attributes = vars(thing)
        self._names.append(_Names(name, attributes, dict(attributes)))
        for key, value in list(attributes.items()):
            self._visit(name if key in _MEMBERS else joined(name, key), value)

    # Putting back

    def _restore(self) -> list[str]:
        """Puts back what changed; returns the names of what could not be put back."""
        for _, namespace, content in self._names:
            if not _same(namespace, content):
                _refill(namespace, content)
        for _, tensor, alias, memory in self._tensors:
            if _memory(tensor) != memory:
                tensor.data = alias
                tensor.requires_grad_(memory.requires_grad)
        damage = [name for name, tensor, _, memory in self._tensors if _memory(tensor) != memory]
        return damage + [name for name, namespace, content in self._names if not _same(namespace, content)]


def joined(path: str, key: str) -> str:
    """The dotted name of a member of the module at `path`."""
    return f"{path}.{key}" if path else key


def _same(live: Any, content: Any) -> bool:
    """True if a container holds the very same objects as `content`, in the same order."""
    if len(live) != len(content):
        return False
    if isinstance(live, set):
        return bool(live == content)
    if isinstance(live, dict):
        pairs = zip(live.items(), content.items(), strict=True)
        return all(a is b and v is w for (a, v), (b, w) in pairs)
    return all(v is w for v, w in zip(live, content, strict=True))


def _refill(live: Any, content: Any) -> None:
    live.clear()
    live.extend(content) if isinstance(live, list) else live.update(content)


def _memory(t: torch.Tensor) -> _Memory:
    storage = t.untyped_storage()
    size, stride = tuple(t.shape), tuple(t.stride())
    offset = int(t.storage_offset())
    return _Memory(storage_id(t), storage.nbytes(), t.data_ptr(), offset, size, stride, t.dtype, bool(t.requires_grad))


def _told(memory: _Memory) -> str:
    return f"shape {list(memory.size)} at {memory.address:#x}"
