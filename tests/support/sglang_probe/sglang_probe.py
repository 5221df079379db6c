"""SGLang plugin of the tests: says what a scheduler keeps when a version is stamped, makes grammars compile slowly, and
lets ranks be busy.

It lies beside the tests, on the PYTHONPATH of a server that shall load it, with an entry point written for the run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMPILE = "SGLANG_PROBE_COMPILE"
"""Environment variable: seconds that a grammar takes to compile."""
REPORTS = "SGLANG_PROBE_REPORTS"
"""Environment variable: a folder for one JSON a stamped version and process.

A file `busy.begin.RANK` or `busy.end.RANK` there makes that rank refuse one flush, at the begin or at the end of the
next transfer. A file `guard` has the sentence with which SGLang refuses updates from the next session on.
"""

_state = {"ends": 0, "transferred": -1}


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    backend = "sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend."
    HookRegistry.register(backend + "apply_vocab_mask", mask_on_cpu, HookType.REPLACE)
    HookRegistry.register(backend + "dispatch_json", compile_slowly, HookType.AROUND)
    scheduler = "sglang.srt.managers.scheduler.Scheduler."
    HookRegistry.register(scheduler + "handle_update_weight_version", report, HookType.AFTER)
    updater = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
    HookRegistry.register(updater + "begin_weight_update", begins, HookType.BEFORE)
    HookRegistry.register(updater + "end_weight_update", ends, HookType.BEFORE)
    HookRegistry.register(scheduler + "flush_cache", flush, HookType.AROUND)


def mask_on_cpu(logits: Any, vocab_mask: Any) -> None:
    """What SGLang 0.5.23 has for GPUs alone."""
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask, backend="cpu")


def compile_slowly(original: Callable[..., Any], *args: Any) -> Any:
    time.sleep(float(os.environ.get(COMPILE, "0")))
    return original(*args)


def guard(manager: Any, *_: Any) -> None:
    """A layer with a derived copy that SGLang cannot make anew, or none."""
    sentence = Path(os.environ[REPORTS]) / "guard"
    layer = manager.tp_worker.model_runner.model.get_submodule("model.layers.0")
    layer._derived_weight_cache_error = sentence.read_text() if sentence.exists() else None


def begins(manager: Any, *_: Any) -> None:
    guard(manager)
    _state["ends"] = 0
    plant()


def ends(*_: Any) -> None:
    from sglang.srt.managers import mm_schedule

    _state["ends"], _state["transferred"] = 1, len(mm_schedule.embedding_cache)
    plant()


def flush(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang.srt.runtime_context import get_parallel

    when = "end" if _state["ends"] else "begin"
    busy = Path(os.environ[REPORTS]) / f"busy.{when}.{get_parallel().tp_rank}"
    if busy.exists():
        busy.unlink()
        return False
    return original(scheduler, *args, **kwargs)


def plant() -> None:
    """An embedding of the old weights, as of an image: the models of the tests have no eyes."""
    import torch
    from sglang.srt.managers import mm_schedule
    from sglang.srt.mem_cache.multimodal_cache import EmbeddingResult

    if mm_schedule.embedding_cache is None:
        mm_schedule.init_mm_embedding_cache(1 << 20)
    mm_schedule.embedding_cache.set(1, EmbeddingResult(embedding=torch.zeros(4, 4)))


def report(result: Any, scheduler: Any, request: Any) -> Any:
    from sglang.srt.managers import mm_schedule

    runner = scheduler.tp_worker.model_runner
    owners = {"scheduler": scheduler, "worker": scheduler.tp_worker, "runner": runner, "tree": scheduler.tree_cache}
    embedding = runner.model.get_submodule("model.embed_tokens").weight
    found = {
        "padding": float(embedding[runner.model.config.vocab_size :].abs().sum()),
        "tree": scheduler.tree_cache.evictable_size() + scheduler.tree_cache.protected_size(),
        "embeddings": len(mm_schedule.embedding_cache),
        "transferred": _state["transferred"],
        "running": len(scheduler.running_batch.reqs),
        "grammars": len(scheduler.grammar_manager.grammar_queue),
        "attributes": sorted(
            f"{who}.{key}"
            for who, owner in owners.items()
            for key, value in vars(owner).items()
            if "cache" in key and not isinstance(value, (bool, int, float, str, type(None)))
        ),
    }
    folder = os.environ.get(REPORTS)
    if folder:
        (Path(folder) / f"{request.new_version}.{os.getpid()}.json").write_text(json.dumps(found))
    return result
