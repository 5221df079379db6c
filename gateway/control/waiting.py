"""Waits with a deadline for shared state of the gateway, and notice of ranks that are no longer heard from.

A wait under way can say who is missing. All of it runs in one event loop, without threads.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

from weightcast.gateway.records import Order, WaitRecord
from weightcast.gateway.reminder import SAY_SECONDS
from weightcast.transfer.deadline import utc
from weightcast.transfer.errors import DeadlineError
from weightcast.transfer.layout.summaries import number_ranges

__all__ = ["Changes", "Journal", "Party", "Wait"]

_SHOWN_RANKS = 4
"""Number of missing ranks whose process a message names."""

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


def _nothing() -> str:
    return ""


@dataclass(slots=True, eq=False)
class Wait:
    """A wait under way for `seconds` at most. `missing` says who did not do what, `detail` what is known of them."""

    seconds: float
    missing: Callable[[], str]
    detail: Callable[[], str] = _nothing
    since: float = field(default_factory=time.time)
    _begun: float = field(default_factory=time.monotonic)
    _said: int = 0

    def is_due(self, now: float) -> bool:
        """True once in every SAY_SECONDS: then the log says who is missing. `now` is a `time.monotonic()`."""
        count = int((now - self._begun) / SAY_SECONDS)
        due, self._said = count > self._said, max(count, self._said)
        return due

    def record(self) -> WaitRecord:
        """The wait as it is now."""
        limit = self.seconds if math.isfinite(self.seconds) else None
        text = _joined(f"{self.missing()} yet", self.detail())
        return WaitRecord(text, utc(self.since), round(time.monotonic() - self._begun, 1), limit)


class Changes:
    """State that others wait for. `label` begins the messages of waits that ran out, `waits` are those under way."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._waits: dict[asyncio.Future[bool], Callable[[], bool]] = {}
        self.waits: list[Wait] = []

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

    @contextmanager
    def waiting(
        self, seconds: float, missing: Callable[[], str], detail: Callable[[], str] = _nothing
    ) -> Iterator[None]:
        """A context of a wait that is one of `waits` until it is left."""
        wait = Wait(seconds, missing, detail)
        self.waits.append(wait)
        try:
            yield
        finally:
            self.waits.remove(wait)

    async def wait(
        self,
        ready: Callable[[], bool],
        seconds: float,
        missing: Callable[[], str],
        detail: Callable[[], str] = _nothing,
    ) -> None:
        """Returns when `ready()` holds. Raises DeadlineError with the texts of `missing` and `detail` after `seconds`.

        Meanwhile it is one of `waits`.
        """
        with self.waiting(seconds, missing, detail):
            in_time = await self.poll(ready, seconds)
        if not in_time:
            raise DeadlineError(_joined(f"{self._label}: {missing()} within {seconds:g} s", detail()))

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


def _joined(text: str, detail: str) -> str:
    return f"{text}; {detail}" if detail else text


def _wake(woken: asyncio.Future[bool], changed: bool) -> None:
    if not woken.done():
        woken.set_result(changed)


class Party(Changes):
    """The trainer or an instance: its ranks follow orders and beat, and those that have stopped are known.

    `orders` are the last `kept` of those for its ranks. `heard` has the time (`time.monotonic`) at which each rank was
    last heard from. `silent` are the ranks that were not heard from for `patience` seconds. `signs` has the time (in
    seconds since 1970) of the last sign of life of each rank, also of those whose beats were forgotten.
    """

    def __init__(self, label: str, who: str, patience: float, kept: int = 1000) -> None:
        super().__init__(label)
        self.orders: Journal[Order] = Journal(kept)
        self._who, self._patience = who, patience
        self.heard: dict[int, float] = {}
        self.signs: dict[int, float] = {}
        self.silent: tuple[int, ...] = ()

    async def orders_from(self, after: int, wait: float) -> list[Order]:
        """The orders from number `after` on; empty when there is none within `wait` seconds."""
        await self.poll(lambda: self.orders.count > after, wait)
        return self.orders.since(after)

    def hear(self, rank: int, now: float) -> bool:
        """Notes that a rank lives; returns True if it had been missed."""
        self.heard[rank] = now
        self.signs[rank] = time.time()
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
        return f"{self._who} ranks {number_ranges(self.silent)} were not heard from for {self._patience:g} s"

    @property
    def last_sign(self) -> str | None:
        """The time of the last sign of life of any rank, in UTC; None before the first."""
        return utc(max(self.signs.values())) if self.signs else None

    def process(self, rank: int) -> str:
        """The process of a rank in words; empty while none is known."""
        return ""

    def accounts(self, ranks: Iterable[int]) -> str:
        """The last known process of ranks in words, and when it was heard. Ranks never heard of are in ranges."""
        processes = {rank: self.process(rank) for rank in ranks}
        known_ranks = [rank for rank, process in processes.items() if process]
        texts = [self._account(rank, processes[rank]) for rank in known_ranks[:_SHOWN_RANKS]]
        if len(known_ranks) > _SHOWN_RANKS:
            texts.append(f"and {len(known_ranks) - _SHOWN_RANKS} ranks more")
        strangers = [rank for rank, process in processes.items() if not process]
        if strangers:
            noun, verb = ("ranks", "were") if len(strangers) > 1 else ("rank", "was")
            texts.append(f"{self._who} {noun} {number_ranges(strangers)} {verb} never heard of")
        return ", ".join(texts)

    def _account(self, rank: int, process: str) -> str:
        sign = self.signs.get(rank)
        if sign is None:
            return f"{self._who} rank {rank} was {process} and has not been heard since the gateway started"
        return (
            f"{self._who} rank {rank} was {process}, last heard {utc(sign)} ({max(0.0, time.time() - sign):.0f} s ago)"
        )
