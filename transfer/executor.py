"""Runs one rank's part of a plan: pack, exchange, unpack, replicate.

    executor = Executor(part, layout, group)      # once for each plan
    report = executor.run(Deadline.after(60.0))   # for each update

Every member of the group runs its own executor at about the same time. The content of a message follows from the
plan alone (`exchange.messages`). How this rank fills and empties it is prepared once (`exchange.schedule`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from weightcast.transfer.colocated.peers import Neighbours, device_of, settle
from weightcast.transfer.colocated.sharing import share
from weightcast.transfer.deadline import Deadline
from weightcast.transfer.errors import PlanError, StalePlanError, TransferError
from weightcast.transfer.exchange.messages import IN_FLIGHT
from weightcast.transfer.exchange.schedule import Schedule, make_schedule
from weightcast.transfer.layout.memory import RankLayout
from weightcast.transfer.plan.operations import RankPart
from weightcast.transfer.transports.communicator import Communicator, Exchange

__all__ = ["Executor", "TransferReport", "member_labels"]


log = logging.getLogger("weightcast.transfer")

_PROGRESS_SECONDS = 5.0
"""Least time between two progress records of a run."""


@dataclass(frozen=True, slots=True)
class TransferReport:
    """The bytes that one run of one rank moved, and the seconds of its phases.

    `exchange_seconds` is time spent waiting for messages. It leaves out what moves while this rank packs or unpacks.
    `shared_seconds` is time spent reading in place, and waiting for ranks that do. `bytes_shared` were read so, by this
    rank or from it. `digest_seconds` is for the caller that digests what the run moved.
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
    digest_seconds: float = 0.0
    bytes_shared: int = 0
    shared_seconds: float = 0.0

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase, by name."""
        return {name: getattr(self, f"{name}_seconds") for name in (*_PHASES, "digest")}


_PHASES = ("pack", "exchange", "unpack", "replicate", "shared")


def member_labels(part: RankPart) -> tuple[str, ...]:
    """Names of the members of the part's group for messages, in the order of their group ranks."""
    trainer = tuple(f"trainer rank {rank}" for rank in part.trainer_ranks)
    return trainer + tuple(f"{part.instance} rank {rank}" for rank in range(part.instance_ranks))


