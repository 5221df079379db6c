"""Tensors that a loader computes beside the parameters, and their renewal after parameters were written in place.

The loader or the end of an update session may write or bind tensors that are no described parameters. Each of them is

- *rewritten*: the engine's own end of the session computes it, as the trace shows; or
- *recomputed*: `Refresh.run` replays the operators that the loader used, into the same memory; or
- refused, by name, before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import torch

from weightcast.adapters.tracing.provenance import same_memory, storage_id
from weightcast.adapters.tracing.recorder import Fill, TracedRegion
from weightcast.adapters.tracing.replay import (
    NotReplayableError,
    Operand,
    Recipe,
    RecordedStep,
    check_order,
    copy_step,
    operand_of,
)
from weightcast.adapters.tracing.snapshot import Binding, Snapshot
from weightcast.adapters.tracing.trace import Trace
from weightcast.transfer.errors import DescribeError, StalePlanError

__all__ = ["Refresh", "find_derived"]


class _Place(NamedTuple):
    """An attribute of a module whose memory is recomputed."""

    name: str
    module: torch.nn.Module
    key: str
    tensor: torch.Tensor
    address: int


@dataclass(frozen=True, slots=True)
class Refresh:
    """The work that is left at the end of an update session, after the engine has done its part.

    `rewritten` names what the engine computes anew itself, `recomputed` what `run` does. `missing` are attributes that
    were not there when the rank was described; they are bound to the results of the recipe, in this order.
    """

    rewritten: tuple[str, ...]
    recomputed: tuple[str, ...]
    recipe: Recipe
    places: tuple[_Place, ...]
    missing: tuple[Binding, ...]

    def run(self) -> None:
        """Recomputes tensors in place. Raises StalePlanError where one has moved since it was described."""
        for holder in self.places:
            tensor = getattr(holder.module, holder.key, None)
            is_there = isinstance(tensor, torch.Tensor) and same_memory(tensor, holder.tensor)
            if not is_there or holder.tensor.data_ptr() != holder.address:
                raise StalePlanError(
                    f"{holder.name!r}, which is computed from parameters, is not where it was described; connect again"
                )
        for bound, value in zip(self.missing, self.recipe.run(), strict=True):
            setattr(bound.module, bound.key, value)
        if any(holder.tensor.is_cuda for holder in self.places):
            torch.cuda.synchronize()  # the engine computes on streams of its own


def find_derived(
    trace: Trace,
    parameters: Mapping[str, torch.Tensor],
    loaded: Sequence[Binding],
    ended: Sequence[Binding],
    snapshot: Snapshot,
) -> Refresh:
    """Sorts all tensors beside `parameters` that the trace writes or binds.

    `loaded` are the attributes that the loader had bound when it was done, `ended` those after the end of the session.
    Raises DescribeError naming a tensor that nobody would bring up to date.
    """
    search = _Search(trace, parameters, loaded, ended, snapshot)
    search.find_written()
    search.find_bound()
    search.refuse_hidden()
    return search.refresh()


class _Search:
    """A collection of the names of what the engine rewrites, and of the storages to recompute, each with its name."""

    def __init__(
        self,
        trace: Trace,
        parameters: Mapping[str, torch.Tensor],
        loaded: Sequence[Binding],
        ended: Sequence[Binding],
        snapshot: Snapshot,
    ) -> None:
        self._loaded, self._ended = loaded, ended
        self._tape, self._alive, self._snapshot = trace.tape, trace.alive, snapshot
        self._at_end = self._tape.steps[self._tape.loaded :]
        self._load_writes = _by_storage(self._tape.steps[: self._tape.loaded])
        self._end_writes = _by_storage(self._at_end)
        self._results = {r.storage: r for step in self._tape.steps for r in step.results if r is not None}
        self._last_write = {storage_id(t): 0 for t in parameters.values()}
        writes: list[TracedRegion | Fill] = [*trace.regions, *trace.fills]
        for write in sorted(writes, key=attrgetter("order")):
            if write.parameter in parameters:
                self._last_write[storage_id(parameters[write.parameter])] = write.order
        self._written = {
            storage: operands[0]
            for storage, operands in (self._end_writes | self._load_writes).items()
            if operands[0].live is not None and storage not in self._last_write
        }
        new_storages = {storage_id(b.after) for b in loaded}.intersection(self._results)
        old_storages = {storage_id(b.before) for b in (*loaded, *ended) if b.before is not None}
        self._changed = frozenset(new_storages | old_storages | self._written.keys()) - self._last_write.keys()
        self._holders: dict[int, list[_Place]] = {}
        for name, module, key, t in snapshot.holders():
            self._holders.setdefault(storage_id(t), []).append(_Place(name, module, key, t, t.data_ptr()))
        self._rewritten: set[str] = set()
        self._wanted: dict[int, str] = {}
        self._places: list[_Place] = []
        self._bound: list[Binding] = []

    def find_written(self) -> None:
        """Sorts memory from before the trace that was written: rewritten by the engine, or to be recomputed."""
        for storage, operand in self._written.items():
            holders = self._holders.get(storage, [])
            names = [holder.name for holder in holders] or [f"of shape {list(operand.size)}, which no module names"]
            if not self._ends(storage, self._load_writes.get(storage, []), names[0]):
                self._wanted[storage] = names[0]
                self._places.extend(holders)
            else:
                self._rewritten.add(names[0])

    def find_bound(self) -> None:
        """Sorts attributes that were bound to other tensors: rewritten by the engine, or to be recomputed."""
        at_load = {(b.module, b.key): b.after for b in self._loaded}
        at_end = {(b.module, b.key): b.after for b in self._ended}
        for b in self._ended:
            if at_load.get((b.module, b.key)) is not b.after and not _is_unmoved(b):
                name = self._snapshot.name_of(b.module, b.key)
                self._check_end(storage_id(b.after), name)
                self._rewritten.add(name)
        for b in self._loaded:
            if at_end.get((b.module, b.key)) is not b.after or _is_unmoved(b):
                continue
            name = self._snapshot.name_of(b.module, b.key)
            if self._ends(storage_id(b.after), [operand_of(b.after)], name):
                self._rewritten.add(name)
            else:
                self._want(b, name)

    def _want(self, b: Binding, name: str) -> None:
        is_made = storage_id(b.after) in self._results or storage_id(b.after) in self._tape.logical
        if b.before is not None:
            if not is_made:
                raise DescribeError(f"tensor {name!r}: the loader binds it to other memory than it has")
            if (b.before.shape, b.before.dtype) != (b.after.shape, b.after.dtype):
                raise DescribeError(
                    f"tensor {name!r} has {b.before.dtype} {list(b.before.shape)}, but the loader makes it "
                    f"{b.after.dtype} {list(b.after.shape)}"
                )
            self._places.append(_Place(name, b.module, b.key, b.before, b.before.data_ptr()))
        if is_made:
            self._wanted[storage_id(b.after)] = name
        self._bound.append(b)

    def _ends(self, storage: int, at_load: Sequence[Operand], name: str) -> bool:
        """True if the end of a session writes a storage. Raises DescribeError where it leaves a part of it."""
        if storage not in self._end_writes:
            return False
        steps = self._check_end(storage, name)
        overwrites = [o for step in steps for o in step.overwritten()]
        if not all(any(a.covers(o) for a in overwrites) for o in [*at_load, *self._end_writes[storage]]):
            raise DescribeError(f"tensor {name!r}: the end of an update session computes only a part of it anew")
        return True

    def _check_end(self, storage: int, name: str) -> list[RecordedStep]:
        """The steps at the session's end behind a storage. Raises DescribeError where they begin with old values."""
        steps = self._tape.behind({storage}, self._at_end)
        try:
            check_order(steps, self._last_write, self._changed)
        except NotReplayableError as why:
            raise DescribeError(f"tensor {name!r} at the end of an update session {why}") from why
        return steps

    def refuse_hidden(self) -> None:
        """Raises DescribeError where no module's attribute shows a kept tensor that was computed from weights."""
        for storage in self._alive - {storage_id(b.after) for b in (*self._loaded, *self._ended)}:
            steps = self._tape.behind({storage}, self._tape.steps)
            inputs = {o.storage for step in steps for o in step.reads()} | {storage}
            if not inputs & (self._last_write.keys() | self._tape.logical.keys()):
                continue
            names = sorted(self._tape.logical[s] for s in inputs & self._tape.logical.keys())
            shape = f" of shape {list(self._results[storage].size)}" if storage in self._results else ""
            raise DescribeError(
                f"the loader keeps a tensor{shape}, which is or was computed from {names[:4] or 'parameters'}, where "
                "no attribute of a module shows it; it would be left at its old version"
            )

    def refresh(self) -> Refresh:
        """The refresh of all tensors to recompute. Raises DescribeError naming one that cannot be recomputed."""
        try:
            steps = self._tape.recipe(frozenset(self._wanted), self._last_write, self._changed)
        except NotReplayableError:
            self._refuse()
            raise
        steps += [copy_step(operand_of(b.after), b.before) for b in self._bound if b.before is not None]
        missing = tuple(b for b in self._bound if b.before is None)
        outputs = [operand_of(b.after, live=storage_id(b.after) not in self._results) for b in missing]
        recipe = Recipe(steps, outputs)
        recomputed = set(self._wanted.values()) - self._rewritten
        return Refresh(tuple(sorted(self._rewritten)), tuple(sorted(recomputed)), recipe, tuple(self._places), missing)

    def _refuse(self) -> None:
        """Raises DescribeError with the name of the first tensor that cannot be recomputed."""
        for storage, name in self._wanted.items():
            try:
                self._tape.recipe(frozenset({storage}), self._last_write, self._changed)
            except NotReplayableError as why:
                raise DescribeError(f"tensor {name!r} {why}; it would be left at its old version") from why


def _is_unmoved(b: Binding) -> bool:
    return b.before is not None and same_memory(b.before, b.after)


def _by_storage(steps: Sequence[RecordedStep]) -> dict[int, list[Operand]]:
    """The operands that steps write in place, by storage."""
    writes: dict[int, list[Operand]] = {}
    for step in steps:
        for operand in step.written:
            writes.setdefault(operand.storage, []).append(operand)
    return writes
