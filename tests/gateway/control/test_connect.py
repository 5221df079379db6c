"""Connect and update step by step, each step failing once: what is called afterwards, recorded, and told.

A fake engine is right here, because the order of its calls is the subject; real engines are in the other tests.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from engine_support import ALL, STEPS, TOP, A, B, Play, connected, first, reports_of

from weightcast.gateway.addresses import Place, check_reachable
from weightcast.gateway.control import connect as coordinator
from weightcast.gateway.control import update as transaction
from weightcast.gateway.control.gateway import Gateway
from weightcast.gateway.control.instance import Instance, Step
from weightcast.gateway.control.instance_state import Phase
from weightcast.gateway.records import Backend, EngineSpec, Order, PairSpec
from weightcast.gateway.settings import Settings
from weightcast.transfer.errors import AddressError, ControlError, CoverageError, EngineError

pytestmark = pytest.mark.usefixtures("quiet")


def refusal(step: str) -> EngineError:
    return EngineError(f"instance {A}: /{step} answered 400: no")


# ---- addresses


@pytest.mark.parametrize("backend", ["tcp", "nccl"])
@pytest.mark.parametrize("trainer", ["10.0.0.7", "127.0.0.1"])
def test_loopback_of_those_who_have_to_be_reached_is_refused(backend: Backend, trainer: str) -> None:
    """NCCL finds the addresses of all but the first member, at which they meet."""

    async def run() -> None:
        play = await connected(version=None)
        instance = play.pair.instances[A]
        instance.spec = replace(instance.spec, backend=backend)
        play.pair.trainer_places.update({rank: Place("a", trainer, "boot:1") for rank in range(2)})
        instance.places.update({rank: Place("b", "127.0.0.1", "boot:2") for rank in range(2)})
        assert instance.parts is not None
        places = coordinator._places(play.pair, instance, instance.parts)
        if backend == "nccl" and trainer == "10.0.0.7":
            check_reachable(A, places)
            return
        blamed = "trainer rank 0 is on host a" if trainer == "127.0.0.1" else "rollout-0 rank 0 is on host b"
        with pytest.raises(AddressError, match=rf"{blamed} \(127.0.0.1\), and loopback reaches nobody on another host"):
            check_reachable(A, places)

    asyncio.run(run())


# ---- all goes well


def test_steps_of_an_update() -> None:
    async def run() -> None:
        play = await connected(version=None)
        assert play.engine.calls == ["connect"]
        assert play.state() == (Phase.CONNECTED, None, True)
        record = await play.update(1)
        assert play.engine.calls == STEPS
        assert play.state() == (Phase.CONNECTED, 1, False)
        assert (record.committed, record.fenced, record.reason, record.attempts) == (True, False, "", 1)
        assert record.verified is not None
        assert (record.verified.regions, record.verified.replicas) == (3, 2)
        record = await play.update(5)
        assert play.engine.calls == STEPS  # connected still: nothing is described or planned again
        assert play.state() == (Phase.CONNECTED, 5, False)

    asyncio.run(run())


def test_nothing_is_written_before_the_fence_and_nothing_published_before_the_digests() -> None:
    async def run() -> None:
        play = await connected()
        seen: dict[str, tuple[str, bool, str]] = {}

        def spy(step: str) -> None:
            inner = getattr(play.engine, step)

            async def spied(*arguments: object) -> None:
                record = play.pair.instances[A].record
                seen[step] = (str(record.phase), record.fenced, str(record.version))
                await inner(*arguments)

            setattr(play.engine, step, spied)

        for step in STEPS:
            spy(step)
        give, given = play.pair.give, []

        def spied_give(instance: Instance, order: Order) -> None:
            given.append((order.action, instance.record.fenced))
            give(instance, order)

        play.pair.give = spied_give  # type: ignore[method-assign]
        await play.update(2)
        assert given == [("prepare", False), ("run", True), ("end", False)]
        assert seen == {
            "pause": ("preparing", False, "1"),
            "begin": ("preparing", False, "1"),
            "transfer": ("preparing", False, "1"),
            "end": ("transferring", True, "1"),
            "publish": ("verifying", True, "1"),
            "resume": ("connected", False, "2"),
        }

    asyncio.run(run())


# ---- a step is refused


@pytest.mark.parametrize(("step", "fenced"), [("pause", False), ("begin", False), ("end", True), ("publish", True)])
def test_a_refused_step(step: str, fenced: bool) -> None:
    """Before the first byte the old version goes on; after it the engine stays paused, and the next update repairs."""

    async def run() -> None:
        play = await connected()
        play.engine.refuses[step] = refusal(step)
        record = await play.update(2)
        assert (record.version, record.committed, record.fenced) == (first(2), False, fenced)
        assert record.reason == str(refusal(step))
        assert play.state() == (Phase.FAILED, 1, fenced)
        after = play.engine.calls[STEPS.index(step) + 1 :]
        assert play.engine.calls[: STEPS.index(step) + 1] == STEPS[: STEPS.index(step) + 1]
        assert set(after) <= ({"end", "disconnect"} if fenced else {"end", "disconnect", "resume"})
        assert "disconnect" in after
        assert fenced or step == "pause" or after[-1] == "resume"
        play.engine.refuses.clear()
        assert (await play.update(3)).committed
        assert play.engine.calls == ["connect", *STEPS]
        assert play.state() == (Phase.CONNECTED, 3, False)

    asyncio.run(run())


def test_a_failed_flush_commits_nothing() -> None:
    """The old KV cache would be used with the new weights."""

    async def run() -> None:
        play = await connected(version=None)
        play.engine.refuses["publish"] = EngineError(f"instance {A}: /flush_cache answered 400: Flush cache failed.")
        record = await play.update(1)
        assert (record.committed, record.fenced) == (False, True)
        assert "/flush_cache" in record.reason
        assert play.state() == (Phase.FAILED, None, True)
        assert "resume" not in play.engine.calls

    asyncio.run(run())


def test_a_refused_transfer_is_told_at_once() -> None:
    """No rank has got the request, so none of them tells; the engine's answer alone ends the wait."""

    async def run() -> None:
        play = await connected(prepare=2.0)
        play.engine.refuses["transfer"] = refusal("transfer")
        play.engine.late["transfer"] = 0.2
        record = await play.update(2)
        assert record.reason.endswith(str(refusal("transfer")))
        assert (record.committed, record.fenced) == (False, False)
        assert record.seconds < 1.5
        assert play.state() == (Phase.FAILED, 1, False)
        assert play.engine.calls[:3] == STEPS[:3]
        assert play.engine.calls[-1] == "resume"

    asyncio.run(run())


