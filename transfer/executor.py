"""Runs one rank's part of a plan: pack, exchange, unpack, replicate.

    executor = Executor(part, layout, group)      # once for each plan
    report = executor.run(Deadline.after(60.0))   # for each update

Every member of the group runs its own executor at about the same time. What lies in a message follows from the plan
alone (`messages`); how this rank fills and empties it is prepared once (`rounds`).
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch

from weightcast.transfer.deadline import Deadline
from weightcast.transfer.errors import PlanError, StalePlanError, TransferError
from weightcast.transfer.layout import RankLayout
from weightcast.transfer.messages import IN_FLIGHT
from weightcast.transfer.plan import RankPart
from weightcast.transfer.rounds import make_schedule
from weightcast.transfer.transports.base import Communicator, Exchange

__all__ = ["Executor", "TransferReport", "member_labels"]


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What one run of one rank moved, and where its time went.

    `exchange_seconds` is time spent waiting for messages; what moves while this rank packs or unpacks does not count
    there.
    """

    bytes_sent: int
    bytes_received: int
    bytes_copied: int
    rounds: int
    pack_seconds: float
    exchange_seconds: float
    unpack_seconds: float
    replicate_seconds: float
    seconds: float


def member_labels(part: RankPart) -> tuple[str, ...]:
    """The members of the part's group in messages, in the order of their group ranks."""
    trainer = tuple(f"trainer rank {rank}" for rank in part.trainer_ranks)
    return trainer + tuple(f"{part.instance} rank {rank}" for rank in range(part.instance_ranks))


class Executor:
    """One rank's part of the updates of one instance, over its live memory and the instance's communicator.

    Raises StalePlanError when the part was planned for another table than `layout` has, PlanError for a part that does
    not fit the layout or the group.
    """

    def __init__(self, part: RankPart, layout: RankLayout, group: Communicator) -> None:
        if part.is_trainer and part.rank not in part.trainer_ranks:
            raise PlanError(
                f"{part.instance}: trainer rank {part.rank} sends nothing to it and is no member of its group"
            )
        self._label = member_labels(part)[part.group_rank]
        if part.table_fingerprint != layout.table.fingerprint:
            raise StalePlanError(
                f"{part.instance}: the plan for {self._label} was made for table {part.table_fingerprint}, "
                f"found {layout.table.fingerprint}; connect again to plan anew"
            )
        if (group.rank, group.size) != (part.group_rank, part.group_size):
            raise PlanError(
                f"{part.instance}: {self._label} is member {group.rank} of {group.size} in the group, "
                f"expected {part.group_rank} of {part.group_size}"
            )
        self._instance = part.instance
        self._layout = layout
        self._group = group
        self._schedule = make_schedule(part, layout, group.device)

    @property
    def staging_bytes(self) -> int:
        """Memory this executor holds beside the parameters."""
        return self._schedule.staging.nbytes

    def run(self, deadline: Deadline) -> TransferReport:
        """Moves this rank's boxes once. All members have to run, at about the same time.

        Raises StalePlanError when parameters were reallocated since the layout was made, DeadlineError and
        TransferError naming the member at fault. After any error the group is aborted and memory is partly written.
        """
        try:
            return self._run(deadline)
        except BaseException:
            self._group.abort()
            raise

    @torch.no_grad()
    def _run(self, deadline: Deadline) -> TransferReport:
        moved = self._layout.memory.moved()
        if moved:
            raise StalePlanError(
                f"{self._instance}: {len(moved)} of the parameters of {self._label} were reallocated since they were "
                "described; connect again to plan anew"
            )
        schedule, clock = self._schedule, _Clock()
        under_way: deque[tuple[int, Exchange]] = deque()
        for number, step in enumerate(schedule.rounds):
            while under_way and (len(under_way) == IN_FLIGHT or under_way[0][0] < step.after):
                self._finish(*under_way.popleft(), deadline, clock)
            step.pack.run()
            clock.charge("pack")
            under_way.append((number, self._group.post(step.sends, step.receives)))
        while under_way:
            self._finish(*under_way.popleft(), deadline, clock)
        schedule.replicate.run()
        if self._group.device.type == "cuda":
            torch.cuda.current_stream(self._group.device).synchronize()
        clock.charge("replicate")
        return TransferReport(
            schedule.bytes_sent,
            schedule.bytes_received,
            schedule.bytes_copied,
            len(schedule.rounds),
            clock.spent["pack"],
            clock.spent["exchange"],
            clock.spent["unpack"],
            clock.spent["replicate"],
            sum(clock.spent.values()),
        )

    def _finish(self, number: int, exchange: Exchange, deadline: Deadline, clock: _Clock) -> None:
        rounds = self._schedule.rounds
        try:
            exchange.wait(deadline)
        except TransferError as error:
            left = sum(r.nbytes for r in rounds[number + 1 :])
            raise type(error)(
                f"{error} in round {number + 1} of {len(rounds)}, {left} bytes in later rounds"
            ) from error
        clock.charge("exchange")
        rounds[number].unpack.run()
        clock.charge("unpack")


class _Clock:
    """Charges the time since the last charge to a phase."""

    def __init__(self) -> None:
        self.spent = {"pack": 0.0, "exchange": 0.0, "unpack": 0.0, "replicate": 0.0}
        self._last = time.perf_counter()

    def charge(self, phase: str) -> None:
        now = time.perf_counter()
        self.spent[phase] += now - self._last
        self._last = now
