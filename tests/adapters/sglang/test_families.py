"""Whole updates of model families on real SGLang, and refusals: a table, a row a family.

`sglang_families.FAMILIES` is the table; a new class is one more row there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sglang_family_workers as workers
from sglang_families import FAMILIES, write_checkpoint
from sglang_nest import Nest

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

ACCEPTED = [name for name, family in FAMILIES.items() if family.refused is None]
REFUSED = [name for name, family in FAMILIES.items() if family.refused is not None]


@pytest.fixture(scope="module")
def nest() -> Iterator[Nest]:
    with Nest(models=True) as started:
        yield started


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def checkpoint(folders: Path, name: str) -> str:
    """The folder of a family's checkpoint, made on first use."""
    folder = folders / name
    if not folder.exists():
        write_checkpoint(FAMILIES[name], folder)
    return str(folder)


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_whole_update_equals_a_fresh_load(nest: Nest, folders: Path, name: str) -> None:
    nest.run(workers.whole_update, FAMILIES[name].world, name, checkpoint(folders, name))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_left_as_it_was(nest: Nest, folders: Path, name: str) -> None:
    nest.run(workers.refused, FAMILIES[name].world, name, checkpoint(folders, name))


def test_the_comparison_sees_what_nobody_refreshes(nest: Nest, folders: Path) -> None:
    nest.run(workers.planted, 1, "llama", checkpoint(folders, "llama"))


def test_memory_that_was_left_is_not_written(nest: Nest, folders: Path) -> None:
    nest.run(workers.changed_under_it, 1, "gemma2", checkpoint(folders, "gemma2"))