def test_an_engine_that_answers_last() -> None:
    """All trainer ranks have long sent and digested when the engine's call comes back."""

    async def run() -> None:
        play = await connected()
        play.engine.late["transfer"] = 0.3
        record = await play.update(2)
        assert (record.committed, record.reason) == (True, "")
        assert record.seconds < 1.5
        assert play.engine.calls == STEPS

    asyncio.run(run())


def test_an_engine_that_does_not_go_on_has_its_version_all_the_same() -> None:
    """The version is committed before the engine is asked to go on: what is recorded and what is told must agree."""

    async def run() -> None:
        play = await connected()
        play.engine.refuses["resume"] = refusal("resume")
        record = await play.update(2)
        assert play.state()[1] == 2
        assert not record.fenced
        assert record.committed
        assert str(refusal("resume")) in record.reason
        play.engine.refuses.clear()
        assert (await play.update(3)).committed
        assert play.engine.calls[-1] == "resume"

    asyncio.run(run())


@pytest.mark.parametrize("step", ["pause", "end"])
def test_an_unforeseen_error_is_a_failure_of_its_instance_alone(step: str) -> None:
    async def run() -> None:
        play = await connected(A, B)
        play.engine.refuses[step] = ZeroDivisionError("a bug")
        record = await play.update(2)
        assert (record.committed, record.fenced) == (False, step == "end")
        assert "a bug" in record.reason
        assert play.pair.results[first(2)][B].committed
        assert play.pair.offers == {}

    asyncio.run(run())


@pytest.mark.parametrize("second", ["end", "disconnect"])
def test_a_second_refusal_hides_neither_the_first_nor_the_resume(second: str) -> None:
    async def run() -> None:
        play = await connected()
        play.engine.refuses = {"begin": refusal("begin"), second: refusal(second)}
        record = await play.update(2)
        assert record.reason == str(refusal("begin"))
        assert play.engine.calls[-1] == "resume"
        assert play.state() == (Phase.FAILED, 1, False)

    asyncio.run(run())


