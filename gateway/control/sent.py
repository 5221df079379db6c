"""The digests that trainer ranks have reported last: they report the same for every instance of an update."""

from __future__ import annotations

from weightcast.transfer.plan.digest_report import DigestReport

__all__ = ["Sent"]


class Sent:
    """Reports by rank, as they came and decoded, so that each is decoded once."""

    def __init__(self) -> None:
        self._reports: dict[int, tuple[bytes, DigestReport]] = {}

    def get(self, rank: int, body: bytes) -> DigestReport | None:
        """The report in `body`, if the rank has sent that before."""
        known = self._reports.get(rank)
        return known[1] if known is not None and known[0] == body else None

    def keep(self, rank: int, body: bytes, report: DigestReport) -> None:
        """Remembers a report of a rank that there is."""
        self._reports[rank] = body, report

    def clear(self) -> None:
        """Forgets all of them."""
        self._reports.clear()
