"""The wire: what goes in comes out, and nothing malformed passes."""

from __future__ import annotations

import dataclasses
import itertools
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_support import K2, TINY, moe_instance, moe_report, random_placement

from weightcast.transfer.errors import InputError, LayoutError, PlacementError, WireError
from weightcast.transfer.layout.dtypes import NAMES
from weightcast.transfer.layout.placement import ExpertPlacement
from weightcast.transfer.layout.tables import LayoutNotes, RankReport, Region, RegionTable, TensorSpec, TensorTable
from weightcast.transfer.plan.digest_report import DigestReport
from weightcast.transfer.plan.operations import DigestRows, Kind, Operations, RankPart
from weightcast.transfer.plan.verification import ValueCounts, Verify
from weightcast.transfer.wire.integers import decode_column, encode_column, is_descriptor, payload_bytes
from weightcast.transfer.wire.messages import (
    decode_catalog,
    decode_digests,
    decode_part,
    decode_report,
    encode_catalog,
    encode_digests,
    encode_part,
    encode_report,
)

INT64 = st.integers(-(2**63), 2**63 - 1)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def small_report(**changes: Any) -> RankReport:
    report = moe_report(TINY, 0, random_placement(TINY, 2, 2))
    return dataclasses.replace(report, **changes)


def small_part(**changes: Any) -> RankPart:
    """Rank 1 of 2 of party 1: two sends from trainer ranks 0 and 2, one copy; three rows to digest."""
    operations = Operations(
        kind=ints(Kind.SEND, Kind.SEND, Kind.COPY),
        tensor=ints(0, 1, 1),
        src_party=ints(0, 0, 1),
        src_rank=ints(0, 2, 1),
        src_region=ints(5, 6, 1),
        dst_party=ints(1, 1, 1),
        dst_rank=ints(1, 1, 1),
        dst_region=ints(0, 1, 2),
        offset=np.array([[0, 0], [2, 0], [2, 0]], dtype=np.int64),
        size=np.array([[4, 1], [2, 3], [2, 3]], dtype=np.int64),
    )
    digests = DigestRows(
        party=ints(1, 1, 1),
        rank=ints(1, 1, 1),
        region=ints(0, 1, 2),
        tensor=ints(0, 1, 1),
        offset=operations.offset,
        size=operations.size,
        dtype=ints(2, 2, 2),
        cell=ints(0, 1, 1),
    )
    part = RankPart(
        instance="rollout-0",
        instance_party=1,
        party=1,
        rank=1,
        trainer_ranks=(0, 2),
        instance_ranks=2,
        table_fingerprint="00ff",
        tensors=TensorTable.from_specs({"a": TensorSpec((4,), "bfloat16"), "b": TensorSpec((4, 3), "float32")}),
        operations=operations,
        wire_dtype=ints(2, 1, 1),
        digests=digests,
        bucket_bytes=1 << 20,
        stage=ints(0, 2, 1),
        stages=3,
        verify=Verify.SAMPLED,
    )
    return dataclasses.replace(part, **changes)


def small_digests() -> DigestReport:
    values = ValueCounts.of({0: (1, 0, 0), 2: (0, 3, 70_000)})
    return DigestReport("rollout-0", 1, ints(0, 1, 1), np.array([3, 2**64 - 1, 7], dtype=np.uint64), values)


def assert_same(found: object, wanted: object) -> None:
    """Equal in every field, arrays by value and type."""
    assert type(found) is type(wanted)
    if isinstance(wanted, np.ndarray):
        assert found.dtype == wanted.dtype  # type: ignore[attr-defined]
        np.testing.assert_array_equal(found, wanted)  # type: ignore[call-overload]
    elif isinstance(wanted, ValueCounts):
        for one, other in zip(found, wanted, strict=True):  # type: ignore[call-overload]
            assert_same(one, other)
    elif dataclasses.is_dataclass(wanted) and not isinstance(wanted, ExpertPlacement):
        for field in dataclasses.fields(wanted):
            assert_same(getattr(found, field.name), getattr(wanted, field.name))
    else:
        assert found == wanted


# ---- round trips


