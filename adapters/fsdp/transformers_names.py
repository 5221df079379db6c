"""Names of a Transformers model's parameters in its checkpoint, and the boxes that they are cut into there.

Transformers 5 holds some weights fused: all experts of a layer are one parameter. It writes them apart, by the reverse
of its conversion table (transformers 5.19, core_model_loading.py, `revert_weight_conversion`). We run that same
function on tensors without memory. Storage and strides of each result tell which box of which parameter it is. So every
family that Transformers knows has its names. A conversion that does more than select, transpose and concatenate is
refused, not guessed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from weightcast.transfer.errors import DescribeError

if TYPE_CHECKING:
    import torch

__all__ = ["NEW_DIM", "NameMap", "Part", "check_parts", "clean_name", "transformers_names", "unchanged_names"]

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Path segments that torch.compile, activation checkpointing and FSDP1 put into names."""

NEW_DIM = -1
"""In `Part.dims`: the logical dimension has size 1 and no counterpart in the parameter."""


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a parameter that is a box of a logical tensor.

    `tensor` and `shape` are name and global shape of the logical tensor; the box begins at `offset` in it. `start` and
    `size` are the box in the parameter. `dims[j]` is the parameter's dimension that logical dimension j runs along, or
    NEW_DIM.
    """

    tensor: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    dims: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> Part:
        """The parameter itself under the name `name`."""
        zeros = (0,) * len(shape)
        return cls(name, shape, zeros, zeros, shape, tuple(range(len(shape))))


NameMap = Callable[[Mapping[str, tuple[int, ...]]], Mapping[str, tuple[Part, ...]]]
"""Names and global shapes of all parameters and buffers of the model -> the parts of each, which tile it exactly.

No part at all means that the tensor is left out on purpose.
"""


def clean_name(name: str) -> str:
    """A name without the path segments of wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def unchanged_names(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[Part, ...]]:
    """The name map of a model whose checkpoint has the parameters' own names and shapes."""
    return {name: (Part.whole(name, shape),) for name, shape in shapes.items()}


def transformers_names(model: Any) -> NameMap:
    """The name map of a `transformers.PreTrainedModel`: the names that its `save_pretrained` writes.

    The map raises DescribeError naming the parameter or logical tensor that cannot be followed.
    """
    return partial(_traced, model)


def _traced(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[Part, ...]]:
    import torch

    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        raise DescribeError(
            "names of a Transformers model are read from Transformers 5; this version has no core_model_loading: "
            "install transformers>=5 or pass names="
        ) from None

    mode = _follower()
    parameters = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    origin = {_storage(tensor): name for name, tensor in parameters.items()}
    try:
        with mode:
            outputs = revert_weight_conversion(model, dict(parameters))
    except Exception as error:
        raise DescribeError(
            f"Transformers' conversion to checkpoint names of {type(model).__name__} cannot be followed without "
            f"memory ({type(error).__name__}: {error}); pass names="
        ) from error
    parts: defaultdict[str, list[Part]] = defaultdict(list)
    for tensor, view in outputs.items():
        for box in _boxes_of(view, mode.joined):
            name = origin.get(_storage(box.view))
            part = None if name is None else _part(tensor, tuple(view.shape), box, shapes[name])
            if name is None or part is None:
                raise DescribeError(
                    f"checkpoint tensor {tensor!r} {tuple(view.shape)} is not a box of a parameter"
                    f"{'' if name is None else f' (it comes from {name!r})'}: its conversion computes; pass names="
                )
            parts[name].append(part)
    for name, shape in shapes.items():
        if not parts[name]:
            # Of two results under one name the converter keeps one.
            raise DescribeError(
                f"parameter {name!r} {shape} is in no checkpoint tensor of {type(model).__name__}; pass names="
            )
    return {name: tuple(parts[name]) for name in shapes}


