"""The layout bundle: both sides of a pair in one JSON or msgpack file, and a plan as JSON.

    {"tensors":   {"NAME": {"shape": [..], "dtype": "bfloat16"}, ...},
     "trainer":   {"ranks": {"0": [{"tensor": "NAME", "offset": [..], "size": [..]}, ...], ...},
                   "hosts": {"0": "h0", ...}},
     "instances": {"rollout-0": {"ranks": {"0": [{"tensor": "NAME", "offset": [..], "size": [..], "slot": 4}, ...]}}}}

`slot` and `hosts` are optional; other keys are refused, because a misspelt one would go unseen. Ranks are "0", "1", ...
without gaps. Every fault is a LayoutError in one line that names the place: `instances.rollout-0.ranks.0.3.size`, say.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NoReturn

import msgpack
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from weightcast.transfer.documents import Record, unique_keys
from weightcast.transfer.errors import LayoutError
from weightcast.transfer.layout.dtypes import ITEMSIZE, dtype_code
from weightcast.transfer.layout.tables import NO_SLOT, Region, RegionTable, TensorSpec, TensorTable
from weightcast.transfer.plan.operations import Kind, TransferPlan
from weightcast.transfer.plan.traffic import Traffic

__all__ = ["Bundle", "plan_document", "read_bundle"]

_MOST = 1 << 60


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


Number = Annotated[int, Field(strict=True, ge=-_MOST, le=_MOST, description="a whole number of at most 60 bits")]
Length = Annotated[int, Field(strict=True, ge=0, le=_MOST, description="a whole number from 0 on, of at most 60 bits")]


def _printable(name: str) -> str:
    if not name or not name.isprintable():
        raise PydanticCustomError("name", "expected printable text")
    return name


Name = Annotated[str, Field(description="printable text"), AfterValidator(_printable)]


@dataclass(frozen=True, slots=True)
class _Tensor(Record):
    shape: Annotated[tuple[Length, ...], Field(max_length=64, description="a list of at most 64 lengths")]
    dtype: str

    def __post_init__(self) -> None:
        try:
            itemsize = int(ITEMSIZE[dtype_code(self.dtype)])
        except LayoutError as error:
            raise ValueError(str(error)) from None
        if math.prod(max(length, 1) for length in self.shape) * itemsize > _MOST:
            raise ValueError(f"shape {reprlib.repr(list(self.shape))} is too large to address")


@dataclass(frozen=True, slots=True)
class _Region(Record):
    tensor: str
    offset: tuple[Number, ...]
    size: tuple[Number, ...]
    slot: Length = NO_SLOT


@dataclass(frozen=True, slots=True)
class _Side(Record):
    ranks: Annotated[dict[str, list[_Region]], Field(min_length=1, description="a table of at least one rank")]
    hosts: dict[str, Name] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [str(rank) for rank in range(len(self.ranks))]
        for name in self.ranks:
            if name not in names:
                raise ValueError(
                    f"rank {reprlib.repr(name)} is not one of 0..{len(names) - 1}; ranks are counted without gaps"
                )
        for name in self.hosts:
            if name not in names:
                raise ValueError(f"hosts names rank {reprlib.repr(name)}, which the side does not have")

    def tables(self, side: str, specs: Mapping[str, TensorSpec]) -> tuple[tuple[RegionTable, ...], tuple[str, ...]]:
        """Tables and hosts by rank."""
        names = [str(rank) for rank in range(len(self.ranks))]
        tables = tuple(_table(self.ranks[name], f"{side} rank {name}", specs) for name in names)
        return tables, tuple(self.hosts.get(name, "") for name in names)


@dataclass(frozen=True, slots=True)
class _Document(Record):
    refusal: ClassVar[type[LayoutError]] = LayoutError

    tensors: dict[Name, _Tensor]
    trainer: _Side
    instances: Annotated[dict[Name, _Side], Field(min_length=1, description="a table of at least one instance")]


def read_bundle(data: bytes) -> Bundle:
    """Decodes and validates a bundle: JSON if it begins with a brace, else msgpack. Raises LayoutError."""
    document = _Document.given(_decode(data), "the bundle")
    specs = {name: TensorSpec(tensor.shape, tensor.dtype) for name, tensor in document.tensors.items()}
    trainer, trainer_hosts = document.trainer.tables("trainer", specs)
    instances = {name: side.tables(name, specs) for name, side in document.instances.items()}
    tables, hosts = ({name: pair[i] for name, pair in instances.items()} for i in (0, 1))
    return Bundle(TensorTable.from_specs(specs), trainer, trainer_hosts, tables, hosts)  # type: ignore[arg-type]


def _decode(data: bytes) -> object:
    try:
        if data.lstrip()[:1] == b"{":
            return json.loads(data, object_pairs_hook=unique_keys, parse_constant=_no_constant)
        return msgpack.unpackb(data, object_pairs_hook=unique_keys)
    except LayoutError:
        raise
    except RecursionError:
        raise LayoutError("the bundle is nested too deeply") from None
    # msgpack raises its own exceptions, ValueError, and for odd keys TypeError.
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        cause = " ".join(str(error).split()) or type(error).__name__
        raise LayoutError(f"the bundle is neither JSON nor msgpack: {cause}") from None


def _no_constant(name: str) -> NoReturn:
    raise LayoutError(f"{name} is no number that a layout can have")


def _table(regions: Sequence[_Region], where: str, specs: Mapping[str, TensorSpec]) -> RegionTable:
    names = {region.tensor for region in regions}
    for number, region in enumerate(regions):
        if region.tensor not in specs:
            name = reprlib.repr(region.tensor)
            raise LayoutError(f"{where}: region {number} names tensor {name}, which is not in the bundle's tensors")
    try:
        return RegionTable.from_regions(
            {name: spec for name, spec in specs.items() if name in names},
            [Region(region.tensor, region.offset, region.size, region.slot) for region in regions],
        )
    except LayoutError as error:
        raise LayoutError(f"{where}: {error}") from None


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
