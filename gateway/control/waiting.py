"""Waits with a deadline for shared state of the gateway, and notice of ranks that are no longer heard from.

All of it runs in one event loop, without threads.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Generic, TypeVar

from weightcast.gateway.records import Order
from weightcast.transfer.errors import DeadlineError

__all__ = ["Changes", "Journal", "Party"]

T = TypeVar("T")


class Journal(Generic[T]):
    """Entries in order, numbered from 0; only the last `kept` of them are still there."""

    def __init__(self, kept: int) -> None:
        self._entries: deque[T] = deque(maxlen=kept)
        self.count = 0

    def add(self, entry: T) -> None:
        """Appends an entry; the oldest one gives way when the journal is full."""
        self._entries.append(entry)
        self.count += 1

    def latest(self) -> Iterator[tuple[int, T]]:
        """Entries that are still there with their numbers, newest first."""
        return zip(range(self.count - 1, -1, -1), reversed(self._entries), strict=False)

    @property
    def last(self) -> T | None:
        """The newest entry, None before the first."""
        return self._entries[-1] if self._entries else None

    def since(self, number: int) -> list[T]:
        """Entries from `number` on that are still there, oldest first."""
        return [entry for _, entry in islice(self.latest(), max(self.count - number, 0))][::-1]


class Changes:
    """State that others wait for. `label` begins the messages of waits that ran out."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._waits: dict[asyncio.Future[bool], Callable[[], bool]] = {}

    def notify(self) -> None:
        """Wakes the waits whose condition now holds; call after each change of the state."""
        futures = [future for future, ready in self._waits.items() if ready()]
        for future in futures:
            _wake(future, True)
            del self._waits[future]

    def end(self) -> None:
        """Wakes every wait as if its time were over: nothing will change any more."""
        for future in self._waits:
            _wake(future, False)

    async def wait(self, ready: Callable[[], bool], seconds: float, missing: Callable[[], str]) -> None:
        """Returns when `ready()` holds. Raises DeadlineError with the text of `missing()` after `seconds`."""
        if not await self.poll(ready, seconds):
            raise DeadlineError(f"{self._label}: {missing()} within {seconds:g} s")

    async def poll(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Waits like `wait`, for long polls: returns False instead of an error when the time is over.

        `ready` is called at each change, by the code that makes it: it only looks, and is quick.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not ready():
            if loop.time() >= deadline:
                return False
            future = loop.create_future()
            self._waits[future] = ready
            timer = loop.call_at(deadline, _wake, future, False)
            try:
                if not await future:
                    return ready()
            finally:
                timer.cancel()
                self._waits.pop(future, None)
        return True


def _wake(woken: asyncio.Future[bool], changed: bool) -> None:
    if not woken.done():
        woken.set_result(changed)


class Party(Changes):
    """The trainer or an instance: its ranks follow orders and beat, and those that have stopped are known.

    `orders` are the last `kept` of those for its ranks. `heard` has the time (`time.monotonic`) at which each rank was
    last heard from. `silent` are the ranks that were not heard from for `patience` seconds.
    """

    def __init__(self, label: str, who: str, patience: float, kept: int = 1000) -> None:
        super().__init__(label)
        self.orders: Journal[Order] = Journal(kept)
        self._who, self._patience = who, patience
        self.heard: dict[int, float] = {}
        self.silent: tuple[int, ...] = ()

    async def orders_from(self, after: int, wait: float) -> list[Order]:
        """The orders from number `after` on; empty when there is none within `wait` seconds."""
        await self.poll(lambda: self.orders.count > after, wait)
        return self.orders.since(after)

    def hear(self, rank: int, now: float) -> bool:
        """Notes that a rank lives; returns True if it had been missed."""
        self.heard[rank] = now
        return rank in self.silent and self.listen(now)

    def listen(self, now: float) -> bool:
        """Finds the ranks that are missing; returns True if these have changed."""
        ranks = (rank for rank, beat in self.heard.items() if now - beat > self._patience)
        earlier_ranks, self.silent = self.silent, tuple(sorted(ranks))
        return earlier_ranks != self.silent

    def excuse(self, seconds: float) -> None:
        """Takes `seconds` as not having passed, in which nobody could be heard."""
        self.heard.update((rank, beat + seconds) for rank, beat in tuple(self.heard.items()))

    def forget(self) -> None:
        """Forgets all beats: no rank has been heard, and none is missed."""
        self.heard, self.silent = {}, ()

    def silence(self) -> str:
        """The ranks that are missing, in words, for messages."""
        ranks = ", ".join(map(str, self.silent))
        return f"{self._who} ranks {ranks} were not heard from for {self._patience:g} s"
