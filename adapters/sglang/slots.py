"""The slots of one expert parameter: laid out as the loader trace says, existing as the placement says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from weightcast.adapters.sglang.experts import ExpertLayer
from weightcast.adapters.tracing.recorder import TracedRegion
from weightcast.adapters.tracing.strided import Box
from weightcast.transfer.errors import AgreementError, DescribeError
from weightcast.transfer.layout.placement import RankPlacement
from weightcast.transfer.layout.tables import NO_SLOT, TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = ["ExpertParameter", "Held", "describe_global", "describe_slots"]

_EXPERT = re.compile(r"(?<![^.])experts\.(\d+)(?=\.)")
_ALL_EXPERTS = re.compile(r"(?<![^.])experts\.")


class Held(NamedTuple):
    """A region to advertise: the box at `offset` of logical `tensor` lies in `view`, and is `box` of its parameter."""

    tensor: str
    offset: tuple[int, ...]
    view: torch.Tensor
    slot: int
    box: Box

    @classmethod
    def as_traced(cls, region: TracedRegion) -> Held:
        """The region itself, in no routed slot."""
        return cls(region.tensor, region.offset, region.view, NO_SLOT, region.box)


class ExpertParameter(NamedTuple):
    """A parameter whose dimension 0 is slots of `layer`; `catalog` is every tensor of the checkpoint."""

    name: str
    data: torch.Tensor
    layer: ExpertLayer
    placement: RankPlacement
    catalog: Mapping[str, TensorSpec]


class _Answer(NamedTuple):
    """The expert that a traced region belongs to, and the name of its logical tensor for another expert."""

    expert: int | None
    before: str
    after: str
    """The name around the expert id. For a tensor with all experts along dimension 0 `after` is empty."""


class _Piece(NamedTuple):
    """A region relative to its slot, a piece of the layout of every slot of the parameter."""

    before: str
    after: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    at: int
    """Elements from the start of the slot."""
    box: Box
    """Without the slot dimension."""


def describe_slots(parameter: ExpertParameter, regions: Iterable[TracedRegion]) -> list[Held]:
    """All regions of a parameter whose dimension 0 is this rank's slots: every slot of the map, loaded or not.

    After a scale-up SGLang 0.5.23 takes routed slots past those known at start for shared slots, and the other way
    round (`FusedMoE._map_global_expert_id_to_local_expert_id`). So a routed expert in a shared slot is no evidence, nor
    is a shared one in such a routed slot.

    Raises AgreementError where the loader wrote another expert into a slot than the map has. Raises DescribeError where
    slots are laid out differently or the checkpoint lacks a tensor.
    """
    layer, num_logical = parameter.layer, parameter.placement.placement.num_logical
    experts = parameter.placement.experts(layer.layer)
    first_slot = layer.storage_rank * layer.num_local_routed
    routed_pieces: dict[int, set[_Piece]] = {}
    shared_entries: dict[int, list[Held]] = {}
    for region in _one_slot_each(parameter, regions):
        slot, answer = region.box.start[0], _answer(parameter, region)
        is_routed = answer.expert is not None and answer.expert < num_logical
        if slot >= layer.num_local_routed:
            if not is_routed:
                shared_entries.setdefault(slot, []).append(Held.as_traced(region))
            continue
        if not is_routed and first_slot + slot >= layer.num_global_routed:
            continue
        if answer.expert != experts[slot]:
            raise AgreementError(
                f"layer {layer.layer}, slot {slot} of storage rank {layer.storage_rank}, parameter {parameter.name!r}: "
                f"the loader writes {'no expert' if answer.expert is None else f'logical expert {answer.expert}'} "
                f"({region.tensor!r}), the map has logical expert {experts[slot]}; do not update while experts move"
            )
        routed_pieces.setdefault(slot, set()).add(_relative(parameter, region, answer))
    template = _template(parameter, routed_pieces)
    entries: list[Held] = []
    for slot in range(layer.num_local_routed):
        entries.extend(_routed(parameter, template, slot, int(experts[slot]), slot))
    for slot in range(layer.num_local_routed, layer.num_slots):
        entries.extend(shared_entries[slot] if slot in shared_entries else _shared(parameter, template, slot))
    return entries


def describe_global(parameter: ExpertParameter, regions: Iterable[TracedRegion]) -> list[Held]:
    """All regions of a parameter that holds every physical slot on every rank (`_sglang_require_global_experts`).

    The map decides, and is not compared with the trace: SGLang 0.5.23 fills these by p % num_logical whatever the map
    says.
    """
    layer = parameter.layer
    experts = parameter.placement.placement.global_slots(layer.layer)
    row_count = parameter.data.shape[0]
    count = min(len(experts), row_count)
    if row_count - layer.num_global_routed > layer.num_shared:
        raise DescribeError(
            f"parameter {parameter.name!r} has {row_count} rows for {layer.num_global_routed} routed slots and "
            f"{layer.num_shared} shared; which row is which is not known"
        )
    pieces: dict[int, set[_Piece]] = {}
    entries = []
    for region in _one_slot_each(parameter, regions):
        row, answer = region.box.start[0], _answer(parameter, region)
        if row >= layer.num_global_routed and row >= count:
            entries.append(Held.as_traced(region))
        elif answer.expert is not None:
            pieces.setdefault(row, set()).add(_relative(parameter, region, answer))
    template = _template(parameter, pieces)
    for row in range(count):
        entries.extend(_routed(parameter, template, row, int(experts[row]), NO_SLOT))
    return entries


def _one_slot_each(parameter: ExpertParameter, regions: Iterable[TracedRegion]) -> Iterator[TracedRegion]:
    """Cuts regions that span several slots."""
    slot_stride = parameter.data.stride(0)
    for region in regions:
        count = region.box.size[0]
        if count == 1:
            yield region
            continue
        dims = [d for d, n in enumerate(region.view.shape) if n == count and region.view.stride(d) == slot_stride]
        if not dims:
            raise DescribeError(
                f"parameter {parameter.name!r}: one write covers {count} slots from {region.tensor!r}, not one "
                "expert a slot"
            )
        d = dims[0]
        for i in range(count):
            offset = (*region.offset[:d], region.offset[d] + i, *region.offset[d + 1 :])
            box = Box((region.box.start[0] + i, *region.box.start[1:]), (1, *region.box.size[1:]))
            yield replace(region, box=box, offset=offset, view=region.view.narrow(d, i, 1))


def _answer(parameter: ExpertParameter, region: TracedRegion) -> _Answer:
    match = _EXPERT.search(region.tensor)
    if match is not None:
        return _Answer(int(match[1]), region.tensor[: match.start(1)], region.tensor[match.end(1) :])
    shape, num_logical = parameter.catalog[region.tensor].shape, parameter.placement.placement.num_logical
    if shape[:1] == (num_logical,) and region.view.shape[0] == 1 and _ALL_EXPERTS.search(region.tensor):
        return _Answer(region.offset[0], region.tensor, "")
    return _Answer(None, region.tensor, "")


def _relative(parameter: ExpertParameter, region: TracedRegion, answer: _Answer) -> _Piece:
    # The stride of a dimension of size 1 says nothing, and differs between ways to reach the same view.
    stride = tuple(s if n > 1 else 0 for n, s in zip(region.view.shape, region.view.stride(), strict=True))
    return _Piece(
        answer.before,
        answer.after,
        region.offset if answer.after else (0, *region.offset[1:]),
        tuple(region.view.shape),
        stride,
        int(region.view.storage_offset()) - _row_start(parameter, region.box.start[0]),
        Box(region.box.start[1:], region.box.size[1:]),
    )


def _row_start(parameter: ExpertParameter, row: int) -> int:
    return int(parameter.data.storage_offset()) + row * parameter.data.stride(0)


def _template(parameter: ExpertParameter, slots: Mapping[int, set[_Piece]]) -> list[_Piece]:
    """The layout that all slots share, from the slot of which the loader wrote most."""
    if not slots:
        raise DescribeError(
            f"parameter {parameter.name!r}: the loader writes no slot of it, so the layout of its slots is not known"
        )
    layout = max(slots.values(), key=len)
    for slot, pieces in slots.items():
        if not pieces <= layout:
            piece = next(iter(pieces - layout))
            raise DescribeError(
                f"parameter {parameter.name!r}: slot {slot} is laid out unlike the others "
                f"(tensor {piece.before}N{piece.after}, box {list(piece.box.start)} + {list(piece.box.size)})"
            )
    return sorted(layout)


def _routed(parameter: ExpertParameter, template: Iterable[_Piece], row: int, expert: int, slot: int) -> Iterator[Held]:
    """The template at one row of the parameter, for one logical expert."""
    for piece in template:
        name = f"{piece.before}{expert}{piece.after}" if piece.after else piece.before
        offset = piece.offset if piece.after else (expert, *piece.offset[1:])
        yield _held(parameter, piece, name, offset, row, slot)


def _shared(parameter: ExpertParameter, template: Iterable[_Piece], row: int) -> Iterator[Held]:
    """A fused shared expert that the loader skipped: laid out like a routed one, named as in DeepSeek checkpoints."""
    for piece in template:
        name = piece.before.removesuffix("experts.") + "shared_experts" + piece.after
        if parameter.layer.num_shared != 1 or name not in parameter.catalog:
            raise DescribeError(
                f"parameter {parameter.name!r}: the loader does not write shared slot {row}, and the checkpoint has no "
                f"{name!r}"
            )
        yield _held(parameter, piece, name, piece.offset, row, NO_SLOT)


def _held(parameter: ExpertParameter, piece: _Piece, name: str, offset: tuple[int, ...], row: int, slot: int) -> Held:
    import torch

    spec = parameter.catalog.get(name)
    if spec is None or any(o + n > extent for o, n, extent in zip(offset, piece.size, spec.shape, strict=True)):
        raise DescribeError(
            f"parameter {parameter.name!r}: row {row} holds box {list(offset)} + {list(piece.size)} of {name!r}, but "
            f"the checkpoint {'has no such tensor' if spec is None else f'has shape {list(spec.shape)}'}"
        )
    view = torch.as_strided(parameter.data, piece.size, piece.stride, _row_start(parameter, row) + piece.at)
    return Held(name, offset, view, slot, Box((row, *piece.box.start), (1, *piece.box.size)))
