"""An SGLang rank as a sink: layout from SGLang's own loader, existence of slots from its placement map.

    sink = SglangSink.from_model_runner(scheduler.tp_worker.model_runner)
    layout = sink.describe()

Made for SGLang 0.5.23. Every attribute it relies on is checked when it is read. Updates write parameters in place. The
notes name tensors that SGLang's loader computes from parameters. The end of an update session computes some of them
anew (MLA's `w_kc` and `w_vc`), and `settle` the others (the `gemma_weight` of GemmaRMSNorm). What neither can is
refused.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from weightcast.adapters.checkpoint import read_headers
from weightcast.adapters.live_memory import byte_span, checkpoint_tensors, this_rank
from weightcast.adapters.sglang.experts import (
    ExpertLayer,
    attribute,
    dispatch_table,
    find_layers,
    read_placement,
    sglang_version,
)
from weightcast.adapters.sglang.slots import ExpertParameter, Held, describe_global, describe_slots
from weightcast.adapters.tracing.coverage import check_coverage
from weightcast.adapters.tracing.recorder import Fill, TracedRegion
from weightcast.adapters.tracing.strided import Box, intersect
from weightcast.adapters.tracing.trace import Trace, trace_loader
from weightcast.transfer.errors import DescribeError, StalePlanError, UpdateError
from weightcast.transfer.layout.memory import LayoutBuilder, RankLayout
from weightcast.transfer.layout.placement import RankPlacement
from weightcast.transfer.layout.tables import LayoutNotes, TensorSpec

if TYPE_CHECKING:
    import torch

    from weightcast.adapters.tracing.derived import Refresh
    from weightcast.adapters.tracing.snapshot import Binding, Snapshot

__all__ = ["SglangSink", "live_tensors", "refuse_guarded"]

_TRUE = ("1", "true")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_UNQUANTISED = "sglang.srt.layers.quantization.unquant"
_KEEPS_LAYOUT = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"}
"""Quantisation methods of the module `_UNQUANTISED` that keep the loader's layout in `process_weights_after_loading`.

