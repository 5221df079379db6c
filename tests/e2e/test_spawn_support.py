from __future__ import annotations

import os
import time
from dataclasses import dataclass

import pytest
from spawn_support import RankFailedError, free_port, run_ranks


@dataclass(frozen=True)
class Step:
    """An argument of a class that only this module knows."""

    size: int


def double_rank(rank: int, world: int, port: int, step: Step) -> tuple[int, int, int]:
    return rank * step.size, world, port


def sum_of_ranks(rank: int, world: int, port: int) -> int:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    total = torch.tensor(rank)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total)


def fail_on_one(rank: int, world: int, port: int) -> None:
    if rank == 1:
        raise ValueError("slot 3 of rank 1 was left")
    time.sleep(100)


def die_on_one(rank: int, world: int, port: int) -> None:
    if rank == 1:
        os._exit(7)


def sleep_on_one(rank: int, world: int, port: int) -> None:
    if rank == 1:
        time.sleep(100)


def test_results_come_back_by_rank() -> None:
    first, second = run_ranks(double_rank, 2, Step(2))
    assert (first[:2], second[:2]) == ((0, 2), (2, 2))
    assert first[2] == second[2]


def test_ranks_form_a_group() -> None:
    assert run_ranks(sum_of_ranks, 3) == [3, 3, 3]


def test_the_first_failure_is_raised_with_its_traceback_and_nobody_is_waited_for() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailedError, match=r"rank 1 failed:(.|\n)*fail_on_one(.|\n)*slot 3 of rank 1 was left"):
        run_ranks(fail_on_one, 2)
    assert time.monotonic() - started < 90


def test_a_dead_rank_is_named() -> None:
    with pytest.raises(RankFailedError, match="rank 1 died without a word"):
        run_ranks(die_on_one, 2)


def test_a_rank_that_hangs_is_named() -> None:
    # On a busy machine the other rank may not even have started by then.
    with pytest.raises(RankFailedError, match=r"ranks \[(0, )?1\] did not finish within 8 s"):
        run_ranks(sleep_on_one, 2, timeout=8)


def test_free_port_is_a_port() -> None:
    assert 1024 <= free_port() < 65536
