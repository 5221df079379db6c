"""Awex's planner on our layouts: what its `TransferPlanBuilder` needs to know of them, and how long it takes.

Awex is no dependency. `make bench` installs `awex==0.9.0` by itself, without its dependencies, into a folder that only
this module looks into.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType
from typing import Any

from weightcast.transfer.layout.tables import RankReport

HOW_TO_GET_IT = "pip install --no-deps --target DIR -r requirements/bench.txt, then --awex DIR"


def load(folder: Path | None) -> tuple[Any, str] | str:
    """Awex's classes and version, or why there are none."""
    if folder is None or not (folder / "awex").is_dir():
        return f"no Awex in {folder}: {HOW_TO_GET_IT}" if folder else f"not asked for: {HOW_TO_GET_IT}"
    # Its __init__ imports its writers, which need Megatron; the planner itself does not.
    package = ModuleType("awex")
    package.__path__ = [str(folder / "awex")]
    sys.modules["awex"] = package
    try:
        from awex.meta import weight_meta
        from awex.transfer import transfer_plan
    except ImportError as error:
        return f"Awex cannot be imported: {error}"
    transfer_plan.logger.level = 40  # its logger prints to the standard output
    found = [d.version for d in distributions(name="awex", path=[str(folder)])]
    package.meta, package.planner = weight_meta, transfer_plan  # type: ignore[attr-defined]
    return package, found[0] if found else "unknown"


def parameters(awex: Any, reports: Sequence[RankReport]) -> list[Any]:
    """One ParameterMeta for each logical tensor: boxes held by several ranks are several replicas."""
    import torch

    shards: dict[str, dict[tuple[int, ...], list[Any]]] = defaultdict(lambda: defaultdict(list))
    shapes: dict[str, tuple[int, ...]] = {}
    for report in reports:
        table = report.table
        for row in range(len(table)):
            region = table.region(row)
            shapes[region.tensor] = table.tensors.spec(int(table.tensor[row])).shape
            shard = awex.meta.ParameterShardMeta(
                tp_rank=0, attn_tp_rank=0, pp_rank=0, ep_rank=report.rank, ep_tp_rank=0, global_rank=report.rank,
                world_size=report.world_size, engine_rank=0, name=region.tensor, shape=region.size,
                numel=int(table.size[row].prod()), dtype=torch.bfloat16, global_offset=region.offset,
            )  # fmt: skip
            shards[region.tensor][region.offset].append(shard)
    made = []
    for name, boxes in shards.items():
        copies = max(map(len, boxes.values()))
        replicas = [
            awex.meta.ParameterReplicaMeta([held[min(i, len(held) - 1)] for held in boxes.values()])
            for i in range(copies)
        ]
        numel = 1
        for n in shapes[name]:
            numel *= n
        every = [shard for held in boxes.values() for shard in held]
        made.append(awex.meta.ParameterMeta(name, numel, shapes[name], torch.bfloat16, every, replicas))
    return made


def seconds_per_rank(
    awex: Any, trainer: Sequence[RankReport], instance: Sequence[RankReport], instances: int, ranks: Iterable[int]
) -> list[float]:
    """Wall seconds that Awex takes on each of these ranks of the transfer, of which the instances' come first."""
    inference, training = parameters(awex, instance), parameters(awex, trainer)
    builder = awex.planner.TransferPlanBuilder(len(instance) * instances, len(trainer), instances)
    seconds = []
    for rank in ranks:
        begin = time.perf_counter()
        builder.build_local_transfer_plan(inference, training, rank)
        seconds.append(time.perf_counter() - begin)
    return seconds
