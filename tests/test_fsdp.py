"""The FSDP source against exporters: every logical tensor is rebuilt from the regions of all ranks, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_workers import CASES, run_cases
from spawn_support import run_ranks

Rows = list[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]


def faults(ranks: list[Rows], truth: dict[str, torch.Tensor]) -> list[str]:
    """What is wrong with these regions; empty when they rebuild the truth."""
    held = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in truth.items()}
    found = []
    for rank, regions in enumerate(ranks):
        for name, shape, offset, view in regions:
            if name not in truth or shape != tuple(truth[name].shape) or view.dtype != truth[name].dtype:
                found.append(f"rank {rank}: {name} {shape} {view.dtype} is not in the checkpoint")
                continue
            box = tuple(slice(begin, begin + size) for begin, size in zip(offset, view.shape, strict=True))
            held[name][box] = True
            if not torch.equal(truth[name][box], view):
                found.append(f"rank {rank}: {name} at {offset} differs")
    return found + [f"{name}: part is on no rank" for name, mask in held.items() if not mask.all()]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The folder of each world size that has run; its first test runs it."""
    return {}


def _run(world: int, results: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    if world not in results:
        folder = tmp_path_factory.mktemp(f"world{world}")
        run_ranks(run_cases, world, str(folder), timeout=180)
        results[world] = folder
    return results[world]


@pytest.mark.parametrize(("world", "case"), [(world, case.__name__) for world in CASES for case in CASES[world]])
def test_regions_rebuild_the_checkpoint(
    world: int, case: str, results: dict[int, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = _run(world, results, tmp_path_factory)
    ranks, truth = _load(folder, case, world)
    assert faults(ranks, truth) == []


def _load(folder: Path, case: str, world: int) -> tuple[list[Rows], dict[str, Any]]:
    return [torch.load(folder / f"{case}.{rank}") for rank in range(world)], torch.load(folder / f"{case}.truth")
