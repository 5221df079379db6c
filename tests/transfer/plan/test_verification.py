from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from digest_support import add
from plain_support import Piece, describe_pieces

from weightcast.transfer.digest.digester import Digester
from weightcast.transfer.layout.memory import RankLayout
from weightcast.transfer.plan.verification import SAMPLE_STEP, Sample, Verify, sampled_rows


def digests(layout: RankLayout, sample: Sample | None) -> list[int]:
    table = layout.table
    dtype = table.tensors.dtype[table.tensor]
    return [int(d) for d in Digester(layout, np.arange(len(table)), table.offset, table.size, dtype).run(sample)]


def test_what_boxes_have_in_common_with_a_sample() -> None:
    shape, ndim = np.array([[64, 9], [64, 9], [64, 9], [8, 9], [64, 1]]), np.array([2, 2, 2, 2, 1])
    offset, size = (
        np.array([[0, 0], [20, 3], [4, 0], [0, 0], [30, 0]]),
        np.array([[64, 9], [44, 2], [10, 9], [8, 9], [34, 1]]),
    )
    first, count, step = Sample(19).thin(*sampled_rows(shape, ndim), offset, size)
    assert first.tolist() == [[3, 0], [35, 3], [19, 0], [3, 0], [35, 0]]
    assert count.tolist() == [[4, 9], [2, 2], [0, 9], [2, 9], [2, 1]]
    assert step.tolist() == [[16, 1], [16, 1], [16, 1], [4, 1], [16, 1]]


def test_a_box_with_half_of_its_tensor_s_rows_or_sixteen_is_in_every_sample() -> None:
    for rows in range(1, 70):
        dim, every = sampled_rows(np.array([[rows, 5]]), np.array([2]))
        for turn in range(SAMPLE_STEP):
            for begin in range(rows):
                size = np.array([[min(SAMPLE_STEP, (rows + 1) // 2, rows - begin), 5]])
                if size[0, 0] < min(SAMPLE_STEP, (rows + 1) // 2):
                    continue
                _, count, _ = Sample(turn).thin(dim, every, np.array([[begin, 0]]), size)
                assert count[0, 0] >= 1


@pytest.mark.parametrize("turn", [0, 5, 31])
@pytest.mark.parametrize(
    ("shape", "cuts"), [((100, 30), (0, 7, 50, 99, 100)), ((3, 70, 5), (0, 1, 3)), ((200,), (0, 17, 20, 200))]
)
def test_samples_of_parts_add_up_to_the_sample_of_the_tensor(
    shape: tuple[int, ...], cuts: tuple[int, ...], turn: int
) -> None:
    full = torch.randn(shape)
    whole = describe_pieces([Piece("w", shape, (0,) * len(shape), full)])
    zeros = (0,) * (len(shape) - 1)
    cut = [(a, full[a:b]) for a, b in pairwise(cuts)]
    views = [(a, view.mT.contiguous().mT if view.dim() > 1 else view) for a, view in cut]
    parts = describe_pieces([Piece("w", shape, (a, *zeros), view) for a, view in views])
    sample = Sample(turn)
    assert add(*digests(parts, sample)) == digests(whole, sample)[0] != digests(whole, None)[0]


def test_a_run_of_versions_covers_every_element() -> None:
    shape = (4, 40, 3)
    full = torch.zeros(shape)
    layout = describe_pieces([Piece("w", shape, (0, 0, 0), full)])
    before = [digests(layout, Sample(turn)) for turn in range(SAMPLE_STEP)]
    for index in np.ndindex(shape):
        full[index] = 1.0
        seen = [turn for turn in range(SAMPLE_STEP) if digests(layout, Sample(turn)) != before[turn]]
        assert seen == [index[1] % SAMPLE_STEP]
        full[index] = 0.0


def test_only_sampled_updates_have_a_sample() -> None:
    assert Sample.of(Verify.FULL, 7) is None
    assert Sample.of(Verify.SAMPLED, 7) == Sample(7)
    assert Verify("off") is Verify.OFF
