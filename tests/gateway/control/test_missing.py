"""Who is missing in a wait under way: listed in the state of the pair, and said in the gateway's log."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from engine_support import A, B, Play, connected, reports_of

from weightcast.gateway.control import connect as coordinator
from weightcast.gateway.control import waiting
from weightcast.gateway.control.gateway import Gateway
from weightcast.gateway.control.pair import Pair
from weightcast.gateway.control.waiting import Changes, Party, Wait
from weightcast.gateway.records import EngineSpec, PairSpec, WaitRecord, wait_lines
from weightcast.transfer.errors import EngineError

SOON = 30.0


async def until(ready: Callable[[], bool]) -> None:
    limit = time.monotonic() + SOON
    while not ready():
        assert time.monotonic() < limit
        await asyncio.sleep(0.02)


def missing(pair: Pair) -> list[tuple[str, str]]:
    return [(wait["instance"], wait["missing"]) for wait in pair.status()["waiting"]]


def test_a_wait_is_listed_until_it_is_over() -> None:
    async def run() -> None:
        changes = Changes("x")
        task = asyncio.create_task(changes.wait(lambda: False, 0.2, lambda: "nobody came", lambda: "look outside"))
        await asyncio.sleep(0)
        (wait,) = changes.waits
        assert str(wait.record()) == "waiting, 0 s of 0.2 s: nobody came yet; look outside"
        with pytest.raises(waiting.DeadlineError, match=r"^x: nobody came within 0.2 s; look outside$"):
            await task
        assert changes.waits == []
        with suppress(asyncio.CancelledError):
            async with asyncio.timeout(0.01):
                await changes.wait(lambda: False, 9.0, lambda: "nobody came")
        assert changes.waits == []

    with suppress(TimeoutError):
        asyncio.run(run())


def test_a_wait_is_said_once_in_an_interval() -> None:
    wait = Wait(99.0, lambda: "nobody came")
    now = wait._begun
    moments = [0.0, 9.9, 10.0, 10.5, 19.9, 20.0, 45.0, 46.0, 50.0]
    assert [wait.is_due(now + seconds) for seconds in moments] == [
        False,
        False,
        True,
        False,
        False,
        True,
        True,
        False,
        True,
    ]


def test_a_thousand_ranks_are_a_range_and_a_thousand_waits_are_few_lines() -> None:
    party = Party("pair main", "rollout-0", 30.0)
    assert party.accounts(range(1000)) == "rollout-0 ranks 0-999 were never heard of"
    lines = wait_lines([WaitRecord(f"instance {n}", "", 10.0, None) for n in range(1000)])
    assert lines[0] == "waiting, 10 s: instance 0"
    assert lines[4:] == ["and 996 waits more; weightcast status has all"]


def test_a_rank_that_was_known_is_named_with_its_process_and_when_it_was_heard() -> None:
    async def run() -> None:
        engines = {"e": EngineSpec(kind="worker", world_size=3)}
        pair = Pair(PairSpec("main", trainer_world=2, instances=engines))
        instance = pair.instances["e"]
        report = reports_of([[], [], []])[1]
        await instance.register(1, 1, report, "host-a~77~x")
        text = instance.accounts(range(3))
        assert text.startswith("e rank 1 was process 77 on host-a (since 2")
        assert "Z), last heard 2" in text
        assert text.endswith(", e ranks 0,2 were never heard of")
        report = reports_of([[], []])[0]
        await pair.register_trainer(0, report, "x.1", pid=5)
        text = pair.accounts(range(2))
        assert text.startswith("trainer rank 0 was process 5 on an unnamed host (registered 2")
        assert text.endswith(", trainer rank 1 was never heard of")

    asyncio.run(run())


def test_the_call_of_an_engine_is_waited_for_by_name(quiet: None) -> None:
    async def run() -> None:
        play = await connected(A)
        play.engine.refuses["pause"] = EngineError("it did not want to")
        play.engine.late["pause"] = 1.0
        task = asyncio.create_task(play.update(2))
        await until(lambda: bool(missing(play.pair)) and missing(play.pair)[0][0] == A)
        assert missing(play.pair) == [(A, f"the engine of instance {A} did not pause yet")]
        assert (await task).reason == "it did not want to"
        assert missing(play.pair) == []

    asyncio.run(run())


def test_an_engine_that_was_asked_and_does_not_answer_is_named_by_its_url(quiet: None) -> None:
    async def run() -> None:
        server = socket.create_server(("127.0.0.1", 0))  # it accepts a connection, and is never asked to answer
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        engines = {"e": EngineSpec(kind="sglang", url=url, world_size=2)}
        pair = Pair(PairSpec("main", trainer_world=1, instances=engines))
        await pair.register_trainer(0, reports_of([[]])[0], "x.1")
        task = asyncio.create_task(coordinator.connect(pair, pair.generation, "127.0.0.1", 1))
        await until(lambda: bool(missing(pair)) and missing(pair)[0][0] == "e")
        assert missing(pair)[0][1] == (
            "instance e ranks 0-1 did not register yet; e ranks 0-1 were never heard of; "
            f"the engine was asked at {url}; its log says what keeps it"
        )
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await pair.instances["e"].driver.close()
        server.close()

    asyncio.run(run())


def test_what_never_connected_waits_and_what_has_connected_is_fenced_until_a_commit(quiet: None) -> None:
    def states(play: Play) -> list[str]:
        return [play.pair.status()["instances"][name]["state"] for name in (A, B)]

    async def run() -> None:
        play = Play(A, B)
        assert states(play) == ["waiting", "waiting"]
        play = await connected(A, B, version=None)
        assert states(play) == ["fenced", "fenced"]
        assert (await play.update(1)).committed
        assert states(play) == ["serves", "serves"]
        instance: dict[str, Any] = play.pair.status()["instances"][A]
        assert instance["committed"] <= play.pair.status()["now"]
        await play.pair.leave(B)
        assert states(play) == ["serves", "left"]

    asyncio.run(run())


def test_the_log_says_who_is_missing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The trainer's rank 1 first; then the engine, of which nobody has come."""
    monkeypatch.setattr(waiting, "SAY_SECONDS", 0.2)
    caplog.set_level(logging.WARNING, "weightcast.gateway")

    async def run() -> None:
        gateway = Gateway("127.0.0.1", 1)
        engines = {"e": EngineSpec(kind="worker", world_size=1)}
        pair = await gateway.create(PairSpec("main", trainer_world=2, instances=engines))
        await gateway.open()
        reports = reports_of([[], []])
        await pair.register_trainer(0, reports[0], "x.1")
        gateway.start_connect("main")
        await until(lambda: "s of 300 s: trainer ranks 1 did not register yet; trainer rank 1 was never" in caplog.text)
        await pair.register_trainer(1, reports[1], "y.1")
        await until(lambda: "s of 300 s: instance e ranks 0 did not register yet; e rank 0 was never" in caplog.text)
        assert "pair main: waiting, " in caplog.text
        await gateway.close()
        assert pair.under_way() == []

    asyncio.run(run())


def test_a_connect_behind_an_update_says_what_it_waits_for() -> None:
    async def run() -> None:
        play = Play(A)
        step = coordinator.Step(play.pair.generation)
        await play.pair.hold(step)
        task = asyncio.create_task(play.pair.hold(coordinator.Step(play.pair.generation)))
        await until(lambda: bool(missing(play.pair)))
        assert missing(play.pair) == [("", f"another connect or update has not released {A} yet")]
        assert play.pair.status()["waiting"][0]["limit"] is None
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(run())
