"""The dispatch mode behind `trace_loader`: it lets no write to a real tensor pass, and remembers the origin of data.

It tells three kinds of storage apart. A *record* is a storage whose content is boxes of logical tensors and
constants: the logical tensors themselves, and whatever was copied together from them. A *temporary* is a real storage
that the loader made during the trace; it may be written. Everything else existed before, and stays as it is.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from weightcast.adapters.tracing.provenance import (
    Piece,
    Record,
    Temporary,
    as_allocated,
    check_lossless,
    constant_piece,
    pieces_of,
    same_memory,
    storage_id,
)
from weightcast.adapters.tracing.recorder import Recorder, copy_between
from weightcast.adapters.tracing.replay import (
    CONSTANTS,
    EMPTY,
    Operand,
    RecordedStep,
    Tape,
    mapped,
    operand_of,
    operator_name,
    tensors_in,
)
from weightcast.adapters.tracing.strided import Box, Copy, NotABoxError, align
from weightcast.transfer.errors import DescribeError
from weightcast.transfer.layout.dtypes import to_torch
from weightcast.transfer.layout.tables import TensorSpec

__all__ = ["LoaderMode"]

aten = torch.ops.aten

_COPIES = {aten.clone.default, aten._to_copy.default}
_COPY_IN_PLACE = {aten.copy_.default, aten.fill_.Tensor}
_FILLS = {aten.fill_.Scalar, aten.zero_.default}
_NO_DATA = CONSTANTS | EMPTY | {"rand_like", "randn_like"}
Targets = list[tuple[frozenset[str], Any]]
_ASKS_NO_VALUE = {aten.is_same_size.default, aten.is_pinned.default}


class LoaderMode(TorchDispatchMode):
    """Use as a context around the loader; `logical` makes its inputs, the recorder gets its writes.

    The tape gets the operators that make or change anything but parameters.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = ""
        self.tape = Tape()
        self._is_input = False
        self._elsewhere: set[int] = set()
        self._recorder = recorder
        self._records: dict[int, Record] = {}
        self._temporaries: dict[int, Temporary] = {}
        self._logical: dict[str, Record] = {}
        self._parameters: dict[int, list[str]] = {}
        for name, t in recorder.parameters.items():
            self._parameters.setdefault(storage_id(t), []).append(name)

    def logical(self, name: str, spec: TensorSpec) -> torch.Tensor:
        """The meta tensor that stands for a logical tensor. Raises LayoutError for an unknown dtype."""
        self.current = name
        self._is_input = True
        t = torch.empty(spec.shape, dtype=to_torch(spec.dtype), device="meta")
        self._is_input = False
        base = as_allocated(t)
        piece = Piece(Box((0,) * t.dim(), base.size), name, 0, base.stride)
        self._records[storage_id(t)] = self._logical[name] = Record(base, t.dtype, [piece], alive=_weakly(t))
        self.tape.logical[storage_id(t)] = name
        return t

    def alive(self) -> frozenset[int]:
        """The storages made under the trace that are still held by somebody."""
        for _ in range(2):
            storages = {k for k, record in self._records.items() if not record.alive.expired()}
            storages |= {k for k, temporary in self._temporaries.items() if not temporary.alive.expired()}
            if not storages:
                break
            gc.collect()
        return frozenset(storages)

    def _record(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        *,
        written: Sequence[torch.Tensor] = (),
        results: Sequence[torch.Tensor | None] = (),
    ) -> None:
        """Puts an operator on the tape that writes some of its arguments or returns new tensors."""
        operands: dict[int, Operand] = {}

        def operand(t: torch.Tensor) -> Operand:
            if id(t) not in operands:
                is_live = storage_id(t) not in self._records and storage_id(t) not in self._temporaries
                operands[id(t)] = operand_of(t, is_live)
            return operands[id(t)]

        step_args, step_kwargs = mapped((args, kwargs), torch.Tensor, operand)
        written_operands = tuple(operand(t) for t in written)
        result_operands = tuple(None if t is None else operand(t) for t in results)
        step = RecordedStep(func, step_args, step_kwargs, written_operands, result_operands, self._recorder.order)
        self.tape.steps.append(step)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_input:
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled():
            # Without autograd nobody has taken composite operators (chunk, to, contiguous) apart yet.
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        arguments = tensors_in([*args, *kwargs.values()])
        written = _written(func, args, kwargs)
        if written:
            return self._mutate(func, args, kwargs, arguments, written)
        placeholders = [t for t in arguments if self._is_known(t)]
        if placeholders:
            return self._derive(func, args, kwargs, arguments, placeholders)
        return self._compute(func, args, kwargs, arguments)

    def _is_known(self, t: torch.Tensor) -> bool:
        """True if the tensor has no values to compute with: on the meta device, or with writes only recorded."""
        return t.is_meta or storage_id(t) in self._records

    # Operators that write

    def _mutate(self, func: Any, args: Any, kwargs: Any, arguments: list[torch.Tensor], targets: Targets) -> Any:
        written = tensors_in(value for _, value in targets)
        reads_placeholders = any(self._is_known(t) for t in arguments)
        if not reads_placeholders and all(storage_id(t) in self._temporaries for t in written):
            for t in written:
                temporary = self._temporaries[storage_id(t)]
                value = _fill_value(args) if func in _FILLS else None
                covers = temporary.constant == value or t.numel() == Box((), temporary.base.size).numel
                is_constant = value is not None and (covers or temporary.constant is not None)
                temporary.constant = value if covers else math.nan if is_constant else None
                temporary.parameter = temporary.parameter or self._parameter_behind(arguments)
            self._record(func, args, kwargs, written=written)
            return func(*args, **kwargs)
        opaque_count = len(self._recorder.opaque)
        if func in _COPY_IN_PLACE:
            self._write(args[0], args[1], str(func))
        elif func is aten._foreach_copy_.default:
            for dst, src in zip(args[0], args[1], strict=True):
                self._write(dst, src, str(func))
        elif func in _FILLS:
            self._write(args[0], _fill_value(args), str(func))
        else:
            names = self._names(*arguments)
            for t in written:
                self._spoil(t, str(func), names, "is no copy")
        storages = [storage_id(t) for t in written if self._parameter_of(t) is None]
        if storages or len(self._recorder.opaque) > opaque_count:
            self._record(func, args, kwargs, written=written)
            self._elsewhere.update(storages)
        return self._returned(func, targets)

    def _returned(self, func: Any, targets: Targets) -> Any:
        """The results of a swallowed operator: the arguments that its schema says it returns."""
        by_alias, values = dict(targets), []
        for output in func._schema.returns:
            key = frozenset(output.alias_info.before_set) if output.alias_info is not None else None
            if key not in by_alias:
                raise DescribeError(
                    f"the engine's loader calls {func} at checkpoint tensor {self.current!r}, which writes and "
                    "computes at once; it cannot be traced"
                )
            values.append(by_alias[key])
        return None if not values else values[0] if len(values) == 1 else tuple(values)

    def _write(self, dst: torch.Tensor, src: torch.Tensor | float, operator: str) -> None:
        """Records a copy, or a fill where `src` is a number."""
        if dst.numel() == 0 or (isinstance(src, torch.Tensor) and same_memory(dst, src)):
            return
        try:
            copies = list(self._copies(dst, src))
            if (parameter := self._parameter_of(dst)) is not None:
                self._write_parameter(parameter, dst, copies)
                return
            record = self._record_for(dst)
            if record is None:
                self._recorder.used.update(name for name, _, _ in copies if isinstance(name, str))
                return
            if dst.dtype != record.dtype:
                raise NotABoxError(f"{dst.dtype} written over {record.dtype}")
            for name, copy, dtypes in copies:
                for piece in align(copy, record.base, "dst"):
                    path = (*dtypes, record.dtype)
                    record.pieces.append(Piece(piece.box, name, piece.copy.src_offset, piece.other, path))
        except NotABoxError as why:
            self._spoil(dst, operator, self._names(*tensors_in([src])), str(why))

    def _write_parameter(
        self, parameter: str, dst: torch.Tensor, copies: list[tuple[str | float, Copy, tuple[torch.dtype, ...]]]
    ) -> None:
        t = self._recorder.parameters[parameter]
        if dst.dtype != t.dtype:
            raise NotABoxError(f"{dst.dtype} written over a parameter of {t.dtype}")
        for name, copy, dtypes in copies:
            if not isinstance(name, str):
                self._recorder.filled(parameter, copy, name)
                continue
            check_lossless(self._logical[name].dtype, dtypes, t.dtype)
            self._recorder.copied(parameter, name, self._logical[name].base, copy)

    def _copies(
        self, dst: torch.Tensor, src: torch.Tensor | float
    ) -> Iterator[tuple[str | float, Copy, tuple[torch.dtype, ...]]]:
        """Yields (logical tensor or constant, copy from it, dtypes on the way). Raises NotABoxError."""
        if not isinstance(src, torch.Tensor):
            yield src, copy_between(dst), ()
            return
        record = self._record_for(src, create=False)
        if record is None:
            # A number in a tensor of its own, as Python's `t[0] = 0` makes it, is a constant as well.
            is_number = src.dim() == 0 and not src.is_meta and self._parameter_behind([src]) is None
            value = float(src) if is_number else self._constant(src)
            if value is None:
                raise NotABoxError("values that are not in the checkpoint")
            yield value, copy_between(dst), ()
            return
        if record.computed is not None:
            raise NotABoxError("values computed from the checkpoint")
        if src.dtype != record.dtype:
            raise NotABoxError(f"bits of {record.dtype} read as {src.dtype}")
        for part in align(copy_between(dst, src.expand(dst.shape)), record.base, "src"):
            yield from pieces_of(part, record)

    def _record_for(self, t: torch.Tensor, create: bool = True) -> Record | None:
        """The record of a storage; a temporary gets one when it is first written with known content."""
        key = storage_id(t)
        record = self._records.get(key)
        if record is None and create and (temporary := self._temporaries.get(key)) is not None:
            record = self._records[key] = Record(temporary.base, temporary.dtype, alive=temporary.alive)
            if temporary.constant is not None:
                record.pieces.append(constant_piece(temporary.base, temporary.constant))
        return record

    def _spoil(self, dst: torch.Tensor, operator: str, names: frozenset[str], why: str) -> None:
        """Records a write that is no strided copy: opaque on a parameter, unknown content elsewhere."""
        self._recorder.used.update(names)
        source = f"{why} (checkpoint tensors: {', '.join(sorted(names)[:4]) or 'none'})"
        if (parameter := self._parameter_of(dst)) is not None:
            self._recorder.refused(parameter, dst, operator, source)
        elif (record := self._record_for(dst)) is not None:
            record.computed = names | self._names(dst)

    # Operators that make tensors

    def _derive(
        self, func: Any, args: Any, kwargs: Any, arguments: list[torch.Tensor], known: list[torch.Tensor]
    ) -> Any:
        """Runs an operator on tensors without values: views pass, copies are remembered, all else is computed."""
        if any(r.alias_info is not None for r in func._schema.returns):
            return func(*args, **kwargs)
        name = operator_name(func)
        if name in _NO_DATA:
            out = func(*args, **kwargs)
            self._register(out, _made_of(name, args, kwargs))
            self._record(func, args, kwargs, results=[out])
            return out
        if func in _ASKS_NO_VALUE:
            return func(*args, **kwargs)
        if not any("Tensor" in str(r.type) for r in func._schema.returns):
            raise self._reads(func, known)
        try:
            out = _on_meta(func, args, kwargs)
        except NotImplementedError as error:
            raise self._reads(func, known) from error  # The shape of its result depends on values.
        results = _results(out, arguments)
        new_tensors = [t for t in results if t is not None]
        for t in new_tensors:
            self._records[storage_id(t)] = Record(as_allocated(t), t.dtype, alive=_weakly(t))
        self._record(func, args, kwargs, results=results)
        if len(new_tensors) == 1 and self._is_copy(func, args, new_tensors[0]):
            return out
        names = self._names(*arguments)
        for t in new_tensors:
            self._records[storage_id(t)].computed = names
        return out

    def _reads(self, func: Any, known: list[torch.Tensor]) -> DescribeError:
        names = ", ".join(sorted(self._names(*known)))
        return DescribeError(
            f"the engine's loader reads values of checkpoint tensor {(names or self.current)!r} ({func}); what it does "
            "with them cannot be traced"
        )

    def _is_copy(self, func: Any, args: Any, out: torch.Tensor) -> bool:
        """True if the operator only moves data; then the record of `out` is filled."""
        if func in _COPIES:
            self._write(out, args[0], str(func))
        elif func is aten.cat.default:
            dim, position = (args[1] if len(args) > 1 else 0), 0
            for t in args[0]:
                if t.dim() == 1 and t.numel() == 0:
                    continue  # The legacy empty tensor, which fits to any shape.
                self._write(out.narrow(dim, position, t.shape[dim]), t, str(func))
                position += t.shape[dim]
        elif func is aten.stack.default:
            for i, t in enumerate(args[0]):
                self._write(out.select(args[1] if len(args) > 1 else 0, i), t, str(func))
        elif func is aten.constant_pad_nd.default and min(args[1]) >= 0:
            padding_value = float(args[2]) if len(args) > 2 else 0.0
            self._records[storage_id(out)].pieces.append(constant_piece(as_allocated(out), padding_value))
            inner = out
            for k, padding in enumerate(args[1][::2]):
                dim = out.dim() - 1 - k
                inner = inner.narrow(dim, padding, args[0].shape[dim])
            self._write(inner, args[0], str(func))
        else:
            return False
        return True

    def _register(self, t: torch.Tensor, constant: float | None, parameter: str | None = None) -> None:
        """Registers a tensor whose content depends on no checkpoint tensor, though perhaps on a parameter."""
        base = as_allocated(t)
        if t.is_meta:
            pieces = [] if constant is None else [constant_piece(base, constant)]
            self._records[storage_id(t)] = Record(base, t.dtype, pieces, alive=_weakly(t))
        else:
            self._temporaries[storage_id(t)] = Temporary(_weakly(t), base, t.dtype, constant, parameter)

    def _compute(self, func: Any, args: Any, kwargs: Any, arguments: list[torch.Tensor]) -> Any:
        """Runs an operator on real tensors alone; its outputs may be written later."""
        parameter = self._parameter_behind(arguments)
        name = operator_name(func)
        out = func(*args, **kwargs)
        results = _results(out, arguments)
        if not results and parameter is not None and func not in _ASKS_NO_VALUE:
            raise DescribeError(
                f"the engine's loader reads values of parameter {parameter} ({func}) at checkpoint tensor "
                f"{self.current!r}; what it does with them cannot be traced"
            )
        constant = self._constant(args[0]) if func in _COPIES else _made_of(name, args, kwargs)
        new_tensors = [t for t in results if t is not None]
        for t in new_tensors:
            self._register(t, constant, None if name in _NO_DATA else parameter)
        if new_tensors:
            self._record(func, args, kwargs, results=results)
        return out

    def _constant(self, t: torch.Tensor) -> float | None:
        """The number in all elements of a tensor that was made so during the trace; see `Temporary`."""
        temporary = self._temporaries.get(storage_id(t))
        return None if temporary is None else temporary.constant

    # Names

    def _parameter_of(self, t: torch.Tensor) -> str | None:
        """The parameter that a view lies in, or None."""
        names = self._parameters.get(storage_id(t), [])
        for name in names:
            p = self._recorder.parameters[name]
            end = p.storage_offset() + sum((n - 1) * s for n, s in zip(p.shape, p.stride(), strict=True))
            if p.storage_offset() <= t.storage_offset() <= end:
                return name
        return None

    def _parameter_behind(self, tensors: list[torch.Tensor]) -> str | None:
        """A parameter whose values some of the tensors hold or were computed from, in words, or None."""
        for t in tensors:
            key = storage_id(t)
            if key in self._parameters:
                return repr(self._parameters[key][0])
            if key in self._temporaries and self._temporaries[key].parameter is not None:
                return self._temporaries[key].parameter
            if key in self._elsewhere:
                return "of its own making"
        return None

    def _names(self, *tensors: torch.Tensor) -> frozenset[str]:
        """The logical tensors that some tensors hold or were computed from."""
        names: set[str] = set()
        for record in (self._records.get(storage_id(t)) for t in tensors):
            if record is not None:
                names.update(record.computed or (), (p.tensor for p in record.pieces if isinstance(p.tensor, str)))
        return frozenset(names)


