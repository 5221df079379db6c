"""Digest reports that trainer ranks have sent last: they send the same for every instance of an update."""

from __future__ import annotations

from weightcast.transfer.plan.digest_report import DigestReport

__all__ = ["Sent"]


class Sent:
    """Reports by rank, as bytes and decoded, so that each is decoded once."""

    def __init__(self) -> None:
        self._reports: dict[int, tuple[bytes, DigestReport]] = {}

    def get(self, rank: int, body: bytes) -> DigestReport | None:
        """The report in `body`, if the rank has sent these bytes last; None otherwise."""
        entry = self._reports.get(rank)
        return entry[1] if entry is not None and entry[0] == body else None

    def keep(self, rank: int, body: bytes, report: DigestReport) -> None:
        """Remembers the last report of a rank; the caller has checked that the rank exists."""
        self._reports[rank] = body, report

    def clear(self) -> None:
        """Forgets the reports of all ranks."""
        self._reports.clear()
