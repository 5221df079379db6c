from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from weightcast.transfer.boxes.slices import contiguous_strides
from weightcast.transfer.boxes.strided import StridedCopies, join
from weightcast.transfer.copy.batch import CopyBatch, make_copies
from weightcast.transfer.copy.runs import SCRATCH_BYTES

Box = tuple[int, int, list[int], list[int]]  # base, start, size, stride


def in_message(boxes: list[Box]) -> StridedCopies:
    """Boxes of some tensors, one after the other in a message."""
    size = np.array([box[2] for box in boxes], dtype=np.int64)
    count, zeros = size.prod(axis=1), np.zeros(len(boxes), dtype=np.int64)
    stride = np.array([box[3] for box in boxes], dtype=np.int64)
    return join(
        StridedCopies(
            zeros,
            size,
            np.stack([np.array([box[0] for box in boxes]), zeros], axis=1),
            np.stack([np.array([box[1] for box in boxes]), np.cumsum(count) - count], axis=1),
            np.stack([stride, contiguous_strides(size)], axis=2),
        )
    )


def batch_of(
    copies: StridedCopies, tensors: tuple[list[torch.Tensor], list[torch.Tensor]], packed: int | None
) -> CopyBatch:
    made, scratch = CopyBatch(), torch.empty(SCRATCH_BYTES, dtype=torch.uint8)
    make_copies(copies, tensors, packed, [made], np.zeros(len(copies), dtype=np.int64), scratch)
    return made


def views(boxes: list[Box], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors[base].as_strided(size, stride, start) for base, start, size, stride in boxes]


def scattered(seed: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[Box]]:
    """Boxes that do not overlap: rows of their own, in several tensors, of few lengths, some of them strided."""
    rng = random.Random(seed)
    tensors, boxes = [], []
    for base in range(rng.randint(1, 5)):
        at = 0
        for _ in range(rng.randint(0, 12)):
            rows, length = rng.choice([1, 1, 1, 2, 40]), rng.choice([1, 3, 8, 8, 8, 700])
            gap, inner = rng.choice([0, 0, 5]), rng.choice([1, 1, 1, 2])
            boxes.append((base, at, [rows, length], [length * inner + gap, inner]))
            at += rows * (length * inner + gap) + rng.choice([0, 0, 3])
        tensors.append(torch.randint(0, 99, (at,), dtype=torch.int32).to(dtype))
    rng.shuffle(boxes)
    return tensors, boxes


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize(("held", "wire"), [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)])
def test_messages_are_filled_and_emptied(seed: int, held: torch.dtype, wire: torch.dtype) -> None:
    tensors, boxes = scattered(seed, held)
    if not boxes:
        return
    copies = in_message(boxes)
    expected = torch.cat([view.reshape(-1) for view in views(boxes, tensors)]).to(wire)
    message = torch.zeros(len(expected), dtype=wire)
    batch_of(copies, (tensors, [message]), 1).run()
    assert torch.equal(message, expected)
    if held == wire:
        before = [tensor.clone() for tensor in tensors]
        for view in views(boxes, tensors):
            view.fill_(99)
        batch_of(copies.turned(), ([message], tensors), 0).run()
        assert all(map(torch.equal, tensors, before))


def test_replicas_are_copied_between_scattered_places() -> None:
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0)).tolist()
    source, target = [torch.randn(50, 300)], [torch.zeros(300) for _ in range(50)]
    k, zeros = 50, np.zeros(50, dtype=np.int64)
    copies = StridedCopies(
        zeros, np.full((k, 1), 300), np.stack([zeros, np.arange(k)], axis=1),
        np.stack([np.array(order) * 300, zeros], axis=1), np.ones((k, 1, 2), dtype=np.int64),
    )  # fmt: skip
    made = batch_of(join(copies), ([source[0].view(-1)], target), None)
    assert made.steps
    assert len(made.steps) + len(made.targets) < 10
    made.run()
    assert torch.equal(torch.stack(target), source[0][order])


def laid_out(
    form: str, count: int, length: int, rng: random.Random
) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
    """Tensors, and where in them (tensor, element) `count` runs lie: side by side, at one distance, or anywhere."""
    if form == "apart":
        return [torch.full((length + rng.randint(0, 9),), -1.0) for _ in range(count)], [(i, 0) for i in range(count)]
    distance = length if form == "fused" else 2 * length + 5
    places = [(0, i * distance) for i in range(count)]
    rng.shuffle(places)
    return [torch.full((count * distance,), -1.0)], places


@pytest.mark.parametrize("length", [3, 300, 9000])
@pytest.mark.parametrize("target", ["fused", "spaced", "apart"])
@pytest.mark.parametrize("source", ["fused", "spaced", "apart"])
def test_runs_at_one_distance_are_not_copied_twice(source: str, target: str, length: int) -> None:
    """Each run to its place and nothing beside it."""
    rng, count = random.Random(length), 40
    (sources, read), (targets, written) = (laid_out(form, count, length, rng) for form in (source, target))
    for number, tensor in enumerate(sources):
        tensor.copy_(torch.arange(tensor.numel()) + 1000.0 * number)
    copies = StridedCopies(
        np.zeros(count, dtype=np.int64), np.full((count, 1), length),
        np.array([[r[0], w[0]] for r, w in zip(read, written, strict=True)]),
        np.array([[r[1], w[1]] for r, w in zip(read, written, strict=True)]), np.ones((count, 1, 2), dtype=np.int64),
    )  # fmt: skip
    expected = [tensor.clone() for tensor in targets]
    for (base, start), (to, at) in zip(read, written, strict=True):
        expected[to][at : at + length] = sources[base][start : start + length]
    made = batch_of(join(copies), (sources, targets), None)
    made.run()
    assert all(map(torch.equal, targets, expected))
    if target != "apart" and length > 3:  # few bytes are not worth it, and where the others lie is up to the allocator
        assert len(made.steps) == 1  # through the scratch memory it would be two


def test_few_calls_move_many_regions() -> None:
    tensors = [torch.full((512,), i % 100, dtype=torch.int16) for i in range(5000)]
    copies = in_message([(i, 0, [512], [1]) for i in range(5000)])
    made = batch_of(copies, (tensors, [torch.zeros(5000 * 512, dtype=torch.int16)]), 1)
    assert (len(made.steps), len(made.targets), len(made.joins)) == (5, 0, 0)


def test_a_message_within_the_window_is_emptied_whole() -> None:
    """numpy takes a message between the places it goes to for one that it overwrites, and has to copy it first."""
    memory = torch.zeros(3000, dtype=torch.int16)
    message = memory[1000:1600].copy_(torch.arange(600))
    flat = memory.view(-1)
    boxes = [(0, start, [100], [1]) for start in (2500, 0, 2000, 300, 900, 1700)]
    batch_of(in_message(boxes).turned(), ([message], [flat]), 0).run()
    assert [int(flat[start]) for _, start, _, _ in boxes] == [0, 100, 200, 300, 400, 500]
