"""What every source asks of a parameter: that it is ordinary strided memory, which can be read where it lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from weightcast.transfer.errors import DescribeError

if TYPE_CHECKING:
    import torch

__all__ = ["plain_memory", "this_rank"]


def plain_memory(tensor: torch.Tensor, refused: Callable[[str], DescribeError]) -> torch.Tensor:
    """The tensor without its autograd. Raises what `refused` makes of the reason where it is not plain memory."""
    import torch

    plain = tensor.detach()
    if type(plain) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise refused(f"a {type(plain).__name__} is not plain memory, as of a quantised or sharded parameter")
    if plain.is_quantized:
        raise refused(f"its dtype {plain.dtype} is quantised; describe the tensors of the checkpoint")
    if plain.layout != torch.strided:
        raise refused(f"its layout {plain.layout} is not strided")
    return plain


def this_rank() -> int:
    """The rank of this process, 0 where there are no others."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
