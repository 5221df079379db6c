"""What a Megatron-Core model chunk holds, as its own `sharded_state_dict()` states it, checked against live memory.

Written against megatron-core 0.19: dist_checkpointing/mapping.py for the entries, transformer/transformer_block.py for
layer numbers, transformer/moe/experts.py for the expert axis, transformer/mlp.py for the gate/up factory.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from weightcast.adapters.live_memory import plain_memory, this_rank
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
    """All of a model chunk (not wrapped). Raises DescribeError naming the parameter."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

    _check_config(chunk.config)
    # Layers by number in the key instead of as a further axis: then it is the same for all kinds of blocks.
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
    """Options that make weights other numbers, or in another order, than a checkpoint has them."""
    for option, what in (
        ("moe_mlp_glu_interleave_size", "mixes gate and up rows in blocks"),
        ("moe_shared_expert_glu_interleave_size", "mixes gate and up rows in blocks"),
        ("layernorm_zero_centered_gamma", "keeps the weights of norms less 1"),
    ):
        if getattr(config, option, None):
            raise DescribeError(f"{option}={getattr(config, option)} {what}, which no checkpoint has; unset it")


def _shard(chunk: Any, name: str, entry: Any, *, gated: bool) -> Shard:
    prepended = int(entry.prepend_axis_num)
    expert = None
    if prepended:
        experts = chunk.config.num_moe_experts
        if prepended > 1 or entry.global_shape[0] != experts:
            axes = list(entry.global_shape[:prepended])
            raise refused(name, f"{entry.key!r} has leading axes {axes}, expected one of num_moe_experts={experts}")
        expert = int(entry.global_offset[0])
    return Shard(
        name,
        entry.key,
        _plain(name, entry.data),
        tuple(int(n) for n in entry.global_shape[prepended:]),
        tuple(int(n) for n in entry.global_offset[prepended:]),
        expert,
        gated,
    )


class LiveMemory:
    """The parameters and persistent buffers of a chunk, and how much of each has been claimed by shards."""

    def __init__(self, chunk: nn.Module) -> None:
        self._tensors: list[tuple[str, torch.Tensor]] = list(_checkpoint_tensors(chunk))
        self._claimed = [0] * len(self._tensors)
        self._seen: set[tuple[int, int, int]] = set()
        by_storage: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for index, (name, tensor) in enumerate(self._tensors):
            plain = _plain(name, tensor)
            if not plain.is_contiguous():
                raise refused(name, f"its strides {plain.stride()} are not those of a whole tensor")
            storage, start, size = _place(plain)
            by_storage[storage].append((start, start + size, index))
        self._by_storage = {storage: sorted(places) for storage, places in by_storage.items()}

    def claim(self, shard: Shard) -> None:
        """Count a shard to the tensor that it is a view of. Raises DescribeError when there is none."""
        storage, start, size = place = _place(shard.data)
        places = self._by_storage.get(storage, [])
        at = bisect.bisect_right(places, (start, float("inf"))) - 1
        if size and (at < 0 or start + size > places[at][1]):
            raise refused(shard.name, "sharded_state_dict() gives a copy of it; only live memory can be sent")
        # An embedding that is tied inside of a chunk is one memory under two entries.
        if size and place not in self._seen:
            self._seen.add(place)
            self._claimed[places[at][2]] += shard.data.nbytes

    def finish(self) -> int:
        """Bytes in all. Raises DescribeError naming a parameter or buffer that no shard accounts for."""
        for (name, tensor), claimed in zip(self._tensors, self._claimed, strict=True):
            if claimed != tensor.nbytes:
                raise refused(name, f"sharded_state_dict() accounts for {claimed} of its {tensor.nbytes} bytes")
        return sum(tensor.nbytes for _, tensor in self._tensors)


def _place(tensor: torch.Tensor) -> tuple[int, int, int]:
    """(storage, first byte in it, bytes from the first to the last element)."""
    size = tensor.element_size()
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset()) * size, extent * size


def _checkpoint_tensors(chunk: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers, each once."""
    yield from chunk.named_parameters()
    for path, module in chunk.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield f"{path}.{key}" if path else key, buffer


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return plain_memory(tensor, partial(refused, name))


def unwrapped(model: Any) -> Any:
    """The model chunk inside wrappers for data parallelism and mixed precision, which all call it `module`."""
    while not hasattr(model, "sharded_state_dict") or "module" in model._modules:
        _check_gathered(model)
        inner = model._modules.get("module")
        if inner is None:
            raise DescribeError(
                f"{type(model).__name__} is no Megatron-Core model: it has no sharded_state_dict(); "
                f"give the model chunks that get_model() returned"
            )
        model = inner
    return model


def _check_gathered(wrapper: Any) -> None:
    """With overlap_param_gather the parts of other ranks stay old after a step, until the next forward."""
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
