"""Connects and updates that meet: each holds the instances that it works on, and nobody waits for another's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import pytest
from engine_support import STEPS, A, B, Engine, Play, Trainer, connected, first

from weightcast.gateway.control import connect as coordinator
from weightcast.gateway.control import gateway as tasks
from weightcast.gateway.control import update as transaction
from weightcast.gateway.control.instance_state import Phase
from weightcast.gateway.records import Action, CommitPolicy
from weightcast.transfer.errors import ControlError
from weightcast.transfer.layout.tables import RankReport
from weightcast.transfer.plan.operations import RankPart

SOON = 2.0
"""Seconds for what waits for nobody; those that stand still do so for longer."""


pytestmark = pytest.mark.usefixtures("quiet")


class Meeting:
    """A pair whose second instance has registered and does not join, while the trainer offers version 1 to both."""

    def __init__(self, commit: CommitPolicy = "each", **settings: float) -> None:
        self.play = Play(A, B, commit=commit, **{"join": 60.0, **settings})
        self.pair = self.play.pair
        self.goes_on = asyncio.Event()
        self._tasks: list[asyncio.Task[Any]] = []
        engine, join = self.play.engines[B], self.play.engines[B]._join

        async def stand(report: RankReport) -> RankPart:
            await engine.instance.register(engine.epoch, report.rank, report, holds=engine.holds)
            await self.goes_on.wait()
            return await join(report)

        engine._join = stand  # type: ignore[method-assign]

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.append(task)
        return task

    async def __aenter__(self) -> Meeting:
        for trainer in self.play.trainers:
            await trainer.register()
            for name in (A, B):
                self.start(follow(trainer, name))
        self.connecting = self.start(coordinator.connect(self.pair, self.pair.generation, "127.0.0.1", 1))
        await self.until(lambda: self.play.state()[0] is Phase.CONNECTED)
        assert self.play.state(B)[0] is Phase.PLANNED
        for engine in self.play.engines.values():
            engine.calls.clear()
        for rank in range(2):
            await self.pair.offer(rank, 1)
        self.updating = self.start(transaction.update(self.pair, first(1), "127.0.0.1", 1))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def until(self, ready: Callable[[], bool]) -> None:
        async with asyncio.timeout(SOON):
            while not ready():
                await asyncio.sleep(0.01)


async def follow(trainer: Trainer, name: str) -> None:
    with suppress(AssertionError):  # no order came: this rank waits for the next
        while True:
            await trainer._follow(name, ("connected", "failed", "end", "left"))


def test_an_instance_commits_while_another_is_being_connected() -> None:
    async def run() -> None:
        async with Meeting() as meeting:
            await meeting.until(lambda: meeting.play.state() == (Phase.CONNECTED, 1, False))
            assert meeting.play.state(B) == (Phase.PLANNED, None, True), "its connect is not over"
            assert not meeting.connecting.done()
            assert not meeting.updating.done(), "the other one takes part if it is connected in time"
            meeting.goes_on.set()
            await asyncio.wait_for(meeting.updating, SOON)
            assert meeting.play.state(B) == (Phase.CONNECTED, 1, False)
            assert meeting.play.engines[B].calls == STEPS, "it was connected once"
            assert [record.committed for record in meeting.pair.results[first(1)].values()] == [True, True]

    asyncio.run(run())


def test_an_instance_that_is_not_connected_in_time_is_left_out() -> None:
    async def run() -> None:
        async with Meeting(update=0.5) as meeting:
            await asyncio.wait_for(meeting.updating, SOON)
            records = meeting.pair.results[first(1)]
            assert (records[A].committed, records[B].committed, records[B].fenced) == (True, False, True)
            assert records[B].reason == f"pair main: still being connected 0.5 s after the first offer: {B}"
            assert meeting.play.state(B) == (Phase.PLANNED, None, True), "its connect goes on"
            orders = [order.action for order in meeting.pair.instances[B].orders.since(0)]
            assert orders == ["register", "join"], "its ranks hear of no update"
            meeting.goes_on.set()
            await asyncio.wait_for(meeting.connecting, SOON)
            assert meeting.play.state(B) == (Phase.CONNECTED, None, True)
            for rank in range(2):
                await meeting.pair.offer(rank, 2)
            await asyncio.wait_for(transaction.update(meeting.pair, first(2), "127.0.0.1", 1), SOON)
            assert all(record.committed for record in meeting.pair.results[first(2)].values())

    asyncio.run(run())


def test_instances_that_commit_together_begin_when_all_are_free() -> None:
    async def run() -> None:
        async with Meeting("all") as meeting:
            await asyncio.sleep(0.3)
            assert meeting.play.engine.calls == [], "it generates meanwhile"
            meeting.goes_on.set()
            await asyncio.wait_for(meeting.updating, SOON)
            assert [record.committed for record in meeting.pair.results[first(1)].values()] == [True, True]
            assert meeting.play.engine.calls == meeting.play.engines[B].calls == STEPS

    asyncio.run(run())


@pytest.mark.parametrize("commit", ["each", "all"])
def test_a_version_that_is_given_up_waits_for_no_connect(commit: CommitPolicy) -> None:
    async def run() -> None:
        async with Meeting(commit) as meeting:
            await asyncio.sleep(0.1)
            assert await meeting.pair.offer(0, 2, SOON), "version 1 is over"
            assert "gave up version 1" in meeting.pair.results[first(1)][B].reason
            assert not meeting.connecting.done(), "the connect is not the update's to end"
            meeting.goes_on.set()
            await asyncio.wait_for(meeting.connecting, SOON)
            assert meeting.play.state(B)[0] is Phase.CONNECTED

    asyncio.run(run())


@pytest.mark.parametrize("commit", ["each", "all"])
def test_an_instance_that_leaves_while_it_is_waited_for(commit: CommitPolicy) -> None:
    async def run() -> None:
        async with Meeting(commit) as meeting:
            await asyncio.sleep(0.1)
            await meeting.pair.leave(B)
            await asyncio.wait_for(meeting.updating, SOON)
            assert meeting.pair.results[first(1)][A].committed
            assert meeting.pair.results[first(1)][B].reason == f"instance {B} left pair main"
            assert meeting.play.state(B)[0] is Phase.LEFT
            assert [o.action for o in meeting.pair.instances[B].orders.since(0)][-1] == "left"

    asyncio.run(run())


def test_an_engine_that_does_not_come_to_rest_keeps_back_nobody_else() -> None:
    """After a restart of the gateway, the engine of an instance that was being updated does not answer."""

    async def run() -> None:
        play = await connected(A, B, clean_up=60.0, update=0.5)
        asks = asyncio.Event()

        class Silent(Engine):
            async def end(self) -> None:
                asks.set()
                await asyncio.sleep(60.0)

        play.pair.instances[B].driver = Silent(play.pair, B, play.engines[B].ranks)
        play.pair.instances[B].paused = True
        recovering = asyncio.create_task(tasks._recover(play.pair))
        await asyncio.wait_for(asks.wait(), SOON)
        for rank in range(2):
            await play.pair.offer(rank, 2)
        ranks = [trainer._follow(A, ("end",)) for trainer in play.trainers]
        update = transaction.update(play.pair, first(2), "127.0.0.1", 1)
        await asyncio.wait_for(asyncio.gather(update, *ranks), SOON)
        assert play.state() == (Phase.CONNECTED, 2, False)
        assert "still being connected" in play.pair.results[first(2)][B].reason
        assert not recovering.done()
        recovering.cancel()
        await asyncio.gather(recovering, return_exceptions=True)

    asyncio.run(run())


def test_a_layout_that_is_merged_while_the_trainer_starts_anew_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        play = Play(A)
        for trainer in play.trainers:
            await trainer.register()
        merges, goes_on, merge = threading.Event(), threading.Event(), coordinator.merge_trainer

        def slow(reports: Sequence[RankReport]) -> object:
            merges.set()
            goes_on.wait(SOON)
            return merge(reports)

        monkeypatch.setattr(coordinator, "merge_trainer", slow)
        merging = asyncio.create_task(coordinator.merge_trainer_reports(play.pair))
        await asyncio.to_thread(merges.wait, SOON)
        await play.trainers[0].register()
        goes_on.set()
        await merging
        assert play.pair.trainer_layout is None

    asyncio.run(run())


class Pausing:
    """A pair with version 1 whose first instance pauses for version 2 until `goes_on`, with a gateway around it."""

    def __init__(self, play: Play) -> None:
        self.play, self.pair = play, play.pair
        self.gateway = tasks.Gateway("127.0.0.1", 1)
        self.gateway.pairs["main"] = self.pair
        self.goes_on = asyncio.Event()
        self._begun = asyncio.Event()
        play.engines[A].pause = self._pause  # type: ignore[method-assign]

    async def _pause(self) -> None:
        self._begun.set()
        await self.goes_on.wait()

    async def restart(self) -> None:
        """The trainer starts anew in the middle of the update, and asks for a connect, which waits for the instance."""
        for trainer in self.play.trainers:
            await self.gateway.offer("main", trainer.rank, 2, 0.0)
        await asyncio.wait_for(self._begun.wait(), SOON)
        await self.play.trainers[0].register()
        self.gateway.start_connect("main")
        await asyncio.sleep(0.05)

    async def phases(self, *names: str) -> list[Phase]:
        """Phases of instances when the connect is over that the rest of the trainer waits for."""
        await self.play.trainers[1].register()
        self.goes_on.set()
        for trainer in self.play.trainers:
            trainer.cursor.update({name: self.pair.instance(name).orders.count for name in self.pair.instances})
        following = [asyncio.create_task(follow(t, name)) for t in self.play.trainers for name in names]
        with suppress(TimeoutError):
            async with asyncio.timeout(3 * SOON):
                while self.gateway._is_connecting("main"):
                    await asyncio.sleep(0.02)
        for task in following:
            task.cancel()
        return [self.pair.instance(name).record.phase for name in names]


def test_an_instance_that_joins_while_a_connect_waits_is_connected_by_it() -> None:
    """Trainer ranks wait for every instance that the pair has when they have registered."""

    async def run() -> None:
        pausing = Pausing(await connected(A, B, version=1))
        await pausing.restart()
        await pausing.play.join("rollout-2")
        assert await pausing.phases(A, B, "rollout-2") == [Phase.CONNECTED] * 3
        await pausing.gateway.close()

    asyncio.run(run())


def test_an_instance_that_leaves_while_a_connect_waits_for_reports_has_left_at_once() -> None:
    async def run() -> None:
        pausing = Pausing(await connected(A, B, version=1, register=60.0))
        await pausing.restart()
        pausing.goes_on.set()
        await asyncio.sleep(0.1)
        await pausing.gateway.leave("main", B)
        orders = pausing.pair.instance(B).orders
        before = orders.count
        assert await pausing.phases(A, B) == [Phase.CONNECTED, Phase.LEFT]
        assert [order.action for order in orders.since(before)] == [Action.LEFT]
        await pausing.gateway.close()

    asyncio.run(run())


def test_a_connect_that_another_one_follows_keeps_nothing_back() -> None:
    """The trainer starts anew twice, and is deleted before it asks for another connect."""

    async def run() -> None:
        pausing = Pausing(await connected(A, version=1, register=60.0))
        await pausing.restart()
        await pausing.play.trainers[0].register()
        pausing.goes_on.set()
        async with asyncio.timeout(SOON):
            while "main" in pausing.gateway.pairs:
                with suppress(ControlError):
                    await pausing.gateway.delete("main")
                await asyncio.sleep(0.02)
        await pausing.gateway.close()

    asyncio.run(run())


def test_a_trainer_that_starts_anew_while_its_reports_are_waited_for_is_connected_at_once() -> None:
    """The orders of the connect before are for nobody: who would wait for their end would do so until `join`."""

    async def run() -> None:
        pausing = Pausing(await connected(A, version=1, register=60.0, join=60.0))
        await pausing.restart()
        pausing.goes_on.set()
        await asyncio.sleep(0.1)  # now the connect waits for the report of rank 1
        await pausing.play.trainers[0].register()
        pausing.gateway.start_connect("main")
        before = pausing.pair.orders.count
        assert await pausing.phases(A) == [Phase.CONNECTED]
        generations = {order.trainer for order in pausing.pair.orders.since(before) if order.action is Action.REGISTER}
        assert generations == {pausing.pair.generation}
        await pausing.gateway.close()

    asyncio.run(run())
