from __future__ import annotations

import dataclasses
import logging
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from executor_workers import feed_three_instances, feed_two_instances, measure_memory, run_random
from group_support import join_all, together
from part_support import make_parts
from plain_support import Piece, describe_pieces
from spawn_support import run_ranks

from weightcast.transfer.deadline import Deadline
from weightcast.transfer.errors import DeadlineError, PlanError, StalePlanError, TransferError
from weightcast.transfer.executor import Executor, TransferReport, member_labels
from weightcast.transfer.layout.memory import RankLayout
from weightcast.transfer.plan.operations import Kind, RankPart

Boxes = Sequence[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]


@pytest.fixture
def store_port() -> Iterator[int]:
    from weightcast.transfer.transports.rendezvous import open_store

    store, port = open_store("127.0.0.1", Deadline.after(60.0))
    yield port
    del store


@pytest.mark.parametrize(
    ("trainer", "instance", "seeds"), [(2, 2, range(0, 40)), (1, 3, range(40, 60)), (3, 1, range(60, 80))]
)
def test_random_layouts_arrive_byte_for_byte(store_port: int, trainer: int, instance: int, seeds: range) -> None:
    results = run_ranks(run_random, trainer + instance, store_port, trainer, seeds)
    checked, received, copied, rounds = (sum(column) for column in zip(*results, strict=True))
    assert min(checked, received, copied, rounds) > 0
    assert max(r[3] for r in results) > 5, "no case needed several rounds"


def test_three_instances_of_different_layouts_with_relays(store_port: int) -> None:
    """Every byte, by the planner's own plans, the instances at the same time and relays in several stages."""
    worlds = (1, 2, 3)
    results = run_ranks(feed_three_instances, 2 + sum(worlds), store_port, worlds, range(24), timeout=300.0)
    checked, received, copied, relayed, stages = (sum(column) for column in zip(*results, strict=True))
    assert min(checked, received, copied, relayed) > 0
    assert stages > 6 * len(results), "no case needed several stages"


def test_an_instance_that_dies_does_not_hold_up_another(store_port: int) -> None:
    trainer, dead, alive = run_ranks(feed_two_instances, 3, store_port, False)
    assert dead == [("rollout-0 1", 2.0)]
    assert alive == [("rollout-1 1", 2.0), ("rollout-1 2", 4.0), ("rollout-1 3", 6.0)]
    assert [what.split(":")[0] for what, _ in trainer] == [f"rollout-{i} {v}" for v in (1, 2, 3) for i in (0, 1)]
    lost, again = trainer[2], trainer[4]
    assert "trainer rank 0 lost its connection to rollout-0 rank 0" in lost[0]
    assert lost[1] < 30.0, "only the deadline noticed"
    assert "the group of trainer rank 0 was closed; connect again" in again[0]


def test_an_instance_that_is_stuck_is_named_and_does_not_hold_up_another(store_port: int) -> None:
    trainer, stuck, alive = run_ranks(feed_two_instances, 3, store_port, True)
    assert stuck == [("rollout-0 1", 2.0)]
    assert alive == [("rollout-1 1", 2.0), ("rollout-1 2", 4.0), ("rollout-1 3", 6.0)]
    said = re.fullmatch(
        r"rollout-0 2: rollout-0: trainer rank 0 waited 3 s and still misses rollout-0 rank 0 \((\d+) bytes to send\) "
        r"in round (\d+) of 25, (\d+) bytes in later rounds",
        trainer[2][0],
    )
    assert said is not None, trainer[2][0]
    missing, number, later = map(int, said.groups())
    message = 2 << 20
    assert 0 < missing <= message
    assert later == (25 - number) * message
    assert 2.5 < trainer[2][1] < 30.0


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read from Linux")
@pytest.mark.parametrize("backend", ["tcp", "gloo"])
def test_extra_memory_stays_within_the_setting_and_later_runs_take_none(store_port: int, backend: str) -> None:
    bucket_bytes = 24 << 20
    measured = run_ranks(measure_memory, 2, store_port, bucket_bytes, 64 << 10, backend)
    for first, second, allocated, staging in measured:
        if backend == "tcp":  # which packs nothing that is as large as this
            assert staging == 0
            assert first < 4 << 20
        else:
            assert 0.5 * bucket_bytes < staging <= bucket_bytes
            assert staging < first <= 1.05 * bucket_bytes
        assert second < 1 << 20
        assert allocated < 1 << 10


# One trainer rank and one instance rank, as threads of this process


