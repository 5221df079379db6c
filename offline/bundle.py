"""The layout bundle: both sides of a pair in one JSON or msgpack file, and a plan as JSON.

    {"tensors":   {"NAME": {"shape": [..], "dtype": "bfloat16"}, ...},
     "trainer":   {"ranks": {"0": [{"tensor": "NAME", "offset": [..], "size": [..]}, ...], ...},
                   "hosts": {"0": "h0", ...}},
     "instances": {"rollout-0": {"ranks": {"0": [{"tensor": "NAME", "offset": [..], "size": [..], "slot": 4}, ...]}}}}

`slot` and `hosts` are optional; other keys are refused, because a misspelt one would go unseen. Ranks are "0", "1", ...
without gaps. Every fault is a LayoutError that names instance, rank, region and tensor in one line.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import msgpack

from weightcast.transfer.documents import unique_keys
from weightcast.transfer.errors import LayoutError
from weightcast.transfer.layout.dtypes import ITEMSIZE, dtype_code
from weightcast.transfer.layout.tables import NO_SLOT, Region, RegionTable, TensorSpec, TensorTable
from weightcast.transfer.plan.operations import Kind, TransferPlan
from weightcast.transfer.plan.traffic import Traffic

__all__ = ["Bundle", "plan_document", "read_bundle"]

_MAX_BYTES = 1 << 60
_MAX_DIMS = 64


@dataclass(frozen=True, slots=True)
class Bundle:
    """Both sides as tables: rank i of a side has its i-th table. A host is "" where the bundle names none.

    `tensors` is the catalogue. Each table has only the tensors of its own regions.
    """

    tensors: TensorTable
    trainer: tuple[RegionTable, ...]
    trainer_hosts: tuple[str, ...]
    instances: dict[str, tuple[RegionTable, ...]]
    instance_hosts: dict[str, tuple[str, ...]]


def read_bundle(data: bytes) -> Bundle:
    """Decodes and validates a bundle: JSON if it begins with a brace, else msgpack. Raises LayoutError."""
    document = _mapping(_decode(data), "the bundle", required=("tensors", "trainer", "instances"))
    specs = {
        _printable(name, "a tensor name"): _spec(name, spec)
        for name, spec in _mapping(document["tensors"], "tensors").items()
    }
    tensors = TensorTable.from_specs(specs)
    trainer, trainer_hosts = _side(document["trainer"], "trainer", specs)
    instances: dict[str, tuple[RegionTable, ...]] = {}
    hosts: dict[str, tuple[str, ...]] = {}
    for name, side in _mapping(document["instances"], "instances").items():
        instances[_printable(name, "an instance name")], hosts[name] = _side(side, name, specs)
    if not instances:
        _fail("instances: there is none, so there is nothing to plan")
    return Bundle(tensors, trainer, trainer_hosts, instances, hosts)


def _fail(message: str) -> NoReturn:
    raise LayoutError(message)


def _decode(data: bytes) -> Any:
    try:
        if data.lstrip()[:1] == b"{":
            return json.loads(data, object_pairs_hook=unique_keys, parse_constant=_no_constant)
        return msgpack.unpackb(data, object_pairs_hook=unique_keys)
    except LayoutError:
        raise
    except RecursionError:
        _fail("the bundle is nested too deeply")
    # msgpack raises its own exceptions, ValueError, and for odd keys TypeError.
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        _fail(f"the bundle is neither JSON nor msgpack: {' '.join(str(error).split()) or type(error).__name__}")


def _no_constant(name: str) -> NoReturn:
    _fail(f"{name} is no number that a layout can have")


def _mapping(
    value: Any, where: str, required: tuple[str, ...] = (), optional: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Returns `value` if it is an object with these keys; with none required any keys are fine."""
    if not isinstance(value, dict):
        _fail(f"{where}: expected an object, found {reprlib.repr(value)}")
    known = (*required, *optional)
    for key in required:
        if key not in value:
            _fail(f"{where}: {key!r} is missing")
    for key in value if required else ():
        if key not in known:
            _fail(f"{where}: key {reprlib.repr(key)} is not known; known are {', '.join(known)}")
    return value


def _printable(name: Any, what: str) -> str:
    if not isinstance(name, str) or not name or not name.isprintable():
        _fail(f"{what} is {reprlib.repr(name)}, expected printable text")
    return name


def _integers(value: Any, where: str) -> tuple[int, ...]:
    """A list of integers that fit into int64; bool is no integer here."""
    if not isinstance(value, list):
        _fail(f"{where}: expected a list of integers, found {reprlib.repr(value)}")
    for number in value:
        if type(number) is not int or not -_MAX_BYTES <= number <= _MAX_BYTES:
            _fail(f"{where}: {reprlib.repr(number)} is not an integer of at most 60 bits")
    return tuple(value)


