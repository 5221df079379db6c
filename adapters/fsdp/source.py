"""A source for models sharded by FSDP2 or as DTensors: FSDP, HSDP, tensor parallel and any mix, Transformers names.

A rank's part is worked out from placements and mesh, without communication. Each region is a view of the live local
shard, in its dtype in memory; the sender casts to the destination's dtype.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from weightcast.adapters.fsdp.lora import Adapted, LoraMode, inner_model, split_adapters
from weightcast.adapters.fsdp.mesh import Cut, IndexRun, possible_runs, total
from weightcast.adapters.fsdp.transformers_names import (
    NEW_DIM,
    NameMap,
    Part,
    check_parts,
    clean_name,
    transformers_names,
    unchanged_names,
)
from weightcast.adapters.live_memory import checkpoint_tensors, plain_memory, this_rank
from weightcast.transfer.errors import DescribeError, InputError
from weightcast.transfer.layout.memory import LayoutBuilder, RankLayout
from weightcast.transfer.layout.tables import LayoutNotes

if TYPE_CHECKING:
    import torch
    from torch import nn

    from weightcast.transfer.layout.placement import RankPlacement

__all__ = ["FsdpSource"]


class _Shard(NamedTuple):
    """The local part of one parameter: the runs of global indices per dimension, and the memory in that order."""

    local: torch.Tensor
    runs: tuple[tuple[IndexRun, ...], ...]


class FsdpSource:
    """One trainer rank of an FSDP2 / DTensor model.

    Names are those of the checkpoint: for a Transformers model the names that its `save_pretrained` writes, with fused
    experts apart, for any other module its parameters' own. `names` replaces them. A model with PEFT adapters needs
    `lora`: "merged" when the trainer merges them before each update, "separate" to send them as tensors beside.

    >>> source = FsdpSource(model)
    >>> layout = source.describe()
    """

    def __init__(self, model: nn.Module, *, names: NameMap | None = None, lora: LoraMode | None = None) -> None:
        self._model, self._lora = _unwrapped(model), lora
        self._names = names or (transformers_names(self._model) if _is_transformers(self._model) else unchanged_names)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._parts: Mapping[str, tuple[Part, ...]] = {}

    def describe(self) -> RankLayout:
        """Every region that this rank holds of every parameter and persistent buffer; a rank may hold none.

        FSDP modules that a forward left unsharded are resharded first, as `state_dict` does; that is local. Raises
        DescribeError naming parameter, rank and placements.
        """
        import torch

        _reshard(self._model)
        tensors, adapter = _checkpoint_tensors(self._model, self._lora)
        self._name({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        left_out = [(name, "left out by names=") for name in tensors if not self._parts[name]]
        parts = dict(self._parts)
        if self._lora == "separate":
            parts |= unchanged_names({name: tuple(tensor.shape) for name, tensor in adapter.items()})
        else:
            left_out += [(name, "merged into the weights") for name in adapter]
        builder, parameter_bytes = LayoutBuilder(), 0
        with torch.no_grad():
            for name, tensor in (tensors | adapter).items():
                shard = _local_shard(name, tensor) if parts.get(name) else None
                if shard is None:
                    continue
                parameter_bytes += shard.local.nbytes
                for part in parts[name]:
                    for offset, view in _regions(part, shard):
                        builder.add(part.tensor, part.shape, offset, view)
        return builder.build(notes=LayoutNotes(parameter_bytes=parameter_bytes, left_out=tuple(left_out)))

    def placement(self) -> RankPlacement | None:
        """None: experts of a module stay where they are. With it a source is a sink of an engine of your own."""
        return None

    def _name(self, shapes: dict[str, tuple[int, ...]]) -> None:
        # Following the conversion of a large model takes seconds, and its result depends on the shapes alone.
        if shapes != self._shapes:
            parts = self._names(shapes)
            check_parts(parts, shapes)
            self._parts, self._shapes = parts, shapes


def _regions(part: Part, shard: _Shard) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """The common boxes of `part` and shard, one for each run: offset in the logical tensor, and view of the shard."""
    overlaps = []
    for runs, start, length in zip(shard.runs, part.start, part.size, strict=True):
        overlap = list(_meet(runs, start, start + length))
        if not overlap:
            return
        overlaps.append(overlap)
    local = shard.local
    strides = local.stride()
    for pieces in itertools.product(*overlaps):
        first_element = local.storage_offset() + sum(
            index * stride for (_, _, index), stride in zip(pieces, strides, strict=True)
        )
        offset = list(part.offset)
        size: list[int] = []
        stride: list[int] = []
        for j, dim in enumerate(part.dims):
            if dim == NEW_DIM:
                size.append(1)
                stride.append(1)
                continue
            lower, upper, _ = pieces[dim]
            offset[j] += lower - part.start[dim]
            size.append(upper - lower)
            stride.append(strides[dim])
        yield tuple(offset), local.as_strided(size, stride, first_element)


def _meet(runs: Sequence[IndexRun], low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """The runs inside low..high-1, each as (first index, end, local position of the first index)."""
    position = 0
    for start, stop in runs:
        lower, upper = max(start, low), min(stop, high)
        if lower < upper:
            yield lower, upper, position + lower - start
        position += stop - start


def _local_shard(name: str, tensor: torch.Tensor) -> _Shard | None:
    """The shard of a parameter that this rank holds; None when it holds nothing."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return _Shard(_plain(name, tensor), tuple((IndexRun(0, n),) if n else () for n in tensor.shape))
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    local = _plain(name, tensor.to_local())
    cuts = _cuts(name, tensor, coordinate)
    runs = tuple(_runs_of_dim(name, tensor, dim, cuts[dim], local) for dim in range(tensor.dim()))
    return _Shard(local, runs) if all(runs) else None