def test_a_report_comes_back() -> None:
    for report in moe_instance(TINY, 2, 2):
        assert_same(decode_report(encode_report(report)), report)


def test_a_catalog_comes_back() -> None:
    for specs in (small_report().table.tensors.specs(), {}, {"scalar": TensorSpec((), "float32")}):
        assert decode_catalog(encode_catalog(TensorTable.from_specs(specs))).specs() == specs


def test_a_report_without_anything_comes_back() -> None:
    report = RankReport(3, 4, "", RegionTable.from_regions({}, []))
    assert_same(decode_report(encode_report(report)), report)


def test_scalars_and_empty_regions_come_back() -> None:
    specs = {"scale": TensorSpec((), "float32"), "none": TensorSpec((0, 4), "bool"), "w": TensorSpec((2, 3, 4), "int8")}
    regions = [Region("scale", (), ()), Region("none", (0, 0), (0, 4), 0), Region("w", (1, 0, 2), (1, 3, 2), 7)]
    report = RankReport(0, 1, "höst", RegionTable.from_regions(specs, regions))
    assert_same(decode_report(encode_report(report)), report)


def test_a_part_comes_back() -> None:
    assert_same(decode_part(encode_part(small_part())), small_part())


def test_a_trainer_part_for_another_instance_is_refused() -> None:
    part = small_part()
    sends = dataclasses.replace(part.operations.take(ints(1)), dst_party=ints(7), dst_rank=ints(1 << 20))
    digests = dataclasses.replace(part.digests.take(ints(1)), party=ints(0), rank=ints(2))
    trainer = small_part(party=0, rank=2, operations=sends, wire_dtype=ints(1), digests=digests, stage=ints(2))
    with pytest.raises(WireError, match="operation 0, which goes to another instance"):
        decode_part(encode_part(trainer))


def test_a_trainer_part_comes_back() -> None:
    part = small_part()
    rows = ints(1)
    digests = dataclasses.replace(part.digests.take(rows), party=ints(0), rank=ints(2))
    sends = part.operations.take(rows)
    changes = {"party": 0, "rank": 2, "operations": sends, "wire_dtype": ints(1), "digests": digests, "stage": ints(2)}
    trainer = small_part(**changes)
    assert_same(decode_part(encode_part(trainer)), trainer)
    with pytest.raises(WireError, match="operation 0, which does not have this rank"):
        decode_part(encode_part(dataclasses.replace(trainer, rank=0)))


def test_digests_come_back() -> None:
    assert_same(decode_digests(encode_digests(small_digests())), small_digests())
    trainer = DigestReport(None, 0, ints(), np.empty(0, dtype=np.uint64))
    assert_same(decode_digests(encode_digests(trainer)), trainer)


@settings(deadline=None)
@given(
    st.lists(INT64)
    | st.lists(st.integers(-3, 300))
    | st.builds(range, st.integers(-9, 9), st.just(99), st.integers(1, 9))
    | st.lists(st.integers(0, 1)).map(lambda steps: list(itertools.accumulate(steps)))
)
def test_any_column_comes_back(values: list[int]) -> None:
    column = np.array(values, dtype=np.int64)
    descriptor, raw = encode_column(column)
    assert is_descriptor(msgpack.unpackb(msgpack.packb(descriptor)))
    assert payload_bytes(descriptor) == len(raw)
    found = decode_column(descriptor, memoryview(raw))
    assert found is not None
    assert_same(found, column)


@pytest.mark.parametrize(
    ("values", "form", "size"),
    [
        ([7] * 1000, "a", 0),
        (list(range(5, 1005)), "a", 0),
        (list(range(1000, 0, -3)), "a", 0),
        ([0, 255], "a", 0),
        ([0, 255, 1], "v", 3),
        ([1000, 1255, 1001], "v", 3),
        ([0, 256, 1], "v", 6),
        ([0, 1 << 16, 1], "v", 12),
        ([0, 1 << 32, 1], "v", 24),
        ([*range(500), *range(499, 1000)], "d", 1000),
    ],
)
def test_columns_are_small(values: list[int], form: str, size: int) -> None:
    descriptor, raw = encode_column(np.array(values, dtype=np.int64))
    assert (descriptor[0], len(raw)) == (form, size)


