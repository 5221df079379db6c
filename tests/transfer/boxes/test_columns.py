"""Sorting and grouping of columns, compared with numpy's own slow ways."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from weightcast.transfer.boxes.columns import lex_sort, ranges, shared, stable_order, starts_of, volumes

INT64 = st.one_of(st.integers(-3, 3), st.integers(-(2**62), 2**62), st.integers(0, 2**31))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 4).flatmap(lambda k: hnp.arrays(np.int64, st.tuples(st.just(k), st.integers(0, 30)), elements=INT64))
)
def test_lex_sort_is_numpys(table):
    order, begins = lex_sort(list(table))
    assert order.tolist() == np.lexsort(table[::-1]).tolist()
    rows = table.T[order].tolist()
    assert begins.tolist() == [i == 0 or rows[i] != rows[i - 1] for i in range(len(rows))]


@settings(deadline=None)
@given(st.lists(st.integers(0, 9)), st.sampled_from([10, 1 << 61]))
def test_stable_order(key, extent):
    assert stable_order(np.array(key, dtype=np.int64), extent).tolist() == sorted(range(len(key)), key=key.__getitem__)


def test_ranges():
    assert ranges(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
    assert ranges(np.array([], dtype=np.int64), np.array([], dtype=np.int64)).tolist() == []


def test_runs():
    starts = starts_of(np.array([True, False, True, True]))
    assert starts.tolist() == [0, 2, 3, 4]
    assert shared(np.array([True, False, True, True])).tolist() == [True, True, False, False]


def test_volumes():
    assert volumes(np.array([[2, 3, 4], [0, 5, 5], [1, 1, 1]])).tolist() == [24, 0, 1]
