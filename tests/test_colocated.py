from __future__ import annotations

import pytest
from colocated_workers import run_random_shared
from spawn_support import run_ranks
from test_executor import store_port  # noqa: F401


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(("trainer", "hosts", "seeds"), [(2, "aaaa", range(40)), (3, "abab", range(40, 80))])
def test_random_layouts_are_read_byte_for_byte(
    store_port: int, trainer: int, hosts: str, seeds: range, staged: bool  # noqa: F811
) -> None:
    results = run_ranks(run_random_shared, 4, store_port, trainer, hosts, staged, seeds)
    checked, messages, shared, rounds = (sum(column) for column in zip(*results, strict=True))
    assert min(checked, shared) > 0
    assert (messages == rounds == 0) == (len(set(hosts)) == 1)