class Pair:
    """A trainer rank and an instance rank that are connected."""

    def __init__(self, source: Boxes, target: Boxes, bucket_bytes: int = 1 << 20) -> None:
        self.layouts = [describe_pieces([Piece(*box) for box in boxes]) for boxes in (source, target)]
        (sender,), (receiver,) = make_parts([self.layouts[0].table], [self.layouts[1].table], bucket_bytes)
        assert sender is not None
        self.parts: list[RankPart] = [sender, receiver]
        self.groups = join_all(member_labels(receiver))

    def executor(self, side: int, layout: RankLayout | None = None, **changes: Any) -> Executor:
        return Executor(
            dataclasses.replace(self.parts[side], **changes), layout or self.layouts[side], self.groups[side]
        )

    def run(self) -> list[TransferReport]:
        executors = [self.executor(0), self.executor(1)]
        results = together(*(lambda e=e: e.run(Deadline.after(10.0)) for e in executors))
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results


def test_reports_count_bytes_and_rounds() -> None:
    source, target, replica = torch.arange(24.0).view(4, 6), torch.zeros(4, 6).bfloat16(), torch.zeros(4, 6).bfloat16()
    sent, received = Pair(
        [("w", (4, 6), (0, 0), source)],
        [("w", (4, 6), (0, 0), target), ("w", (4, 6), (0, 0), replica)],
        bucket_bytes=96,
    ).run()
    assert torch.equal(target, source.bfloat16())
    assert torch.equal(replica, source.bfloat16())
    assert (sent.bytes_sent, sent.bytes_received, sent.bytes_copied, sent.rounds) == (48, 0, 0, 2)
    assert (received.bytes_sent, received.bytes_received, received.bytes_copied, received.rounds) == (0, 48, 48, 2)
    assert list(received.phases) == ["pack", "exchange", "unpack", "replicate", "shared", "digest"]
    assert sum(received.phases.values()) == pytest.approx(received.seconds)


def test_a_run_says_in_log_records_how_far_it_is(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr("weightcast.transfer.executor._PROGRESS_SECONDS", 0.0)
    caplog.set_level(logging.INFO, logger="weightcast.transfer")
    pair = Pair(*vectors(), bucket_bytes=32)
    executors = [pair.executor(0), pair.executor(1)]
    together(*(lambda e=e: e.run(Deadline.after(10.0), {"pair": "main", "version": 7}) for e in executors))
    records = [vars(r) for r in caplog.records if vars(r)["side"] == "instance"]
    assert [(r["bytes_moved"], r["bytes_total"]) for r in records] == [(8, 32), (16, 32), (24, 32), (32, 32)]
    assert {(r["pair"], r["version"], r["instance"], r["rank"]) for r in records} == {("main", 7, "rollout-0", 0)}
    assert records[-1]["message"].startswith("rollout-0 rank 0: moved 32 bytes in ")
    assert min(records[-1][f"{phase}_seconds"] for phase in ("pack", "exchange", "unpack", "replicate")) > 0.0


def test_large_contiguous_boxes_need_no_staging() -> None:
    n = 1 << 20
    source, target = torch.randn(n), torch.zeros(n)
    pair = Pair([("w", (n,), (0,), source)], [("w", (n,), (0,), target)])
    assert [pair.executor(side).staging_bytes for side in (0, 1)] == [0, 0]
    pair.run()
    assert torch.equal(source, target)


def test_what_is_small_in_a_message_is_packed_and_the_rest_is_not() -> None:
    """Vectors of which some are long enough to be sent as they are, all in one message."""
    lengths = (3, 1 << 10, 5, 1 << 11, 9, 9)
    sources = [torch.randn(n) for n in lengths]
    targets = [torch.zeros(n) for n in lengths]
    boxes = [[(f"t{i}", (t.numel(),), (0,), t) for i, t in enumerate(side)] for side in (sources, targets)]
    pair = Pair(*boxes)
    for side in (0, 1):
        (step,) = pair.executor(side)._schedule.rounds
        ((_, message),) = step.sends or step.receives
        assert (message.nbytes, len(message.rows)) == (4 * sum(lengths), 3), "packed, then the two that are long"
    pair.run()
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source, target)


@pytest.mark.parametrize("bucket_bytes", [1 << 12, 1 << 16, 1 << 20])
def test_staging_stays_within_the_setting(bucket_bytes: int) -> None:
    rows, columns = 1 << 10, 1 << 9
    source, target = torch.randn(columns, rows).t(), torch.zeros(rows, 2 * columns)[:, ::2]
    pair = Pair([("w", (rows, columns), (0, 0), source)], [("w", (rows, columns), (0, 0), target)], bucket_bytes)
    for side in (0, 1):
        assert 0.5 * bucket_bytes < pair.executor(side).staging_bytes <= bucket_bytes
    pair.run()
    assert torch.equal(source, target)


