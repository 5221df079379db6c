"""The expert layers of an SGLang model, and the slots that they must hold by the placement.

The loader trace says how a slot is laid out; the placement says which slots exist. The loader alone is no witness of
existence: with an a2a backend SGLang 0.5.23 writes only the first of two replicas on one rank. (Source:
`eplb/expert_location.py`, `_compute_logical_to_all_physical_map`, which `FusedMoE.weight_loader` reads.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.errors import AgreementError, DescribeError, PlacementError
from weightcast.transfer.layout.placement import ExpertPlacement, RankPlacement

if TYPE_CHECKING:
    import torch

__all__ = ["ExpertLayer", "attribute", "dispatch_table", "find_layers", "read_placement", "sglang_version"]


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A FusedMoE module of SGLang: `name` in the model, and the numbers that place its slots."""

    name: str
    layer: int
    storage_rank: int
    num_local_routed: int
    num_global_routed: int
    num_shared: int
    follows_map: bool

    @property
    def num_slots(self) -> int:
        """Number of local slots, routed and shared."""
        return self.num_local_routed + self.num_shared


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
            f"{type(owner).__name__} of SGLang {sglang_version()} has no attribute {name!r}; this adapter was made "
            "for 0.5.23"
        ) from None


def find_layers(model: torch.nn.Module) -> list[ExpertLayer]:
    """All FusedMoE modules of a model, as they are now. Raises DescribeError for layouts this adapter does not know."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    layers = []
    for name, module in model.named_modules():
        if not isinstance(module, FusedMoE):
            continue
        for flag in ("_dwdp_bound", "_mega_moe_weights_built"):
            if attribute(module, flag):
                raise DescribeError(
                    f"{name!r}: its weights are rearranged ({flag} is set), which this adapter cannot describe"
                )
        layers.append(
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
    return layers


def read_placement(layers: Sequence[ExpertLayer]) -> RankPlacement | None:
    """The placement of this rank from the live map; None without expert layers. The numbers are copied.

    Raises AgreementError where layers contradict each other or the map.
    """
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    if not layers:
        return None
    first = layers[0]
    for layer in layers:
        if _numbers(layer) != _numbers(first):
            raise AgreementError(
                f"{first.name!r} has slots {_numbers(first)}, {layer.name!r} has {_numbers(layer)}; one rank has one"
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
    """The choices of this rank's token dispatcher: (n, 3) layer, logical expert, physical slot; True if all must agree.

    Source: `eplb/expert_location_dispatch.py`, 0.5.23. Without an algorithm ids pass unchanged, "static" takes the
    rank's own table, and every other algorithm any slot of the logical-to-physical map. Draft layers have no table.
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
        slot_map = attribute(metadata, name).cpu().numpy().astype(np.int64)
        rows = [r for r in rows if r < len(slot_map)]
        tables = slot_map[rows].reshape(len(rows), num_logical, -1)
    layer, expert, column = np.nonzero(tables != -1)
    return np.stack([np.array(rows, dtype=np.int64)[layer], expert, tables[layer, expert, column]], axis=1), shared
