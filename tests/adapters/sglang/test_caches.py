"""What SGLang keeps of old weights, and what it says itself of updates: against its real models."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import sglang_cache_workers as workers
from sglang_models import write_checkpoint
from sglang_nest import Nest

from weightcast.adapters.sglang import plugin, session
from weightcast.adapters.sglang.caches import Prefixes, drop_caches
from weightcast.adapters.sglang.session import Described, Member, Session, Thread
from weightcast.transfer.errors import DescribeError, TransferError

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

ONE = {"tp_size": 1}

Fate = Literal["dropped", "keyed", "refreshed", "refused", "independent"]


@dataclass(frozen=True, slots=True)
class Kept:
    """Something that SGLang keeps between requests.

    `place` is the path of its module or attribute under `sglang.srt`. `fate` is its fate at an update, `by` says how or
    why.
    """

    name: str
    place: str
    fate: Fate
    by: str


INVENTORY = (
    Kept("KV cache and its radix tree", "managers.scheduler.Scheduler.tree_cache", "dropped", "flush_cache"),
    Kept("the same, with pause in_place", "managers.scheduler.Scheduler.tree_cache", "keyed", "extra_key of requests"),
    Kept("sliding-window, Mamba states", "mem_cache.unified_radix_cache.UnifiedRadixCache", "dropped", "flush_cache"),
    Kept("KV of streaming sessions", "session.streaming_session.StreamingSession.slots", "dropped", "flush_cache"),
    Kept("HiCache, host memory", "managers.cache_controller.HiCacheController.mem_pool_host", "dropped", "flush_cache"),
    Kept("HiCache, storage", "managers.cache_controller.HiCacheController.storage_backend", "refused", "setting"),
    Kept("LMCache", "mem_cache.storage.lmcache", "refused", "setting"),
    Kept("FlexKV", "mem_cache.storage.flexkv", "refused", "setting"),
    Kept("linked external cache", "mem_cache.unified_cache.unified_cache_linker", "refused", "setting"),
    Kept("prefix cache of a plugin", "mem_cache.registry", "refused", "setting"),
    Kept("KV of other engines (PD)", "disaggregation", "refused", "setting"),
    Kept("host KV of sparse attention", "managers.scheduler.Scheduler.hisparse_coordinator", "refused", "setting"),
    Kept("image and audio embeddings", "managers.mm_schedule.embedding_cache", "dropped", "clear"),
    Kept("embeddings shared by servers", "mem_cache.embedding_cache_controller", "refused", "setting"),
    Kept("embeddings of encoder servers", "managers.scheduler.Scheduler.mm_receiver", "refused", "setting"),
    Kept("interpolated positions (MoonViT)", "models.kimi_vl_moonvit.Learnable2DInterpPosEmb", "dropped", "clear"),
    Kept("interpolated positions (PaddleOCR)", "models.paddleocr_vl.SiglipVisionEmbeddings", "dropped", "clear"),
    Kept("router bias in another dtype", "layers.moe.topk.TopKConfig", "refreshed", "copied anew at its address"),
    Kept("norms in another dtype (Inkling)", "models.inkling_common.attn", "refused", "once computed"),
    Kept("norms in another dtype (Hunyuan)", "models.hunyuan_v3", "refused", "once computed"),
    Kept("split router (Muse Spark)", "models.muse_spark", "refused", "once computed"),
    Kept("gates of FlashInfer's KDA", "layers.attention.linear.kernels.kda_flashinfer", "refused", "once computed"),
    Kept("draft model and its caches", "managers.scheduler.Scheduler.draft_worker", "refused", "speculative decoding"),
    Kept("n-gram corpora", "managers.scheduler.Scheduler.external_corpus_manager", "independent", "token ids alone"),
    Kept("compiled grammars", "constrained.grammar_manager.GrammarManager", "independent", "schemas, tokenizer alone"),
    Kept("preprocessed images", "multimodal.cache.preprocess_cache", "independent", "pixels and processor alone"),
    Kept("rotary tables", "layers.rotary_embedding", "independent", "positions and configuration alone"),
    Kept("CUDA graphs", "model_executor", "independent", "addresses, which an update keeps"),
    Kept("expert statistics", "eplb.expert_distribution", "independent", "never an input of an answer"),
)
"""Everything that weights could determine and a later request could meet."""


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
    assert [r.extra_key for r in (waiting, running, grammar)] == ["weightcast=1.1|tenant", "tenant", "weightcast=1.1|"]
    assert scheduler.cur_batch_for_debug is None
    later = request()
    prefixes.apply(later)
    assert later.extra_key == "weightcast=1.1|"
    prefixes.move_on(scheduler, "2")
    assert waiting.extra_key == "weightcast=2.2|tenant"
    assert later.extra_key == "weightcast=1.1|", "it is not in a queue: it runs"
    prefixes.move_on(scheduler, "1")
    again = request()
    prefixes.apply(again)
    assert again.extra_key == "weightcast=1.3|", "the number of an earlier version, with other weights"


def test_ranks_agree_on_copies_whatever_each_answers() -> None:
    """HiCache needs a GPU, so a stand-in: SGLang's poll waits for all ranks, one that refuses the request has to come
    too, and nothing that ranks do alone may call it.
    """
    polls: list[int] = []
    scheduler = SimpleNamespace(
        enable_hierarchical_cache=True,
        tree_cache=SimpleNamespace(check_hicache_events=lambda: polls.append(1)),
        grammar_manager=SimpleNamespace(grammar_queue=[]),
        flush_cache=lambda empty_cache: True,
        _engine_paused=True,
    )
    manager = SimpleNamespace(scheduler=scheduler, _session=object())
    asked = SimpleNamespace(load_format="weightcast", group_name="weightcast/main/rollout-0/1")
    answer = plugin._update(lambda *_: None, manager, asked)
    assert "init the group first" in answer.message
    assert len(polls) == 1
    drop_caches(scheduler)
    assert len(polls) == 1


UNDESCRIBED = Described(None, DescribeError("of no interest here"))


class Stuck:
    """A worker whose transfer does not end before it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def transfer(self) -> None:
        self.go.wait(60.0)

    def give_up(self, *, quietly: bool = False) -> None: ...

    def close(self) -> None: ...


def test_every_later_connect_waits_for_a_rank_that_still_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the end of the session was asked for, and when the connect in between was refused already."""
    monkeypatch.setattr(session, "_LEAVING", 0.2)
    process, stuck = Session(), Stuck()
    member = Member("a", "a", "abort", stuck, UNDESCRIBED, Thread("cpu", 0))  # type: ignore[arg-type]
    process.member = member
    member.receiving = member.writing = member.thread.do(stuck.transfer)
    member.receiving = None  # what the end of a session does first
    process.close()
    for name in ("b", "c"):
        for earlier in list(process.earlier):
            if earlier is member:
                with pytest.raises(TransferError, match="this rank still receives for a, which was called off"):
                    earlier.wait_until_left()
        assert member in process.earlier
        other = Stuck()
        process.member = Member(name, name, "abort", other, UNDESCRIBED, Thread("cpu", 0))  # type: ignore[arg-type]
        process.close()
    stuck.go.set()
    assert member.thread.ended(20.0)
    process.member = Member("d", "d", "abort", Stuck(), UNDESCRIBED, Thread("cpu", 0))  # type: ignore[arg-type]
    process.close()
    assert member not in process.earlier