def test_neighbours_are_joined() -> None:
    """Eight experts that lie one after the other at the trainer, and the other way round in every second slot here."""
    fused, slots = torch.randn(8, 16), torch.zeros(16, 16)
    pair = Pair(
        [(f"expert.{e}", (16,), (0,), fused[e]) for e in range(8)],
        [(f"expert.{e}", (16,), (0,), slots[2 * e]) for e in range(8)],
    )
    sender, receiver = (pair.executor(side)._schedule.rounds[0] for side in (0, 1))
    assert (len(sender.pack.joins), len(sender.pack.targets), len(sender.pack.steps), len(sender.sends)) == (0, 0, 0, 1)
    assert (len(receiver.unpack.targets), len(receiver.unpack.steps)) == (0, 1)
    pair.run()
    assert torch.equal(slots[::2], fused)
    assert not slots[1::2].any()


def vectors() -> tuple[Boxes, Boxes]:
    return [("v", (8,), (0,), torch.ones(8))], [("v", (8,), (0,), torch.zeros(8)), ("v", (8,), (0,), torch.zeros(8))]


def test_a_peer_that_is_late_is_named_with_what_is_left_and_the_group_is_given_up() -> None:
    pair = Pair(*vectors(), bucket_bytes=32)
    start = time.monotonic()
    with pytest.raises(
        DeadlineError,
        match=r"^rollout-0: rollout-0 rank 0 waited 0.5 s and still misses trainer rank 0 \(8 bytes to receive\) "
        r"in round 1 of 4, 24 bytes in later rounds$",
    ):
        pair.executor(1).run(Deadline.after(0.5))
    with pytest.raises(TransferError, match="lost its connection to rollout-0 rank 0"):
        pair.executor(0).run(Deadline.after(60.0))
    assert time.monotonic() - start < 30.0, "the peer was left waiting"
    with pytest.raises(TransferError, match="was closed; connect again"):
        pair.executor(1).run(Deadline.after(60.0))


def test_a_part_of_another_table_is_stale() -> None:
    pair = Pair(*vectors())
    other = describe_pieces([Piece("v", (8,), (0,), torch.zeros(8))])
    with pytest.raises(
        StalePlanError, match=r"rollout-0: the plan for rollout-0 rank 0 was made for table \w+, found \w+"
    ):
        pair.executor(1, layout=other)


def test_reallocated_parameters_are_stale() -> None:
    pair = Pair(*vectors())
    executor = pair.executor(1)
    pair.layouts[1].memory.bases[0].untyped_storage().resize_(1 << 22)
    with pytest.raises(StalePlanError, match="1 of the parameters of rollout-0 rank 0 were reallocated"):
        executor.run(Deadline.after(5.0))


def test_the_wrong_place_in_the_group_is_refused() -> None:
    pair = Pair(*vectors())
    pair.groups.reverse()
    with pytest.raises(PlanError, match="trainer rank 0 is member 1 of 2 in the group, expected 0 of 2"):
        pair.executor(0)


def test_a_trainer_rank_that_sends_nothing_is_no_member() -> None:
    with pytest.raises(PlanError, match="rollout-0: trainer rank 1 sends nothing to it and is no member of its group"):
        Pair(*vectors()).executor(0, rank=1)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (
            "offset",
            [[1]],
            r"moves 'v' offset \[1\] size \[8\], but region 0 is Region\(tensor='v', offset=\(0,\), size=\(8,\)",
        ),
        ("offset", [[-1]], r"moves 'v' offset \[-1\]"),
        ("region", 5, "an operation names a region outside 0.."),
        ("region", -1, "an operation names a region outside 0.."),
    ],
)
def test_operations_outside_the_memory_are_refused(side: int, column: str, value: Any, message: str) -> None:
    pair = Pair(*vectors())
    if column == "region":
        column = "dst_region" if side else "src_region"
    changed = getattr(pair.parts[side].operations, column).copy()
    changed[:1] = value
    ops = dataclasses.replace(pair.parts[side].operations, **{column: changed})
    with pytest.raises(PlanError, match=message):
        pair.executor(side, operations=ops)


def test_trainer_ranks_only_send() -> None:
    pair = Pair(*vectors())
    ops = dataclasses.replace(pair.parts[0].operations, kind=np.array([Kind.RELAY], dtype=np.int64))
    with pytest.raises(PlanError, match="operation 0 has kind 2, expected 0, a send"):
        pair.executor(0, operations=ops)


def test_another_tensor_and_another_dtype_are_refused() -> None:
    pair = Pair(*vectors())
    table = pair.parts[1].tensors
    with pytest.raises(PlanError, match="moves 'u' offset"):
        pair.executor(1, tensors=dataclasses.replace(table, names=("u",)))
    with pytest.raises(PlanError, match="tensor 'v' travels as float64, expected float32 as it is held"):
        pair.executor(1, wire_dtype=np.zeros(2, dtype=np.int64))
