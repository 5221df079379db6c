"""An instance that stays dead leaves its pair by itself, and comes back by itself: by whose clock, and who does not."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
from engine_support import A, B, Play, connected, first

from weightcast.gateway.control import gateway as pool
from weightcast.gateway.control import update as transaction
from weightcast.gateway.control.gateway import Gateway
from weightcast.gateway.control.instance import Instance, Step
from weightcast.gateway.control.instance_state import Phase
from weightcast.gateway.control.store import SavedInstance, Store
from weightcast.gateway.records import Action, EngineSpec, PairSpec
from weightcast.gateway.settings import Settings
from weightcast.transfer.errors import ControlError, InputError, VersionError

QUICK = {"heartbeat": 0.1, "silence": 0.4, "evict_after": 1.0}
URL = "http://127.0.0.1:9"

pytestmark = pytest.mark.usefixtures("quiet")


async def until(ready: object, seconds: float = 30.0) -> None:
    limit = time.monotonic() + seconds
    while not ready():  # type: ignore[operator]
        assert time.monotonic() < limit
        await asyncio.sleep(0.02)


async def listening(play: Play) -> tuple[Gateway, Instance]:
    gateway = Gateway("127.0.0.1", 1)
    gateway.pairs["main"] = play.pair
    await gateway.open()
    instance = play.pair.instance(A)
    for rank in range(2):
        await instance.beat(rank, "")
    return gateway, instance


async def beating(instance: Instance, *ranks: int, identity: str = "") -> None:
    while True:
        for rank in ranks:
            await instance.beat(rank, identity)
        await asyncio.sleep(0.1)


def test_no_update_is_needed_to_be_evicted_or_to_come_back() -> None:
    """Nor does one keep anybody: an instance that beats stays, though its trainer does nothing."""

    async def run() -> None:
        play = await connected(A, B, **QUICK)
        gateway, instance = await listening(play)
        alive = asyncio.create_task(beating(play.pair.instance(B), 0, 1))
        await until(lambda: play.state(A)[0] is Phase.LEFT)
        assert instance.record.reason.startswith("evicted: rank 0 was not heard from since 20")
        assert instance.orders.since(0)[-1].action == "left"
        assert play.pair.instance(B).present
        back = asyncio.create_task(beating(instance, 0, 1))
        await until(lambda: play.state(A) == (Phase.REGISTERING, 1, True))
        assert instance.record.reason.startswith("it lives again; it was evicted: rank 0")
        assert (await play.update(2)).committed
        assert play.state(A) == (Phase.CONNECTED, 2, False)
        alive.cancel()
        back.cancel()
        await gateway.close()

    asyncio.run(run())


def test_one_of_two_ranks_brings_nobody_back() -> None:
    async def run() -> None:
        play = await connected(A, **QUICK)
        gateway, instance = await listening(play)
        half = asyncio.create_task(beating(instance, 0))
        await until(lambda: play.state(A)[0] is Phase.LEFT)
        assert instance.record.reason.startswith("evicted: rank 1 was")
        epochs = instance.record.epoch
        for _ in range(20):
            await asyncio.sleep(0.1)
            assert play.state(A)[0] is Phase.LEFT
        other = asyncio.create_task(beating(instance, 1, identity="elsewhere~7~x"))  # which is the rank now
        await until(lambda: play.state(A)[0] is Phase.REGISTERING)
        assert instance.record.epoch == epochs + 1
        half.cancel()
        other.cancel()
        await gateway.close()

    asyncio.run(run())


def test_one_that_dies_in_an_update_is_evicted_behind_it() -> None:
    async def run() -> None:
        play = await connected(A, B, verify=60.0, **{**QUICK, "silence": 3.0, "evict_after": 0.2})
        gateway, instance = await listening(play)
        play.engine.silent = 1
        record = await play.update(2)
        assert not record.committed
        assert play.state(B) == (Phase.CONNECTED, 2, False)
        await until(lambda: instance.evicted and play.state(A)[0] is Phase.LEFT)
        await gateway.close()

    asyncio.run(run())


def test_who_was_taken_out_stays_out() -> None:
    """Whether it lived then, or was evicted already."""

    async def run() -> None:
        play = await connected(A, B, **QUICK)
        gateway, instance = await listening(play)
        await gateway.leave("main", B)
        await until(lambda: play.state(A)[0] is Phase.LEFT)
        await gateway.leave("main", A)
        assert instance.record.reason == "it was taken out after it had been evicted"
        tasks = [asyncio.create_task(beating(play.pair.instance(name), 0, 1)) for name in (A, B)]
        for _ in range(20):
            await asyncio.sleep(0.1)
            assert play.pair.present == []
        for task in tasks:
            task.cancel()
        await gateway.close()

    asyncio.run(run())


def test_a_gateway_that_stood_still_evicts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        play = await connected(A, **QUICK)
        monkeypatch.setattr(pool, "LISTEN_SECONDS", 0.05)
        gateway, instance = await listening(play)
        alive = asyncio.create_task(beating(instance, 0, 1))
        await asyncio.sleep(0.2)
        time.sleep(2.0)
        await asyncio.sleep(0.6)
        assert instance.present
        alive.cancel()
        await until(lambda: instance.evicted)
        await gateway.close()

    asyncio.run(run())


def test_the_state_file_tells_who_was_evicted_from_who_was_taken_out(tmp_path: Path) -> None:
    async def run() -> None:
        store = Store(tmp_path / "state")
        store.open()
        gateway = Gateway("127.0.0.1", 1, store)
        spec = EngineSpec(kind="worker", world_size=1)
        engines = dict.fromkeys((A, B), spec) | {"c": EngineSpec(world_size=1, url=URL)}
        settings = Settings(evict_after=5.0)
        pair = await gateway.create(PairSpec("main", trainer_world=1, instances=engines, settings=settings))
        await pair.leave(A, "evicted: rank 0 was not heard from")
        await gateway.leave("main", B)
        await pair.leave("c", "evicted: it was not reached")
        await gateway.close()
        store = Store(tmp_path / "state")
        store.open()
        gateway = Gateway("127.0.0.1", 1, store)
        pair = gateway.pair("main")
        assert {i.name: (i.record.phase, i.evicted) for i in pair.instances.values()} == {
            A: (Phase.LEFT, "evicted: rank 0 was not heard from"),
            B: (Phase.LEFT, ""),
            "c": (Phase.LEFT, "evicted: it was not reached"),
        }
        reasons = {name: record["reason"] for name, record in pair.status()["instances"].items()}
        assert reasons == {A: "evicted: rank 0 was not heard from", B: "", "c": "evicted: it was not reached"}
        assert pair.instance(A).unready == "evicted: rank 0 was not heard from"
        assert pair.instance(B).unready == "it has left, or leaves"
        with pytest.raises(ControlError, match=f"{URL} belongs to pair main already"):
            await gateway.join("main", "d", EngineSpec(world_size=1, url=URL))  # it may come back at any time
        with pytest.raises(InputError, match=f"{URL} is an instance already"):
            await pair.join("d", EngineSpec(world_size=1, url=URL))
        assert (await gateway.join("main", "c", EngineSpec(world_size=1, url=URL))).present
        await pair.bring_back(pair.instance(A))
        await gateway.close()
        store = Store(tmp_path / "state")
        store.open()
        ((_, instances),) = store.load()
        assert {i.name: (i.left, i.evicted, i.fenced) for i in instances} == {
            A: (False, "", True),
            B: (True, "", True),
            "c": (False, "", True),
        }
        store.close()

    asyncio.run(run())


def test_an_update_that_is_refused_says_so_to_a_trainer_whose_instances_are_all_evicted() -> None:
    """With no record at all it would be taken for one that all have."""

    async def run() -> None:
        play = await connected(A)
        await play.pair.leave(A, "evicted: rank 0 was not heard from")
        await play.pair.offer(0, 2)
        with pytest.raises(VersionError, match="trainer rank 1 offers 3, other ranks offer 2"):
            await play.pair.offer(1, 3)
        await transaction.update(play.pair, first(2), "127.0.0.1", 1)
        record = play.pair.results[first(2)][A]
        assert (record.committed, record.reason) == (False, "pair main: trainer rank 1 offers 3, other ranks offer 2")
        assert play.pair.instance(A).orders.since(0)[-1].action == "left", "its last order"

    asyncio.run(run())


def test_a_restart_waits_for_no_surprise_by_an_instance_that_comes_back() -> None:
    """One that takes integer stamps alone would refuse every version of the lineage once it lives again."""

    async def run() -> None:
        play = await connected(A, B, version=100)
        instance = play.pair.instance(B)
        instance.spec = replace(instance.spec, stamps="integer")
        await play.pair.leave(B, "evicted: rank 0 was not heard from")
        with pytest.raises(VersionError, match=f"instances {B} take integer stamps alone"):
            await play.pair.offer(0, 81, restart=True)
        await play.pair.leave(B)
        assert (await play.update(81, restart=True)).committed

    asyncio.run(run())


def test_one_that_is_released_while_its_end_is_written_has_left_for_its_own_reason() -> None:
    async def run() -> None:
        play = await connected(A)
        instance, step = play.pair.instance(A), Step(play.pair.generation)
        assert await play.pair.hold(step) == [instance]
        save = play.pair.store.save

        async def meanwhile(*instances: SavedInstance) -> None:
            play.pair.release(step, [instance])
            await save(*instances)

        play.pair.store.save = meanwhile  # type: ignore[method-assign]
        await play.pair.leave(A)
        assert play.state(A)[0] is Phase.LEFT
        assert instance.record.reason == ""
        assert [order.action for order in instance.orders.since(0)].count(Action.LEFT) == 1

    asyncio.run(run())


def test_a_row_of_an_earlier_version_has_nobody_evicted() -> None:
    row = {"pair": "main", "name": A, "spec": {"kind": "worker", "world_size": 1}, "version": 3, "fenced": False}
    row |= {"epoch": 2, "paused": False, "left": True, "identities": {}, "displaced": {}}
    assert SavedInstance.given(row).evicted == ""


def test_an_eviction_that_cannot_be_written_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        play = await connected(A, **QUICK)
        save, tries = play.pair.store.save, []

        async def fails(*instances: SavedInstance) -> None:
            tries.append(instances)
            if len(tries) < 3:
                raise ControlError("the disk is full")
            await save(*instances)

        gateway, instance = await listening(play)
        monkeypatch.setattr(play.pair.store, "save", fails)
        await until(lambda: play.state(A)[0] is Phase.LEFT)
        assert len(tries) == 3
        tries.clear()
        alive = asyncio.create_task(beating(instance, 0, 1))
        await until(lambda: play.state(A)[0] is Phase.REGISTERING)
        assert len(tries) == 3
        alive.cancel()
        await gateway.close()

    asyncio.run(run())
