"""Records the operators that run while a loader is traced, and replays those behind a tensor that it computes.

A tape knows tensors as strided views of storages: of memory from before the recording, or of what a step makes. So
views need no steps, and a tape holds no memory of its own. A recipe is the steps behind some storages. It gives the
same values at every run: it begins with parameters as the loader left them, and has deterministic operators alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from weightcast.adapters.tracing.provenance import storage_id

__all__ = [
    "CONSTANTS",
    "EMPTY",
    "NotReplayableError",
    "Operand",
    "Recipe",
    "RecordedStep",
    "Tape",
    "check_order",
    "copy_step",
    "mapped",
    "operand_of",
    "operator_name",
    "tensors_in",
]

aten = torch.ops.aten

CONSTANTS = {"zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_MOVES = {
    *("_to_copy", "cat", "stack", "constant_pad_nd", "repeat", "index_select", "index", "gather", "flip", "roll"),
    *("copy_", "_foreach_copy_", "fill_", "zero_", "arange", "linspace", "tril", "triu", "amax", "amin"),
    *("scalar_tensor", "eye", *CONSTANTS, *EMPTY),
}
"""Operators beside torch's pointwise ones that give the same bits for the same inputs, on every device."""

_OVERWRITES = {"copy_", "_foreach_copy_", "fill_", "zero_"}


class NotReplayableError(Exception):
    """The steps behind a tensor cannot be run again; the message is the end of a sentence about that tensor."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A strided view of a storage, in elements; `live` is that view where the storage is from before the recording."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    whole: bool
    """It has every byte of its storage."""
    meta: bool
    live: torch.Tensor | None = None

    def covers(self, other: Operand) -> bool:
        """True if every element of `other` is one of this view; False, too, where that takes more than a look."""
        if self.storage != other.storage:
            return False
        layout = (self.size, self.stride, self.offset, self.dtype)
        return self.whole or layout == (other.size, other.stride, other.offset, other.dtype)


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One operator with its arguments, operands in place of tensors.

    `written` are the operands that it changes. `results` are those that it makes, one for each tensor that it returns,
    None for a view of an argument. `order` counts the writes into parameters before it.
    """

    operator: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    written: tuple[Operand, ...]
    results: tuple[Operand | None, ...]
    order: int

    @property
    def name(self) -> str:
        """The operator's name without namespace and overload."""
        return operator_name(self.operator)

    def reads(self) -> Iterator[Operand]:
        """The operands whose values the step needs."""
        targets = self.overwritten()
        for operand in _operands((self.args, self.kwargs)):
            if not any(operand is r for r in targets):
                yield operand

    def overwritten(self) -> tuple[Operand, ...]:
        """The operands that the step fills with values that do not depend on their old content."""
        return self.written if self.name in _OVERWRITES or "out" in self.kwargs else ()


@dataclass(slots=True)
class Tape:
    """The steps of a trace in order, and the storages of the logical tensors that it was given, by name.

    `loaded` is the number of steps of the loader; later steps belong to the end of an update session.
    """

    steps: list[RecordedStep] = field(default_factory=list)
    logical: dict[int, str] = field(default_factory=dict)
    loaded: int = 0

    def behind(self, storages: Iterable[int], steps: Sequence[RecordedStep]) -> list[RecordedStep]:
        """The part of `steps`, in order, that the final content of some storages depends on."""
        needs, dependencies = set(storages), []
        for step in reversed(steps):
            outputs = {r.storage for r in step.results if r is not None}
            if not needs & (outputs | {w.storage for w in step.written}):
                continue
            dependencies.append(step)
            needs -= outputs
            needs -= {w.storage for w in step.overwritten() if w.whole}
            needs |= {r.storage for r in step.reads()}
        return dependencies[::-1]

    def recipe(
        self, storages: frozenset[int], last_write: Mapping[int, int], changed: frozenset[int]
    ) -> list[RecordedStep]:
        """The loader's steps behind some storages. Raises NotReplayableError where they cannot be run again.

        `last_write` has the order of the last write into each storage of parameters. `changed` are other storages from
        before the recording that the loader or the end of a session writes.
        """
        steps = self.behind(storages, self.steps[: self.loaded])
        check_order(steps, last_write, changed)
        inputs = {o.storage for step in steps for o in step.reads()}.union(storages)
        names = sorted(self.logical[storage] for storage in inputs & self.logical.keys())
        if names or any(r is not None and r.meta for step in steps for r in step.results):
            suffix = f" ({steps[-1].operator})" if steps else ""
            raise NotReplayableError(
                f"is loaded or computed from checkpoint tensor {', '.join(map(repr, names[:4])) or 'unknown'}{suffix}, "
                "and is no copy of it in a parameter or persistent buffer"
            )
        for step in steps:
            if not _is_deterministic(step):
                raise NotReplayableError(f"is computed with {step.operator}, which need not give the same values again")
        return steps


