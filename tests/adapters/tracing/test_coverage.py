from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.adapters.tracing.coverage import check_coverage
from weightcast.adapters.tracing.strided import Box
from weightcast.transfer.errors import DescribeError


@pytest.mark.parametrize(
    ("shape", "regions", "fills", "padding"),
    [
        ((4, 6), [Box((0, 0), (4, 6))], [], 0),
        ((4, 6), [Box((0, 0), (4, 4))], [Box((0, 4), (4, 2))], 8),
        ((4, 6), [Box((0, 0), (2, 6)), Box((2, 0), (2, 6))], [Box((0, 0), (4, 6))], 0),
        ((4,), [], [Box((0,), (3,)), Box((2,), (2,))], 4),
        ((), [Box((), ())], [], 0),
    ],
)
def test_complete(shape: tuple[int, ...], regions: list[Box], fills: list[Box], padding: int) -> None:
    assert check_coverage("p", shape, regions, fills) == padding


@pytest.mark.parametrize(
    ("shape", "regions", "fills", "message"),
    [
        (
            (4, 6),
            [],
            [],
            r"parameter 'p' of shape \[4, 6\]: box at \[0, 0\] of size \[4, 6\] is written by no checkpoint",
        ),
        ((4, 6), [Box((0, 0), (3, 6))], [], r"box at \[3, 0\] of size \[1, 6\] is written by no checkpoint tensor"),
        ((4, 6), [Box((0, 0), (4, 4)), Box((3, 0), (1, 6))], [], r"box at \[3, 0\] of size \[1, 4\] is written by two"),
        (
            (2, 2, 2),
            [Box((0, 0, 0), (2, 2, 1))],
            [Box((0, 0, 1), (1, 2, 1))],
            r"box at \[1, 0, 1\] of size \[1, 2, 1\]",
        ),
        ((), [], [], r"box at \[\] of size \[\] is written by no checkpoint tensor"),
        ((), [Box((), ()), Box((), ())], [], r"is written by two regions"),
    ],
)
def test_faults(shape: tuple[int, ...], regions: list[Box], fills: list[Box], message: str) -> None:
    with pytest.raises(DescribeError, match=message):
        check_coverage("p", shape, regions, fills)


@st.composite
def writes(draw: Any) -> tuple[tuple[int, ...], list[Box], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))

    def box() -> Box:
        start = tuple(draw(st.integers(0, n - 1)) for n in shape)
        return Box(start, tuple(draw(st.integers(1, n - s)) for n, s in zip(shape, start, strict=True)))

    return shape, [box() for _ in range(draw(st.integers(0, 3)))], [box() for _ in range(draw(st.integers(0, 2)))]


@given(writes())
def test_equals_counting(drawn: tuple[tuple[int, ...], list[Box], list[Box]]) -> None:
    shape, regions, fills = drawn
    copied, filled = np.zeros(shape, dtype=int), np.zeros(shape, dtype=int)
    for count, box in [*product([copied], regions), *product([filled], fills)]:
        count[tuple(slice(s, s + n) for s, n in zip(box.start, box.size, strict=True))] += 1
    if (copied > 1).any() or ((copied == 0) & (filled == 0)).any():
        with pytest.raises(DescribeError):
            check_coverage("p", shape, regions, fills)
    else:
        assert check_coverage("p", shape, regions, fills) == int((copied == 0).sum())
