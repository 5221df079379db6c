"""Messages between ranks and gateway as bytes: rank reports, catalogs, parts of plans, digests.

Frames and columns are those of `weightcast.transfer.wire.frames`: versioned, without pickle, limited in size. Decoded
values are validated in full before they are returned: types and lengths of columns, and bounds of every index and box.
No product may leave 64 bits. Tables and placements are validated by their own constructors. Decoding raises only
WireError, or another InputError of the value's own validation.

    data = encode_report(report)
    assert decode_report(data).table.fingerprint == report.table.fingerprint
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.layout.dtypes import NAMES
from weightcast.transfer.layout.placement import ExpertPlacement, RankPlacement
from weightcast.transfer.layout.tables import NO_SLOT, LayoutNotes, RankReport, RegionTable, TensorTable
from weightcast.transfer.plan.digest_report import DigestReport
from weightcast.transfer.plan.operations import DigestRows, Kind, Operations, RankPart
from weightcast.transfer.plan.verification import ValueCounts, Verify
from weightcast.transfer.wire.frames import DEFAULT_MAX_BYTES, FrameReader, FrameWriter
from weightcast.transfer.wire.tables import check_regions, read_tensors, write_tensors

__all__ = [
    "MSGPACK",
    "WIRE_VERSION",
    "decode_catalog",
    "decode_digests",
    "decode_part",
    "decode_report",
    "encode_catalog",
    "encode_digests",
    "encode_part",
    "encode_report",
]

MSGPACK = "application/msgpack"


WIRE_VERSION = 3
"""Both sides must have the same; a change of any message changes it."""

_REPORT, _PART, _DIGESTS, _CATALOG = 1, 2, 3, 4

_MAX_RANKS = 1 << 20
_MAX_COUNT = (1 << 62) - 1
_MAX_NOTED_BYTES = 1 << 60

_OPERATION_BOUNDS = {
    "kind": (min(Kind), max(Kind)),
    "tensor": (0, _MAX_COUNT),
    "src_party": (0, _MAX_RANKS),
    "src_rank": (0, _MAX_RANKS),
    "src_region": (0, _MAX_COUNT),
    "dst_party": (1, _MAX_RANKS),
    "dst_rank": (0, _MAX_RANKS),
    "dst_region": (0, _MAX_COUNT),
}
_DIGEST_BOUNDS = {
    "party": (0, _MAX_RANKS),
    "rank": (0, _MAX_RANKS),
    "region": (0, _MAX_COUNT),
    "tensor": (0, _MAX_COUNT),
    "dtype": (0, len(NAMES) - 1),
    "cell": (0, _MAX_COUNT),
}
"""Least and greatest value of each column of operations and of digest rows, in the order of the message."""


def encode_report(report: RankReport) -> bytes:
    """A rank's report as one frame. Raises WireError for texts with control characters."""
    w = FrameWriter(WIRE_VERSION, _REPORT)
    w.field("rank", report.rank)
    w.field("world_size", report.world_size)
    w.text("host", report.host)
    write_tensors(w, report.table.tensors)
    w.column("tensor", report.table.tensor)
    w.matrix("offset", report.table.offset)
    w.matrix("size", report.table.size)
    w.column("slot", report.table.slot)
    _write_placement(w, report.placement)
    _write_notes(w, report.notes)
    return w.finish()


def decode_report(data: bytes, *, max_bytes: int = DEFAULT_MAX_BYTES) -> RankReport:
    """The report in a frame, validated. Raises InputError (WireError, LayoutError, PlacementError).

    `max_bytes` limits each of these: the frame, the bytes it unpacks to, and the memory of the decoded report.
    """
    r = FrameReader(data, version=WIRE_VERSION, kind=_REPORT, what="rank report", max_bytes=max_bytes)
    world_size = r.integer("world_size", 1, _MAX_RANKS)
    rank = r.integer("rank", 0, world_size - 1)
    host = r.text("host")
    tensors = read_tensors(r)
    count = r.count("tensor")
    table = RegionTable(
        tensors,
        r.column("tensor", count),
        r.matrix("offset", count, tensors.width),
        r.matrix("size", count, tensors.width),
        r.column("slot", count),
    )
    check_regions(r, table, "regions")
    report = RankReport(rank, world_size, host, table, _read_placement(r), _read_notes(r))
    r.finish()
    return report


def encode_catalog(tensors: TensorTable) -> bytes:
    """The tensors of the trainer as one frame."""
    w = FrameWriter(WIRE_VERSION, _CATALOG)
    write_tensors(w, tensors)
    return w.finish()


def decode_catalog(data: bytes, *, max_bytes: int = DEFAULT_MAX_BYTES) -> TensorTable:
    """The tensors in a frame, validated. Raises InputError."""
    r = FrameReader(data, version=WIRE_VERSION, kind=_CATALOG, what="catalog", max_bytes=max_bytes)
    tensors = read_tensors(r)
    r.finish()
    return tensors


