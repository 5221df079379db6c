"""What a rank digests after a transfer, how much of it, and how long that took."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import NamedTuple

import numpy as np

from weightcast.transfer.digest import digest_rows
from weightcast.transfer.layout import RankLayout
from weightcast.transfer.plan import DigestRows, RankPart
from weightcast.transfer.verification import Sample, Verify
from weightcast.transfer.wire import DigestReport

__all__ = ["Digested", "SharedDigests", "digest_report"]

log = logging.getLogger("weightcast.transfer")


class Digested(NamedTuple):
    """A report for the gateway and the seconds that it took."""

    report: DigestReport
    seconds: float


def digest_report(
    part: RankPart, layout: RankLayout, version: int, labels: Mapping[str, object] | None = None
) -> Digested:
    """Digests of this rank's own rows of a part, read from its live memory; none where nothing is to be verified.

    `labels` become fields of the log record, as in Executor.run.
    """
    start, rows = time.perf_counter(), part.digests
    if part.verify is Verify.OFF:
        rows = rows.between(0, 0)
    sample = Sample.of(part.verify, version)
    values = digest_rows(layout, rows.region, rows.offset, rows.size, rows.dtype, sample)
    seconds = time.perf_counter() - start
    label = f"{'trainer' if part.is_trainer else part.instance} rank {part.rank}"
    fields = {"rank": part.rank, "version": version, "digest_seconds": seconds, "verify": part.verify.value}
    log.info("%s: digested %d boxes in %.3f s", label, len(rows), seconds, extra={**(labels or {}), **fields})
    report = DigestReport(None if part.is_trainer else part.instance, part.rank, rows.cell, values)
    return Digested(report, seconds)


class SharedDigests:
    """A trainer rank's digests of a version: made once for all instances, in a thread beside the transfers.

    Its memory holds still until the update is over, so it may be read while it is sent.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._kept: list[tuple[int, RankPart, Future[Digested]]] = []

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
            future = self._pool.submit(digest_report, part, layout, version, labels)
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
    columns = ("region", "offset", "size", "dtype", "cell")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in columns)
