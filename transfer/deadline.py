"""A moment after which nobody waits any longer, and how moments are written."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta

__all__ = ["Deadline", "utc"]


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on the monotonic clock of this process; `seconds` is the time it allowed, for messages.

    One deadline covers a whole task: each wait inside gets what is left, so that the waits cannot add up. `cut` ends
    the task early.
    """

    at: float
    seconds: float
    _cut: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The moment `seconds` from now."""
        return cls(time.monotonic() + seconds, seconds)

    @property
    def left(self) -> float:
        """Seconds left, 0 once the moment is past."""
        return 0.0 if self._cut.is_set() else max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        """True if the moment is past."""
        return self._cut.is_set() or time.monotonic() >= self.at

    def cut(self) -> None:
        """Ends the time at once, from any thread. A wait under way may still last as long as it was given."""
        self._cut.set()

    def wait_time(self) -> timedelta:
        """Time left, for a wait of torch.distributed: at least 1 ms, because there 0 means "use the default"."""
        return timedelta(seconds=max(self.left, 0.001))


def utc(moment: float) -> str:
    """A time in seconds since 1970 as UTC: "2026-12-01T12:03:11Z"."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))