def test_sixteen_ranks_of_a_trillion_parameters_fit_in_2_mb() -> None:
    sent = [encode_report(report) for report in moe_instance(K2, 16, 16)]
    assert sum(map(len, sent)) < 2_000_000


# ---- what is malformed


def frame(data: bytes) -> tuple[dict[str, Any], dict[str, list[Any]], bytes]:
    """Fields, descriptors and payload of a frame."""
    body = zlib.decompress(data[16:])
    (length,) = struct.unpack_from("<I", body)
    fields, columns = msgpack.unpackb(body[4 : 4 + length])
    return fields, columns, body[4 + length :]


def reframe(data: bytes, fields: object, columns: object, payload: bytes) -> bytes:
    """A frame of the same version and kind with another body."""
    header = msgpack.packb([fields, columns])
    body = struct.pack("<I", len(header)) + header + payload
    return data[:8] + struct.pack("<Q", len(body)) + zlib.compress(body)


def changed(data: bytes, **changes: Any) -> bytes:
    """A frame with some fields, or, where the name is a column's, some columns replaced. __ stands for a dot."""
    fields, columns, payload = frame(data)
    slices, start = {}, 0
    for name, descriptor in columns.items():
        slices[name] = payload[start : start + payload_bytes(descriptor)]
        start += payload_bytes(descriptor)
    for key, value in changes.items():
        name = key.replace("__", ".")
        if name not in columns:
            fields[name] = value
        elif isinstance(value, np.ndarray):
            columns[name], slices[name] = encode_column(value)
        elif isinstance(value, tuple):
            raw = "\0".join(value).encode("utf-8", "surrogatepass")
            columns[name], slices[name] = ["s", len(value), len(raw)], raw
        else:
            columns[name] = value
            slices[name] = b"" if value[0] == "a" else slices[name]
    return reframe(data, fields, columns, b"".join(slices.values()))


REPORT, PART, DIGESTS = encode_report(small_report()), encode_part(small_part()), encode_digests(small_digests())
CATALOG = encode_catalog(small_report().table.tensors)
DECODERS = [(REPORT, decode_report), (PART, decode_part), (DIGESTS, decode_digests), (CATALOG, decode_catalog)]
N, T = len(small_report().table), len(small_report().table.tensors)


