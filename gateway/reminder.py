"""Moments at which a rank that waits says so, without a thread: it is asked between two long polls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["SAY_SECONDS", "SELDOM_SECONDS", "Reminder"]

SAY_SECONDS = 10.0
"""Seconds of a wait after which the gateway and one rank of a side say so, and between two times that they do."""
SELDOM_SECONDS = 60.0
"""The same for all its other ranks, of which there may be hundreds."""


class Reminder:
    """Calls `remind` `first` seconds after `begin`, and then after each multiple of `every` seconds."""

    def __init__(self, remind: Callable[[], None], first: float, every: float) -> None:
        self._remind, self._first, self._every = remind, first, every
        self._lock = threading.Lock()
        self.begin()

    def begin(self) -> None:
        """Counts from now on."""
        self._start, self._due = time.monotonic(), self._first

    @property
    def left(self) -> float:
        """Seconds until the next call; no long poll should take longer."""
        return max(0.0, self._start + self._due - time.monotonic())

    def tick(self) -> None:
        """Calls `remind` if it is time to. Several threads may tick."""
        with self._lock:
            seconds = time.monotonic() - self._start
            due = seconds >= self._due
            if due:
                self._due = (seconds // self._every + 1) * self._every
        if due:
            self._remind()