Exceptions are what `_rearranged` names. So an update session in which nothing is written changes nothing.
"""


class _Writes(NamedTuple):
    """The regions and fills of one parameter in a trace."""

    regions: list[TracedRegion]
    fills: list[Fill]


class Padding(NamedTuple):
    """A box of a parameter that the loader fills."""

    parameter: torch.Tensor
    fill: Fill

    def write(self) -> None:
        """Fills the box as the loader does."""
        start, size = self.fill.box
        self.parameter[tuple(slice(o, o + n) for o, n in zip(start, size, strict=True))].fill_(self.fill.value)


class SglangSink:
    """One rank of an SGLang instance, as `weightcast.transfer.protocols.Sink`."""

    def __init__(
        self,
        model: torch.nn.Module,
        catalog: Mapping[str, TensorSpec],
        *,
        rank: int = 0,
        as_loaded: bool = False,
        is_dummy: bool = False,
    ) -> None:
        """`catalog` is every tensor of the checkpoint, named as SGLang's loader takes them; `rank` is for messages.

        `as_loaded` says that nothing was done to the weights since they were loaded. Then a quantisation method that
        repacks them afterwards is no obstacle. `is_dummy` says that no loader has written them (`--load-format dummy`):
        all numbers of the model's state are random.
        """
        self._model = model
        self._catalog = dict(catalog)
        self._rank = rank
        self._as_loaded = as_loaded
        self._is_dummy = is_dummy
        self._paddings: list[Padding] = []
        self._refresh: Refresh | None = None

    @classmethod
    def from_model_runner(cls, runner: Any, catalog: Mapping[str, TensorSpec] | None = None) -> SglangSink:
        """The sink of a `ModelRunner`. Without `catalog` the headers of the server's model path are read."""
        if catalog is None:
            catalog = read_headers(attribute(attribute(runner, "model_config"), "model_path"))
        is_dummy = attribute(attribute(runner, "load_config"), "load_format") == "dummy"
        return cls(attribute(runner, "model"), catalog, rank=this_rank(), is_dummy=is_dummy)

    def placement(self) -> RankPlacement | None:
        """The placement as SGLang's map has it now; None for a model without expert layers. Cheap, and copied."""
        return read_placement(find_layers(self._model))

    def describe(self) -> RankLayout:
        """Every byte of every parameter as regions or padding. Raises DescribeError or AgreementError, see `Sink`.

        Leaves the model as it was, whether it succeeds or not. Must not run while experts are moved, weights are loaded
        or the model computes.
        """
        try:
            return self._describe()
        except DescribeError as error:
            raise type(error)(f"rank {self._rank}: {error}") from error

    def pad(self) -> None:
        """Writes what SGLang's loader fills parameters with, where no loader has run.

        Called once, before the first update writes its first byte: a fill may lie under what is received.
        """
        import torch

        if self._is_dummy:
            with torch.inference_mode():
                for padding in self._paddings:
                    padding.write()

    def settle(self) -> None:
        """Recomputes tensors that SGLang's loader computes from parameters and its end of a session does not.

        Called after that end, once every parameter is written. Raises UpdateError.
        """
        if self._refresh is None:
            raise UpdateError(f"rank {self._rank} was not described, so what to compute anew is not known")
        try:
            self._refresh.run()
        except StalePlanError as error:
            raise StalePlanError(f"rank {self._rank}: {error}") from error
        except Exception as error:
            names = ", ".join(self._refresh.recomputed[:4])
            raise UpdateError(
                f"rank {self._rank}: {names} could not be computed anew: "
                f"{type(error).__name__}: {' '.join(str(error).split())}"
            ) from error

    def _describe(self) -> RankLayout:
        layers = find_layers(self._model)
        placement = read_placement(layers)
        self._check_methods()
        tensors = dict(live_tensors(self._model))
        required = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        trace, refresh = self._trace(tensors, required)
        self._paddings = []
        builder, padding = LayoutBuilder(), 0
        writes = _by_parameter(trace)
        names = [name for name in tensors if name in required or name in writes]
        experts = {m.name: m for m in layers}
        for name in names:
            regions, fills = self._held(name, tensors[name], writes[name], experts, placement)
            boxes = [r.box for r in regions]
            padding += check_coverage(name, tensors[name].shape, boxes, [f.box for f in fills]) * tensors[name].itemsize
            self._paddings += [Padding(tensors[name], fill) for fill in fills]
            for r in regions:
                builder.add(r.tensor, self._catalog[r.tensor].shape, r.offset, r.view, r.slot)
        dispatch, shared = dispatch_table(layers)
        notes = LayoutNotes(
            parameter_bytes=sum(tensors[name].numel() * tensors[name].itemsize for name in names),
            padding_bytes=padding,
            derived=tuple(sorted({*refresh.rewritten, *refresh.recomputed})),
            left_out=tuple(self._left_out(trace.used)),
            dispatch=dispatch,
            dispatch_shared=shared,
        )
        self._refresh = refresh
        if self._is_dummy:
            self._refuse_random({name: t for name, t in tensors.items() if name not in {*names, *notes.derived}})
        return builder.build(placement, notes)

    def _trace(self, tensors: Mapping[str, torch.Tensor], required: set[str]) -> tuple[Trace, Refresh]:
        """Traces the loader and the end of an update session, and puts back what they change about the model."""
        from weightcast.adapters.tracing.derived import find_derived
        from weightcast.adapters.tracing.snapshot import Snapshot

        modules = self._model.named_modules()
        methods = [(f"{path}.quant_method", m.quant_method) for path, m in modules if _has_method(m)]
        with Snapshot(self._model, methods) as snapshot:
            bindings: list[Binding] = []

            def end() -> None:
                _refuse_surgery(snapshot)
                bindings.extend(snapshot.rebound())
                if not self._as_loaded:
                    _end_session(self._model)

            trace = trace_loader(attribute(self._model, "load_weights"), tensors, self._catalog, end)
            _refuse_surgery(snapshot)
            computed_names = {w.parameter for w in trace.opaque} - required - {r.parameter for r in trace.regions}
            _refuse_untraceable(trace, computed_names)
            parameters = {name: t for name, t in tensors.items() if name not in computed_names}
            return trace, find_derived(trace, parameters, bindings, snapshot.rebound(), snapshot)

    def _held(
        self,
        name: str,
        t: torch.Tensor,
        writes: _Writes,
        experts: Mapping[str, ExpertLayer],
        placement: RankPlacement | None,
    ) -> tuple[list[Held], list[Fill]]:
        """The regions of one parameter and what the loader fills."""
        regions, fills = _once(writes), writes.fills
        prefix, _, local = name.rpartition(".")
        layer = experts.get(prefix)
        if layer is not None and placement is not None and t.dim() > 0:
            parameter = ExpertParameter(name, t, layer, placement, self._catalog)
            original = getattr(self._model.get_submodule(prefix), local)
            if getattr(original, "_sglang_require_global_experts", False):
                return describe_global(parameter, regions), fills
            if t.shape[0] == layer.num_slots:
                return describe_slots(parameter, regions), _fills_of_all_slots(fills, layer.num_slots)
        return [Held.as_traced(r) for r in regions], fills

    def _refuse_random(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Refuses what a dummy model cannot get: `buffers` that nobody computes, and fills of several numbers."""
        remedy = 'start the server with its checkpoint, not with "--load-format dummy"'
        for name, buffer in buffers.items():
            if buffer.is_floating_point():
                raise DescribeError(f"buffer {name!r} has random numbers, and no checkpoint tensor gives it; {remedy}")
        for padding in self._paddings:
            if math.isnan(padding.fill.value):
                raise DescribeError(
                    f"parameter {padding.fill.parameter!r}: the loader pads it with several numbers, which the trace "
                    f"does not tell apart; {remedy}"
                )

    def _check_methods(self) -> None:
        """Refuses weights that SGLang rearranges after loading, which a trace of the loader cannot see."""
        refuse_guarded(self._model)
        for name, module in self._model.named_modules():
            if getattr(module, "use_intel_amx_backend", False):
                raise DescribeError(
                    f"module {name!r}: its weights are packed for AMX, which cannot be written in place"
                )
            # The method of experts is a module itself; what a wrapper only passes on is no method of its own.
            method = module.__dict__.get("quant_method") or module._modules.get("quant_method")
            if not hasattr(method, "process_weights_after_loading"):
                continue
            kind = type(method)
            if kind.__module__ != _UNQUANTISED or kind.__name__ not in _KEEPS_LAYOUT:
                if self._as_loaded:
                    continue
                raise DescribeError(
                    f"module {name!r}: quantisation method {kind.__name__} of SGLang {sglang_version()} may rearrange "
                    "weights after loading; weightcast does not write such weights in place"
                )
            if kind.__name__ == "UnquantizedFusedMoEMethod" and (reason := _rearranged(method, module)):
                raise DescribeError(f"module {name!r}: {reason}")

    def _left_out(self, used: frozenset[str]) -> Iterator[tuple[str, str]]:
        """Checkpoint tensors that no rank of the instance holds, with the reason; not those that other ranks hold."""
        config = getattr(self._model, "config", None)
        count = getattr(config, "num_hidden_layers", None)
        for name in self._catalog:
            if name in used:
                continue
            layer = _LAYER.search(name)
            if layer is not None and count is not None and int(layer[1]) >= count:
                yield name, f"layer {layer[1]} is a draft (MTP) layer, which is no part of this model"
            elif re.search(r"(?:^|\.)mtp\.", name):
                yield name, "draft (MTP) tensors are no part of this model"
            elif "rotary_emb.inv_freq" in name:
                yield name, "rotary frequencies are computed by the engine"
            elif name == "lm_head.weight" and getattr(config, "tie_word_embeddings", False):
                yield name, "the output head is tied to the embedding"


def _has_method(module: torch.nn.Module) -> bool:
    return hasattr(module.__dict__.get("quant_method"), "__dict__")


def refuse_guarded(model: torch.nn.Module) -> None:
    """Raises DescribeError with SGLang's own sentence where it would refuse an update of the weights of `model`.

    SGLang's updates ask these two before they write (0.5.23,
    `model_executor/model_runner_components/weight_updater.py`).
    """
    from sglang.srt.model_executor.model_runner_components import weight_updater

    reason = attribute(weight_updater, "_unsupported_derived_weight_cache_error")(model)
    try:
        attribute(weight_updater.WeightUpdater, "_assert_weight_cache_inactive")(
            None, "update_weights_from_distributed"
        )
    except RuntimeError as error:
        reason = reason or str(error)
    if reason is not None:
        raise DescribeError(f"SGLang {sglang_version()} refuses updates of this model: {' '.join(reason.split())}")


def _rearranged(method: Any, module: torch.nn.Module) -> str:
    """Says how SGLang rearranges unquantised experts after loading, and the remedy; empty where it does not.

    After `UnquantizedFusedMoEMethod.process_weights_after_loading` (0.5.23, `layers/quantization/unquant.py`).
    """
    from sglang.srt.environ import envs

    if attribute(method, "use_flashinfer_trtllm_moe"):
        return (
            "FlashInfer's TRT-LLM kernels keep its experts in blocks, which are not the trainer's bytes; start the "
            "server with --moe-runner-backend triton"
        )
    if attribute(method, "w13_swiglu_interleaved") or attribute(envs, "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED").get():
        return (
            "its gate and up rows are interleaved after loading, so they are not the trainer's bytes; unset "
            "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"
        )
    if attribute(method, "_aiter_runner") is not None or os.environ.get("SGLANG_USE_AITER", "0").lower() in _TRUE:
        return "AITER shuffles its weights after loading; unset SGLANG_USE_AITER"
    if hasattr(module, "w13_kernel"):
        return "Ascend's kernels convert its weights after loading; weightcast does not write such weights in place"
    return ""


def _end_session(model: torch.nn.Module) -> None:
    """Ends a session as `end_weight_update` of SGLang 0.5.23 does for a model in whose session no load call ran.

    Source: `model_executor/model_runner_components/weight_updater.py`, with `run_post_load`.
    """
    import torch
    from sglang.srt.model_loader.loader import DefaultModelLoader, post_load_weights

    post_load_weights(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    DefaultModelLoader.postprocess_weights(model, device)


def live_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then persistent buffers, by name, without those that lie inside an earlier one (tied weights)."""
    import torch

    spans_by_storage: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for name, tensor in checkpoint_tensors(model):
        # A buffer is the object itself, so that the trace sees a loader that gives it other memory.
        t = tensor.data if isinstance(tensor, torch.nn.Parameter) else tensor
        if t.numel() == 0:
            continue
        if t.is_meta:
            raise DescribeError(f"parameter {name!r} has no memory (meta device)")
        storage, start, end = byte_span(t)
        spans = spans_by_storage[storage]
        if any(a <= start and end <= b for a, b in spans):
            continue
        if any(a < end and start < b for a, b in spans):
            raise DescribeError(f"parameter {name!r} shares a part of its memory with another parameter")
        spans.append((start, end))
        yield name, t


