"""Fused rows of Megatron tensors, and the tables of names; Megatron itself is not needed."""

from __future__ import annotations

import itertools
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.adapters.megatron.names import FAMILIES
from weightcast.adapters.megatron.rows import FusedRows, Fusion, Sizes, fused_rows, overlap

# 4 query heads in 2 groups, 3 rows a head: groups of 6 query rows, 3 key rows and 3 value rows.
SIZES = Sizes(heads=4, query_groups=2, head_dim=3, vocab_size=10)
Q, K, V = 0, 1, 2


def test_query_groups_lie_one_after_the_other() -> None:
    assert fused_rows(Fusion.QKV, 24, SIZES) == (
        FusedRows(0, 6, Q, 0, 12), FusedRows(6, 3, K, 0, 6), FusedRows(9, 3, V, 0, 6),
        FusedRows(12, 6, Q, 6, 12), FusedRows(18, 3, K, 3, 6), FusedRows(21, 3, V, 3, 6),
    )  # fmt: skip


def test_a_rank_may_hold_part_of_a_group() -> None:
    """Four ranks, two groups: the second rank has the last query row of its group and all of key and value."""
    runs = fused_rows(Fusion.QKV, 24, SIZES)
    assert list(overlap(runs, 5, 7)) == [FusedRows(5, 1, Q, 5, 12), FusedRows(6, 3, K, 0, 6), FusedRows(9, 3, V, 0, 6)]


def test_gate_and_up_are_halves() -> None:
    assert fused_rows(Fusion.GATE_UP, 8, SIZES) == (FusedRows(0, 4, 0, 0, 4), FusedRows(4, 4, 1, 0, 4))


def test_padding_of_the_vocabulary_is_in_no_run() -> None:
    runs = fused_rows(Fusion.VOCABULARY, 16, SIZES)
    assert list(overlap(runs, 8, 4)) == [FusedRows(8, 2, 0, 8, 10)]
    assert list(overlap(runs, 12, 4)) == []


@pytest.mark.parametrize(
    ("fusion", "rows", "expected"),
    [
        (Fusion.QKV, 20, "24 rows: 4 query heads and 2 x 2 key and value heads of 3"),
        (Fusion.GATE_UP, 7, "an even number of rows"),
        (Fusion.VOCABULARY, 9, "at least the 10 rows of vocab_size="),
    ],
)
def test_rows_that_contradict_the_sizes_are_refused(fusion: Fusion, rows: int, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        fused_rows(fusion, rows, SIZES)


def test_heads_that_do_not_divide_into_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="5 query heads and 2 x 2"):
        fused_rows(Fusion.QKV, 27, SIZES._replace(heads=5))


@given(groups=st.integers(1, 5), per_group=st.integers(1, 4), dim=st.integers(1, 5), cuts=st.data())
def test_ranks_together_hold_every_row_once(groups: int, per_group: int, dim: int, cuts: st.DataObject) -> None:
    sizes = Sizes(groups * per_group, groups, dim, 0)
    rows = (sizes.heads + 2 * groups) * dim
    edges = sorted({0, rows, *cuts.draw(st.lists(st.integers(0, rows), max_size=4))})
    runs = fused_rows(Fusion.QKV, rows, sizes)
    held = [run for low, high in itertools.pairwise(edges) for run in overlap(runs, low, high - low)]
    assert sorted(start + i for start, length, *_ in held for i in range(length)) == list(range(rows))
    found = [(part, offset + i) for _, length, part, offset, _ in held for i in range(length)]
    heads = {Q: sizes.heads, K: groups, V: groups}
    assert sorted(found) == [(part, row) for part, count in heads.items() for row in range(count * dim)]


@pytest.mark.parametrize("family", FAMILIES)
def test_names_have_the_numbers_of_their_keys(family: str) -> None:
    """A layer's tensor has the layer in its name, an expert's the expert, a fused one the part, and no other."""
    for key, rule in FAMILIES[family].items():
        fields = {field for _, field, _, _ in string.Formatter().parse(rule.name) if field}
        expected = {"layer"} if ".layers." in key else set()
        expected |= {"expert"} if ".experts.experts." in key else set()
        expected |= {"part"} if len(rule.parts) > 1 else set()
        assert fields == expected, key


@pytest.mark.parametrize("family", FAMILIES)
def test_only_a_norm_that_is_kept_in_two_places_has_two_keys(family: str) -> None:
    names = [rule.name for key, rule in FAMILIES[family].items() if "norm" not in key and not key.startswith("mtp.")]
    assert len(names) == len(set(names))