def encode_part(part: RankPart) -> bytes:
    """A rank's part of a plan as one frame."""
    w = FrameWriter(WIRE_VERSION, _PART)
    for name in ("instance", "table_fingerprint"):
        w.text(name, getattr(part, name))
    for name in ("instance_party", "party", "rank", "instance_ranks", "bucket_bytes"):
        w.field(name, getattr(part, name))
    w.column("trainer_ranks", np.array(part.trainer_ranks, dtype=np.int64))
    write_tensors(w, part.tensors)
    for name in _OPERATION_BOUNDS:
        w.column(f"operations.{name}", getattr(part.operations, name))
    for name in _DIGEST_BOUNDS:
        w.column(f"digests.{name}", getattr(part.digests, name))
    for name in ("offset", "size"):
        w.matrix(f"operations.{name}", getattr(part.operations, name))
        w.matrix(f"digests.{name}", getattr(part.digests, name))
    w.column("wire_dtype", part.wire_dtype)
    w.column("stage", np.zeros(0, dtype=np.int64) if part.stage is None else part.stage)
    w.field("stages", part.stages)
    w.text("verify", part.verify.value)
    return w.finish()


def decode_part(data: bytes, *, max_bytes: int = DEFAULT_MAX_BYTES) -> RankPart:
    """The part in a frame, validated in itself. Raises InputError.

    Region columns are non-negative; only the rank itself has the table that says whether they are too large.
    """
    r = FrameReader(data, version=WIRE_VERSION, kind=_PART, what="part of a plan", max_bytes=max_bytes)
    instance = r.text("instance")
    trainer_ranks = r.column("trainer_ranks", r.count("trainer_ranks"), 0, _MAX_RANKS)
    if (np.diff(trainer_ranks) <= 0).any():
        raise r.error("lists trainer ranks that do not ascend")
    instance_party, instance_ranks = (r.integer(name, 1, _MAX_RANKS) for name in ("instance_party", "instance_ranks"))
    party = r.integer("party", 0, instance_party)
    if party not in (0, instance_party):
        raise r.error(f"is for party {party}, expected 0 or {instance_party}")
    tensors = read_tensors(r)
    operations = Operations(**_read_rows(r, "operations", _OPERATION_BOUNDS, tensors))
    wire_dtype = r.column("wire_dtype", len(operations), 0, len(NAMES) - 1)
    stages = r.integer("stages", 1, _MAX_COUNT)
    stage = r.column("stage", len(operations) if stages > 1 else 0, 0, stages - 1)
    part = RankPart(
        instance=instance,
        instance_party=instance_party,
        party=party,
        rank=r.integer("rank", 0, _MAX_RANKS if party == 0 else instance_ranks - 1),
        trainer_ranks=tuple(trainer_ranks.tolist()),
        instance_ranks=instance_ranks,
        table_fingerprint=r.text("table_fingerprint"),
        tensors=tensors,
        operations=operations,
        wire_dtype=wire_dtype,
        digests=DigestRows(**_read_rows(r, "digests", _DIGEST_BOUNDS, tensors)),
        bucket_bytes=r.integer("bucket_bytes", 1, _MAX_NOTED_BYTES),
        stage=stage if stages > 1 else None,
        stages=stages,
        verify=_read_verify(r),
    )
    r.finish()
    _check_part(r, part)
    return part


def encode_digests(report: DigestReport) -> bytes:
    """A rank's digests as one frame."""
    w = FrameWriter(WIRE_VERSION, _DIGESTS)
    w.strings("instance", () if report.instance is None else (report.instance,))
    w.field("rank", report.rank)
    w.column("cell", report.cell)
    w.words("digest", report.digest)
    for name in ValueCounts._fields:
        w.column(f"values.{name}", getattr(report.values, name))
    return w.finish()


def decode_digests(data: bytes, *, max_bytes: int = DEFAULT_MAX_BYTES) -> DigestReport:
    """The digests in a frame, validated. Raises WireError."""
    r = FrameReader(data, version=WIRE_VERSION, kind=_DIGESTS, what="digest report", max_bytes=max_bytes)
    instance = r.text("instance") if r.count("instance") else None
    if instance is None:
        r.strings("instance")
    count = r.count("cell")
    cell = r.column("cell", count, 0, _MAX_COUNT)
    rank, digest = r.integer("rank", 0, _MAX_RANKS), r.words("digest", count)
    report = DigestReport(instance, rank, cell, digest, _read_values(r, count))
    r.finish()
    return report


def _read_values(r: FrameReader, rows: int) -> ValueCounts:
    count = r.count("values.row")
    row, *counts = ValueCounts._fields
    columns = [r.column(f"values.{name}", count, 0, _MAX_COUNT) for name in counts]
    values = ValueCounts(r.column(f"values.{row}", count, 0, rows - 1), *columns)
    if (np.diff(values.row) <= 0).any():
        raise r.error("counts values of rows that do not ascend")
    return values


def _read_verify(r: FrameReader) -> Verify:
    name = r.text("verify")
    if name not in {mode.value for mode in Verify}:
        raise r.error(f"has verify {name!r:.200}, expected {', '.join(Verify)}")
    return Verify(name)


