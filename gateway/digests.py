"""What a rank digests after a transfer, how much of it, and how long that took."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import NamedTuple

import numpy as np

from weightcast.transfer.digesting import Digester
from weightcast.transfer.layout import RankLayout
from weightcast.transfer.plan import DigestRows, RankPart
from weightcast.transfer.verification import Sample, Verify
from weightcast.transfer.wire import DigestReport

__all__ = ["Digested", "PartDigests", "SharedDigests"]

log = logging.getLogger("weightcast.transfer")


class Digested(NamedTuple):
    """A report for the gateway and the seconds that it took."""

    report: DigestReport
    seconds: float


class PartDigests:
    """Digests of a rank's own rows of a part, read from its live memory; prepared once for a part and a layout."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._made: tuple[DigestRows, RankLayout, Digester] | None = None

    def prepare(self, part: RankPart, layout: RankLayout) -> None:
        """Makes ready for `report`, as when joining: it takes longer than many a report."""
        if part.verify is not Verify.OFF:
            self._digester(part.digests, layout)

    def report(
        self, part: RankPart, layout: RankLayout, version: int, labels: Mapping[str, object] | None = None
    ) -> Digested:
        """What the gateway is told; of no rows where nothing is to be verified.

        `labels` become fields of the log record, as in Executor.run. Raises StalePlanError when memory was reallocated.
        """
        start, rows = time.perf_counter(), part.digests
        if part.verify is Verify.OFF:
            rows, values = rows.between(0, 0), np.empty(0, dtype=np.uint64)
        else:
            values = self._digester(rows, layout).run(Sample.of(part.verify, version))
        seconds = time.perf_counter() - start
        label = f"{'trainer' if part.is_trainer else part.instance} rank {part.rank}"
        fields = {"rank": part.rank, "version": version, "digest_seconds": seconds, "verify": part.verify.value}
        log.info("%s: digested %d boxes in %.3f s", label, len(rows), seconds, extra={**(labels or {}), **fields})
        report = DigestReport(None if part.is_trainer else part.instance, part.rank, rows.cell, values)
        return Digested(report, seconds)

    def _digester(self, rows: DigestRows, layout: RankLayout) -> Digester:
        with self._lock:
            if self._made is None or self._made[1] is not layout or not _same(self._made[0], rows):
                self._made = rows, layout, Digester(layout, rows.region, rows.offset, rows.size, rows.dtype)
            return self._made[2]


class SharedDigests:
    """A trainer rank's digests of a version: made once for all instances, in a thread beside the transfers.

    Its memory holds still until the update is over, so it may be read while it is sent.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._kept: list[tuple[int, RankPart, Future[Digested]]] = []
        self._digests = PartDigests()

    def prepare(self, part: RankPart, layout: RankLayout) -> None:
        """Makes ready for `start`."""
        self._digests.prepare(part, layout)

    def start(
        self, part: RankPart, layout: RankLayout, version: int, labels: Mapping[str, object] | None = None
    ) -> Future[Digested]:
        """The digests of a part, perhaps under way since another instance asked."""
        with self._lock:
            self._kept = [kept for kept in self._kept if kept[0] == version]
            for _, known, future in self._kept:
                if known.verify is part.verify and _same(known.digests, part.digests):
                    return future
            if self._pool is None:
                self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weightcast-digest")
            future = self._pool.submit(self._digests.report, part, layout, version, labels)
            self._kept.append((version, part, future))
            return future

    def forget(self) -> None:
        """Before another update, even to the same version: memory may have changed."""
        with self._lock:
            self._kept = []

    def close(self) -> None:
        """Ends the thread."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _same(one: DigestRows, other: DigestRows) -> bool:
    if one is other:
        return True
    columns = ("region", "offset", "size", "dtype", "cell")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in columns)
