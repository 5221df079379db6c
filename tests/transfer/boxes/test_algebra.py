"""Algebra of boxes: literal boxes, and random ones compared with arrays of elements."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.transfer.boxes import algebra as regions
from weightcast.transfer.boxes.algebra import decompose, intersect, overlaps, uncovered
from weightcast.transfer.errors import LayoutError
from weightcast.transfer.layout.coverage import missing_boxes


def columns(rows, dims=2):
    """[(key, offset, size), ...] -> key, offset, size."""
    return (
        np.array([row[0] for row in rows], dtype=np.int64),
        np.array([row[1] for row in rows], dtype=np.int64).reshape(-1, dims),
        np.array([row[2] for row in rows], dtype=np.int64).reshape(-1, dims),
    )


def elements(key, offset, size, shape=(9, 9, 9)):
    """One boolean array of all keys' elements for each row."""
    made = np.zeros((len(key), 4, *shape[: offset.shape[1]]), dtype=bool)
    for i in range(len(key)):
        made[(i, key[i], *(slice(o, o + s) for o, s in zip(offset[i], size[i], strict=True)))] = True
    return made.reshape(len(key), int(np.prod(made.shape[1:])))


@st.composite
def boxes(draw, dims=None, most=14):
    width = dims or draw(st.integers(1, 3))
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, 3),
                st.lists(st.integers(0, 5), min_size=width, max_size=width),
                st.lists(st.integers(0, 4), min_size=width, max_size=width),
            ),
            max_size=most,
        )
    )
    return columns(rows, width)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 3).flatmap(lambda d: st.tuples(boxes(d), boxes(d))))
def test_intersect_finds_every_pair_that_shares_an_element(sides):
    left, right = sides
    a, b, offset, size = intersect(left, right)
    shared = elements(*left)[:, None, :] & elements(*right)[None, :, :]
    assert sorted(zip(b.tolist(), a.tolist(), strict=True)) == list(zip(b.tolist(), a.tolist(), strict=True))
    assert set(zip(a.tolist(), b.tolist(), strict=True)) == {
        (i, j) for i, j in np.argwhere(shared.any(axis=2)).tolist()
    }
    assert len(set(zip(a.tolist(), b.tolist(), strict=True))) == len(a)
    assert (elements(left[0][a], offset, size) == shared[a, b]).all()


@settings(max_examples=300, deadline=None)
@given(boxes())
def test_decompose_gives_disjoint_cells_that_make_up_every_box(rows):
    cells = decompose(*rows)
    inside, cell = elements(*rows), elements(cells.key, cells.offset, cells.size)
    assert (cell.sum(axis=0) <= 1).all()
    assert (cell.any(axis=0) == inside.any(axis=0)).all()
    holds = {(c, r) for c, r in itertools.product(range(len(cell)), range(len(inside))) if (inside[r] & cell[c]).any()}
    assert all((cell[c] <= inside[r]).all() for c, r in holds)
    assert list(zip(cells.cell.tolist(), cells.row.tolist(), strict=True)) == sorted(holds)
    order = list(zip(cells.key.tolist(), cells.offset.tolist(), strict=True))
    assert order == sorted(order)


@settings(max_examples=300, deadline=None)
@given(boxes())
def test_overlaps_are_found_and_real(rows):
    inside = elements(*rows)
    a, b = overlaps(*rows)
    assert all((inside[i] & inside[j]).any() and i != j for i, j in zip(a, b, strict=True))
    some = any((inside[i] & inside[j]).any() for i, j in itertools.combinations(range(len(inside)), 2))
    assert bool(len(a)) == some == (overlaps(*rows)[0].size > 0)


@settings(max_examples=200, deadline=None)
@given(boxes(2))
def test_missing_boxes_are_what_is_left(rows):
    key, offset, size = rows
    shape = np.array([9, 9])
    held = elements(np.zeros_like(key), offset, size).reshape(-1, 4, 9, 9)[:, 0].any(axis=0)
    low, extent = missing_boxes(offset, size, shape)
    free = elements(np.zeros(len(low), dtype=np.int64), low, extent).reshape(-1, 4, 9, 9)[:, 0]
    assert (free.sum(axis=0) == ~held).all()


def test_missing_boxes_are_joined():
    _, offset, size = columns([(0, (0, 0), (2, 8)), (0, (2, 0), (2, 4)), (0, (2, 4), (2, 4))])
    low, extent = missing_boxes(offset, size, np.array([8, 8]))
    assert (low.tolist(), extent.tolist()) == ([[4, 0]], [[4, 8]])


def test_distinct_disjoint_boxes_are_the_cells():
    cells = decompose(*columns([(0, (4, 0), (4, 4)), (0, (0, 0), (4, 4)), (0, (4, 0), (4, 4)), (2, (0, 0), (8, 4))]))
    assert cells.key.tolist() == [0, 0, 2]
    assert cells.offset.tolist() == [[0, 0], [4, 0], [0, 0]]
    assert cells.start.tolist() == [0, 1, 3, 4]
    assert cells.row.tolist() == [1, 0, 2, 3]


