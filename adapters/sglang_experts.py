"""The expert layers of an SGLang model, and the slots that they must hold by the placement.

The loader trace says how a slot is laid out; the placement says which slots exist. The loader alone is no witness of existence: with
an a2a backend SGLang 0.5.23 writes only the first of two replicas on one rank (`eplb/expert_location.py`,
`_compute_logical_to_all_physical_map`, which `FusedMoE.weight_loader` reads).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from weightcast.adapters.loader_trace import TracedRegion
from weightcast.adapters.copies import Box
from weightcast.transfer.errors import AgreementError, DescribeError, PlacementError
from weightcast.transfer.layout import NO_SLOT, IntArray, TensorSpec
from weightcast.transfer.placement import ExpertPlacement, RankPlacement

if TYPE_CHECKING:
    import torch

__all__ = [
    "ExpertLayer",
    "Held",
    "describe_global",
    "describe_slots",
    "dispatch_table",
    "find_layers",
    "read_placement",
]

_EXPERT = re.compile(r"(?<![^.])experts\.(\d+)(?=\.)")


class Held(NamedTuple):
    """One region to advertise: the box at `offset` of logical `tensor` lies in `view`, which is `box` of its parameter."""

    tensor: str
    offset: tuple[int, ...]
    view: torch.Tensor
    slot: int
    box: Box


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A FusedMoE module: `name` in the model, and the numbers that place its slots (`fused_moe_triton/layer.py`, 0.5.23)."""

    name: str
    layer: int
    storage_rank: int
    num_local_routed: int
    num_global_routed: int
    num_shared: int
    follows_map: bool

    @property
    def num_slots(self) -> int:
        """Local slots, routed and shared."""
        return self.num_local_routed + self.num_shared


class _Answer(NamedTuple):
    """Which expert a traced region belongs to, and how its logical tensor is named for another expert."""

    expert: int | None
    before: str
    after: str
    """The name around the expert id; for a tensor with all experts along dimension 0 `before` is the name, `after` empty."""


class _Piece(NamedTuple):
    """A region of a slot relative to the slot: how every slot of the parameter is laid out."""

    before: str
    after: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    at: int
    """Elements from the start of the slot."""
    box: Box
    """Without the slot dimension."""


def sglang_version() -> str:
    """The version of the installed SGLang, for messages."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("sglang")
    except PackageNotFoundError:
        return "of unknown version"


def attribute(owner: Any, name: str) -> Any:
    """`owner.name`. Raises DescribeError naming the SGLang version where it is missing."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise DescribeError(
            f"{type(owner).__name__} of SGLang {sglang_version()} has no attribute {name!r}; this adapter was made for 0.5.23"
        ) from None


