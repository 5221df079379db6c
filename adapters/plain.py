"""A source for tensors that are not sharded: one process that holds every logical tensor whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from weightcast.transfer.errors import DescribeError, LayoutError
from weightcast.transfer.layout import LayoutBuilder, LayoutNotes, RankLayout

if TYPE_CHECKING:
    import torch

__all__ = ["PlainSource"]


class PlainSource:
    """Named tensors, each a whole box. Names are the checkpoint's; the mapping is read again at every `describe`.

    >>> source = PlainSource({"model.norm.weight": torch.ones(64)})
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def describe(self) -> RankLayout:
        """One region a tensor. Raises DescribeError naming a tensor that is not plain strided memory."""
        builder = LayoutBuilder()
        for name, tensor in self._tensors.items():
            view = tensor.detach()
            try:
                builder.add(name, view.shape, (0,) * view.dim(), view)
            except (LayoutError, NotImplementedError, RuntimeError) as error:
                raise DescribeError(
                    f"tensor {name!r} ({type(tensor).__name__}) is not plain strided memory: {error}"
                ) from error
        return builder.build(notes=LayoutNotes(parameter_bytes=sum(t.nbytes for t in self._tensors.values())))
