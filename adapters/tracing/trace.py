"""Traces an engine's own weight loader into regions, without moving a byte.

The loader gets meta tensors, one per checkpoint name, under a `TorchDispatchMode`. Views of a meta tensor keep storage
offset and strides, so the final `copy_` into a parameter names both sides exactly. Nothing real is written: every
operator that would change a tensor which existed before the trace is swallowed and recorded. Tensors made on the way
(cat, clone, dtype conversion, buffers filled piece by piece) remember which boxes of which logical tensors they hold.

    trace = trace_loader(model.load_weights, dict(model.named_parameters()), read_headers(model_path))
    for region in trace.regions:
        region.view.copy_(checkpoint[region.tensor][region.box])

Nothing is guessed: a write that is no strided copy of logical tensors or constants is listed in `Trace.opaque`. A
loader that reads a loaded value in Python (`.item()`, a comparison) raises DescribeError. The operators that compute
anything else than a parameter are on `Trace.tape`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightcast.adapters.tracing.recorder import Fill, OpaqueWrite, Recorder, TracedRegion
from weightcast.transfer.errors import DescribeError
from weightcast.transfer.layout.tables import TensorSpec

if TYPE_CHECKING:
    import torch

    from weightcast.adapters.tracing.replay import Tape

__all__ = ["Trace", "trace_loader"]


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


def trace_loader(
    load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    parameters: Mapping[str, torch.Tensor],
    catalog: Mapping[str, TensorSpec],
    end: Callable[[], object] | None = None,
) -> Trace:
    """Traces the writes of `load_weights` into `parameters`, as if it got every tensor of `catalog` in that order.

    `parameters` are real tensors by name. Names that share a storage are told apart by their place in it; a name with
    the memory of an earlier one is not written separately. `end` is the engine's end of an update session, traced after
    the loader. No real tensor is changed. Raises DescribeError when the loader or `end` raises, reads loaded values in
    Python, or gives a parameter other memory.
    """
    import torch

    from weightcast.adapters.tracing.dispatch_mode import LoaderMode

    recorder = Recorder(parameters)
    mode = LoaderMode(recorder)
    memories = {name: _memory(t) for name, t in parameters.items()}
    with torch.no_grad(), mode:
        _traced(
            lambda: load_weights((name, mode.logical(name, spec)) for name, spec in catalog.items()),
            lambda: f"the engine's loader failed while it was traced, at checkpoint tensor {mode.current!r}",
        )
        mode.tape.loaded = len(mode.tape.steps)
        recorder.written.clear()
        if end is not None:
            _traced(end, lambda: "the engine's end of an update session failed while it was traced")
    for name, t in parameters.items():
        if _memory(t) != memories[name]:
            raise DescribeError(
                f"the engine's loader gives parameter {name!r} other memory (was {memories[name]}, is {_memory(t)}); "
                "regions over its old memory would be lost"
            )
    return Trace(
        tuple(recorder.regions),
        tuple(recorder.fills),
        tuple(recorder.opaque),
        frozenset(recorder.used),
        frozenset(recorder.written),
        mode.tape,
        mode.alive(),
    )


def _traced(work: Callable[[], object], what: Callable[[], str]) -> None:
    """Runs `work` in the trace. An error of it becomes a DescribeError that begins with `what()`."""
    try:
        work()
    except DescribeError:
        raise
    except Exception as error:
        raise DescribeError(f"{what()}: {type(error).__name__}: {' '.join(str(error).split())}") from error


def _memory(t: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]:
    return t.data_ptr(), tuple(t.shape), tuple(t.stride()), t.dtype
