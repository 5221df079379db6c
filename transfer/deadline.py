"""A moment after which nobody waits any longer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

__all__ = ["Deadline"]


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on the monotonic clock of this process; `seconds` is how long it was given, for messages.

    One deadline covers a whole task: each wait inside gets what is left, so that the waits cannot add up.
    """

    at: float
    seconds: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The moment `seconds` from now."""
        return cls(time.monotonic() + seconds, seconds)

    @property
    def left(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether the moment is past."""
        return time.monotonic() >= self.at

    def wait_time(self) -> timedelta:
        """What is left, for a wait of torch.distributed: at least 1 ms, because there 0 means "use the default"."""
        return timedelta(seconds=max(self.left, 0.001))
