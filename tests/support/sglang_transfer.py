"""Weight updates between one trainer rank and the real ranks of an SGLang instance, by the real plan and executor.

Without a gateway: reports and parts meet in a store that the test process opens.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from sglang_models import read_tensors

from weightcast.adapters.unsharded import PlainSource
from weightcast.gateway.layouts.merge import merge_instance, merge_trainer
from weightcast.transfer.deadline import Deadline
from weightcast.transfer.executor import Executor, TransferReport, member_labels
from weightcast.transfer.layout.memory import RankLayout
from weightcast.transfer.layout.tables import RankReport
from weightcast.transfer.plan.operations import RankPart
from weightcast.transfer.plan.parts import PlanParts
from weightcast.transfer.planner.planner import plan_transfer
from weightcast.transfer.transports.choose import join_group
from weightcast.transfer.transports.rendezvous import connect_store

__all__ = ["parts_of", "receive", "repeated_bytes", "train"]

INSTANCE = "rollout-0"
SECONDS = 100.0
BUCKET_BYTES = 32 << 10
"""So little that every instance of the tests needs several rounds."""


def parts_of(trainer: RankReport, reports: Sequence[RankReport]) -> list[RankPart]:
    """What the gateway makes of the reports: the part of the one trainer rank, then those of the instance's ranks."""
    source = merge_trainer([trainer])
    layout = merge_instance(INSTANCE, reports, source.tensors)
    plan = plan_transfer(
        source.tables,
        {INSTANCE: layout.tables},
        required=source.tensors.names,
        left_out={INSTANCE: tuple(layout.left_out)},
    )
    made = PlanParts(plan, BUCKET_BYTES)
    assert made.trainer_ranks(INSTANCE) == (0,)
    return [made.trainer_part(INSTANCE, 0), *(made.instance_part(INSTANCE, rank) for rank in range(len(reports)))]


def train(port: int, path: str, world: int) -> TransferReport:
    """The trainer rank: every tensor of the checkpoint whole, sent once to an instance of `world` ranks."""
    torch.set_num_threads(1)
    deadline = Deadline.after(SECONDS)
    layout = PlainSource(read_tensors(path)).describe()
    store = connect_store("127.0.0.1", port, deadline)
    reports = [pickle.loads(store.get(f"report {rank}")) for rank in range(world)]
    parts = parts_of(RankReport(0, 1, "", layout.table, None, layout.notes), reports)
    for member, part in enumerate(parts):
        store.set(f"part {member}", pickle.dumps(part))
    return _run(store, layout, parts[0], deadline)


def receive(port: int, layout: RankLayout, report: RankReport) -> TransferReport:
    """A rank of the instance: reports, fetches its part and lets the executor write its live memory."""
    deadline = Deadline.after(SECONDS)
    store = connect_store("127.0.0.1", port, deadline)
    store.set(f"report {report.rank}", pickle.dumps(report))
    return _run(store, layout, pickle.loads(store.get(f"part {1 + report.rank}")), deadline)


def _run(store: Any, layout: RankLayout, part: RankPart, deadline: Deadline) -> TransferReport:
    group = join_group(
        store,
        rank=part.group_rank,
        labels=member_labels(part),
        name=part.instance,
        deadline=deadline,
        address="127.0.0.1",
    )
    try:
        return Executor(part, layout, group).run(deadline)
    finally:
        group.close()


def repeated_bytes(layout: RankLayout) -> int:
    """Bytes of the regions that hold the same box as an earlier region of the rank: replicas of an expert on it."""
    seen, repeated = set(), 0
    for row, nbytes in enumerate(layout.table.nbytes.tolist()):
        region = layout.table.region(row)
        key = (region.tensor, region.offset, region.size)
        repeated += nbytes if key in seen else 0
        seen.add(key)
    return repeated