@pytest.mark.parametrize(("data", "decode"), DECODERS, ids=["report", "part", "digests", "catalog"])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda d: b"", "has 0 bytes"),
        (lambda d: d[:10], "has 10 bytes"),
        (lambda d: d[:-1], "cut off"),
        (lambda d: d + b"x", "cut off or damaged"),
        (lambda d: d[: len(d) // 2], "cut off"),
        (lambda d: b"\x80\x04K" + d[3:], "no message of weightcast"),
        (lambda d: d[:4] + b"\x04\x00" + d[6:], "has version 4, expected 3"),
        (lambda d: d[:6] + b"\x09\x00" + d[8:], "is of kind 9"),
        (lambda d: d[:8] + struct.pack("<Q", 1 << 40) + d[16:], "unpacks to 1099511627776 bytes, more than the limit"),
        (lambda d: d[:8] + struct.pack("<Q", 5) + d[16:], "cut off or damaged"),
        (lambda d: d[:16] + b"\xff" * (len(d) - 16), "is damaged"),
        (lambda d: reframe(d, {}, {}, b""), "has no"),
        (lambda d: reframe(d, [], {}, b""), "two maps"),
        (lambda d: reframe(d, {}, {"a": ["x", 1, 1]}, b""), "malformed descriptor"),
        (lambda d: changed(d, surprise=1), "'surprise', which is no part of it"),
    ],
)
def test_damaged_frames(
    data: bytes, decode: Callable[[bytes], object], damage: Callable[[bytes], bytes], said: str
) -> None:
    with pytest.raises(WireError, match=said) as caught:
        decode(damage(data))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"rank": 2}, WireError, "has rank 2, expected a whole number in 0..1"),
        ({"rank": True}, WireError, "has rank True"),
        ({"rank": 1.0}, WireError, "has rank 1.0"),
        ({"rank": -1}, WireError, "has rank -1"),
        ({"world_size": 1 << 40}, WireError, "has world_size"),
        ({"host": ("a\nb",)}, WireError, "control characters"),
        ({"host": ("a", "b")}, WireError, "has 2 texts in host"),
        ({"host": ("\ud800",)}, WireError, "not UTF-8"),
        ({"names": ("x",)}, WireError, "entries in column shape.0"),
        ({"names": ("x",) * T}, WireError, "names tensor 'x' twice"),
        ({"names": ["s", T, 0]}, WireError, "belong to no column"),
        ({"names": ["s", 1 << 40, 0]}, WireError, "more memory than the limit|belong to no column"),
        ({"names": ["a", T, 0, 0]}, WireError, "another form than texts"),
        ({"ndim": np.full(T, 3)}, WireError, "has ndim 3 in row 0, expected 0..2"),
        ({"ndim": np.full(T, -1)}, WireError, "has ndim -1"),
        ({"tensor_dtype": np.full(T, 99)}, WireError, "has tensor_dtype 99"),
        ({"shape__0": np.full(T, -4)}, WireError, "which is negative"),
        ({"shape__0": np.full(T, 1 << 62)}, WireError, "which is too large"),
        ({"shape__0": np.full(T, 1 << 46)}, WireError, "which is too large"),
        ({"shape__1": np.full(T, 8)}, WireError, "dimensions the tensor lacks"),
        ({"tensor": np.full(N, T)}, LayoutError, f"region 0 names tensor row {T} of {T}"),
        ({"tensor": np.full(N, -1)}, LayoutError, f"region 0 names tensor row -1 of {T}"),
        ({"tensor": np.full(N + 1, 0)}, WireError, "entries in column offset.0, expected"),
        ({"tensor": ["a", 1 << 50, 0, 0]}, WireError, "more memory than the limit"),
        ({"tensor": ["a", N, 1 << 62, 1 << 62]}, WireError, "beyond 64 bits"),
        ({"tensor": ["a", -1, 0, 0]}, WireError, "malformed descriptor"),
        ({"tensor": ["a", N, 1 << 63, 0]}, WireError, "malformed descriptor"),
        ({"offset__0": np.full(N, 1 << 62)}, LayoutError, "which is not inside shape"),
        ({"offset__0": np.full(N, -1)}, LayoutError, "which is not inside shape"),
        ({"size__0": np.full(N, (1 << 63) - 1)}, LayoutError, "which is not inside shape"),
        ({"size__1": np.full(N, 0)}, WireError, "reaches into dimensions the tensor lacks"),
        ({"slot": np.full(N, -2)}, LayoutError, "has slot -2"),
        ({"slot": np.full(N - 1, 0)}, WireError, "entries in column slot, expected"),
        ({"layers": 5}, WireError, "5 layers do not divide"),
        ({"layers": 0}, WireError, "has layers 0"),
        ({"physical_to_logical": np.full(12, 4)}, PlacementError, "holds logical expert 4"),
        ({"physical_to_logical": np.full(12, 0)}, PlacementError, "without a slot"),
        ({"num_logical": 1 << 40}, WireError, "has num_logical"),
        ({"ep_size": 5}, PlacementError, "EP size 5"),
        ({"storage_rank": 2}, PlacementError, "storage rank 2"),
        ({"num_local_routed": 2}, PlacementError, "stores 2 routed slots"),
        ({"padding_bytes": 1 << 40}, WireError, "has padding_bytes"),
        ({"left_out_reason": ("a", "b")}, WireError, "leaves out 1 tensors with 2 reasons"),
        ({"dispatch__0": np.arange(12) - 1}, WireError, "has dispatch.0 -1 in row 0"),
        ({"dispatch_shared": 1}, WireError, "has dispatch_shared 1"),
    ],
)
def test_malformed_reports(changes: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        decode_report(changed(REPORT, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trainer_ranks": ints(2, 0)}, "do not ascend"),
        ({"trainer_ranks": ints(0, 1)}, "operation 1, which is sent by a trainer rank that is no member"),
        ({"instance_ranks": 1}, "has rank 1"),
        ({"rank": 0}, "operation 0, which does not have this rank"),
        ({"operations__kind": ints(0, 0, 3)}, "has operations.kind 3 in row 2"),
        ({"operations__kind": ints(0, 1, 1)}, "operation 1, which is sent by the trainer and is no send"),
        ({"operations__src_party": ints(0, -2, 1)}, "has operations.src_party -2"),
        ({"operations__dst_party": ints(1, 0, 1)}, "has operations.dst_party 0 in row 1"),
        ({"operations__dst_party": ints(1, 1, 2)}, "operation 2, which goes to another instance"),
        ({"operations__kind": ints(0, 0, 2), "operations__src_party": ints(0, 0, 2)}, "which is relayed from"),
        ({"party": 2}, "has party 2, expected a whole number in 0..1"),
        ({"party": 1, "instance_party": 2}, "is for party 1, expected 0 or 2"),
        ({"operations__src_rank": ints(0, 2, 0)}, "operation 2, which copies between two ranks"),
        ({"operations__dst_rank": ints(0, 1, 1)}, "operation 0, which does not have this rank"),
        ({"operations__tensor": ints(0, 1, 2)}, "names tensor row 2 of 2"),
        ({"operations__size__0": ints(5, 2, 2)}, "not inside shape"),
        ({"operations__size__1": ints(0, 3, 3)}, "dimensions the tensor lacks"),
        ({"operations__dst_region": ints(0, 1)}, "has 2 entries in column operations.dst_region, expected 3"),
        ({"operations__dst_region": ints(0, 1, -1)}, "has operations.dst_region -1"),
        ({"wire_dtype": ints(2, 1, 99)}, "has wire_dtype 99"),
        ({"wire_dtype": ints(2, 1)}, "has 2 entries in column wire_dtype"),
        ({"digests__rank": ints(1, 0, 1)}, "digest row 1 of another rank"),
        ({"digests__party": ints(1, 1, 0)}, "digest row 2 of another rank"),
        ({"digests__cell": ints(0, 1, -1)}, "has digests.cell -1"),
        ({"digests__dtype": ints(2, 2, len(NAMES))}, f"has digests.dtype {len(NAMES)}"),
        ({"bucket_bytes": 0}, "has bucket_bytes 0"),
        ({"instance": ()}, "has 0 texts in instance"),
        ({"stage": ints(0, 3, 1)}, "has stage 3 in row 1, expected 0..2"),
        ({"stages": 0}, "has stages 0"),
        ({"verify": ("some",)}, "has verify 'some', expected full, sampled, off"),
    ],
)
def test_malformed_parts(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        decode_part(changed(PART, **changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cell": ints(0, 1)}, "has 3 entries in column digest, expected 2"),
        ({"cell": ints(0, 1, -1)}, "has cell -1"),
        ({"digest": ints(0, 1, 5)}, "another form than 64-bit words"),
        ({"rank": None}, "has rank None"),
        ({"instance": ("a", "b")}, "has 2 texts in instance"),
        ({"values__row": ints(0, 3)}, "has values.row 3"),
        ({"values__row": ints(2, 0)}, "counts values of rows that do not ascend"),
        ({"values__row": ints(0)}, "column values.nan, expected 1"),
        ({"values__inf": ints(0, -1)}, "has values.inf -1"),
    ],
)
def test_malformed_digests(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(WireError, match=said):
        decode_digests(changed(DIGESTS, **changes))


def test_a_column_cannot_be_words() -> None:
    fields, columns, payload = frame(REPORT)
    columns["slot"] = ["v", N, "u8", 0]
    with pytest.raises(WireError, match=r"does not hold the bytes|no column|another form"):
        decode_report(reframe(REPORT, fields, columns, payload))


def test_texts_with_control_characters_are_not_sent() -> None:
    with pytest.raises(WireError, match=r"left_out_reason has 'two.nlines'"):
        encode_report(small_report(notes=LayoutNotes(left_out=(("a", "two\nlines"),))))


@pytest.mark.parametrize(("data", "decode"), DECODERS, ids=["report", "part", "digests", "catalog"])
def test_messages_above_the_limit(data: bytes, decode: Callable[..., object]) -> None:
    with pytest.raises(WireError, match=r"more than the limit of 50"):
        decode(data, max_bytes=50)
    with pytest.raises(WireError, match=r"unpacks to|more memory than"):
        decode(data, max_bytes=len(data))


def peak_of(decode: Callable[..., object], data: bytes, max_bytes: int) -> int:
    """Most bytes allocated while decoding something that is refused."""
    tracemalloc.start()
    try:
        with pytest.raises(InputError):
            decode(data, max_bytes=max_bytes)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_bombs_do_not_go_off() -> None:
    limit = 1 << 20
    zeros = zlib.compress(bytes(256 << 20), 9)
    nested = msgpack.packb([{}, {}])[:1] + b"\x91" * 60_000
    nils = [[None] * 60 for _ in range(1000)]
    body = struct.pack("<I", len(nested)) + nested
    bombs = [
        REPORT[:8] + struct.pack("<Q", limit) + zeros,
        REPORT[:8] + struct.pack("<Q", len(body)) + zlib.compress(body),
        reframe(REPORT, {"rank": nils}, {}, b""),
        changed(REPORT, tensor=["a", 1 << 30, 0, 0]),
        changed(REPORT, tensor=["a", (limit // 8) - 1, 0, 0]),
        changed(REPORT, names=("",) * 100_000),
    ]
    for bomb in bombs:
        assert peak_of(decode_report, bomb, limit) < 16 * limit


def assert_refused_or_taken(decode: Callable[..., object], data: bytes) -> None:
    """A mutation may happen to be valid; else it is refused in one line, and nothing else is raised."""
    try:
        decode(data, max_bytes=1 << 20)
    except InputError as error:
        said = str(error)
    else:
        said = ""
    assert "\n" not in said


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_bytes_raise_nothing_else(draw: st.DataObject) -> None:
    data, decode = draw.draw(st.sampled_from(DECODERS))
    fields, columns, payload = frame(data)
    header = msgpack.packb([fields, columns])
    body = bytearray(struct.pack("<I", len(header)) + header + payload)
    for _ in range(draw.draw(st.integers(1, 4))):
        at = draw.draw(st.integers(0, len(body) - 1))
        body[at] = draw.draw(st.integers(0, 255))
    broken = data[:8] + struct.pack("<Q", len(body)) + zlib.compress(bytes(body))
    assert_refused_or_taken(decode, broken)


FORMS = ["a", "v", "d", "s", "u1", "u2", "i8", "u8"]
HOSTILE = st.recursive(
    st.none() | st.booleans() | INT64 | st.floats() | st.text(max_size=5) | st.sampled_from(FORMS),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_headers_raise_nothing_else(draw: st.DataObject) -> None:
    data, decode = draw.draw(st.sampled_from(DECODERS))
    fields, columns, payload = frame(data)
    for _ in range(draw.draw(st.integers(1, 3))):
        part = draw.draw(st.sampled_from([part for part in (fields, columns) if part]))
        name = draw.draw(st.sampled_from(sorted(part)))
        if part is columns and isinstance(part[name], list) and part[name] and draw.draw(st.booleans()):
            part[name][draw.draw(st.integers(0, len(part[name]) - 1))] = draw.draw(HOSTILE)
        else:
            part[name] = draw.draw(HOSTILE)
    assert_refused_or_taken(decode, reframe(data, fields, columns, payload))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_mutated_columns_raise_nothing_else(draw: st.DataObject) -> None:
    data, decode = draw.draw(st.sampled_from(DECODERS))
    _, columns, _ = frame(data)
    name = draw.draw(st.sampled_from(sorted(n for n, d in columns.items() if d[0] != "s")))
    values = draw.draw(st.lists(INT64 | st.integers(-2, 20), max_size=2 * N))
    if draw.draw(st.booleans()):
        values = (values * columns[name][1] + [0] * columns[name][1])[: columns[name][1]]
    assert_refused_or_taken(decode, changed(data, **{name.replace(".", "__"): np.array(values, dtype=np.int64)}))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_raise_nothing_else(data: bytes) -> None:
    for _, decode in DECODERS:
        with pytest.raises(WireError):
            decode(data)
