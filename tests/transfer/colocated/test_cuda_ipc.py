"""Two processes on one GPU, the reader in the trainer's memory. Needs a GPU; has not been run yet."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from executor_workers import group_of
from part_support import make_parts
from plain_support import Piece, describe_pieces
from spawn_support import run_ranks

from weightcast.transfer.colocated.offers import Share
from weightcast.transfer.colocated.peers import find_neighbours
from weightcast.transfer.deadline import Deadline
from weightcast.transfer.executor import Executor, member_labels
from weightcast.transfer.transports.rendezvous import open_store

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ELEMENTS = 1 << 28
VERSIONS = 100
SOON = 60.0


@pytest.fixture
def store_port() -> Iterator[int]:
    store, port = open_store("127.0.0.1", Deadline.after(SOON))
    yield port
    del store


def on_one_gpu(rank: int, _: int, __: int, port: int, share: Share) -> tuple[list[bool], int, int, float, float]:
    """Which versions arrived, growth of device memory after the first, bytes shared, best seconds of an update and of a
    copy on the device of as many bytes."""
    memory = torch.zeros(ELEMENTS, dtype=torch.bfloat16, device="cuda")
    layouts = [describe_pieces([Piece("w", (ELEMENTS,), (0,), memory)])] * 2
    (sender,), (receiver,) = make_parts([layouts[0].table], [layouts[1].table], 1 << 26)
    part = receiver if rank else sender
    assert part is not None
    # Two ranks on one GPU cannot share an NCCL communicator; what goes over this one are a few numbers.
    group = group_of(port, part.group_rank, member_labels(part), "gpu", SOON)
    neighbours = find_neighbours(group, part, layouts[rank], None if rank else share, Deadline.after(SOON))
    executor = Executor(part, layouts[rank], group, neighbours)
    right, best, used, shared = [], float("inf"), 0, 0
    for version in range(1, VERSIONS + 1):
        if rank == 0:
            memory.fill_(version)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        shared = executor.run(Deadline.after(SOON)).bytes_shared
        best = min(best, time.perf_counter() - begun)
        right.append(bool((memory == version).all()))
        if version == 1:
            used = torch.cuda.memory_allocated()
    growth, copied = torch.cuda.memory_allocated() - used, float("inf")
    if rank == 1:
        other = torch.empty_like(memory)
        for _ in range(5):
            begun = time.perf_counter()
            other.copy_(memory)
            torch.cuda.synchronize()
            copied = min(copied, time.perf_counter() - begun)
    group.close()
    return right, growth, shared, best, copied


@pytest.mark.parametrize("share", ["in_place", "staged"])
def test_a_hundred_updates_on_one_gpu(store_port: int, share: Share) -> None:
    results = run_ranks(on_one_gpu, 2, store_port, share)
    for right, growth, shared, _, _ in results:
        assert right == [True] * VERSIONS
        assert growth == 0
        assert shared == 2 * ELEMENTS
    if share == "in_place":
        _, _, _, seconds, copy = results[1]
        assert seconds < copy / 0.8