# ---- a rank fails


@pytest.mark.parametrize(
    ("seen", "cause"),
    [
        (f"it lost its connection to {A} rank 1", f"{A} rank 1: memory is gone"),
        (f"it lost its connection to {A} rank 11", f"trainer rank 0: it lost its connection to {A} rank 11"),
    ],
)
def test_a_member_that_is_blamed_and_says_why_is_believed(seen: str, cause: str) -> None:
    """Who closes its connections because of another one is seen to have gone by those who are heard first."""

    async def run() -> None:
        play = await connected(A)
        play.engine.dies, play.engine.seen = 1, seen
        assert (await play.update(2)).reason == cause

    asyncio.run(run())


def test_a_rank_that_dies_while_receiving_fences_its_instance_alone() -> None:
    async def run() -> None:
        play = await connected(A, B)
        play.engine.dies = 1
        record = await play.update(2)
        assert record.reason == f"{A} rank 1: memory is gone"
        assert (record.committed, record.fenced) == (False, True)
        assert {"publish", "resume"}.isdisjoint(play.engine.calls)
        assert play.state() == (Phase.FAILED, 1, True)
        assert play.pair.results[first(2)][B].committed
        assert play.engines[B].calls == STEPS
        assert play.state(B) == (Phase.CONNECTED, 2, False)
        play.engine.dies = -1
        assert (await play.update(3)).committed
        assert play.engine.calls == ["connect", *STEPS]
        assert play.engines[B].calls == STEPS

    asyncio.run(run())


def test_wrong_digests_fence() -> None:
    async def run() -> None:
        play = await connected()
        play.engine.corrupt = 1
        record = await play.update(2)
        assert (record.committed, record.fenced) == (False, True)
        assert f"'w' (bfloat16) box [0:8, 0:4] on {A} rank 1" in record.reason
        assert {"publish", "resume"}.isdisjoint(play.engine.calls)
        assert play.state() == (Phase.FAILED, 1, True)

    asyncio.run(run())


@pytest.mark.parametrize("who", ["trainer", "instance"])
def test_whoever_is_missing_is_named(who: str) -> None:
    async def run() -> None:
        play = await connected(transfer=0.5, verify=0.5)
        if who == "trainer":
            play.trainers[1].silent = True
            reason = "trainer ranks 1 did not finish the transfer within 0.5 s"
        else:
            play.engine.silent = 0
            reason = "no digests of its ranks 0 within 0.5 s"
        record = await play.update(2)
        assert record.reason == f"pair main: instance {A}: {reason}"
        assert record.fenced
        assert {"publish", "resume"}.isdisjoint(play.engine.calls)

    asyncio.run(run())


def test_a_fence_stays_until_a_commit() -> None:
    """An update of a fenced instance that fails before its first byte leaves it fenced, and paused."""

    async def run() -> None:
        play = await connected()
        play.engine.refuses["end"] = refusal("end")
        assert (await play.update(2)).fenced
        play.engine.refuses = {"begin": refusal("begin")}
        record = await play.update(3)
        assert (record.committed, record.fenced) == (False, True)
        assert "resume" not in play.engine.calls
        assert play.state() == (Phase.FAILED, 1, True)

    asyncio.run(run())


# ---- something changed since the plan was made


def test_a_change_is_planned_anew_within_the_update() -> None:
    async def run() -> None:
        play = await connected()
        play.engine.stale = 2
        record = await play.update(2)
        assert (record.committed, record.fenced, record.attempts) == (True, False, 3)
        again = ["pause", "begin", "transfer", "end", "disconnect", "connect"]
        assert play.engine.calls == [*again, *again, *STEPS]
        assert play.pair.instances[A].record.epoch == 3
        assert play.state() == (Phase.CONNECTED, 2, False)

    asyncio.run(run())


def test_a_layout_that_never_rests_leaves_the_old_version() -> None:
    async def run() -> None:
        play = await connected()
        play.engine.stale = 99
        record = await play.update(2)
        assert (record.committed, record.fenced, record.attempts) == (False, False, 3)
        assert record.reason == f"instance {A}: rank 0: a placement changed"
        assert play.engine.calls[-1] == "resume"
        assert play.state() == (Phase.FAILED, 1, False)

    asyncio.run(run())


# ---- offers and connecting


