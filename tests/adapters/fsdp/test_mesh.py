"""Placements to runs: literal cuts in, literal runs out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.adapters.fsdp.mesh import Cut, mesh_runs, possible_runs, total


@pytest.mark.parametrize(
    ("size", "cuts", "runs"),
    [
        (5, [], [(0, 5)]),
        (0, [Cut(2, 0)], []),
        (130, [Cut(4, 0)], [(0, 33)]),
        (130, [Cut(4, 3)], [(99, 130)]),
        (6, [Cut(4, 2)], [(4, 6)]),
        (6, [Cut(4, 3)], []),
        (12, [Cut(2, 0, split=3), Cut(2, 0)], [(0, 2), (4, 5)]),
        (12, [Cut(2, 0, split=3), Cut(2, 1)], [(5, 6), (8, 10)]),
        (12, [Cut(2, 1, split=3), Cut(2, 0)], [(2, 4), (6, 7)]),
        (9, [Cut(4, 0, split=2)], [(0, 2), (5, 6)]),
        (9, [Cut(4, 3, split=2)], [(8, 9)]),
        (6, [Cut(2, 0, split=2), Cut(2, 1)], [(3, 5)]),
        (3, [Cut(2, 0, split=5)], [(0, 3)]),
    ],
)
def test_cuts_from_left_to_right(size: int, cuts: list[Cut], runs: list[tuple[int, int]]) -> None:
    assert list(mesh_runs(size, cuts)) == runs


@pytest.mark.parametrize(
    ("size", "cuts", "readings"),
    [
        (8, [Cut(2, 1, split=2), Cut(2, 0)], [[(2, 4)]]),
        # 7 rows over 3 x 2 ranks: DTensor's reading, then what FSDP2 over tensor parallel really does.
        (7, [Cut(3, 2, split=2), Cut(2, 0)], [[(6, 7)], []]),
        (13, [Cut(3, 2, split=2), Cut(2, 1)], [[(12, 13)], [(11, 13)]]),
        (12, [Cut(2, 0, split=3), Cut(2, 0)], [[(0, 2), (4, 5)]]),
        # Three mesh dimensions, the first cut made last.
        (8, [Cut(2, 1, split=4), Cut(2, 0), Cut(2, 1)], [[(3, 4)]]),
        (8, [Cut(2, 1), Cut(2, 0, split=2), Cut(2, 1)], [[(6, 7)]]),
    ],
)
def test_both_readings_of_strided_placements(size: int, cuts: list[Cut], readings: list[list[tuple[int, int]]]) -> None:
    assert [list(runs) for runs in possible_runs(size, cuts)] == readings


@given(size=st.integers(0, 60), dims=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=3))
def test_the_ranks_of_a_mesh_hold_every_index_once(size: int, dims: list[tuple[int, int]]) -> None:
    for reading in range(2):
        held: list[int] = []
        for coordinate in _coordinates([ranks for ranks, _ in dims]):
            cuts = [Cut(ranks, place, split) for (ranks, split), place in zip(dims, coordinate, strict=True)]
            readings = possible_runs(size, cuts)
            runs = readings[min(reading, len(readings) - 1)]
            indices = [i for run in runs for i in range(*run)]
            assert total(runs) == len(indices)
            assert indices == sorted(indices)
            held += indices
        assert sorted(held) == list(range(size))


def _coordinates(shape: list[int]) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for ranks in shape:
        found = [[*head, place] for head in found for place in range(ranks)]
    return found


@settings(deadline=None)
@given(size=st.integers(1, 40), dims=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=3))
def test_runs_are_the_rows_that_torch_splits_off(size: int, dims: list[tuple[int, int]]) -> None:
    import torch
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    for coordinate in _coordinates([ranks for ranks, _ in dims]):
        left = torch.arange(size)
        for (ranks, split), place in zip(dims, coordinate, strict=True):
            placement = _StridedShard(0, split_factor=split) if split else Shard(0)
            left = placement._split_tensor(left, ranks, with_padding=False)[0][place]
        cuts = [Cut(ranks, place, split or 1) for (ranks, split), place in zip(dims, coordinate, strict=True)]
        assert [i for run in mesh_runs(size, cuts) for i in range(*run)] == left.tolist()
