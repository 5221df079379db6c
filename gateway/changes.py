"""Waiting, with a deadline, until shared state of the gateway is as one needs it, and noticing who is no longer there.

One event loop, no threads.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from weightcast.transfer.errors import DeadlineError

__all__ = ["Changes", "Journal", "Side"]

T = TypeVar("T")


class Journal(Generic[T]):
    """What happened, in order and numbered from 0; only the last `kept` entries are still there."""

    def __init__(self, kept: int) -> None:
        self._entries: deque[T] = deque(maxlen=kept)
        self.count = 0

    def add(self, entry: T) -> None:
        """One more."""
        self._entries.append(entry)
        self.count += 1

    @property
    def last(self) -> T | None:
        """The newest, if there is one."""
        return self._entries[-1] if self._entries else None

    @property
    def entries(self) -> tuple[T, ...]:
        """Those that are still there, oldest first."""
        return tuple(self._entries)

    def since(self, number: int) -> list[T]:
        """Those from `number` on that are still there."""
        new = self.count - number
        return list(self._entries)[-new:] if new > 0 else []


class Changes:
    """State that others wait for. `label` begins the messages of waits that ran out."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._changed = asyncio.Condition()
        self._notifying: set[asyncio.Task[None]] = set()

    async def notify(self) -> None:
        """Wakes every wait on this state; call after each change of it."""
        async with self._changed:
            self._changed.notify_all()

    def notify_soon(self) -> None:
        """The same from where nothing can be awaited."""
        task = asyncio.create_task(self.notify())
        self._notifying.add(task)
        task.add_done_callback(self._notifying.discard)

    async def wait(self, ready: Callable[[], bool], seconds: float, missing: Callable[[], str]) -> None:
        """Until `ready()`. Raises DeadlineError with what `missing()` says when `seconds` have passed."""
        if not await self.poll(ready, seconds):
            raise DeadlineError(f"{self._label}: {missing()} within {seconds:g} s")

    async def poll(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Like `wait`, for long polls: False instead of an error when the time is over."""
        if ready():
            return True
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(ready)
        except TimeoutError:
            return False
        return True


class Side(Changes):
    """The trainer or an instance: its ranks beat, and those that have stopped are known.

    `heard` is when each rank that has ever beaten was heard from last, `silent` who was not for `patience` seconds.
    """

    def __init__(self, label: str, who: str, patience: float) -> None:
        super().__init__(label)
        self._who, self._patience = who, patience
        self.heard: dict[int, float] = {}
        self.silent: tuple[int, ...] = ()

    def hear(self, rank: int, now: float) -> bool:
        """A rank lives; True when it had been missed."""
        self.heard[rank] = now
        return rank in self.silent and self.listen(now)

    def listen(self, now: float) -> bool:
        """Finds out who is missing; True when that has changed."""
        late = (rank for rank, at in self.heard.items() if now - at > self._patience)
        before, self.silent = self.silent, tuple(sorted(late))
        return before != self.silent

    def forget(self) -> None:
        """Nobody has beaten yet."""
        self.heard, self.silent = {}, ()

    def silence(self) -> str:
        """Who is missing, in words."""
        ranks = ", ".join(map(str, self.silent))
        return f"{self._who} ranks {ranks} were not heard from for {self._patience:g} s"