def _written(func: Any, args: Any, kwargs: Any) -> Targets:
    """The arguments that an operator writes, each with the alias that its schema gives it; that of lists is empty."""
    if not func._schema.is_mutable:
        return []
    targets = []
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write and value is not None:
            targets.append((frozenset(argument.alias_info.before_set), value))
    return targets


def _fill_value(args: Any) -> float:
    """The number that a fill writes; `zero_` has no argument for it."""
    return float(args[1]) if len(args) > 1 else 0.0


def _made_of(name: str, args: Any, kwargs: Any) -> float | None:
    """The number that an operator fills its result with, None for one that does not."""
    if name not in CONSTANTS:
        return None
    if "full" in name:
        return float(kwargs.get("fill_value", args[-1]))
    return 1.0 if "ones" in name else 0.0


def _results(out: Any, arguments: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """The tensors that an operator returns, None for a view of an argument."""
    inputs = {storage_id(t) for t in arguments}
    return [None if storage_id(t) in inputs else t for t in tensors_in([out])]


def _on_meta(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operator on the meta device, whatever device it names."""
    options = {k: torch.device("meta") if k == "device" else v for k, v in kwargs.items() if k != "pin_memory"}
    meta_args, meta_options = mapped((args, options), torch.Tensor, lambda t: t.to("meta"))
    return func(*meta_args, **meta_options)


def _weakly(t: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(t.untyped_storage())
