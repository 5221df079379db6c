"""Sources that are not sharded: tensors that one process holds whole, and a checkpoint on disk."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from weightcast.adapters.checkpoint import stored_tensors
from weightcast.adapters.live_memory import plain_memory
from weightcast.transfer.errors import DescribeError, InputError, LayoutError
from weightcast.transfer.layout.dtypes import ITEMSIZE, dtype_code, to_torch
from weightcast.transfer.layout.memory import LayoutBuilder, RankLayout
from weightcast.transfer.layout.tables import LayoutNotes

if TYPE_CHECKING:
    import torch

__all__ = ["CheckpointSource", "PlainSource"]


class PlainSource:
    """Named tensors, each a whole box. Names are the checkpoint's; the mapping is read again at every `describe`.

    >>> source = PlainSource({"model.norm.weight": torch.ones(64)})
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if not isinstance(tensors, Mapping):
            raise InputError(
                f"PlainSource takes a mapping of names to tensors, found {type(tensors).__name__}; "
                "of a model take FsdpSource(model)"
            )
        self._tensors = tensors

    def describe(self) -> RankLayout:
        """One region a tensor. Raises DescribeError naming a tensor that is not plain strided memory."""
        builder = LayoutBuilder()
        for name, tensor in self._tensors.items():
            view = plain_memory(tensor, partial(_refused, name))
            builder.add(name, view.shape, (0,) * view.dim(), view)
        return builder.build(notes=LayoutNotes(parameter_bytes=sum(t.nbytes for t in self._tensors.values())))


class CheckpointSource:
    """A safetensors checkpoint on disk: the first load of an engine, or its recovery without a trainer.

    `folder` has one or more `*.safetensors` files, with an index or without. They are mapped, and a weight is read when
    it is sent. With several processes, number `rank` of `world_size` has each `world_size`-th tensor. The files must
    not be changed in place while the source lives.

    >>> source = CheckpointSource("/models/qwen3-moe")
    """

    def __init__(self, folder: str | os.PathLike[str], *, rank: int = 0, world_size: int = 1) -> None:
        self._folder = Path(folder)
        self._rank, self._world_size = rank, world_size
        self._layout: RankLayout | None = None

    def describe(self) -> RankLayout:
        """One region a tensor, each a whole box.

        Raises LayoutError naming a file that is no checkpoint, DescribeError naming a tensor that cannot be mapped.
        """
        if self._layout is None:
            self._layout = self._describe()
        return self._layout

    def _describe(self) -> RankLayout:
        import torch

        builder, files, parameter_bytes = LayoutBuilder(), dict[str, torch.UntypedStorage](), 0
        for name, entry in list(stored_tensors(self._folder).items())[self._rank :: self._world_size]:
            if entry.file not in files:
                files[entry.file] = _mapped(self._folder / entry.file)
            (shape, dtype), size = entry.spec, int(ITEMSIZE[dtype_code(entry.spec.dtype)])
            if entry.start % size:
                raise DescribeError(
                    f"tensor {name!r} begins at byte {entry.start} of {str(self._folder / entry.file)!r}, which the "
                    f"{size} bytes of {dtype} do not divide; write the checkpoint again"
                )
            empty = torch.empty(0, dtype=to_torch(dtype))
            stride = torch.empty(shape, device="meta").stride()
            view = empty.set_(files[entry.file], entry.start // size, shape, stride)
            builder.add(name, shape, (0,) * len(shape), view)
            parameter_bytes += view.nbytes
        return builder.build(notes=LayoutNotes(parameter_bytes=parameter_bytes))


def _refused(name: str, why: str) -> DescribeError:
    return DescribeError(f"tensor {name!r}: {why}")


def _mapped(path: Path) -> torch.UntypedStorage:
    """The bytes of a file, read when they are touched. Raises LayoutError naming the file."""
    import torch

    try:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise LayoutError(f"cannot map {str(path)!r}: {error}") from None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapping, dtype=torch.uint8).untyped_storage()
