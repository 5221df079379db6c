"""Checks that a parameter is ordinary strided memory, which a source can read where it lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from weightcast.transfer.errors import DescribeError

if TYPE_CHECKING:
    import torch

__all__ = ["plain_memory", "this_rank"]


def plain_memory(tensor: torch.Tensor, refused: Callable[[str], DescribeError]) -> torch.Tensor:
    """The tensor without its autograd. Raises the error that `refused` makes of a reason, if it is not plain memory."""
    import torch

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
