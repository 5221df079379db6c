"""A gateway that an engine does not reach: since when that is so, and when it is asked again.

An engine goes on with what it has. One line a minute says so, and one that it is over.
"""

from __future__ import annotations

import logging
import time

__all__ = ["Outage"]

log = logging.getLogger("weightcast.worker")

_FIRST, _LAST = 1.0, 10.0
"""Seconds between two attempts: at first, and at most."""
_MINUTE = 60.0
"""Seconds between two lines about one outage."""


class Outage:
    """The outages of one gateway, as the rank `who` sees them."""

    def __init__(self, url: str, who: str) -> None:
        self._url, self._who = url, who
        self._since: str | None = None
        self._lost_at = self._next = self._spoke = 0.0
        self._pause = _FIRST
        self._kind: type[Exception] | None = None

    @property
    def left(self) -> float:
        """Seconds until the gateway is asked again; 0.0 unless it was lost."""
        return 0.0 if self._since is None else max(0.0, self._next - time.monotonic())

    def note(self, error: Exception, standing: str) -> None:
        """Notes an attempt that failed. `standing` says what the engine does meanwhile.

        An error of another class is said at once: the gateway may be there, and take no token of this engine.
        """
        now = time.monotonic()
        if self._since is None:
            self._since, self._lost_at = time.strftime("%H:%M:%S UTC", time.gmtime()), now
            self._pause, self._spoke = _FIRST, now - _MINUTE
        if now >= self._spoke + _MINUTE or type(error) is not self._kind:
            self._spoke, self._kind = now, type(error)
            text = "%s: gateway %s not reached since %s; %s; trying again (%s)"
            log.warning(text, self._who, self._url, self._since, standing, error)
        self._next, self._pause = now + self._pause, min(2 * self._pause, _LAST)

    def soon(self) -> None:
        """Has the gateway asked again at once, because something else of this process has reached it."""
        self._next = 0.0

    def over(self) -> None:
        """Notes that the gateway has answered."""
        if self._since is not None:
            seconds = time.monotonic() - self._lost_at
            log.warning("%s: gateway %s is reached again, after %.0f s", self._who, self._url, seconds)
            self._since = None