def test_an_update_that_nobody_else_offers_asks_nothing_of_the_engine() -> None:
    async def run() -> None:
        play = await connected(offer=0.3)
        play.engine.calls.clear()
        await play.pair.offer(0, 2)
        await transaction.update(play.pair, first(2), "127.0.0.1", 1)
        record = play.pair.results[first(2)][A]
        assert record.reason.startswith(
            "pair main: trainer ranks 1 did not offer version 2 within 0.3 s; trainer rank 1 "
        )
        assert (record.committed, record.fenced) == (False, False)
        assert play.engine.calls == []
        assert play.state() == (Phase.CONNECTED, 1, False)

    asyncio.run(run())


def test_an_engine_that_refuses_to_connect_fails_alone() -> None:
    async def run() -> None:
        play = Play(A, B)
        play.engine.refuses["connect"] = refusal("init_weights_update_group")
        await play.connect()
        assert play.state() == (Phase.FAILED, None, True)
        assert play.state(B) == (Phase.CONNECTED, None, True)
        for trainer in play.trainers:
            assert (trainer.told[A].action, trainer.told[B].action) == ("failed", "connected")
            assert trainer.told[A].reason == str(refusal("init_weights_update_group"))
        play.engine.refuses.clear()
        assert (await play.update(1)).committed
        assert play.engine.calls == ["connect", *STEPS]
        assert play.engines[B].calls == STEPS

    asyncio.run(run())


def test_what_lies_on_no_rank_is_told_to_all() -> None:
    async def run() -> None:
        play = Play(A, B)
        play.engine.ranks = [[TOP], [TOP]]
        await play.connect()
        failure = play.pair.instances[A].failure
        assert isinstance(failure, CoverageError)
        assert "w" in str(failure)
        assert play.state(B)[0] is Phase.CONNECTED
        for trainer in play.trainers:
            assert trainer.told[A].reason == str(failure)

    asyncio.run(run())


def test_ranks_that_do_not_register_are_named() -> None:
    async def run() -> None:
        play = Play(register=0.3)
        await play.trainers[0].register()
        await coordinator.connect(play.pair, play.pair.generation, "127.0.0.1", 1)
        last = play.pair.instances[A].orders.since(0)[-1]
        assert (
            last.reason == "pair main: trainer ranks 1 did not register within 0.3 s; trainer rank 1 was never heard of"
        )
        assert play.engine.calls == []

    asyncio.run(run())


def test_a_trainer_that_starts_twice_before_its_turn_is_connected_once() -> None:
    """An update that is being called off holds the pair meanwhile."""

    async def run() -> None:
        gateway = Gateway("127.0.0.1", 1)
        settings = Settings(register=0.3, join=0.3)
        engines = {A: EngineSpec(kind="worker", world_size=1)}
        pair = await gateway.create(PairSpec("main", trainer_world=1, instances=engines, settings=settings))
        report = reports_of([[ALL]])[0]
        step, instances = Step(pair.generation), pair.present
        await pair.hold(step, instances)
        for start in ("x.1", "x.2"):
            await pair.register_trainer(0, report, start)
            gateway.start_connect("main")
        pair.release(step, instances)
        await pair.poll(lambda: any(order.action == "failed" for order in pair.orders.since(0)), 20.0)
        await asyncio.gather(*gateway._tasks)
        registers = [order.trainer for order in pair.orders.since(0) if order.action == "register"]
        assert registers == [pair.generation]
        await gateway.close()

    asyncio.run(run())


@pytest.mark.parametrize("moment", range(6))
def test_a_connect_ends_at_whatever_moment_its_pair_is_closed(moment: int) -> None:
    """A connect begins an epoch, which forgets what its instances were told to stop for."""

    async def run() -> None:
        play = await connected(A, B, register=60.0, join=60.0)
        for trainer in play.trainers:
            await trainer.register()
        work = asyncio.create_task(coordinator.connect(play.pair, play.pair.generation, "127.0.0.1", 1))
        while play.pair.idle:
            await asyncio.sleep(0)
        for _ in range(moment):
            await asyncio.sleep(0.002)
        play.pair.close(ControlError("it is replaced"))
        assert await play.pair.poll(lambda: play.pair.idle, 10.0)
        await asyncio.wait_for(work, 10.0)
        assert {i.record.phase for i in play.pair.present} <= {Phase.FAILED, Phase.CONNECTED}

    asyncio.run(run())