def check_order(steps: Sequence[RecordedStep], last_write: Mapping[int, int], changed: frozenset[int]) -> None:
    """Checks that steps read parameters after their last write, and changed memory after they wrote it themselves.

    Raises NotReplayableError otherwise.
    """
    outputs: list[Operand] = []
    for step in steps:
        for operand in step.reads():
            if last_write.get(operand.storage, 0) > step.order:
                raise NotReplayableError("is computed from a parameter of which the loader writes more afterwards")
            if operand.storage in changed and not any(f.covers(operand) for f in outputs):
                raise NotReplayableError(f"is computed from its own or another old value ({step.operator})")
        outputs.extend(step.overwritten())
        outputs.extend(output for output in step.results if output is not None)


class Recipe:
    """Steps that recompute tensors in place, and those of their results that are bound to something afterwards."""

    def __init__(self, steps: Sequence[RecordedStep], results: Sequence[Operand] = ()) -> None:
        self.steps, self._results = tuple(steps), tuple(results)
        needs = {r.storage for r in results}
        self._done: list[set[int]] = [set() for _ in self.steps]
        for step, storages in zip(reversed(self.steps), reversed(self._done), strict=True):
            uses = {o.storage for o in _operands((step.args, step.kwargs, step.results)) if o.live is None}
            storages |= uses - needs
            needs |= uses

    def run(self) -> list[torch.Tensor]:
        """Runs the steps; returns the tensors of `results`. What a step makes is freed after its last use."""
        tensors: dict[int, torch.Tensor] = {}

        def tensor(operand: Operand) -> torch.Tensor:
            if operand.live is not None:
                return operand.live
            base = tensors[operand.storage]
            view = torch.empty(0, dtype=operand.dtype, device=base.device)
            return view.set_(base.untyped_storage(), operand.offset, operand.size, operand.stride)

        # Parameters of engines that were made in inference mode can only be written in it.
        with torch.inference_mode():
            for step, storages in zip(self.steps, self._done, strict=True):
                args, kwargs = mapped((step.args, step.kwargs), Operand, tensor)
                out = step.operator(*args, **kwargs)
                for t, output in zip(tensors_in([out]) if step.results else (), step.results, strict=True):
                    if output is None:
                        continue
                    if (tuple(t.shape), t.dtype) != (output.size, output.dtype) or tuple(t.stride()) != output.stride:
                        raise RuntimeError(
                            f"{step.operator} made {t.dtype} {tuple(t.shape)} of strides {tuple(t.stride())}, "
                            f"{output.dtype} {output.size} of strides {output.stride} when it was recorded"
                        )
                    tensors[output.storage] = t
                for storage in storages:
                    tensors.pop(storage, None)
            return [tensor(operand) for operand in self._results]


def copy_step(source: Operand, target: torch.Tensor) -> RecordedStep:
    """The step that copies an output of other steps into memory that is there."""
    destination = operand_of(target, live=True)
    return RecordedStep(aten.copy_.default, (destination, source), {}, (destination,), (None,), 0)


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among an operator's arguments or results, and in lists among them."""
    nested = (value if isinstance(value, (list, tuple)) else (value,) for value in values)
    return [item for items in nested for item in items if isinstance(item, torch.Tensor)]


def mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The arguments of an operator with every value of type `kind` changed, in lists and dicts, too."""
    # As torch's `tree_map_only`, which takes as long as all other work on an operator.
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([mapped(v, kind, change) for v in value])
    if isinstance(value, dict):
        return {k: mapped(v, kind, change) for k, v in value.items()}
    return value


def operator_name(operator: Any) -> str:
    """The name of an operator without namespace and overload."""
    return str(operator._schema.name).rpartition("::")[2]


def operand_of(t: torch.Tensor, live: bool = False) -> Operand:
    """The operand of a tensor: of one that a step of a tape made, or of `live` memory."""
    return Operand(
        storage_id(t),
        tuple(t.shape),
        tuple(t.stride()),
        int(t.storage_offset()),
        t.dtype,
        t.numel() * t.itemsize == t.untyped_storage().nbytes(),
        t.is_meta,
        t.detach() if live else None,
    )


def _operands(values: object) -> list[Operand]:
    return [value for value in tree_leaves(values) if isinstance(value, Operand)]


def _is_deterministic(step: RecordedStep) -> bool:
    tags = step.operator.tags
    if torch.Tag.nondeterministic_seeded in tags:
        return False
    return torch.Tag.pointwise in tags or step.name in _MOVES