def _cuts(name: str, tensor: Any, coordinate: Sequence[int]) -> list[list[Cut]]:
    """The mesh dimensions that split each dimension of the tensor, first to last."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    cuts: list[list[Cut]] = [[] for _ in range(tensor.dim())]
    for mesh_dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, (Shard, _StridedShard)):
            raise _refused(name, tensor, f"{placement} holds no values of the parameter; redistribute it first")
        split = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        cuts[placement.dim].append(Cut(tensor.device_mesh.size(mesh_dim), coordinate[mesh_dim], split))
    return cuts


def _runs_of_dim(name: str, tensor: Any, dim: int, cuts: list[Cut], local: torch.Tensor) -> tuple[IndexRun, ...]:
    size = int(tensor.shape[dim])
    readings = possible_runs(size, cuts)
    matches = [runs for runs in readings if total(runs) == local.shape[dim]]
    if not matches:
        finding = f"dimension {dim} of size {size} has {local.shape[dim]} local indices"
        raise _refused(name, tensor, f"{finding}, expected {' or '.join(str(total(runs)) for runs in readings)}")
    if len(matches) > 1:
        ranges = " or ".join(str([(run.start, run.stop) for run in runs]) for runs in matches)
        raise _refused(name, tensor, f"dimension {dim} of size {size} may hold rows {ranges}; use sizes that divide")
    return matches[0]


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return plain_memory(tensor, partial(_refused, name, tensor))


def _refused(name: str, tensor: torch.Tensor, why: str) -> DescribeError:
    placements = getattr(tensor, "placements", None)
    mesh = f" on mesh {tuple(tensor.device_mesh.shape)}" if placements is not None else ""  # type: ignore[attr-defined]
    suffix = f", placements {tuple(placements)}{mesh}" if placements is not None else ""
    return DescribeError(f"parameter {name!r} {tuple(tensor.shape)} on rank {this_rank()}{suffix}: {why}")


def _reshard(model: nn.Module) -> None:
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _checkpoint_tensors(model: nn.Module, lora: LoraMode | None) -> Adapted:
    """Parameters and persistent buffers that belong into a checkpoint, by cleaned name, tied ones once."""
    named_tensors = {clean_name(name): tensor for name, tensor in checkpoint_tensors(model)}
    tensors, adapter = split_adapters(model, named_tensors, lora)
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        tensors.pop(name, None)
    _check_ties(model, tensors)
    tied_names = _tied_names(model, tensors)
    return Adapted({name: tensor for name, tensor in tensors.items() if name not in tied_names}, adapter)


def _tied_names(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Names to leave out because another name of the same tensor is the checkpoint's."""
    names_of = defaultdict(list)
    for name, tensor in tensors.items():
        names_of[id(tensor)].append(name)
    patterns = [
        clean_name(f"{path}.{key}".removeprefix("."))
        for path, module in model.named_modules()
        for key in getattr(module, "_tied_weights_keys", None) or ()
    ]
    tied_names: set[str] = set()
    for names in names_of.values():
        candidates = [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]
        # As in save_pretrained: targets of a tie are left out; where all are targets, the last in order stays.
        checkpoint_name = candidates[0] if candidates else max(names)
        tied_names.update(name for name in names if name != checkpoint_name)
    return tied_names


def _check_ties(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuses tied weights that are two tensors: sharded apart they train apart, and an engine ties them again."""
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        target_tensor, source_tensor = tensors.get(target), tensors.get(source)
        if target_tensor is not None and source_tensor is not None and target_tensor is not source_tensor:
            raise DescribeError(
                f"parameter {target!r} is tied to {source!r} by the model but is another tensor in memory; "
                f"shard both in one fully_shard call, or untie them in the config"
            )


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile, data-parallel wrappers and an outermost PEFT model. Raises InputError."""
    from torch.nn import Module
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    if not isinstance(model, Module):
        raise InputError(
            f"FsdpSource takes a model, found {type(model).__name__}; of named tensors take PlainSource(tensors)"
        )
    while True:
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model._modules["_orig_mod"]  # type: ignore[assignment]
        elif (inner := inner_model(model)) is not model:
            model = inner
        else:
            return model


def _is_transformers(model: nn.Module) -> bool:
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)