def check_parts(parts: Mapping[str, tuple[Part, ...]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Checks that each parameter has no parts, or parts with all of its elements. Raises DescribeError naming it."""
    for name, shape in shapes.items():
        if name not in parts:
            raise DescribeError(f"parameter {name!r} {shape} has no entry in names=; give it () to leave it out")
        volume = sum(math.prod(part.size) for part in parts[name])
        if parts[name] and volume != math.prod(shape):
            tensors = sorted({part.tensor for part in parts[name]})
            raise DescribeError(
                f"parameter {name!r} {shape} has {math.prod(shape)} elements, but its parts have {volume} "
                f"({', '.join(tensors[:3])}{', ...' if len(tensors) > 3 else ''}); pass names="
            )


class _Box(NamedTuple):
    """A piece of a written tensor: `view` of some storage at `offset` of the tensor."""

    offset: tuple[int, ...]
    view: torch.Tensor


def _boxes_of(view: torch.Tensor, joined: Mapping[int, tuple[torch.Tensor, list[_Box]]]) -> Iterator[_Box]:
    """The pieces of a tensor: itself, or the tensors that it was concatenated from."""
    concatenation, pieces = joined.get(_storage(view), (None, []))
    # A view into a concatenation stays unresolved: its storage is no parameter's, so it is refused by name.
    if concatenation is None or concatenation.shape != view.shape or concatenation.stride() != view.stride():
        yield _Box((0,) * view.dim(), view)
        return
    for piece in pieces:
        for inner in _boxes_of(piece.view, joined):
            yield _Box(tuple(a + b for a, b in zip(piece.offset, inner.offset, strict=True)), inner.view)


def _part(tensor: str, shape: tuple[int, ...], box: _Box, parameter: tuple[int, ...]) -> Part | None:
    """The part that a view of a parameter's storage is; None for no box, as with stepped or merged dimensions."""
    if 0 in parameter:
        return Part(tensor, shape, box.offset, (0,) * len(parameter), parameter, (NEW_DIM,) * len(shape))
    strides = [math.prod(parameter[i + 1 :]) for i in range(len(parameter))]
    position = int(box.view.storage_offset())
    start = [position // stride % count for stride, count in zip(strides, parameter, strict=True)]
    size = [1] * len(parameter)
    dims = []
    for count, stride in zip(box.view.shape, box.view.stride(), strict=True):
        if count == 1:
            dims.append(NEW_DIM)
            continue
        fits = [i for i, s in enumerate(strides) if s == stride and parameter[i] != 1 and i not in dims]
        if not fits or start[fits[0]] + count > parameter[fits[0]]:
            return None
        dims.append(fits[0])
        size[fits[0]] = int(count)
    return Part(tensor, shape, box.offset, tuple(start), tuple(size), tuple(dims))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _follower() -> Any:
    """A dispatch mode under which copies of a tensor are the tensor itself and concatenations remember their pieces."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten

    class Follow(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.joined: dict[int, tuple[torch.Tensor, list[_Box]]] = {}
            # A storage that is freed may give its address to another, so results live as long as the trace.
            self.results: list[Any] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func._schema.is_mutable:
                raise DescribeError(f"the conversion writes in place ({func})")
            if func is aten.clone.default:
                return aten.alias(args[0])
            output = func(*args, **kwargs)
            if func in (aten.cat.default, aten.stack.default):
                self._remember(output, args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0), func)
            self.results.append(output)
            return output

        def _remember(self, output: torch.Tensor, pieces: list[torch.Tensor], dim: int, func: Any) -> None:
            dim %= output.dim()
            if func is aten.stack.default:
                pieces = [piece.unsqueeze(dim) for piece in pieces]
            boxes, offset = [], [0] * output.dim()
            for piece in pieces:
                boxes.append(_Box(tuple(offset), piece))
                offset[dim] += piece.shape[dim]
            self.joined[_storage(output)] = (output, boxes)

    return Follow()
