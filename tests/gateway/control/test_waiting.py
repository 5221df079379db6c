"""Waits: who is woken by a change, and by what they end."""

from __future__ import annotations

import asyncio

import pytest

from weightcast.gateway.control.waiting import Changes, Journal
from weightcast.transfer.errors import DeadlineError


def test_a_change_wakes_only_whose_wait_it_ends() -> None:
    async def run() -> None:
        changes, there = Changes("x"), set[int]()
        waits = [asyncio.create_task(changes.poll(lambda n=n: n in there, 5.0)) for n in range(3)]  # type: ignore[misc]
        await asyncio.sleep(0)
        there.add(1)
        changes.notify()
        assert [len(changes._waits), *(w.done() for w in waits)] == [2, False, False, False]
        await asyncio.sleep(0)
        assert [wait.done() for wait in waits] == [False, True, False]
        there |= {0, 2}
        changes.notify()
        assert await asyncio.gather(*waits) == [True] * 3
        assert not changes._waits

    asyncio.run(run())


def test_what_is_over_before_anyone_could_look_is_waited_for_again() -> None:
    async def run() -> None:
        changes, there = Changes("x"), {"it"}
        there.clear()
        wait = asyncio.create_task(changes.poll(lambda: bool(there), 5.0))
        await asyncio.sleep(0)
        there.add("it")
        changes.notify()
        there.clear()
        await asyncio.sleep(0)
        assert not wait.done()
        there.add("it")
        changes.notify()
        assert await wait

    asyncio.run(run())


def test_waits_end() -> None:
    async def run() -> None:
        changes = Changes("pair p")
        assert await changes.poll(lambda: True, 0.0)
        assert not await changes.poll(lambda: False, 0.0)
        assert not await changes.poll(lambda: False, 0.01)
        with pytest.raises(DeadlineError, match=r"^pair p: nobody came within 0.01 s$"):
            await changes.wait(lambda: False, 0.01, lambda: "nobody came")
        given_up = asyncio.create_task(changes.poll(lambda: False, 5.0))
        await asyncio.sleep(0)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert not changes._waits, "nobody is waited for who has gone"

    asyncio.run(run())


def test_a_journal_keeps_its_numbers() -> None:
    journal: Journal[str] = Journal(3)
    for entry in "abcde":
        journal.add(entry)
    assert journal.count == 5
    assert [journal.since(n) for n in (0, 2, 3, 4, 5, 9)] == [[*"cde"], [*"cde"], [*"de"], ["e"], [], []]
    assert list(journal.latest()) == [(4, "e"), (3, "d"), (2, "c")]