def _spec(name: str, value: Any) -> TensorSpec:
    label = f"tensor {name!r}"
    spec = _mapping(value, label, required=("shape", "dtype"))
    shape = _integers(spec["shape"], f"{label}: shape")
    if len(shape) > _MAX_DIMS or min(shape, default=0) < 0:
        _fail(f"{label}: shape {reprlib.repr(list(shape))} has a negative number or more than {_MAX_DIMS} dimensions")
    if not isinstance(spec["dtype"], str):
        _fail(f"{label}: expected the name of a dtype, found {reprlib.repr(spec['dtype'])}")
    try:
        elements = int(ITEMSIZE[dtype_code(spec["dtype"])])
    except LayoutError as error:
        raise LayoutError(f"{label}: {error}") from None
    for length in shape:
        elements *= max(length, 1)
        if elements > _MAX_BYTES:
            _fail(f"{label}: shape {reprlib.repr(list(shape))} is too large to address")
    return TensorSpec(shape, spec["dtype"])


def _side(
    value: Any, side: str, specs: Mapping[str, TensorSpec]
) -> tuple[tuple[RegionTable, ...], tuple[str, ...]]:
    """Tables and hosts of a side, by rank."""
    document = _mapping(value, side, required=("ranks",), optional=("hosts",))
    ranks = _mapping(document["ranks"], f"{side}: ranks")
    hosts = _mapping(document.get("hosts", {}), f"{side}: hosts")
    if not ranks:
        _fail(f"{side}: there are no ranks")
    names, last = [str(rank) for rank in range(len(ranks))], len(ranks) - 1
    for rank in ranks:
        if rank not in names:
            _fail(f"{side}: rank {reprlib.repr(rank)} is not one of 0..{last}; ranks are counted without gaps")
    for rank in hosts:
        if rank not in names:
            _fail(f"{side}: hosts names rank {reprlib.repr(rank)}, which the side does not have")
    return (
        tuple(_table(ranks[name], f"{side} rank {name}", specs) for name in names),
        tuple(_printable(hosts[name], f"{side} rank {name}: host") if name in hosts else "" for name in names),
    )


def _table(value: Any, where: str, specs: Mapping[str, TensorSpec]) -> RegionTable:
    if not isinstance(value, list):
        _fail(f"{where}: expected a list of regions, found {reprlib.repr(value)}")
    regions = [_region(region, f"{where}: region {i}", specs) for i, region in enumerate(value)]
    names = {region.tensor for region in regions}
    try:
        return RegionTable.from_regions({name: spec for name, spec in specs.items() if name in names}, regions)
    except LayoutError as error:
        raise LayoutError(f"{where}: {error}") from None


def _region(value: Any, where: str, specs: Mapping[str, TensorSpec]) -> Region:
    region = _mapping(value, where, required=("tensor", "offset", "size"), optional=("slot",))
    name = region["tensor"]
    if not isinstance(name, str) or name not in specs:
        _fail(f"{where} names tensor {reprlib.repr(name)}, which is not in the bundle's tensors")
    offset = _integers(region["offset"], f"{where} of {name!r}: offset")
    size = _integers(region["size"], f"{where} of {name!r}: size")
    slot = region.get("slot", NO_SLOT)
    if "slot" in region and (type(slot) is not int or not 0 <= slot <= _MAX_BYTES):
        _fail(f"{where} of {name!r} has slot {reprlib.repr(slot)}, expected an integer from 0 on")
    return Region(name, offset, size, slot)


def plan_document(plan: TransferPlan, traffic: Traffic, seconds: float, *, operations: bool = True) -> dict[str, Any]:
    """A plan as the JSON object that `weightcast plan --json` prints. Regions index the ranks' lists in the bundle, so
    without a bundle there are no `operations` to print."""
    o = plan.operations
    columns = [getattr(o, name).tolist() for name in o.__slots__] if operations else []
    return {
        "ops": [_operation(plan, dict(zip(o.__slots__, row, strict=True))) for row in zip(*columns, strict=True)],
        "summary": {
            "bytes_sent": traffic.bytes_sent,
            "bytes_copied": traffic.bytes_copied,
            "max_send_bytes": traffic.max_send_bytes,
            "max_receive_bytes": traffic.max_receive_bytes,
            "seconds_to_plan": seconds,
        },
    }


def _operation(plan: TransferPlan, row: dict[str, Any]) -> dict[str, Any]:
    kind, tensor, ndim = Kind(row["kind"]), plan.tensors.names[row["tensor"]], int(plan.tensors.ndim[row["tensor"]])
    record: dict[str, Any] = {"kind": kind.name.lower(), "tensor": tensor}
    if kind == Kind.RELAY:
        record["src_instance"] = plan.parties[row["src_party"]].name
    if kind != Kind.COPY:
        record["src_rank"] = row["src_rank"]
    record |= {"instance": plan.parties[row["dst_party"]].name, "dst_rank": row["dst_rank"]}
    if kind == Kind.COPY:
        record["src_region"] = row["src_region"]
    return record | {"dst_region": row["dst_region"], "offset": row["offset"][:ndim], "size": row["size"][:ndim]}