def _write_placement(w: FrameWriter, placement: RankPlacement | None) -> None:
    w.field("has_placement", placement is not None)
    if placement is None:
        return
    experts = placement.placement
    w.field("layers", experts.num_layers)
    w.field("num_logical", experts.num_logical)
    w.field("ep_size", experts.ep_size)
    w.column("physical_to_logical", experts.physical_to_logical.reshape(-1))
    for name in ("storage_rank", "num_local_routed", "num_global_routed", "num_shared"):
        w.field(name, getattr(placement, name))


def _read_placement(r: FrameReader) -> RankPlacement | None:
    if not r.flag("has_placement"):
        return None
    count = r.count("physical_to_logical")
    layers = r.integer("layers", 1, max(count, 1))
    if count % layers:
        raise r.error(f"has a placement of {count} entries, which {layers} layers do not divide")
    experts = ExpertPlacement(
        r.column("physical_to_logical", count).reshape(layers, -1),
        r.integer("num_logical", 1, max(count, 1)),
        r.integer("ep_size", 1, _MAX_RANKS),
    )
    return RankPlacement(
        experts,
        r.integer("storage_rank", 0, _MAX_RANKS),
        r.integer("num_local_routed", 0, max(count, 1)),
        r.integer("num_global_routed", 0, _MAX_COUNT),
        r.integer("num_shared", 0, _MAX_RANKS),
    )


def _write_notes(w: FrameWriter, notes: LayoutNotes) -> None:
    w.field("parameter_bytes", notes.parameter_bytes)
    w.field("padding_bytes", notes.padding_bytes)
    w.strings("derived", notes.derived)
    w.strings("left_out", tuple(name for name, _ in notes.left_out))
    w.strings("left_out_reason", tuple(reason for _, reason in notes.left_out))
    w.matrix("dispatch", notes.dispatch)
    w.field("dispatch_shared", notes.dispatch_shared)


def _read_notes(r: FrameReader) -> LayoutNotes:
    left_out, reasons = r.strings("left_out"), r.strings("left_out_reason")
    if len(left_out) != len(reasons):
        raise r.error(f"leaves out {len(left_out)} tensors with {len(reasons)} reasons")
    dispatch = r.matrix("dispatch", r.count("dispatch.0"), 3, 0, _MAX_COUNT)
    parameter_bytes = r.integer("parameter_bytes", 0, _MAX_NOTED_BYTES)
    return LayoutNotes(
        parameter_bytes=parameter_bytes,
        padding_bytes=r.integer("padding_bytes", 0, parameter_bytes),
        derived=r.strings("derived"),
        left_out=tuple(zip(left_out, reasons, strict=True)),
        dispatch=dispatch,
        dispatch_shared=r.flag("dispatch_shared"),
    )


def _read_rows(
    r: FrameReader, table: str, bounds: Mapping[str, tuple[int, int]], tensors: TensorTable
) -> dict[str, IntArray]:
    """Columns of operations or of digest rows, by name."""
    count = r.count(f"{table}.tensor")
    columns = {name: r.column(f"{table}.{name}", count, low, high) for name, (low, high) in bounds.items()}
    columns |= {name: r.matrix(f"{table}.{name}", count, tensors.width) for name in ("offset", "size")}
    no_slots = np.full(count, NO_SLOT, dtype=np.int64)
    regions = RegionTable(tensors, columns["tensor"], columns["offset"], columns["size"], no_slots)
    check_regions(r, regions, table)
    return columns


def _check_part(r: FrameReader, part: RankPart) -> None:
    """Checks that this rank takes part in every operation, and that every digest row is its own."""
    o, rank, party = part.operations, part.rank, part.party
    own_rows = (o.dst_party == party) & (o.dst_rank == rank) | (o.src_party == party) & (o.src_rank == rank)
    sends, arrivals = o.kind == Kind.SEND, o.dst_party == part.instance_party
    member_sends = np.isin(o.src_rank, np.array(part.trainer_ranks, dtype=np.int64))
    copies = (o.kind == Kind.COPY) & ((o.src_party != o.dst_party) | (o.src_rank != o.dst_rank))
    for bad, fault in (
        (~own_rows, "does not have this rank as sender or receiver"),
        (sends != (o.src_party == 0), "is sent by the trainer and is no send, or the other way"),
        (~arrivals, "goes to another instance"),
        (~sends & (o.src_party != part.instance_party), "is relayed from another instance"),
        (sends & ~member_sends, "is sent by a trainer rank that is no member of the communicator"),
        (arrivals & (o.dst_rank >= part.instance_ranks), "goes to a rank the instance does not have"),
        (copies, "copies between two ranks"),
    ):
        if bad.any():
            raise r.error(f"for rank {rank} has operation {int(bad.argmax())}, which {fault}")
    d = part.digests
    foreign_rows = (d.party != party) | (d.rank != rank)
    if foreign_rows.any():
        raise r.error(f"for rank {rank} has digest row {int(foreign_rows.argmax())} of another rank")
