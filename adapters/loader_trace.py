"""Traces an engine's own weight loader into regions, without moving a byte.

The loader gets meta tensors, one per checkpoint name, under a `TorchDispatchMode`. Views of a meta tensor keep storage
offset and strides, so the final `copy_` into a parameter names both sides exactly. Nothing real is written: every
operator that would change a tensor which existed before the trace is swallowed and recorded. Tensors made on the way
(cat, clone, dtype conversion, buffers filled piece by piece) remember which boxes of which logical tensors they hold.

    trace = trace_loader(model.load_weights, dict(model.named_parameters()), read_headers(model_path))
    for region in trace.regions:
        region.view.copy_(checkpoint[region.tensor][region.box])

What is no strided copy of logical tensors is not guessed: a write that cannot be resolved is listed in `Trace.opaque`,
and a loader that reads a loaded value in Python (`.item()`, a comparison) raises DescribeError. The operators that
compute anything else than a parameter are on `Trace.tape`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightcast.adapters.copies import Aligned, Base, Box, Copy, Dim, NotABoxError, align
from weightcast.transfer.errors import DescribeError
from weightcast.transfer.layout import TensorSpec

if TYPE_CHECKING:
    import torch

    from weightcast.adapters.replay import Tape

__all__ = ["Fill", "OpaqueWrite", "Trace", "TracedRegion", "trace_loader"]


@dataclass(frozen=True, slots=True)
class TracedRegion:
    """Box `box` of `parameter` is written with the box (offset, view.shape) of logical tensor `tensor`.

    `view` is the memory of the box, its dimensions in the order of the logical tensor's; `box` is in the coordinates of
    the parameter. `order` numbers all writes of the trace.
    """

    parameter: str
    box: Box
    tensor: str
    offset: tuple[int, ...]
    view: torch.Tensor
    order: int


@dataclass(frozen=True, slots=True)
class Fill:
    """The loader fills box `box` of `parameter` with a constant: padding, unless a later copy overwrites it."""

    parameter: str
    box: Box
    order: int


@dataclass(frozen=True, slots=True)
class OpaqueWrite:
    """Operator `operator` writes box `box` of `parameter` with what is no strided copy; `why` says what."""

    parameter: str
    box: Box
    operator: str
    why: str


@dataclass(frozen=True, slots=True)
class Trace:
    """Everything the loader would have written, in that order; `used` names the logical tensors it took.

    `at_end` names the parameters that the end of an update session writes. `tape` has the operators that compute or
    write anything else than parameters. `alive` are the storages made under the trace that somebody still holds.
    """

    regions: tuple[TracedRegion, ...]
    fills: tuple[Fill, ...]
    opaque: tuple[OpaqueWrite, ...]
    used: frozenset[str]
    at_end: frozenset[str]
    tape: Tape
    alive: frozenset[int]


@dataclass(slots=True)
class Recorder:
    """Collects the writes of a trace and turns them into regions in the parameters' own coordinates."""

    parameters: Mapping[str, torch.Tensor]
    regions: list[TracedRegion] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    opaque: list[OpaqueWrite] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    order: int = 0
    """How many writes into parameters there were."""
    _bases: dict[str, Base] = field(default_factory=dict)

    def base(self, parameter: str) -> Base:
        """The parameter as allocated."""
        known = self._bases.get(parameter)
        if known is None:
            t = self.parameters[parameter]
            known = self._bases[parameter] = Base(int(t.storage_offset()), tuple(t.shape), tuple(t.stride()))
        return known

    def copied(self, parameter: str, tensor: str, logical: Base, copy: Copy) -> None:
        """One strided copy of logical `tensor` (allocated as `logical`) into a parameter. Raises NotABoxError."""
        self.used.add(tensor)
        for source in align(copy, logical, "src"):
            parts = list(align(source.copy, self.base(parameter), "dst"))
            if len(parts) == 1:
                self._region(parameter, parts[0].box, tensor, source)
                continue
            for part in parts:
                pieces = list(align(part.copy, logical, "src"))
                if len(pieces) != 1:
                    raise NotABoxError("boxes of the parameter and of the checkpoint tensor that do not fit together")
                self._region(parameter, part.box, tensor, pieces[0])

    def _region(self, parameter: str, box: Box, tensor: str, source: Aligned) -> None:
        view = self._view(parameter, source.box.size, source.other, source.copy.dst_offset)
        self.order += 1
        self.regions.append(TracedRegion(parameter, box, tensor, source.box.start, view, self.order))

    def _view(self, parameter: str, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
        import torch

        return torch.as_strided(self.parameters[parameter].data, size, stride, offset)

    def filled(self, parameter: str, copy: Copy) -> None:
        """A constant into a view of a parameter; only the destination of `copy` counts. Raises NotABoxError."""
        for piece in align(copy, self.base(parameter), "dst"):
            self.order += 1
            self.fills.append(Fill(parameter, piece.box, self.order))

    def refused(self, parameter: str, dst: torch.Tensor, operator: str, why: str) -> None:
        """A write that is no strided copy."""
        self.opaque.append(OpaqueWrite(parameter, self._around(parameter, dst), operator, why))

    def written_since(self, counts: tuple[int, int, int]) -> frozenset[str]:
        """The parameters written since there were `counts` regions, fills and opaque writes."""
        regions, fills, opaque = counts
        names = {r.parameter for r in self.regions[regions:]} | {f.parameter for f in self.fills[fills:]}
        return frozenset(names | {w.parameter for w in self.opaque[opaque:]})

    def counts(self) -> tuple[int, int, int]:
        """How many regions, fills and opaque writes there are."""
        return len(self.regions), len(self.fills), len(self.opaque)

    def _around(self, parameter: str, dst: torch.Tensor) -> Box:
        """The box of a view for a message; the whole parameter where the view is no box."""
        base = self.base(parameter)
        try:
            boxes = [piece.box for piece in align(copy_between(dst), base, "dst")]
        except NotABoxError:
            boxes = []
        return boxes[0] if len(boxes) == 1 else Box((0,) * len(base.size), base.size)


def copy_between(dst: torch.Tensor, src: torch.Tensor | None = None) -> Copy:
    """The copy of one view into another of the same shape; without `src` the source does not move."""
    steps = (0,) * dst.dim() if src is None else src.stride()
    dims = tuple(Dim(n, d, s) for n, d, s in zip(dst.shape, dst.stride(), steps, strict=True) if n > 1)
    return Copy(int(dst.storage_offset()), 0 if src is None else int(src.storage_offset()), dims)


def trace_loader(
    load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    parameters: Mapping[str, torch.Tensor],
    catalog: Mapping[str, TensorSpec],
    end: Callable[[], object] | None = None,
) -> Trace:
    """What `load_weights` would write into `parameters` if it were given every tensor of `catalog`, in that order.

    `parameters` are real tensors by name; names that share a storage are told apart by where they lie in it, and a name
    that is the same memory as an earlier one is not written separately. `end` is what the engine does at the end of an
    update session, traced after the loader. No real tensor is changed. Raises
    DescribeError when the loader or `end` raises, reads loaded values in Python, or gives a parameter other memory.
    """
    import torch

    from weightcast.adapters.loader_mode import LoaderMode

    recorder = Recorder(parameters)
    mode = LoaderMode(recorder)
    before = {name: _memory(t) for name, t in parameters.items()}
    with torch.no_grad(), mode:
        _traced(
            lambda: load_weights((name, mode.logical(name, spec)) for name, spec in catalog.items()),
            lambda: f"the engine's loader failed while it was traced, at checkpoint tensor {mode.current!r}",
        )
        counts, mode.tape.loaded = recorder.counts(), len(mode.tape.steps)
        if end is not None:
            _traced(end, lambda: "the engine's end of an update session failed while it was traced")
    for name, t in parameters.items():
        if _memory(t) != before[name]:
            raise DescribeError(
                f"the engine's loader gives parameter {name!r} other memory (was {before[name]}, is {_memory(t)}); "
                "regions over its old memory would be lost"
            )
    return Trace(
        tuple(recorder.regions),
        tuple(recorder.fills),
        tuple(recorder.opaque),
        frozenset(recorder.used),
        recorder.written_since(counts),
        mode.tape,
        mode.alive(),
    )


def _traced(work: Callable[[], object], what: Callable[[], str]) -> None:
    """Runs what is traced. What it raises becomes a DescribeError that begins with `what`."""
    try:
        work()
    except DescribeError:
        raise
    except Exception as error:
        raise DescribeError(f"{what()}: {type(error).__name__}: {' '.join(str(error).split())}") from error


def _memory(t: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]:
    return t.data_ptr(), tuple(t.shape), tuple(t.stride()), t.dtype
