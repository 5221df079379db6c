from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.transfer.boxes.slices import contiguous_strides
from weightcast.transfer.boxes.strided import StridedCopies, join

Row = tuple[list[int], int, list[int]]
"""Size, first element and strides in a parameter. The other side is a message that the rows fill without a gap."""


def copies(rows: list[Row], group: list[int] | None = None) -> StridedCopies:
    size = np.array([s for s, _, _ in rows])
    wire = contiguous_strides(size)
    elements = size.prod(axis=1)
    start = np.stack([np.array([a for _, a, _ in rows]), np.cumsum(elements) - elements], axis=1)
    stride = np.stack([np.array([t for _, _, t in rows]), wire], axis=2)
    return StridedCopies(np.array(group or [0] * len(rows)), size, np.zeros((len(rows), 2), dtype=int), start, stride)


def joined(rows: list[Row], group: list[int] | None = None) -> list[Row]:
    made = join(copies(rows, group))
    out = []
    for size, start, stride in zip(made.size, made.start[:, 0], made.stride[:, :, 0], strict=True):
        keep = size != 1
        out.append((size[keep].tolist(), int(start), stride[keep].tolist()))
    return out


def test_a_contiguous_box_is_one_run() -> None:
    assert joined([([2, 3, 4], 5, [12, 4, 1])]) == [([24], 5, [1])]


def test_rows_of_a_matrix_part_stay_two_dimensions() -> None:
    assert joined([([2, 3, 4], 0, [30, 10, 1])]) == [([6, 4], 0, [10, 1])]


def test_a_transposed_box_keeps_its_strides() -> None:
    assert joined([([3, 4], 7, [1, 3])]) == [([3, 4], 7, [1, 3])]


def test_neighbours_of_any_length_become_one() -> None:
    assert joined([([1, 8], 0, [8, 1]), ([2, 8], 8, [8, 1]), ([1, 1], 24, [1, 1])]) == [([25], 0, [1])]
    assert joined([([2, 4], 0, [10, 1]), ([3, 4], 20, [10, 1])]) == [([5, 4], 0, [10, 1])]


def test_even_distances_become_a_dimension() -> None:
    assert joined([([4], 0, [1]), ([4], 10, [1]), ([4], 20, [1])]) == [([3, 4], 0, [10, 1])]


def test_a_change_of_distance_begins_anew() -> None:
    rows: list[Row] = [([4], a, [1]) for a in (0, 10, 20, 100, 110, 120, 500, 5)]
    assert joined(rows) == [([3, 4], 0, [10, 1]), ([3, 4], 100, [10, 1]), ([4], 500, [1]), ([4], 5, [1])]


def test_groups_are_never_joined() -> None:
    assert joined([([4], 0, [1]), ([4], 4, [1])], [0, 1]) == [([4], 0, [1]), ([4], 4, [1])]


def test_no_rows() -> None:
    assert len(join(StridedCopies(*(np.zeros((0, *s), dtype=int) for s in ((), (2,), (2,), (2,), (2, 2)))))) == 0


def addresses(made: StridedCopies) -> list[tuple[int, int, int]]:
    """Every element moved: (group, element of side 0, element of side 1), in order."""
    out = []
    for i in range(len(made)):
        index = np.indices(made.size[i]).reshape(made.size.shape[1], -1)
        sides = [made.start[i, side] + (index * made.stride[i, :, side][:, None]).sum(axis=0) for side in (0, 1)]
        out += [(int(made.group[i]), int(a), int(b)) for a, b in zip(*sides, strict=True)]
    return out


row = st.tuples(
    st.lists(st.integers(1, 3), min_size=3, max_size=3),
    st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 20]),
    st.sampled_from([[9, 3, 1], [6, 2, 1], [1, 3, 9], [40, 10, 1], [4, 2, 1], [3, 1, 50]]),
)


@given(st.lists(row, min_size=1, max_size=12), st.randoms())
@settings(max_examples=300, deadline=None)
def test_joined_copies_move_the_same_elements(rows: list[Row], random: object) -> None:
    before = copies(rows, sorted(random.randint(0, 1) for _ in rows))  # type: ignore[attr-defined]
    after = join(before)
    assert sorted(addresses(after)) == sorted(addresses(before))
    assert len(after) <= len(before)
    memory = torch.empty(1000)
    views = [memory.as_strided(s, t) for s, t in zip(after.size.tolist(), after.stride[:, :, 0].tolist(), strict=True)]
    assert after.contiguous(0).tolist() == [view.is_contiguous() for view in views]
