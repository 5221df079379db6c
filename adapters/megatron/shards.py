"""Shards of a Megatron-Core model chunk, as its own `sharded_state_dict()` states them, checked against live memory.

Written against megatron-core 0.19: dist_checkpointing/mapping.py for the entries, transformer/transformer_block.py for
layer numbers, transformer/moe/experts.py for the expert axis, transformer/mlp.py for the gate/up factory.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from weightcast.adapters.live_memory import byte_span, checkpoint_tensors, plain_memory, this_rank
from weightcast.transfer.errors import DescribeError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["LiveMemory", "Shard", "refused", "shards", "unwrapped"]


class Shard(NamedTuple):
    """One part of a global tensor: `data` lies at `offset` of the tensor `key`, which has `shape`.

    `key` has global layer numbers counted from 0, `name` is the entry's name in the model chunk. `expert` is the
    logical expert, or None. `gated` is True where Megatron split the tensor into gate and up: `shape` is then that of
    [gate; up], whatever the order in memory.
    """

    name: str
    key: str
    data: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    expert: int | None
    gated: bool


def shards(chunk: Any) -> Iterator[Shard]:
    """All shards of an unwrapped model chunk. Raises DescribeError naming the parameter."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

    _check_config(chunk.config)
    # The layer as a number in the key, not as a further axis: so all kinds of blocks are alike.
    entries = chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    for name, entry in entries.items():
        if isinstance(entry, ShardedTensor):
            yield _shard(chunk, name, entry, gated=False)
        elif isinstance(entry, ShardedTensorFactory):
            parts = entry.build()
            if not isinstance(parts, list) or len(parts) != 2:
                raise refused(name, "it is built of parts that are not gate and up")
            for part in parts:
                yield _shard(chunk, name, part, gated=True)
        elif not (isinstance(entry, ShardedObject) and name.rpartition(".")[2].startswith("_extra_state")):
            raise refused(name, f"sharded_state_dict() has a {type(entry).__name__} for it, expected a ShardedTensor")


def _check_config(config: Any) -> None:
    """Refuses options by which weights have other values, or another order, than in a checkpoint."""
    for option, effect in (
        ("moe_mlp_glu_interleave_size", "mixes gate and up rows in blocks"),
        ("moe_shared_expert_glu_interleave_size", "mixes gate and up rows in blocks"),
        ("layernorm_zero_centered_gamma", "keeps the weights of norms less 1"),
    ):
        if getattr(config, option, None):
            raise DescribeError(f"{option}={getattr(config, option)} {effect}, which no checkpoint has; unset it")


def _shard(chunk: Any, name: str, entry: Any, *, gated: bool) -> Shard:
    axis_count = int(entry.prepend_axis_num)
    expert = None
    if axis_count:
        experts = chunk.config.num_moe_experts
        if axis_count > 1 or entry.global_shape[0] != experts:
            axes = list(entry.global_shape[:axis_count])
            raise refused(name, f"{entry.key!r} has leading axes {axes}, expected one of num_moe_experts={experts}")
        expert = int(entry.global_offset[0])
    return Shard(
        name,
        entry.key,
        _plain(name, entry.data),
        tuple(int(n) for n in entry.global_shape[axis_count:]),
        tuple(int(n) for n in entry.global_offset[axis_count:]),
        expert,
        gated,
    )


class LiveMemory:
    """The parameters and persistent buffers of a chunk, and the bytes of each that shards have claimed."""

    def __init__(self, chunk: nn.Module) -> None:
        self._tensors: list[tuple[str, torch.Tensor]] = list(checkpoint_tensors(chunk, remove_duplicate=True))
        self._claimed = [0] * len(self._tensors)
        self._seen: set[tuple[int, int, int]] = set()
        by_storage: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for index, (name, tensor) in enumerate(self._tensors):
            view = _plain(name, tensor)
            if not view.is_contiguous():
                raise refused(name, f"its strides {view.stride()} are not those of a whole tensor")
            storage, start, end = byte_span(view)
            by_storage[storage].append((start, end, index))
        self._by_storage = {storage: sorted(places) for storage, places in by_storage.items()}

    def claim(self, shard: Shard) -> None:
        """Counts a shard towards the tensor that it is a view of. Raises DescribeError when there is none."""
        storage, start, end = span = byte_span(shard.data)
        places = self._by_storage.get(storage, [])
        index = bisect.bisect_right(places, (start, float("inf"))) - 1
        if start < end and (index < 0 or end > places[index][1]):
            raise refused(shard.name, "sharded_state_dict() gives a copy of it; only live memory can be sent")
        # An embedding that is tied inside a chunk is one memory with two entries.
        if start < end and span not in self._seen:
            self._seen.add(span)
            self._claimed[places[index][2]] += shard.data.nbytes

    def finish(self) -> int:
        """Number of bytes in all. Raises DescribeError naming a parameter or buffer that shards do not account for."""
        for (name, tensor), nbytes in zip(self._tensors, self._claimed, strict=True):
            if nbytes != tensor.nbytes:
                raise refused(name, f"sharded_state_dict() accounts for {nbytes} of its {tensor.nbytes} bytes")
        return sum(tensor.nbytes for _, tensor in self._tensors)


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return plain_memory(tensor, partial(refused, name))


def unwrapped(model: Any) -> Any:
    """The model chunk inside wrappers for data parallelism and mixed precision, which all call it `module`."""
    while not hasattr(model, "sharded_state_dict") or "module" in getattr(model, "_modules", ()):
        _check_gathered(model)
        inner = getattr(model, "_modules", {}).get("module")
        if inner is None:
            raise DescribeError(
                f"{type(model).__name__} is no Megatron-Core model: it has no sharded_state_dict(); "
                f"give the model chunks that get_model() returned"
            )
        model = inner
    return model


def _check_gathered(wrapper: Any) -> None:
    """Refuses weights to gather: with overlap_param_gather, parts of other ranks stay old until the next forward."""
    if not getattr(getattr(wrapper, "ddp_config", None), "overlap_param_gather", False):
        return
    groups = (*wrapper.bucket_groups, *wrapper.expert_parallel_bucket_groups)
    if any(group.param_gather_handle is not None or not group.param_gather_dispatched for group in groups):
        raise DescribeError(
            "overlap_param_gather has weights of this rank not gathered yet; call start_param_sync(force_sync=True) on "
            "every model chunk, on all ranks, before describe()"
        )


def refused(name: str, why: str) -> DescribeError:
    """The error that names a parameter and this rank."""
    return DescribeError(f"parameter {name!r} on rank {this_rank()}: {why}")