def find_layers(model: torch.nn.Module) -> list[ExpertLayer]:
    """All FusedMoE modules of a model, as they are now. Raises DescribeError for layouts this adapter does not know."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    found = []
    for name, module in model.named_modules():
        if not isinstance(module, FusedMoE):
            continue
        for flag in ("_dwdp_bound", "_mega_moe_weights_built"):
            if attribute(module, flag):
                raise DescribeError(
                    f"{name!r}: its weights are rearranged ({flag} is set), which this adapter cannot describe"
                )
        found.append(
            ExpertLayer(
                name,
                int(attribute(module, "layer_id")),
                int(attribute(module, "_expert_storage_rank")),
                int(attribute(module, "_num_local_routed")),
                int(attribute(module, "_num_global_routed")),
                int(attribute(module, "num_fused_shared_experts")),
                bool(attribute(module, "uses_expert_location")),
            )
        )
    return found


def read_placement(layers: Sequence[ExpertLayer]) -> RankPlacement | None:
    """The placement of this rank from the live map; None without expert layers. The numbers are copied.

    Raises AgreementError where layers contradict each other or the map.
    """
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    if not layers:
        return None
    first = layers[0]
    for other in layers:
        if _numbers(other) != _numbers(first):
            raise AgreementError(
                f"{first.name!r} has slots {_numbers(first)}, {other.name!r} has {_numbers(other)}; one rank has one"
            )
    metadata = get_global_expert_location_metadata()
    try:
        return RankPlacement(_whole(layers, metadata), *_numbers(first))
    except PlacementError as error:
        raise AgreementError(f"expert map and expert layers of this rank do not fit together: {error}") from error


def _whole(layers: Sequence[ExpertLayer], metadata: Any) -> ExpertPlacement:
    first = layers[0]
    if metadata is None:
        count = first.num_global_routed
        return ExpertPlacement.identity(max(m.layer for m in layers) + 1, count, count // first.num_local_routed)
    physical_to_logical = np.array(attribute(metadata, "physical_to_logical_map_cpu").numpy(), dtype=np.int64)
    num_logical = int(attribute(metadata, "num_logical_experts"))
    for m in layers:
        if not m.follows_map and m.layer < len(physical_to_logical):
            physical_to_logical[m.layer] = np.arange(physical_to_logical.shape[1]) % num_logical
    return ExpertPlacement(physical_to_logical, num_logical, int(attribute(metadata, "ep_size")))


def _numbers(m: ExpertLayer) -> tuple[int, int, int, int]:
    return m.storage_rank, m.num_local_routed, m.num_global_routed, m.num_shared


def dispatch_table(layers: Sequence[ExpertLayer]) -> tuple[IntArray, bool]:
    """What this rank's token dispatcher may choose: (layer, logical expert, physical slot) rows, and whether all ranks must agree.

    Source: `eplb/expert_location_dispatch.py`, 0.5.23: without an algorithm ids pass unchanged, "static" takes the rank's own table,
    every other algorithm any slot of the logical-to-physical map. Draft layers have no dispatch table.
    """
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
    from sglang.srt.runtime_context import get_exec

    moe = attribute(get_exec(), "moe")
    shared = bool(attribute(moe, "moe_a2a_backend") == "none")
    metadata = get_global_expert_location_metadata()
    rows = sorted({m.layer for m in layers if m.follows_map})
    if metadata is None or not rows:
        return np.empty((0, 3), dtype=np.int64), shared
    algorithm = attribute(moe, "ep_dispatch_algorithm")
    num_logical = int(attribute(metadata, "num_logical_experts"))
    if algorithm is None:
        identity = np.arange(num_logical, dtype=np.int64)
        tables = np.tile(identity[None, :, None], (len(rows), 1, 1))
    else:
        name = "logical_to_rank_dispatch_physical_map" if algorithm == "static" else "logical_to_all_physical_map_cpu"
        whole = attribute(metadata, name).cpu().numpy().astype(np.int64)
        rows = [r for r in rows if r < len(whole)]
        tables = whole[rows].reshape(len(rows), num_logical, -1)
    layer, expert, which = np.nonzero(tables != -1)
    return np.stack([np.array(rows, dtype=np.int64)[layer], expert, tables[layer, expert, which]], axis=1), shared


def describe_slots(
    parameter: str,
    data: torch.Tensor,
    layer: ExpertLayer,
    placement: RankPlacement,
    regions: Iterable[TracedRegion],
    catalog: Mapping[str, TensorSpec],
) -> list[Held]:
    """All regions of a parameter whose dimension 0 is this rank's slots: every slot of the map, whether the loader wrote it or not.

    After a scale-up SGLang 0.5.23 takes routed slots past those known at start for shared slots, and the other way round
    (`FusedMoE._map_global_expert_id_to_local_expert_id`): a routed expert in a shared slot, or a shared one in such a routed
    slot, is no evidence.

    Raises AgreementError where the loader wrote another expert into a slot than the map has, and DescribeError where
    slots are laid out differently or the checkpoint lacks a tensor.
    """
    num_logical = placement.placement.num_logical
    experts = placement.experts(layer.layer)
    first = layer.storage_rank * layer.num_local_routed
    routed: dict[int, set[_Piece]] = {}
    shared: dict[int, list[Held]] = {}
    for region in _one_slot_each(regions, data):
        slot, answer = region.box.start[0], _answer(region, num_logical, catalog)
        is_routed = answer.expert is not None and answer.expert < num_logical
        if slot >= layer.num_local_routed:
            if not is_routed:
                shared.setdefault(slot, []).append(Held(region.tensor, region.offset, region.view, NO_SLOT, region.box))
            continue
        if not is_routed and first + slot >= layer.num_global_routed:
            continue
        if answer.expert != experts[slot]:
            raise AgreementError(
                f"layer {layer.layer}, slot {slot} of storage rank {layer.storage_rank}, parameter {parameter!r}: the loader writes "
                f"{'no expert' if answer.expert is None else f'logical expert {answer.expert}'} ({region.tensor!r}), the map has "
                f"logical expert {experts[slot]}; do not update while experts move"
            )
        routed.setdefault(slot, set()).add(_relative(region, answer, data))
    template = _template(parameter, routed)
    held = [
        h
        for s in range(layer.num_local_routed)
        for h in _apply(template, data, s, int(experts[s]), s, catalog, parameter)
    ]
    for slot in range(layer.num_local_routed, layer.num_slots):
        held.extend(shared[slot] if slot in shared else _shared(template, data, slot, layer, catalog, parameter))
    return held


def describe_global(
    parameter: str,
    data: torch.Tensor,
    layer: ExpertLayer,
    placement: RankPlacement,
    regions: Iterable[TracedRegion],
    catalog: Mapping[str, TensorSpec],
) -> list[Held]:
    """All regions of a parameter that holds every physical slot of the instance on every rank (`_sglang_require_global_experts`).

    The map decides, and is not compared with the trace: SGLang 0.5.23 fills these by p % num_logical whatever the map says.
    """
    experts = placement.placement.global_slots(layer.layer)
    count = min(len(experts), data.shape[0])
    rest = data.shape[0] - layer.num_global_routed
    if rest > layer.num_shared:
        raise DescribeError(
            f"parameter {parameter!r} has {data.shape[0]} rows for {layer.num_global_routed} routed slots and {layer.num_shared} shared; "
            "which row is which is not known"
        )
    pieces: dict[int, set[_Piece]] = {}
    held = []
    for region in _one_slot_each(regions, data):
        row, answer = region.box.start[0], _answer(region, placement.placement.num_logical, catalog)
        if row >= layer.num_global_routed and row >= count:
            held.append(Held(region.tensor, region.offset, region.view, NO_SLOT, region.box))
        elif answer.expert is not None:
            pieces.setdefault(row, set()).add(_relative(region, answer, data))
    template = _template(parameter, pieces)
    for row in range(count):
        held.extend(_apply(template, data, row, int(experts[row]), NO_SLOT, catalog, parameter))
    return held


def _one_slot_each(regions: Iterable[TracedRegion], data: torch.Tensor) -> Iterator[TracedRegion]:
    """Cuts regions that span several slots."""
    for region in regions:
        count = region.box.size[0]
        if count == 1:
            yield region
            continue
        along = [d for d, n in enumerate(region.view.shape) if n == count and region.view.stride(d) == data.stride(0)]
        if not along:
            raise DescribeError(
                f"parameter {region.parameter!r}: one write covers {count} slots from {region.tensor!r}, not one expert a slot"
            )
        d = along[0]
        for i in range(count):
            offset = (*region.offset[:d], region.offset[d] + i, *region.offset[d + 1 :])
            box = Box((region.box.start[0] + i, *region.box.start[1:]), (1, *region.box.size[1:]))
            yield TracedRegion(region.parameter, box, region.tensor, offset, region.view.narrow(d, i, 1), region.order)


def _answer(region: TracedRegion, num_logical: int, catalog: Mapping[str, TensorSpec]) -> _Answer:
    found = _EXPERT.search(region.tensor)
    if found is not None:
        return _Answer(int(found[1]), region.tensor[: found.start(1)], region.tensor[found.end(1) :])
    shape = catalog[region.tensor].shape
    if len(shape) >= 1 and shape[0] == num_logical and region.view.shape[0] == 1 and "experts" in region.tensor:
        return _Answer(region.offset[0], region.tensor, "")
    return _Answer(None, region.tensor, "")


def _relative(region: TracedRegion, answer: _Answer, data: torch.Tensor) -> _Piece:
    start = data.storage_offset() + region.box.start[0] * data.stride(0)
    # The stride of a dimension of size 1 says nothing, and differs between ways to reach the same view.
    stride = tuple(s if n > 1 else 0 for n, s in zip(region.view.shape, region.view.stride(), strict=True))
    return _Piece(
        answer.before,
        answer.after,
        region.offset if answer.after else (0, *region.offset[1:]),
        tuple(region.view.shape),
        stride,
        region.view.storage_offset() - start,
        Box(region.box.start[1:], region.box.size[1:]),
    )


def _template(parameter: str, slots: Mapping[int, set[_Piece]]) -> list[_Piece]:
    """The layout that all slots share, from the slot of which the loader wrote most."""
    if not slots:
        raise DescribeError(
            f"parameter {parameter!r}: the loader writes no slot of it, so the layout of its slots is not known"
        )
    whole = max(slots.values(), key=len)
    for slot, pieces in slots.items():
        if not pieces <= whole:
            odd = next(iter(pieces - whole))
            raise DescribeError(
                f"parameter {parameter!r}: slot {slot} is laid out unlike the others (tensor {odd.before}N{odd.after}, box {odd.box})"
            )
    return sorted(whole)


def _apply(
    template: Iterable[_Piece],
    data: torch.Tensor,
    row: int,
    expert: int,
    slot: int,
    catalog: Mapping[str, TensorSpec],
    parameter: str,
) -> Iterator[Held]:
    """The template at one row of the parameter, for one logical expert."""
    for piece in template:
        name = f"{piece.before}{expert}{piece.after}" if piece.after else piece.before
        offset = piece.offset if piece.after else (expert, *piece.offset[1:])
        yield _held(piece, name, offset, data, row, slot, catalog, parameter)


def _shared(
    template: Iterable[_Piece],
    data: torch.Tensor,
    row: int,
    layer: ExpertLayer,
    catalog: Mapping[str, TensorSpec],
    parameter: str,
) -> Iterator[Held]:
    """A fused shared expert that the loader skipped: laid out like a routed one, named as DeepSeek checkpoints name it."""
    for piece in template:
        name = piece.before.removesuffix("experts.") + "shared_experts" + piece.after
        if layer.num_shared != 1 or name not in catalog:
            raise DescribeError(
                f"parameter {parameter!r}: shared slot {row} is not written by the loader, and the checkpoint has no {name!r}"
            )
        yield _held(piece, name, piece.offset, data, row, NO_SLOT, catalog, parameter)


def _held(
    piece: _Piece,
    name: str,
    offset: tuple[int, ...],
    data: torch.Tensor,
    row: int,
    slot: int,
    catalog: Mapping[str, TensorSpec],
    parameter: str,
) -> Held:
    import torch

    spec = catalog.get(name)
    if spec is None or any(o + n > full for o, n, full in zip(offset, piece.size, spec.shape, strict=True)):
        raise DescribeError(
            f"parameter {parameter!r}: row {row} holds box {list(offset)} + {list(piece.size)} of {name!r}, but the checkpoint "
            f"{'has no such tensor' if spec is None else f'has shape {list(spec.shape)}'}"
        )
    start = data.storage_offset() + row * data.stride(0) + piece.at
    view = torch.as_strided(data, piece.size, piece.stride, start)
    return Held(name, offset, view, slot, Box((row, *piece.box.start), (1, *piece.box.size)))
