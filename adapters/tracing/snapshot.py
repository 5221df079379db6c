"""Everything that a model's own code can change about a model while it is traced, to be seen and put back.

    with Snapshot(model) as snapshot:
        ...                         # code that binds attributes, deletes modules, gives parameters other memory
        snapshot.rebound()          # which tensors it bound
    # all is as it was, or an error says what is not

Values are not copied: who lets code run here sees that it writes no memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from weightcast.adapters.tracing.provenance import storage_id
from weightcast.transfer.errors import DescribeError

__all__ = ["Bound", "Snapshot"]

_CONTAINERS = (dict, OrderedDict, list, set)


class Bound(NamedTuple):
    """A tensor that a module holds as a buffer or attribute where it held another one before, or none."""

    module: torch.nn.Module
    key: str
    before: torch.Tensor | None
    after: torch.Tensor


class _Memory(NamedTuple):
    """Where a tensor lies, and how it is laid out there."""

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
            path: {kind: dict(vars(module)[kind]) for kind in ("_parameters", "_buffers", "_modules")}
            for path, module in self._modules.items()
        }
        for path, module in self._modules.items():
            self._visit(path, module)
        for name, thing in others:
            self._namespace(name, thing)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        damage = self._restore()
        if damage:
            raise DescribeError(
                f"THE ENGINE IS DAMAGED, restart it: its own code changed {damage[0]} while it was traced, and that "
                f"could not be put back ({len(damage)} such changes)"
            ) from error

    def rebound(self) -> list[Bound]:
        """Buffers and attributes of modules that hold another tensor than before. Those that hold none now are not."""
        bound = []
        for path, module in self._modules.items():
            for now, before in (
                (vars(module), self._attributes[path]),
                (module._buffers, self._members[path]["_buffers"]),
            ):
                for key, value in now.items():
                    old = before.get(key)
                    if isinstance(value, torch.Tensor) and value is not old:
                        bound.append(Bound(module, key, old if isinstance(old, torch.Tensor) else None, value))
        return bound

    def surgery(self) -> str | None:
        """In words, a module, parameter or buffer that is there no more, is new, or has other memory; None if none."""
        for path, module in self._modules.items():
            for kind, before in self._members[path].items():
                now = vars(module).get(kind, {})
                for key in before.keys() ^ now.keys():
                    what = "deletes" if key in before else "adds"
                    return f"{what} {kind.strip('_').removesuffix('s')} {joined(path, key)!r}"
                for key in before.keys() if kind == "_modules" else ():
                    if before[key] is not now[key]:
                        return f"replaces module {joined(path, key)!r}"
        for name, tensor, _, memory in self._tensors:
            if isinstance(tensor, torch.nn.Parameter) and _memory(tensor) != memory:
                return (
                    f"gives parameter {name!r} other memory (was {_told(memory)}, is {_told(_memory(tensor))}); "
                    "regions over its old memory would be lost"
                )
        for path, module in self._modules.items():
            for key, old in self._members[path]["_parameters"].items():
                new = module._parameters[key]
                if old is not new and (old is None or new is None or _memory(old)[:-1] != _memory(new)[:-1]):
                    return f"replaces parameter {joined(path, key)!r}"
        return None

    def holders(self) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor]]:
        """Every buffer and tensor attribute that was there: its name, module and key."""
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
            is_member = key in ("_parameters", "_buffers", "_modules")
            if is_member and isinstance(value, dict):
                self._names.append(_Names(name, value, value.copy()))
                for member, item in value.items():
                    self._visit(joined(name, member), item)
            else:
                self._visit(joined(name, key), value)

    # Putting back

    def _restore(self) -> list[str]:
        """Puts back what changed; the names of what could not be."""
        for _, live, content in self._names:
            if not _same(live, content):
                _refill(live, content)
        for _, tensor, alias, memory in self._tensors:
            if _memory(tensor) != memory:
                tensor.data = alias
                tensor.requires_grad_(memory.requires_grad)
        damage = [name for name, tensor, _, memory in self._tensors if _memory(tensor) != memory]
        return damage + [name for name, live, content in self._names if not _same(live, content)]


def joined(path: str, key: str) -> str:
    """The name of a member of a module."""
    return f"{path}.{key}" if path else key


def _same(live: Any, content: Any) -> bool:
    """Returns whether a container holds the very same things, in the same order."""
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
