"""Nobody waits for what cannot come: a gateway that is gone or cut off, a rank that died, an update without end.

Bounds are generous; what they are compared with is the minute and more that a fixed time limit used to cost. Where one
is not, the least of several calls is compared with it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
from engine_support import A, B, Play, connected, first
from gateway_support import running_gateway
from life_support import ENGINE, SIZE, Engine, create, cut_link, soon, trainer
from plain_support import Piece, PlainSink

from weightcast.gateway.client import TOKEN_VARIABLE, GatewayClient
from weightcast.gateway.control import update as transaction
from weightcast.gateway.control.instance import Instance, Step
from weightcast.gateway.control.instance_state import Phase
from weightcast.gateway.ranks.instance import InstanceWorker
from weightcast.gateway.ranks.trainer import TrainerWorker
from weightcast.transfer.errors import DeadlineError, EngineError, TransferError, UpdateError

OUTAGE = 3.0
SPARE = 12.0
"""Seconds that a busy machine may take beside what was waited for."""


pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def idle_worker(undo: ExitStack, url: str, token: str) -> InstanceWorker:
    sink = PlainSink([Piece("t", (SIZE,), (0,), torch.zeros(SIZE))])
    worker = InstanceWorker(url, "main", ENGINE, sink, rank=0, world_size=1, token=token)
    undo.callback(worker.close)
    return worker


def seconds_of(call: object) -> float:
    begun = time.monotonic()
    call()  # type: ignore[operator]
    return time.monotonic() - begun


def fails(call: object) -> None:
    with pytest.raises(TransferError, match="is it up"):
        call()  # type: ignore[operator]


def test_serve_waits_as_long_as_it_is_told(undo: ExitStack) -> None:
    """Longer than one poll, which is shorter than `outage`."""
    url, token = undo.enter_context(running_gateway())
    create(url, token, outage=1.0)
    worker = idle_worker(undo, url, token)
    worker.serve()
    assert 2.4 < min(seconds_of(lambda: worker.serve(wait=2.5)) for _ in range(3)) < 3.5


def test_a_gateway_that_stands_still_for_less_than_the_outage_is_waited_for(undo: ExitStack) -> None:
    url, token = undo.enter_context(running_gateway())
    create(url, token, outage=30.0)
    link = undo.enter_context(cut_link(url))
    worker = idle_worker(undo, link.url, token)
    worker.serve()
    link.cut()
    threading.Timer(2.0, link.mend).start()
    assert worker.serve(wait=0.05) is None
    assert not worker._client.lost


def test_update_on_a_link_that_is_cut(undo: ExitStack) -> None:
    url, token = undo.enter_context(running_gateway())
    create(url, token, outage=OUTAGE)
    link = undo.enter_context(cut_link(url))
    engine = Engine(url, token)
    undo.callback(engine.close)
    training = trainer(link.url, token)
    undo.callback(training.close)
    training.update(1)
    link.cut()
    assert seconds_of(lambda: fails(lambda: training.update(2))) < OUTAGE + SPARE
    link.mend()
    training.update(3)  # what the gateway may still be doing about version 2 ends
    soon(lambda: engine.state == (3, False))


def test_update_whose_link_is_cut_in_the_middle_of_the_transfer(undo: ExitStack) -> None:
    """The trainer waits for bytes to be taken, the engine for the gateway: all of it ends within the outage."""
    url, token = undo.enter_context(running_gateway())
    create(url, token, outage=OUTAGE, heartbeat=0.5, silence=60.0, transfer=120.0)
    link = undo.enter_context(cut_link(url))
    engine = Engine(link.url, token)
    undo.callback(engine.close)
    training = trainer(link.url, token)
    undo.callback(training.close)
    training.update(1)
    receives, goes_on = threading.Event(), threading.Event()
    undo.callback(goes_on.set)
    member = engine.worker._member
    assert member is not None

    class Slow:
        def __getattr__(self, name: str) -> object:
            return getattr(member, name)

        def executor_for(self, *arguments: object) -> object:
            receives.set()
            goes_on.wait(60.0)
            return member.executor_for(*arguments)  # type: ignore[arg-type]

    engine.worker._member = Slow()  # type: ignore[assignment]
    with ThreadPoolExecutor(1) as pool:
        updating = pool.submit(seconds_of, lambda: fails(lambda: training.update(2)))
        assert receives.wait(30.0)
        link.cut()
        assert updating.result(90.0) < OUTAGE + SPARE
        goes_on.set()
        soon(lambda: engine.worker._outage.left, 60.0)
    assert engine.said == []
    assert engine.state == (1, True)


def test_an_engine_whose_link_is_cut_does_not_wait_for_bytes_that_nobody_sends(undo: ExitStack) -> None:
    """Its trainer stands still, and the gateway cannot tell it so: it asks in vain, and ends the run itself."""
    url, token = undo.enter_context(running_gateway())
    create(url, token, outage=OUTAGE, heartbeat=0.5, silence=60.0, transfer=120.0)
    link = undo.enter_context(cut_link(url))
    engine = Engine(link.url, token)
    undo.callback(engine.close)
    training = trainer(url, token)
    undo.callback(training.close)
    training.update(1)
    sends, goes_on = threading.Event(), threading.Event()
    run = training._run

    def late(*arguments: object, **keywords: object) -> None:
        sends.set()
        goes_on.wait(90.0)
        run(*arguments, **keywords)  # type: ignore[arg-type]

    training._run = late  # type: ignore[assignment]
    with ThreadPoolExecutor(1) as pool:
        updating = pool.submit(training.update, 2)
        assert sends.wait(30.0)
        soon(lambda: engine.worker._run is not None)
        link.cut()
        begun = time.monotonic()
        soon(lambda: engine.worker._outage.left, 80.0)
        assert time.monotonic() - begun < OUTAGE + SPARE
        assert engine.state == (1, True)
        link.mend()
        goes_on.set()
        with suppress(UpdateError):  # by then it may have been tried again
            updating.result(90.0)


def test_a_trainer_rank_that_dies_while_it_joins_is_not_waited_for_by_the_others(undo: ExitStack) -> None:
    """The others are told what the gateway decides: after `silence`, not after `join`."""
    url, token = undo.enter_context(running_gateway())
    create(url, token, trainers=2, join=200.0, heartbeat=0.5, silence=3.0)
    engine = Engine(url, token)
    undo.callback(engine.close)
    command = [sys.executable, str(Path(__file__).parents[2] / "support" / "wait_ranks.py"), url, "1", "2"]
    environment = {**os.environ, TOKEN_VARIABLE: token}
    dying = undo.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
    undo.callback(dying.kill)
    half = PlainSink([Piece("t", (SIZE,), (0,), torch.ones(SIZE // 2))])
    survivor = TrainerWorker(url, "main", half, rank=0, world_size=2, token=token)
    undo.callback(survivor.close)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(survivor.connect)
        assert dying.stdout is not None
        assert dying.stdout.readline() == "joining\n"
        dying.kill()
        killed = time.monotonic()
        with pytest.raises(TransferError, match="trainer ranks 1 were not heard from for 3 s"):
            connecting.result(100.0)
        assert time.monotonic() - killed < 3.0 + SPARE + 5.0
    soon(lambda: engine.worker._joining is None, 3.0 + SPARE)


# ---- the setting `update`


@pytest.mark.parametrize("step", ["pause", "begin", "transfer", "end", "publish"])
def test_a_whole_update_has_a_deadline(step: str) -> None:
    """An engine whose call hangs is named, long before its own deadline, and others commit."""

    async def run() -> None:
        play = await connected(A, B, engine=60.0, transfer=60.0, verify=60.0, clean_up=0.2, update=1.0)
        play.engine.refuses[step] = EngineError("too late")
        play.engine.late[step] = 60.0
        record = await play.update(2)
        assert (record.committed, record.fenced) == (False, step in ("end", "publish"))
        assert "within the 1 s of setting update for a whole update" in record.reason
        assert record.reason.startswith(f"pair main: the engine of instance {A} did not ") or step == "transfer"
        assert record.seconds < SPARE
        assert play.state(B) == (Phase.CONNECTED, 2, False)

    asyncio.run(run())


def test_what_is_tried_again_has_no_more_time() -> None:
    async def run() -> None:
        play = await connected(A, prepare=60.0, register=60.0, join=60.0, update=1.0, replans=1000, clean_up=0.2)
        play.engine.stale = 1000
        record = await play.update(2)
        assert not record.committed
        assert record.attempts > 2
        assert "within the 1 s of setting update for a whole update" in record.reason
        assert record.seconds < SPARE

    asyncio.run(run())


def test_who_is_missing_at_the_end_of_an_update_is_named() -> None:
    async def run() -> None:
        play = await connected(A, B, verify=60.0, update=1.0, clean_up=0.2)
        play.engine.silent = 1
        record = await play.update(2)
        text = "no digests of its ranks 1 within the 1 s of setting update for a whole update"
        assert record.reason == f"pair main: instance {A}: {text}"
        assert play.state(B) == (Phase.CONNECTED, 2, False)
        play.engine.silent = -1
        assert (await play.update(3)).committed

    asyncio.run(run())


def test_an_offer_that_is_alone_ends_with_the_update() -> None:
    async def run() -> None:
        play = await connected(A, offer=60.0, update=0.5)
        await play.pair.offer(0, 2)
        await asyncio.wait_for(transaction.update(play.pair, first(2), "127.0.0.1", 1), SPARE)
        assert "trainer ranks 1 did not offer version 2 within 0." in play.pair.results[first(2)][A].reason

    asyncio.run(run())


def test_an_update_behind_a_connect_that_hangs_is_decided() -> None:
    async def run() -> None:
        play: Play = await connected(A, update=0.5)
        step, instances = Step(play.pair.generation), play.pair.present
        await play.pair.hold(step, instances)
        for rank in range(2):
            await play.pair.offer(rank, 2)
        await asyncio.wait_for(transaction.update(play.pair, first(2), "127.0.0.1", 1), SPARE)
        play.pair.release(step, instances)
        reason = play.pair.results[first(2)][A].reason
        assert reason == f"pair main: still being connected 0.5 s after the first offer: {A}"
        assert play.pair.orders.since(0)[-1].version == first(2), "trainer ranks hear that it is over"
        for player in play.trainers:
            player.cursor[A] = play.pair.instances[A].orders.count
        assert (await play.update(3)).committed

    asyncio.run(run())


@pytest.mark.parametrize("silent", [False, True])
def test_an_update_that_the_trainer_left_before_its_first_step_connects_nobody(silent: bool) -> None:
    """What an instance is told to stop for is forgotten by its next connect, which would wait for the trainer."""

    async def run() -> None:
        play = await connected(A, join=60.0)
        begin = play.pair.begin

        async def left(version: int) -> list[Instance]:
            members = await begin(version)
            if silent:
                play.pair.silent = (0,)
                play.pair.instances[A].stop(DeadlineError(play.pair.silence()))
            else:
                assert await play.pair.offer(0, 3) is None, "version 2 is still under way"
            return members

        play.pair.begin = left  # type: ignore[method-assign]
        for rank in range(2):
            await play.pair.offer(rank, 2)
        play.engine.calls.clear()
        ranks = [trainer.follow("end") for trainer in play.trainers]
        await asyncio.wait_for(asyncio.gather(transaction.update(play.pair, first(2), "127.0.0.1", 1), *ranks), SPARE)
        reason = play.pair.results[first(2)][A].reason
        assert ("were not heard from" if silent else "trainer rank 0 gave up version 2") in reason
        assert "connect" not in play.engine.calls
        play.pair.begin, play.pair.silent = begin, ()  # type: ignore[method-assign]
        assert (await play.update(3)).committed

    asyncio.run(run())


def test_a_client_of_a_gateway_that_never_answered_has_its_own_time(undo: ExitStack) -> None:
    url, token = undo.enter_context(running_gateway())
    link = undo.enter_context(cut_link(url))
    link.cut()
    client = undo.enter_context(GatewayClient(link.url, token, timeout=1.0))
    assert seconds_of(lambda: fails(client.status)) < 1.0 + SPARE
