"""Digests of a rank in an update: of its rows or a sample of them, with the seconds that they took."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import NamedTuple

import numpy as np

from weightcast.gateway.versions import Version
from weightcast.transfer.boxes.arrays import DigestArray
from weightcast.transfer.digest.digester import Digester
from weightcast.transfer.errors import PairStateError, WeightsChangedError
from weightcast.transfer.layout.memory import RankLayout
from weightcast.transfer.layout.summaries import summarize
from weightcast.transfer.plan.digest_report import DigestReport
from weightcast.transfer.plan.operations import DigestRows, RankPart
from weightcast.transfer.plan.verification import Sample, ValueCounts, Verify

__all__ = ["Digested", "PartDigests", "SharedDigests"]

log = logging.getLogger("weightcast.transfer")

_KEPT = 4
"""Number of sets of rows that stay prepared: those of instances that were planned apart differ."""


class Digested(NamedTuple):
    """A report for the gateway and the seconds that it took."""

    report: DigestReport
    seconds: float


class PartDigests:
    """Digests of a rank's own rows of a part, read from its live memory; prepared once for a part and a layout."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._prepared: list[tuple[DigestRows, RankLayout, Digester]] = []

    def prepare(self, part: RankPart, layout: RankLayout) -> None:
        """Makes ready for `report`, as when joining: this takes longer than many a report."""
        if part.verify is not Verify.OFF:
            self._digester(part.digests, layout)

    def report(
        self,
        part: RankPart,
        layout: RankLayout,
        version: Version,
        labels: Mapping[str, object] | None = None,
        *,
        values: bool = False,
    ) -> Digested:
        """Report of a part for the gateway; without rows when nothing is to be verified.

        With `values` it counts those of the same elements that are not finite. `labels` become fields of the log
        record, as in Executor.run. Raises StalePlanError when memory was reallocated.
        """
        start, rows, counts = time.perf_counter(), part.digests, ValueCounts.of({})
        digests: DigestArray
        if part.verify is Verify.OFF:
            rows, digests = rows.between(0, 0), np.empty(0, dtype=np.uint64)
        else:
            digester, sample = self._digester(rows, layout), Sample.of(part.verify, version.number)
            digests, counts = digester.read(sample) if values else (digester.run(sample), counts)
        seconds = time.perf_counter() - start
        label = f"{'trainer' if part.is_trainer else part.instance} rank {part.rank}"
        fields: dict[str, object] = {"rank": part.rank, "version": version.as_json()}
        fields |= {"digest_seconds": seconds, "verify": part.verify.value}
        log.info("%s: digested %d boxes in %.3f s", label, len(rows), seconds, extra={**(labels or {}), **fields})
        report = DigestReport(None if part.is_trainer else part.instance, part.rank, rows.cell, digests, counts)
        return Digested(report, seconds)

    def _digester(self, rows: DigestRows, layout: RankLayout) -> Digester:
        with self._lock:
            for entry_rows, entry_layout, digester in self._prepared:
                if entry_layout is layout and _same(entry_rows, rows):
                    return digester
            digester = Digester(layout, rows.region, rows.offset, rows.size, rows.dtype)
            # Entries of another layout would keep memory that the trainer may have given up.
            entries = [entry for entry in self._prepared if entry[1] is layout][: _KEPT - 1]
            self._prepared = [(rows, layout, digester), *entries]
            return digester


@dataclass(slots=True)
class _Passes:
    """The two passes over the rows of a part, and the time at which the second was asked for, by `time.monotonic`."""

    part: RankPart
    first: Future[Digested]
    second: Future[Digested] | None = None
    second_asked: float = 0.0


class SharedDigests:
    """A trainer rank's two passes over its weights in an update, for all instances together, in a thread.

    The gateway tells ranks to send when every rank has reported its first pass. A rank begins its second pass after it
    was told to. So weights with the same digests in both were all as in the first pass at one moment: when that had
    ended everywhere.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._passes: list[_Passes] = []
        self._begun: list[Future[Digested]] = []
        self._digests = PartDigests()
        self._report: Callable[..., Digested] | None = None

    def prepare(self, part: RankPart, layout: RankLayout) -> None:
        """Makes ready for the passes over a part."""
        self._digests.prepare(part, layout)

    def begin(
        self,
        parts: Sequence[RankPart],
        layout: RankLayout,
        version: Version,
        labels: Mapping[str, object] | None = None,
    ) -> None:
        """Starts the first pass for all parts of an update, and forgets the update before: memory may have changed.

        The passes of the update read `layout`. `labels` are as in `PartDigests.report`.
        """
        with self._lock:
            for passes in self._passes:
                for future in (passes.first, passes.second):
                    if future is not None:
                        future.cancel()
            self._passes = []
            self._report = partial(self._digests.report, layout=layout, version=version, labels=labels)
            for part in parts:
                self._passes_over(part)
            self._begun = [passes.first for passes in self._passes]

    def first(self, part: RankPart) -> Digested:
        """The first pass over a part, with counts of values. Waits also for the passes that began with the update, so
        that there is one moment at which all of them had ended.

        A part whose instance was planned anew meanwhile needs another pass, which must find the weights as they were.
        Raises WeightsChangedError naming tensors that changed, StalePlanError when memory moved.
        """
        with self._lock:
            first, futures = self._passes_over(part).first, list(self._begun)
        for future in futures:
            future.result()
        return first.result()

    def second(self, part: RankPart, *, since: float = 0.0) -> Future[Digested]:
        """The second pass over a part, perhaps under way for another instance, unless it began before `since`.

        `since` (of `time.monotonic`) is the time at which the rank was told to send, for instances that joined in this
        update.
        """
        with self._lock:
            passes = self._passes_over(part)
            if passes.second is None or passes.second_asked < since:
                passes.second_asked = time.monotonic()
                passes.second = self._submit(part, values=False, earlier=())
            return passes.second

    def _passes_over(self, part: RankPart) -> _Passes:
        for passes in self._passes:
            if passes.part.verify is part.verify and _same(passes.part.digests, part.digests):
                return passes
        predecessors = tuple(passes for passes in self._passes if passes.second is not None)
        passes = _Passes(part, self._submit(part, values=True, earlier=predecessors))
        self._passes.append(passes)
        return passes

    def _submit(self, part: RankPart, *, values: bool, earlier: Sequence[_Passes]) -> Future[Digested]:
        """Submits a pass over a part. Parts that had their second pass before it began are digested again after it, so
        that all instances of the update are of one state.
        """
        report = self._report
        if report is None:
            raise PairStateError("weights are digested within an update; none has begun")

        def work() -> Digested:
            digested = report(part, values=values)
            for passes in earlier:
                _check_same(passes.part, passes.first.result().report, report(passes.part).report)
            return digested

        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weightcast-digest")
        return self._pool.submit(work)

    def close(self) -> None:
        """Ends the thread of the passes."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _check_same(part: RankPart, first: DigestReport, again: DigestReport) -> None:
    rows = np.unique(part.digests.tensor[first.digest != again.digest])
    if len(rows):
        names = summarize([part.tensors.names[row] for row in rows.tolist()])
        raise WeightsChangedError(
            f"weights changed during update() while an instance connected anew: {names}; let them stand still until "
            "update() has returned, then offer a greater version"
        )


def _same(one: DigestRows, other: DigestRows) -> bool:
    if one is other:
        return True
    columns = ("region", "offset", "size", "dtype", "cell")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in columns)
