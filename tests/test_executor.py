from __future__ import annotations

from collections.abc import Iterator

import pytest
from executor_workers import run_random
from spawn_support import run_ranks

from weightcast.transfer.deadline import Deadline
from weightcast.transfer.transports.torch_group import open_store


@pytest.fixture
def store_port() -> Iterator[int]:
    store, port = open_store("127.0.0.1", Deadline.after(60.0))
    yield port
    del store


@pytest.mark.parametrize(
    "trainer, instance, seeds", [(2, 2, range(0, 40)), (1, 3, range(40, 60)), (3, 1, range(60, 80))]
)
def test_random_layouts_arrive_byte_for_byte(store_port: int, trainer: int, instance: int, seeds: range) -> None:
    results = run_ranks(run_random, trainer + instance, store_port, trainer, seeds)
    checked, received, copied, rounds = (sum(column) for column in zip(*results, strict=True))
    assert min(checked, received, copied, rounds) > 0
    assert max(r[3] for r in results) > 5, "no case needed several rounds"
