"""What SGLang keeps of old weights, and what it says itself of updates: against its real models."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_cache_workers as workers
from sglang_models import write_checkpoint
from sglang_nest import Nest

from weightcast.adapters.sglang_caches import INVENTORY, Prefixes

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

ONE = {"tp_size": 1}


@pytest.fixture(scope="module")
def nest() -> Iterator[Nest]:
    with Nest() as started:
        yield started


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def test_refusals(nest: Nest, checkpoints: Path) -> None:
    nest.run(workers.guards, 1, str(write_checkpoint("qwen3-moe", checkpoints)), ONE)


@pytest.mark.parametrize("model", ["qwen3", "qwen3-moe", "deepseek"])
def test_a_session_without_a_transfer_changes_nothing(nest: Nest, checkpoints: Path, model: str) -> None:
    (tensors,) = nest.run(workers.empty_session, 1, str(write_checkpoint(model, checkpoints)), ONE)
    assert tensors >= 20


def test_memos(nest: Nest, checkpoints: Path) -> None:
    nest.run(workers.memos, 1, str(write_checkpoint("deepseek", checkpoints)), ONE)


def test_settings(nest: Nest, checkpoints: Path) -> None:
    (count,) = nest.run(workers.settings, 1, str(write_checkpoint("qwen3", checkpoints)), ONE)
    assert count == 19


def test_the_inventory_names_what_there_is() -> None:
    """Each place is a module of SGLang, or something in its text."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent / "srt"
    for kept in INVENTORY:
        path, rest = root, kept.place.split(".")
        while rest and (path / rest[0]).is_dir():
            path, rest = path / rest[0], rest[1:]
        if rest:
            text = (path / f"{rest[0]}.py").read_text()
            assert all(name in text for name in rest[1:]), kept
        else:
            assert (path / "__init__.py").exists() or list(path.glob("*.py")), kept
    assert len({(kept.name, kept.place) for kept in INVENTORY}) == len(INVENTORY)


def request(key: str | None = None, holds_kv: bool = False) -> Any:
    return SimpleNamespace(extra_key=key, kv=SimpleNamespace(holds_kv=holds_kv))


def test_requests_find_prefixes_of_their_version_alone() -> None:
    prefixes, early = Prefixes(), request("tenant")
    prefixes.apply(early)
    assert early.extra_key == "tenant", "before the first update in place nothing is another version"
    waiting, running, grammar = request("tenant"), request("tenant", holds_kv=True), request()
    queues = {"waiting_queue": [waiting, running], "grammar_manager": SimpleNamespace(grammar_queue=[grammar])}
    scheduler = SimpleNamespace(**queues, cur_batch_for_debug=object())
    prefixes.move_on(scheduler, "1")
    assert [r.extra_key for r in (waiting, running, grammar)] == ["weightcast=1|tenant", "tenant", "weightcast=1|"]
    assert scheduler.cur_batch_for_debug is None
    later = request()
    prefixes.apply(later)
    assert later.extra_key == "weightcast=1|"
    prefixes.move_on(scheduler, "2")
    assert waiting.extra_key == "weightcast=2|tenant"
    assert later.extra_key == "weightcast=1|", "it is not in a queue: it runs"