def _refuse_surgery(snapshot: Snapshot) -> None:
    if (change := snapshot.surgery()) is not None:
        raise DescribeError(f"the engine's loader {change}")


def _refuse_untraceable(trace: Trace, computed: set[str]) -> None:
    """Refuses writes into parameters that are no copies of checkpoint tensors; `computed` are buffers instead."""
    for name in sorted(trace.at_end - computed):
        raise DescribeError(
            f"parameter {name!r}: the engine writes it at the end of an update session, so what is received would not "
            "be what is served"
        )
    opaque = [write for write in trace.opaque if write.parameter not in computed]
    if opaque:
        w = opaque[0]
        raise DescribeError(
            f"parameter {w.parameter!r}: the loader writes box {list(w.box.start)} + {list(w.box.size)} with "
            f"{w.operator}, {w.why}; {len(opaque)} writes are no strided copies of checkpoint tensors, and "
            "those cannot be sent"
        )


def _by_parameter(trace: Trace) -> defaultdict[str, _Writes]:
    writes: defaultdict[str, _Writes] = defaultdict(lambda: _Writes([], []))
    for region in trace.regions:
        writes[region.parameter].regions.append(region)
    for fill in trace.fills:
        writes[fill.parameter].fills.append(fill)
    return writes


def _once(writes: _Writes) -> list[TracedRegion]:
    """Regions without exact repetitions. Raises DescribeError where a fill overwrites an earlier region."""
    regions = {(r.box, r.tensor, r.offset, r.view.shape): r for r in writes.regions}
    for fill in writes.fills:
        for r in regions.values():
            if fill.order > r.order and intersect(fill.box, r.box) is not None:
                raise DescribeError(
                    f"parameter {r.parameter!r}: the loader fills box {list(fill.box.start)} + {list(fill.box.size)} "
                    f"after it wrote {r.tensor!r} there"
                )
    return list(regions.values())


def _fills_of_all_slots(fills: list[Fill], slots: int) -> list[Fill]:
    """Padding inside a slot, at every slot: the loader pads only the slots that it writes."""
    boxes = {Box((slot, *fill.box.start[1:]), (1, *fill.box.size[1:])): fill for fill in fills for slot in range(slots)}
    return [replace(fill, box=box) for box, fill in boxes.items()]