def test_a_grid_is_made_only_where_boxes_overlap():
    cells = decompose(*columns([(0, (0, 0), (4, 4)), (0, (2, 0), (4, 4)), (0, (6, 0), (2, 4)), (1, (0, 0), (8, 4))]))
    assert list(zip(cells.key.tolist(), cells.offset[:, 0].tolist(), cells.size[:, 0].tolist(), strict=True)) == [
        (0, 0, 2), (0, 2, 2), (0, 4, 2), (0, 6, 2), (1, 0, 8),
    ]  # fmt: skip
    assert [cells.row[a:b].tolist() for a, b in itertools.pairwise(cells.start.tolist())] == [
        [0],
        [0, 1],
        [1],
        [2],
        [3],
    ]


def test_a_pinwheel_that_no_cut_takes_apart_is_disjoint():
    pinwheel = columns(
        [(0, (0, 0), (1, 2)), (0, (0, 2), (2, 1)), (0, (2, 1), (1, 2)), (0, (1, 0), (2, 1)), (0, (1, 1), (1, 1))]
    )
    assert not overlaps(*pinwheel)[0].size
    assert len(decompose(*pinwheel)) == 5


def test_boxes_without_elements_are_dropped():
    rows = columns([(0, (0, 0), (0, 4)), (0, (0, 0), (4, 4)), (0, (2, 2), (1, 0))])
    assert decompose(*rows).row.tolist() == [1]
    assert not overlaps(*rows)[0].size
    assert len(decompose(*columns([(0, (0, 0), (0, 4))]))) == 0
    assert len(decompose(*columns([]))) == 0


def test_uncovered():
    rows = columns([(0, (0, 0), (4, 4)), (2, (0, 0), (8, 2)), (2, (0, 2), (8, 2))])
    shapes = np.array([[8, 4], [1, 1], [8, 4], [0, 4]])
    assert uncovered(*rows, shapes).tolist() == [0, 1]


def test_large_coordinates_do_not_wrap_around():
    far = 1 << 59
    rows = columns(
        [(0, (far - 4, 0), (4, 2)), (0, (0, 0), (far - 4, 2)), (7, (far - 2, 0), (2, 2)), (7, (far - 3, 0), (2, 2))]
    )
    assert overlaps(*rows)[0].size == 1
    a, _, offset, _ = intersect(rows, rows)
    assert len(a) == 6
    assert [far - 2, 0] in offset.tolist()
    assert len(decompose(*rows)) == 5


def test_many_shards_of_many_tensors_take_no_quadratic_join(monkeypatch):
    # 4,000 tensors in 64 shards, received in 16: 64 x 16 candidates a tensor would be 4 million pairs.
    monkeypatch.setattr(regions, "PAIR_LIMIT", 600_000)
    tensors, shards, parts = 4000, 64, 16

    def side(count):
        key = np.repeat(np.arange(tensors), count)
        low = np.tile(np.arange(count) * (128 // count), tensors)
        offset = np.stack([np.zeros_like(low), low], axis=1)
        return key, offset, np.stack([np.full_like(low, 3), np.full_like(low, 128 // count)], axis=1)

    left = side(shards)
    assert not overlaps(*left)[0].size
    assert len(intersect(left, side(parts))[0]) == tensors * shards


def test_a_grid_too_large_for_memory_is_refused_by_name():
    # 2,000 rows and 2,000 columns across one another: 4 million cells, each in two boxes.
    n = 2000
    low = np.arange(n)
    offset = np.concatenate([np.stack([low, 0 * low], axis=1), np.stack([0 * low, low], axis=1)])
    size = np.concatenate([np.stack([1 + 0 * low, n + 0 * low], axis=1), np.stack([n + 0 * low, 1 + 0 * low], axis=1)])
    limit = regions.CELL_LIMIT
    try:
        regions.CELL_LIMIT = 100_000
        with pytest.raises(LayoutError, match="tensor 'w': its boxes overlap partly"):
            decompose(np.zeros(2 * n, dtype=np.int64), offset, size, lambda key: f"tensor {'vw'[key + 1]!r}")
    finally:
        regions.CELL_LIMIT = limit


def test_hopelessly_many_overlaps_are_refused(monkeypatch):
    monkeypatch.setattr(regions, "PAIR_LIMIT", 10_000)
    low = np.arange(300)
    with pytest.raises(LayoutError, match="boxes overlap in"):
        decompose(0 * low, np.stack([low, low], axis=1), np.full((300, 2), 300))


def test_joins_in_chunks_give_the_same(monkeypatch):
    rng = np.random.default_rng(3)
    left = (rng.integers(0, 2, 60), rng.integers(0, 20, (60, 2)), rng.integers(1, 9, (60, 2)))
    right = (rng.integers(0, 2, 60), rng.integers(0, 20, (60, 2)), rng.integers(1, 9, (60, 2)))
    expected = intersect(left, right)
    monkeypatch.setattr(regions, "PAIR_CHUNK", 7)
    for a, b in zip(expected, intersect(left, right), strict=True):
        assert np.array_equal(a, b)
