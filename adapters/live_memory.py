"""The tensors of a model that belong into a checkpoint, and the memory that each of them is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from weightcast.transfer.errors import DescribeError

if TYPE_CHECKING:
    import torch

__all__ = ["byte_span", "checkpoint_tensors", "plain_memory", "this_rank"]


def checkpoint_tensors(model: torch.nn.Module, remove_duplicate: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then persistent buffers, by name; those that are tied under each of their names."""
    yield from model.named_parameters(remove_duplicate=remove_duplicate)
    for path, module in model.named_modules(remove_duplicate=remove_duplicate):
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield f"{path}.{key}".removeprefix("."), buffer


def byte_span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """The storage of a tensor, and the bytes there from its first element to the end of its last one."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    return int(tensor.untyped_storage()._cdata), start, start + extent * size


def plain_memory(tensor: torch.Tensor, refused: Callable[[str], DescribeError]) -> torch.Tensor:
    """The tensor without its autograd. Raises the error that `refused` makes of a reason, if it is not plain memory."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise refused(f"it is of type {type(tensor).__name__}, expected a torch tensor")
    view = tensor.detach()
    if type(view) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise refused(f"a {type(view).__name__} is not plain memory, as of a quantised or sharded parameter")
    if view.is_quantized:
        raise refused(f"its dtype {view.dtype} is quantised; describe the tensors of the checkpoint")
    if view.layout != torch.strided:
        raise refused(f"its layout {view.layout} is not strided")
    return view


def this_rank() -> int:
    """The rank of this process in torch.distributed, 0 where that is not initialised."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
