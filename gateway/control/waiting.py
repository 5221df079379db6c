"""Waiting, with a deadline, until shared state of the gateway is as one needs it, and noticing who is no longer there.

One event loop, no threads.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
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

    def latest(self) -> Iterator[tuple[int, T]]:
        """Those that are still there with their numbers, newest first."""
        return zip(range(self.count - 1, -1, -1), reversed(self._entries), strict=False)

    @property
    def last(self) -> T | None:
        """The newest, if there is one."""
        return self._entries[-1] if self._entries else None

    def since(self, number: int) -> list[T]:
        """Those from `number` on that are still there."""
        return [entry for _, entry in islice(self.latest(), max(self.count - number, 0))][::-1]


class Changes:
    """State that others wait for. `label` begins the messages of waits that ran out."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._waits: dict[asyncio.Future[bool], Callable[[], bool]] = {}

    def notify(self) -> None:
        """Wakes the waits on this state that are over; call after each change of it."""
        over = [woken for woken, ready in self._waits.items() if ready()]
        for woken in over:
            _wake(woken, True)
            del self._waits[woken]

    def end(self) -> None:
        """Wakes every wait as if its time were over: nothing will change any more."""
        for woken in self._waits:
            _wake(woken, False)

    async def wait(self, ready: Callable[[], bool], seconds: float, missing: Callable[[], str]) -> None:
        """Until `ready()`. Raises DeadlineError with what `missing()` says when `seconds` have passed."""
        if not await self.poll(ready, seconds):
            raise DeadlineError(f"{self._label}: {missing()} within {seconds:g} s")

    async def poll(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Like `wait`, for long polls: False instead of an error when the time is over.

        `ready` is asked at each change, by whoever makes it: it only looks, and is quick.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while not ready():
            if loop.time() >= until:
                return False
            woken = loop.create_future()
            self._waits[woken] = ready
            late = loop.call_at(until, _wake, woken, False)
            try:
                if not await woken:
                    return ready()
            finally:
                late.cancel()
                self._waits.pop(woken, None)
        return True


def _wake(woken: asyncio.Future[bool], changed: bool) -> None:
    if not woken.done():
        woken.set_result(changed)


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
