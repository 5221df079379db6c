from __future__ import annotations

import dataclasses

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.transfer.colocated.offers import Offer, decode_offer, encode_offer, fingerprint_of
from weightcast.transfer.colocated.segment import CPU, Segment
from weightcast.transfer.errors import PlanError, WireError
from weightcast.transfer.layout.dtypes import dtype_code


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def offer(**changes: object) -> Offer:
    """Two boxes, one row and one column of a float32 matrix of 4 x 6 that begins at byte 64."""
    made = Offer(
        staged=False,
        segments=(Segment(CPU, 4096, b"abc"), Segment("GPU-1", 16, bytes(range(256)))),
        segment=ints(0),
        first=ints(64),
        elements=ints(24),
        dtype=ints(dtype_code("float32")),
        base=ints(0, 0),
        start=ints(6, 5),
        stride=np.array([[6, 1], [6, 1]], dtype=np.int64),
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


SIZE = np.array([[1, 6], [4, 1]], dtype=np.int64)


def same(one: Offer, other: Offer) -> bool:
    rest = [name for name in Offer.__slots__ if name not in ("staged", "segments")]
    equal = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in rest)
    return equal and (one.staged, one.segments) == (other.staged, other.segments)


def test_an_offer_survives_the_wire_and_its_fingerprint_is_of_its_contents() -> None:
    frame = encode_offer(offer())
    assert same(decode_offer(frame), offer())
    assert fingerprint_of(frame) == fingerprint_of(encode_offer(offer()))
    assert fingerprint_of(frame) != fingerprint_of(encode_offer(offer(segments=(Segment(CPU, 4096, b"abd"),) * 2)))


def test_boxes_inside_are_let_through() -> None:
    offer().check(SIZE, "trainer rank 0")
    offer(start=ints(24, 5)).check(SIZE * [[0], [1]], "an empty box may begin at the end")


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({"start": ints(19, 0)}, SIZE, "box 0 up to element 24 of 24"),
        ({"start": ints(0, 6)}, SIZE, "box 1 up to element 24 of 24"),
        ({"stride": np.array([[6, 5], [6, 1]])}, SIZE, "box 0 up to element 31 of 24"),
        ({"stride": np.array([[6, 1], [1 << 40, 1]])}, SIZE * [[1], [1 << 30]], "box 1 up to element"),
        ({}, SIZE[:1], "offers 2 boxes, the plan has 1"),
    ],
)
def test_boxes_outside_are_refused(changes: dict[str, object], size: np.ndarray, message: str) -> None:
    with pytest.raises(PlanError, match=f"trainer rank 0 offers .*{message}|trainer rank 0 {message}"):
        offer(**changes).check(size, "trainer rank 0")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"segment": ints(2)}, r"has segment 2 in row 0, expected 0\.\.1"),
        ({"segment": ints(-1)}, "has segment -1 in row 0, expected 0"),
        ({"first": ints(4032)}, "base that is not inside its segment"),
        ({"first": ints(62)}, "base that is not inside its segment"),
        ({"elements": ints(-1)}, "has elements -1 in row 0, expected 0"),
        ({"dtype": ints(99)}, "has dtype 99 in row 0, expected 0"),
        ({"base": ints(0, 1)}, r"has base 1 in row 1, expected 0\.\.0"),
        ({"start": ints(0, -1)}, "has start -1 in row 1, expected 0"),
        ({"stride": np.array([[6, 1], [-6, 1]])}, "has stride.0 -6 in row 1, expected 0"),
        ({"segments": (Segment(CPU, -1, b""), Segment(CPU, 16, b""))}, "has nbytes -1 in row 0, expected 0"),
    ],
)
def test_offers_that_name_nothing_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(WireError, match=message):
        decode_offer(encode_offer(offer(**changes)))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_offers_are_refused_or_are_offers(data: st.DataObject) -> None:
    frame = bytearray(encode_offer(offer()))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_offer(bytes(frame[: data.draw(st.integers(0, len(frame)))]))
    except WireError:
        return


def test_frames_of_other_kinds_are_refused() -> None:
    for other in (b"", b"WCST", msgpack.packb({"staged": True})):
        with pytest.raises(WireError):
            decode_offer(other)