class Executor:
    """One rank's part of the updates of one instance, over its live memory and the instance's communicator.

    With `neighbours` boxes move through shared memory where both ends can.

    Raises StalePlanError when the part was planned for another table than that of `layout`. Raises PlanError for a part
    that does not fit the layout or the group.
    """

    def __init__(
        self, part: RankPart, layout: RankLayout, group: Communicator, neighbours: Neighbours | None = None
    ) -> None:
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
        self._where = {
            "instance": part.instance,
            "rank": part.rank,
            "side": "trainer" if part.is_trainer else "instance",
        }
        self._layout, self._device = layout, device_of(layout)
        self._group = group
        self._shared = share(part, layout, group, neighbours or Neighbours(), member_labels(part))
        self._schedule = make_schedule(self._shared.left, layout, group.device, group.scatters)

    @property
    def staging_bytes(self) -> int:
        """Memory this executor holds beside the parameters."""
        return self._schedule.staging.nbytes + self._shared.staging_bytes

    def run(self, deadline: Deadline, labels: Mapping[str, object] | None = None) -> TransferReport:
        """Moves this rank's boxes once. All members have to run, at about the same time.

        `labels`, such as pair and version, become fields of the log records beside instance, rank and what they report.
        Raises StalePlanError when parameters were reallocated since the layout was made, DeadlineError and
        TransferError naming the member at fault. After any error the group is aborted and memory is partly written.
        """
        watch = _Watch(self._schedule, self._shared.nbytes, self._label, {**(labels or {}), **self._where})
        try:
            return self._run(deadline, watch)
        except BaseException as error:
            self._group.abort()
            watch.fail(error)
            raise

    @torch.no_grad()
    def _run(self, deadline: Deadline, watch: _Watch) -> TransferReport:
        bases = self._layout.memory.moved()
        if bases:
            raise StalePlanError(
                f"{self._instance}: {len(bases)} of the parameters of {self._label} were reallocated since they were "
                "described; connect again to plan anew"
            )
        schedule = self._schedule
        self._shared.begin(deadline)
        watch.charge("shared")
        watch.advance(self._shared.nbytes)
        exchanges: deque[tuple[int, Exchange]] = deque()
        for number, step in enumerate(schedule.rounds):
            while exchanges and (len(exchanges) == IN_FLIGHT or exchanges[0][0] < step.after):
                self._finish(*exchanges.popleft(), deadline, watch)
            step.pack.run()
            watch.charge("pack")
            exchanges.append((number, self._group.post(step.sends, step.receives)))
        while exchanges:
            self._finish(*exchanges.popleft(), deadline, watch)
        if self._group.buffers:
            self._confirm(deadline)
            watch.charge("exchange")
        self._shared.finish(deadline)
        watch.charge("shared")
        schedule.replicate.run()
        settle(self._device)
        watch.charge("replicate")
        return watch.report()

    def _finish(self, number: int, exchange: Exchange, deadline: Deadline, watch: _Watch) -> None:
        rounds = self._schedule.rounds
        try:
            exchange.wait(deadline)
        except TransferError as error:
            later_bytes = sum(r.nbytes for r in rounds[number + 1 :])
            raise type(error)(
                f"{error} in round {number + 1} of {len(rounds)}, {later_bytes} bytes in later rounds"
            ) from error
        watch.charge("exchange")
        rounds[number].unpack.run()
        watch.charge("unpack")
        watch.advance(rounds[number].nbytes)

    def _confirm(self, deadline: Deadline) -> None:
        """Tells senders that everything is here, and hears it from receivers: networks take bytes for dead peers."""
        try:
            self._group.post(self._schedule.said, self._schedule.heard).wait(deadline)
        except TransferError as error:
            raise type(error)(f"{error}, a byte that says that everything has arrived") from error


class _Watch:
    """Charges the time since the last charge to a phase, and logs the progress of a run."""

    def __init__(self, schedule: Schedule, shared: int, label: str, fields: Mapping[str, object]) -> None:
        self._schedule, self._shared, self._label, self._fields = schedule, shared, label, fields
        self._spent = dict.fromkeys(_PHASES, 0.0)
        self._total, self._moved = shared + sum(r.nbytes for r in schedule.rounds), 0
        self._last = self._said = time.perf_counter()

    def charge(self, phase: str) -> None:
        moment = time.perf_counter()
        self._spent[phase] += moment - self._last
        self._last = moment

    def advance(self, nbytes: int) -> None:
        self._moved += nbytes
        if nbytes and self._last - self._said >= _PROGRESS_SECONDS and self._moved < self._total:
            self._said = self._last
            self._log(logging.INFO, f"moved {self._moved} of {self._total} bytes")

    def report(self) -> TransferReport:
        s = self._schedule
        report = TransferReport(
            bytes_sent=s.bytes_sent,
            bytes_received=s.bytes_received,
            bytes_copied=s.bytes_copied,
            bytes_shared=self._shared,
            rounds=len(s.rounds),
            seconds=sum(self._spent.values()),
            **{f"{phase}_seconds": seconds for phase, seconds in self._spent.items()},
        )
        self._log(logging.INFO, f"moved {self._moved} bytes in {report.seconds:.3f} s")
        return report

    def fail(self, error: BaseException) -> None:
        self._log(logging.WARNING, f"gave up after {self._moved} of {self._total} bytes: {type(error).__name__}")

    def _log(self, level: int, text: str) -> None:
        phases = {f"{phase}_seconds": seconds for phase, seconds in self._spent.items()}
        counts = {"bytes_moved": self._moved, "bytes_total": self._total, **phases}
        log.log(level, "%s: %s", self._label, text, extra={**self._fields, **counts})
