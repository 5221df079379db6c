"""Who is no longer heard from: noticed between updates and in them, named, and no longer waited for."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest
from engine_support import ALL, A, B, Play, connected, first, reports_of
from gateway_support import running_gateway

from weightcast.gateway.client import GatewayClient
from weightcast.gateway.control import gateway as pool
from weightcast.gateway.control import update as transaction
from weightcast.gateway.control.gateway import Gateway
from weightcast.gateway.control.instance_state import Phase
from weightcast.gateway.control.waiting import Party
from weightcast.gateway.incarnations import HEADER
from weightcast.gateway.ranks.heartbeat import Heartbeat
from weightcast.gateway.settings import Settings
from weightcast.transfer.errors import InputError, UnregisteredError

QUICK = {"heartbeat": 0.1, "silence": 0.4}


pytestmark = pytest.mark.usefixtures("quiet")


def test_who_is_missing() -> None:
    side = Party("pair main", "rollout-0", 10.0)
    assert not side.listen(100.0), "nobody has beaten yet, so nobody is missed"
    side.hear(0, 100.0)
    side.hear(2, 105.0)
    assert not side.listen(110.0)
    assert side.listen(110.5)
    assert side.silent == (0,)
    assert side.silence() == "rollout-0 ranks 0 were not heard from for 10 s"
    assert side.listen(116.0)
    assert side.silent == (0, 2)
    assert side.hear(0, 117.0), "that is news"
    assert side.silent == (2,)
    assert not side.hear(0, 118.0)


async def listening(play: Play) -> Gateway:
    gateway = Gateway("127.0.0.1", 1)
    gateway.pairs["main"] = play.pair
    await gateway.open()
    return gateway


async def until_silent(play: Play) -> None:
    limit = time.monotonic() + 5.0
    while not (play.pair.silent or play.engine.instance.silent):
        assert time.monotonic() < limit
        await asyncio.sleep(0.05)


def test_a_server_that_dies_between_updates_serves_no_more() -> None:
    async def run() -> None:
        play = await connected(A, B, **QUICK)
        gateway = await listening(play)
        instance = play.engine.instance
        for rank in range(2):
            await instance.beat(rank, "")
        assert instance.serves
        await instance.beat(0, "")
        await until_silent(play)
        status = play.pair.status()["instances"]
        assert (status[A]["serves"], status[A]["fenced"], status[A]["silent"]) == (False, False, [0, 1])
        assert status[A]["reason"] == "rollout-0 ranks 0-1 were not heard from for 0.4 s"
        assert status[B]["serves"]
        for rank in range(2):
            await instance.beat(rank, "")
        assert instance.serves, "the network was down, the memory is the same"
        await gateway.close()

    asyncio.run(run())


def test_a_rank_that_falls_silent_ends_the_update_long_before_its_deadline() -> None:
    async def run() -> None:
        play = await connected(A, B, verify=60.0, **QUICK)
        gateway = await listening(play)
        play.engine.silent = 1
        await play.engine.instance.beat(1, "")
        record = await play.update(2)
        assert record.reason == "pair main: rollout-0 ranks 1 were not heard from for 0.4 s"
        assert record.fenced
        assert record.seconds < 3.0
        assert play.state(B) == (Phase.CONNECTED, 2, False)
        await gateway.close()

    asyncio.run(run())


def test_nobody_waits_for_the_call_of_an_engine_that_is_not_heard_from() -> None:
    async def run() -> None:
        play = await connected(A, B, transfer=60.0, clean_up=0.2, **QUICK)
        gateway = await listening(play)
        play.engine.late["transfer"] = 60.0
        await play.engine.instance.beat(1, "")
        record = await play.update(2)
        assert record.reason == "pair main: rollout-0 ranks 1 were not heard from for 0.4 s"
        assert record.fenced
        assert record.seconds < 3.0
        assert play.engine.instance.running is None, "and who runs is told that it is over"
        await gateway.close()

    asyncio.run(run())


def test_a_trainer_rank_that_falls_silent_ends_all_that_waits_for_it() -> None:
    async def run() -> None:
        play = await connected(A, B, offer=60.0, transfer=60.0, **QUICK)
        gateway = await listening(play)
        await play.pair.beat(1)
        play.trainers[1].silent = True
        record = await play.update(2)
        assert record.reason == "pair main: trainer ranks 1 were not heard from for 0.4 s"
        assert play.pair.results[first(2)][B].reason == record.reason
        assert record.seconds < 3.0
        await play.pair.offer(0, 3)
        await asyncio.wait_for(transaction.update(play.pair, first(3), "127.0.0.1", 1), 2.0)
        assert play.pair.results[first(3)][A].reason == record.reason, "nor is its offer waited for"
        await gateway.close()

    asyncio.run(run())


def test_a_beat_of_a_process_that_has_not_registered_takes_no_place() -> None:
    """As an engine of the pair that had the name before: it beats on, and is no sign that the rank lives."""

    async def run() -> None:
        play = await connected(A, **QUICK)
        gateway = await listening(play)
        await play.engine.instance.beat(1, "")
        for _ in range(3):
            with pytest.raises(UnregisteredError, match=r"rollout-0 rank 1 is .*; process 7 on elsewhere .* beats"):
                await play.engine.instance.beat(1, "elsewhere~7~x")
            assert play.engine.instance.serves
        await until_silent(play)
        await gateway.close()

    asyncio.run(run())

    asyncio.run(run())


def test_a_rank_that_starts_anew_is_missed_no_more() -> None:
    async def run() -> None:
        play = await connected(A, **QUICK)
        gateway = await listening(play)
        await play.engine.instance.beat(1, "")
        await until_silent(play)
        await play.engine.instance.restarted(1)
        assert play.engine.instance.silent == ()
        assert (await play.update(2)).committed, "it is waited for again"
        await gateway.close()

    asyncio.run(run())


def test_a_gateway_that_stood_still_misses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        play = await connected(A, **QUICK)
        monkeypatch.setattr(pool, "LISTEN_SECONDS", 0.1)
        gateway = await listening(play)
        await play.engine.instance.beat(0, "")
        await asyncio.sleep(0.15)
        time.sleep(1.5)
        await asyncio.sleep(0.15)
        assert play.engine.instance.serves
        await until_silent(play)
        await gateway.close()

    asyncio.run(run())


def test_a_real_beat() -> None:
    """Of a thread, against a real gateway; it ends when the rank does."""
    with running_gateway() as (url, token), GatewayClient(url, token) as client:
        engine = {"kind": "worker", "world_size": 1}
        client.create_pair("main", 1, {A: engine}, {"heartbeat": 0.1, "silence": 0.8})

        def silent() -> list[int]:
            return list(client.pair_status("main")["instances"][A]["silent"])

        beat = Heartbeat(url, token, f"main/instances/{A}/ranks/0", "x", 0.1)
        time.sleep(1.6)
        assert silent() == []
        beat.close()
        limit = time.monotonic() + 10.0
        while silent() != [0]:
            assert time.monotonic() < limit
            time.sleep(0.1)


def test_a_gateway_that_is_stopped_tells_those_who_wait_to_ask_again() -> None:
    paths = ["orders?after=0&wait=20", "updates/1?wait=20", "instances/rollout-0/orders?after=0&wait=20"]
    with ThreadPoolExecutor(len(paths)) as pool:
        with running_gateway() as (url, token):
            with GatewayClient(url, token) as client:
                client.create_pair("stopped", 1, {"rollout-0": {"kind": "worker", "world_size": 1}})
                client.register_trainer("stopped", reports_of([[ALL]])[0])
                trainer = {HEADER: str(client.incarnation)}
            ask = partial(httpx.get, timeout=30, trust_env=False)
            answers = []
            for path, extra in zip(paths, (trainer, trainer, {}), strict=True):
                headers = {"Authorization": f"Bearer {token}", **extra}
                answers.append(pool.submit(ask, f"{url}/pairs/stopped/{path}", headers=headers))
            time.sleep(1.0)
            assert not any(answer.done() for answer in answers)
        found = [answer.result() for answer in answers]
    assert [answer.status_code for answer in found] == [503] * 3
    assert {answer.json()["message"] for answer in found} == {"the gateway is stopping"}


def test_who_waits_for_a_pair_that_is_deleted_is_answered() -> None:
    with running_gateway() as (url, token), ThreadPoolExecutor(2) as pool, GatewayClient(url, token) as client:
        client.create_pair("deleted", 1, {"rollout-0": {"kind": "worker", "world_size": 1}})
        begun = time.monotonic()
        ask = partial(httpx.get, headers={"Authorization": f"Bearer {token}"}, timeout=30, trust_env=False)
        paths = ("updates/1?wait=20", "instances/rollout-0/orders?after=0&wait=20")
        answers = [pool.submit(ask, f"{url}/pairs/deleted/{path}") for path in paths]
        time.sleep(1.0)
        client.delete_pair("deleted")
        assert [answer.result().status_code for answer in answers] == [204, 200]
        assert time.monotonic() - begun < 15.0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"offer": 0.0}, "settings: offer is 0.0, expected a positive number of seconds"),
        ({"join": float("nan")}, "settings: join is nan, expected a positive number of seconds"),
        ({"resends": -1}, "settings: resends is -1, expected a whole number from 0 to 1000"),
        ({"resends": 1.5}, "settings: resends is 1.5, expected a whole number"),
        ({"replans": float("nan")}, "settings: replans is nan, expected a whole number"),
        ({"retries": 1e308}, "settings: retries is 1e+308, expected a whole number from 0 to 1000"),
        ({"resends": True}, "settings: resends is True, expected a whole number"),
        ({"heartbeat": 30.0, "silence": 30.0}, "settings: silence is 30.0, expected more than the 30.0 of heartbeat"),
        ({"patience": 1.0}, "settings: patience is not known; known are offer, register, "),
    ],
)
def test_settings_that_are_none(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        Settings.given(settings)
    assert str(caught.value).startswith(said)


def test_an_update_is_decided_within_the_longest() -> None:
    """After its own time only calls that clean up; and a connect has deadlines of its own."""
    assert Settings(update=2000.0).longest == 2000.0 + 5 * 30.0
    assert Settings(update=5.0).longest == 300.0 + 120.0 + 600.0 + 5 * 30.0
