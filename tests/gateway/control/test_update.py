"""Updates that go through their steps more than once, instances that commit together, and instances that come and go.

A fake engine is right here, because the order of its calls is the subject; real engines are in the other tests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any

import pytest
from engine_support import STEPS, A, B, Engine, Play, connected, first

from weightcast.gateway.control.instance_state import Phase
from weightcast.gateway.control.store import SavedInstance
from weightcast.gateway.records import Action, CommitPolicy, EngineSpec, NonFinite, Order, PairSpec
from weightcast.gateway.versions import Version
from weightcast.transfer.errors import (
    ControlError,
    DeadlineError,
    EngineError,
    InputError,
    PairStateError,
    TransferError,
    VersionError,
    WeightcastError,
)

pytestmark = pytest.mark.usefixtures("quiet")


# ---- a placement changes under the transfer


def test_layers_that_move_under_the_transfer_are_sent_again_within_the_update() -> None:
    async def run() -> None:
        play = await connected()
        play.engine.moves = 1
        play.engine.layers.clear()
        record = await play.update(2)
        assert (record.committed, record.fenced, record.reason) == (True, False, "")
        assert (record.attempts, record.resends) == (2, 1)
        assert play.engine.layers == [None, (1,)], "all, then the layer that moved"
        again = ["pause", "begin", "transfer", "end", "disconnect", "connect"]
        assert play.engine.calls == [*again, *STEPS]
        assert play.state() == (Phase.CONNECTED, 2, False)
        play.engine.layers.clear()
        assert (await play.update(3)).committed
        assert play.engine.layers == [None], "the next update sends all, over the same communicator"
        assert play.engine.calls == STEPS

    asyncio.run(run())


def test_layers_that_never_rest_fence_after_three_more_transfers() -> None:
    async def run() -> None:
        play = await connected(A, B)
        play.engine.moves = 99
        play.engine.layers.clear()
        record = await play.update(2)
        assert (record.committed, record.fenced, record.attempts, record.resends) == (False, True, 4, 3)
        # 99, 98, 97 and 96 are the layers that this engine names.
        assert play.engine.layers == [None, (99,), (98, 99), (97, 98, 99)]
        assert record.reason == (
            f"instance {A}: rank 0: the expert placement of layers 96 changed during the transfer, "
            "and went on changing while they were sent 3 times more; let the engine rest and update it in full"
        )
        assert {"publish", "resume"}.isdisjoint(play.engine.calls)
        assert play.state() == (Phase.FAILED, 1, True)
        assert play.state(B) == (Phase.CONNECTED, 2, False)
        play.engine.moves = 0
        assert (await play.update(3)).committed

    asyncio.run(run())


def test_no_resends_if_the_settings_say_so() -> None:
    async def run() -> None:
        play = await connected(resends=0)
        play.engine.moves = 1
        record = await play.update(2)
        assert record.fenced
        assert record.reason.endswith("rank 0: the expert placement of layers 1 changed during the transfer")

    asyncio.run(run())


def test_a_change_before_the_layers_go_out_again_adds_to_them() -> None:
    """The engine goes on moving between the report of the transfer and the next prepare."""

    async def run() -> None:
        play = await connected()
        play.engine.moves = 1
        play.engine.stale_after = 1
        play.engine.layers.clear()
        record = await play.update(2)
        assert (record.committed, record.attempts, record.resends) == (True, 3, 1)
        assert play.engine.layers == [None, (0, 1)]

    asyncio.run(run())


# ---- a connection is lost


def test_a_lost_connection_makes_all_go_out_again_over_a_new_one() -> None:
    async def run() -> None:
        play = await connected(A, B)
        play.engine.dies, play.engine.dying, play.engine.lives = 1, TransferError, 1
        play.engine.layers.clear()
        record = await play.update(2)
        assert (record.committed, record.attempts, record.resends) == (True, 2, 0)
        assert play.engine.layers == [None, None]
        assert play.engine.calls == [*STEPS[:4], "disconnect", "connect", *STEPS]
        assert play.engines[B].calls == STEPS

    asyncio.run(run())


@pytest.mark.parametrize(("error", "transfers"), [(TransferError, 2), (DeadlineError, 1), (EngineError, 1)])
def test_what_is_not_tried_again(error: type[WeightcastError], transfers: int) -> None:
    """A connection that is lost a second time, somebody who is late, and an engine that says no."""

    async def run() -> None:
        play = await connected()
        play.engine.dies, play.engine.dying = 1, error
        play.engine.layers.clear()
        record = await play.update(2)
        assert (record.committed, record.fenced, record.attempts) == (False, True, transfers)
        assert play.engine.layers == [None] * transfers
        assert record.reason == f"{A} rank 1: memory is gone"

    asyncio.run(run())


# ---- the trainer's two passes


@pytest.mark.parametrize("commit", ["each", "all"])
def test_nobody_is_told_to_run_before_every_trainer_rank_has_digested(commit: CommitPolicy) -> None:
    async def run() -> None:
        play = await connected(A, B, commit=commit, verify=0.3)
        play.trainers[1].mute = True
        play.engine.layers.clear()
        record = await play.update(2)
        assert record.reason.startswith(f"pair main: instance {A}: trainer ranks 1 did not digest their weights before")
        assert (record.committed, record.fenced, play.engine.layers) == (False, False, [])
        assert play.state() == (Phase.FAILED, 1, False), "nothing was written"
        assert "resume" in play.engine.calls
        play.trainers[1].mute = False
        assert (await play.update(3)).committed

    asyncio.run(run())


@pytest.mark.parametrize("commit", ["each", "all"])
def test_weights_that_change_between_the_passes_fence_and_are_named(commit: CommitPolicy) -> None:
    async def run() -> None:
        play = await connected(A, B, commit=commit)
        for trainer in play.trainers:
            trainer.drifts = 1
        record = await play.update(2)
        assert record.reason.startswith("the trainer's weights changed during update(): 'w' on trainer ranks 0-1 had")
        assert play.state() == play.state(B) == (Phase.FAILED, 1, True)
        for trainer in play.trainers:
            trainer.drifts = 0
        assert (await play.update(3)).committed
        assert play.state() == play.state(B) == (Phase.CONNECTED, 3, False)

    asyncio.run(run())


def test_every_attempt_has_two_passes() -> None:
    """After a replan, a lost connection and a placement that moved, the passes of that attempt are compared."""

    async def run() -> None:
        for fault in ("stale", "dies", "moves"):
            play = await connected()
            setattr(play.engine, fault, 1)
            play.engine.dying, play.engine.lives = TransferError, 1
            play.trainers[0].drifts = 1
            record = await play.update(2)
            assert record.attempts == 2
            assert record.reason.startswith("the trainer's weights changed during update(): 'w' on trainer ranks 0 had")
            assert record.fenced

    asyncio.run(run())


# ---- values that are not finite


@pytest.mark.parametrize("commit", ["each", "all"])
def test_values_that_are_not_finite_are_refused_before_anything_is_written(commit: CommitPolicy) -> None:
    async def run() -> None:
        play = await connected(A, B, commit=commit)
        play.trainers[1].values = (1, 0, 3)
        play.engine.layers.clear()
        record = await play.update(2)
        assert (record.committed, record.fenced, play.engine.layers) == (False, False, [])
        assert record.reason == (
            f"instance {A}: values are not finite: 'w' as bfloat16 on trainer ranks 1: 1 NaN, 3 too large; version 2 "
            "was not sent, and the one before goes on; mend the weights, or allow these tensors by allow_non_finite"
        )
        assert record.non_finite == (NonFinite("w", "bfloat16", 1, 0, 3, (1,)),)
        assert record.non_finite_tensors == 1
        assert play.engine.calls == ["pause", "begin", "transfer", "end", "resume"], "it stays connected"
        for name in (A, B):
            assert play.state(name) == (Phase.CONNECTED, 1, False)
            assert play.pair.instance(name).serves
        play.trainers[1].values = (0, 0, 0)
        record = await play.update(3)
        assert (record.committed, record.non_finite) == (True, ())
        assert play.engine.calls == STEPS

    asyncio.run(run())


def test_one_that_refuses_values_keeps_all_at_the_old_version() -> None:
    async def run() -> None:
        play = await connected(A, B, commit="all")
        play.pair.instance(A).spec = replace(play.pair.instance(A).spec, non_finite="report")
        play.trainers[0].values = (0, 5, 0)
        record = await play.update(2)
        assert (
            f"{B} did not: instance {B}: values are not finite: 'w' as bfloat16 on trainer ranks 0: 5 inf"
            in record.reason
        )
        assert play.state(A) == play.state(B) == (Phase.CONNECTED, 1, False)
        assert "disconnect" not in play.engine.calls

    asyncio.run(run())


@pytest.mark.parametrize("spec", [{"non_finite": "report"}, {"allow_non_finite": ("x", "w*")}])
def test_values_that_are_only_reported(spec: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        logging.disable(logging.NOTSET)
        play = await connected()
        play.pair.instance(A).spec = replace(play.pair.instance(A).spec, **spec)
        play.trainers[0].values = (0, 5, 0)
        record = await play.update(2)
        assert (record.committed, record.non_finite) == (True, (NonFinite("w", "bfloat16", 0, 5, 0, (0,)),))
        assert f"instance {A}: values are not finite: 'w' as bfloat16 on trainer ranks 0: 5 infinite" in caplog.text
        status = play.pair.status()["instances"][A]["updates"][-1]
        assert status["non_finite"][0]["inf"] == 5

    asyncio.run(run())


# ---- all together


def test_instances_that_commit_together() -> None:
    async def run() -> None:
        play = await connected(A, B, commit="all")
        assert play.state(A) == play.state(B) == (Phase.CONNECTED, 1, False)
        seen: list[tuple[int | None, int | None]] = []
        resume = play.engines[A].resume

        async def spied() -> None:
            seen.append((play.state(A)[1], play.state(B)[1]))
            await resume()

        play.engines[A].resume = spied  # type: ignore[method-assign]
        play.engines[B].late["transfer"] = 0.2
        assert (await play.update(2)).committed
        assert seen == [(2, 2)]

    asyncio.run(run())


@pytest.mark.parametrize("step", ["pause", "begin", "transfer"])
def test_one_that_does_not_get_ready_keeps_all_at_the_old_version(step: str) -> None:
    async def run() -> None:
        play = await connected(A, B, commit="all", replans=0)
        play.engines[B].refuses[step] = EngineError("no")
        record = await play.update(2)
        assert (record.committed, record.fenced) == (False, False)
        assert record.reason.startswith(f"instance {A}: all instances commit together, and {B} did not: ")
        assert play.engines[A].calls[-1] == "resume"
        assert play.state(A) == play.state(B) == (Phase.FAILED, 1, False), "nothing was written"
        play.engines[B].refuses.clear()
        assert (await play.update(3)).committed
        assert play.state(A) == play.state(B) == (Phase.CONNECTED, 3, False)

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["corrupt", "end", "publish"])
def test_one_that_fails_later_fences_all(fault: str) -> None:
    async def run() -> None:
        play = await connected(A, B, commit="all")
        if fault == "corrupt":
            play.engines[B].corrupt = 0
        else:
            play.engines[B].refuses[fault] = EngineError("no")
        play.engines[A].calls.clear()
        record = await play.update(2)
        assert ("publish" in play.engines[A].calls) == (fault == "publish"), "no stamp before all are verified"
        assert (record.committed, record.fenced) == (False, True)
        assert f"all instances commit together, and {B} did not: " in record.reason
        assert "resume" not in play.engines[A].calls + play.engines[B].calls
        assert play.state(A) == play.state(B) == (Phase.FAILED, 1, True)
        play.engines[B].corrupt = -1
        play.engines[B].refuses.clear()
        assert (await play.update(3)).committed
        assert play.state(A) == play.state(B) == (Phase.CONNECTED, 3, False)

    asyncio.run(run())


def silent(play: Play, name: str) -> None:
    """The ranks of an instance were not heard from for long when the next update begins."""
    instance = play.pair.instance(name)
    instance.hear(1, time.monotonic() - 100.0)
    assert instance.listen(time.monotonic())


@pytest.mark.parametrize("commit", ["each", "all"])
def test_those_that_are_alive_get_the_version_if_they_are_enough(commit: CommitPolicy) -> None:
    async def run() -> None:
        play = await connected(A, B, "rollout-2", commit=commit, min_instances=2)
        silent(play, B)
        assert (await play.update(2)).committed
        record, text = play.pair.results[first(2)][B], "rollout-1 ranks 1 were not heard from for 30 s"
        together = "all instances that are alive commit together without this one: " if commit == "all" else ""
        assert record.reason == f"{together}pair main: {text}"
        assert (record.committed, record.fenced, record.seconds) == (False, False, 0.0)
        assert play.engines[B].calls == [], "it is not touched"
        assert play.pair.instance(B).updates[-1] is record
        assert [play.state(name)[1] for name in (A, B, "rollout-2")] == [2, 1, 2]
        await play.pair.instance(B).beat(1, "")
        assert (await play.update(3)).committed
        assert play.pair.results[first(3)][B].committed, "it takes part again"

    asyncio.run(run())


@pytest.mark.parametrize("needed", [None, 2, 10_000])
def test_with_one_dead_none_gets_the_version_if_all_have_to(needed: int | None) -> None:
    """Nobody is paused for an update that is known to fail."""

    async def run() -> None:
        play = await connected(A, B, commit="all", min_instances=needed)
        silent(play, B)
        record = await play.update(2)
        assert record.reason == (
            "pair main: 2 of 2 instances have to commit together, and dead are rollout-1: "
            "pair main: rollout-1 ranks 1 were not heard from for 30 s"
        )
        assert play.engine.calls == []
        assert play.state(A) == (Phase.CONNECTED, 1, False)
        assert play.pair.instance(A).serves

    asyncio.run(run())


@pytest.mark.parametrize("step", ["pause", "begin", "end", "publish", "resume"])
def test_a_call_ends_when_the_ranks_of_its_engine_fall_silent(step: str) -> None:
    """As those of a server that is stopped, whose sockets still take requests."""

    async def run() -> None:
        play = await connected(A, B, clean_up=0.2)
        call = getattr(play.engine, step)

        async def stands_still() -> None:
            if play.engine.calls.count(step) == 0:
                silent(play, A)
                play.engine.instance.notify()
                play.engine.calls.append(step)
                await asyncio.sleep(60.0)
            await call()

        setattr(play.engine, step, (lambda version: stands_still()) if step == "publish" else stands_still)
        record = await play.update(2)
        assert "rollout-0 ranks 1 were not heard from for 30 s" in record.reason
        assert record.committed == (step == "resume")
        assert play.state(B) == (Phase.CONNECTED, 2, False)

    asyncio.run(run())


def test_a_call_that_an_engine_does_not_answer_keeps_no_pair_from_being_deleted() -> None:
    async def run() -> None:
        play = await connected(clean_up=0.2)
        pause = play.engine.pause

        async def stands_still() -> None:
            play.pair.close(ControlError("pair main is deleted"))
            await pause()
            await asyncio.sleep(60.0)

        play.engine.pause = stands_still  # type: ignore[method-assign]
        record = await play.update(2)
        assert (record.committed, record.fenced, record.reason) == (False, False, "pair main is deleted")
        assert play.engine.calls == ["pause", "end", "disconnect", "resume"]
        assert play.pair.idle

    asyncio.run(run())


# ---- instances come and go


def test_an_instance_joins_and_gets_the_newest_version_first() -> None:
    async def run() -> None:
        play = await connected(A)
        await play.join(B)
        assert play.state(B) == (Phase.REGISTERING, None, True)
        assert not play.pair.instance(B).serves
        play.engines[B].calls.clear()
        assert (await play.update(5)).committed
        assert play.engines[B].calls == ["connect", *STEPS]
        assert play.engines[A].calls == STEPS, "nobody else is connected anew"
        assert play.state(B) == (Phase.CONNECTED, 5, False)

    asyncio.run(run())


def test_an_instance_leaves_and_comes_back_fenced() -> None:
    async def run() -> None:
        play = await connected(A, B)
        await play.pair.leave(B)
        assert play.state(B) == (Phase.LEFT, 1, False)
        assert play.pair.instance(B).orders.since(0)[-1].action == "left"
        del play.engines[B]
        assert (await play.update(2)).committed
        assert list(play.pair.results[first(2)]) == [A]
        await play.join(B)
        assert play.state(B) == (Phase.REGISTERING, 1, True), "what it holds is old, and nobody knows what else"
        assert (await play.update(3)).committed
        assert play.state(B) == (Phase.CONNECTED, 3, False)

    asyncio.run(run())


def test_an_instance_that_leaves_in_an_update_ends_it_for_itself_alone() -> None:
    async def run() -> None:
        play = await connected(A, B)
        play.engine.late["transfer"] = 0.3

        async def leave() -> None:
            await asyncio.sleep(0.1)
            await play.pair.leave(A)

        leaving = asyncio.create_task(leave())
        record = await play.update(2)
        await leaving
        assert not record.committed
        assert record.reason == f"instance {A} left pair main"
        assert play.state(A)[0] is Phase.LEFT
        assert play.state(B) == (Phase.CONNECTED, 2, False)

    asyncio.run(run())


def test_who_may_not_join() -> None:
    async def run() -> None:
        play = await connected(A)
        spec = EngineSpec(kind="sglang", world_size=1, url="http://127.0.0.1:30000")
        with pytest.raises(ControlError, match="has an instance rollout-0 already; it has to leave first"):
            await play.pair.join(A, spec)
        same = EngineSpec(kind="worker", world_size=2)
        assert await play.pair.join(A, same) is play.pair.instance(A), "the same again is no change"
        await play.pair.join(B, spec)
        with pytest.raises(InputError, match="each engine is one instance"):
            await play.pair.join("rollout-2", spec)
        with pytest.raises(InputError, match="is not 1 to 64 letters"):
            await play.pair.join("../x", spec)
        with pytest.raises(InputError, match="has no instance 'rollout-9'"):
            await play.pair.leave("rollout-9")
        await play.pair.instance(B).driver.close()

    asyncio.run(run())


# ---- late, repeated and older


def test_what_comes_too_late_is_refused_with_both_numbers() -> None:
    async def run() -> None:
        play = await connected()
        part = play.engine.parts[0]
        with pytest.raises(VersionError, match="has version 1; version 1 is not newer"):
            await play.pair.offer(0, 1)
        report = Engine.digests(part, 1)
        with pytest.raises(VersionError, match="is being updated to None, not to 1; it is too late"):
            await play.engine.instance.report_digests(1, "instance", 0, first(1), report)

    asyncio.run(run())


def test_an_offer_of_a_restart_that_comes_again_is_the_same_update() -> None:
    async def run() -> None:
        play = await connected(version=100)
        taken = [await play.pair.offer(0, 81, restart=True) for _ in range(2)]
        assert [(str(each.version), each.first) for each in taken if each] == [("81@2", True), ("81@2", False)]
        with pytest.raises(VersionError, match="trainer rank 1 offers 81, other ranks offer 81 with restart=True"):
            await play.pair.offer(1, 81)

    asyncio.run(run())


def test_no_consumer_of_integers_gets_a_stamp_of_a_later_lineage() -> None:
    """Also one that joined at the very moment at which the lineage began."""

    async def run() -> None:
        play = await connected(A, B, version=100)
        check = play.pair._check_stamps
        late = play.pair.instances[B]

        def check_and_join() -> None:
            check()
            late.spec = replace(late.spec, stamps="integer")
            play.pair._check_stamps = lambda: None  # type: ignore[method-assign]

        play.pair._check_stamps = check_and_join  # type: ignore[method-assign]
        assert (await play.update(81, restart=True)).committed
        record = play.pair.results[Version(2, 81)][B]
        assert (record.committed, record.fenced) == (False, False)
        assert record.reason == f"instance {B} takes integer stamps alone, and not 81@2; it has to leave"
        assert play.engines[B].calls == []

    asyncio.run(run())


def test_a_lineage_that_cannot_be_written_down_has_not_begun() -> None:
    async def run() -> None:
        play = await connected(version=100)

        async def full(spec: PairSpec) -> None:
            raise ControlError(f"the disk is full at lineage {spec.lineage}")

        save, play.pair.store.save_spec = play.pair.store.save_spec, full  # type: ignore[method-assign]
        record = await play.update(81, restart=True)
        assert (record.committed, record.reason) == (False, "the disk is full at lineage 2")
        assert play.engine.calls == [], "the engine heard of nothing"
        assert (await play.update(101)).version == first(101)
        play.pair.store.save_spec = save  # type: ignore[method-assign]
        assert (await play.update(81, restart=True)).version == Version(2, 81)
        assert (await play.update(82)).version == Version(2, 82)

    asyncio.run(run())


def test_a_trainer_that_starts_anew_ends_what_is_under_way() -> None:
    async def run() -> None:
        play = await connected(A, B)
        for trainer in play.trainers:
            trainer.silent = True

        async def restart() -> None:
            await asyncio.sleep(0.1)
            for trainer in play.trainers:
                await trainer.register()

        restarting = asyncio.create_task(restart())
        record = await play.update(2)
        await restarting
        assert record.reason == "pair main: trainer rank 0 started anew"
        assert record.fenced
        assert record.seconds < 1.0
        for trainer in play.trainers:
            trainer.silent = False
        await play.connect()
        assert (await play.update(3)).committed

    asyncio.run(run())


def test_an_instance_that_was_fenced_while_it_committed_is_not_resumed() -> None:
    """A rank starts anew, with other memory, while the commit is being written."""

    async def run() -> None:
        play = await connected()
        instance, save = play.pair.instances[A], play.pair.store.save

        async def late(*saved: SavedInstance) -> None:
            await save(*saved)
            if any(one.version == first(2) for one in saved):
                await instance.restarted(0, "another~1~x")

        play.pair.store.save = late  # type: ignore[method-assign]
        record = await play.update(2)
        assert (record.committed, record.fenced) == (True, True)
        assert "the instance was fenced meanwhile: " in record.reason
        assert play.engine.calls == STEPS[:-1]
        assert instance.paused

    asyncio.run(run())


def test_those_that_commit_together_are_written_once() -> None:
    """Nothing is left to write for the others, so nothing of theirs can fail once all are committed."""

    async def run() -> None:
        play = await connected(A, B, commit="all")
        save = play.pair.store.save

        async def full(*saved: SavedInstance) -> None:
            if not saved:
                raise ControlError("disk full")
            await save(*saved)

        play.pair.store.save = full  # type: ignore[method-assign]
        await play.update(2)
        assert [record.committed for record in play.pair.results[first(2)].values()] == [True, True]

    asyncio.run(run())


def test_what_is_said_of_another_epoch_is_refused_with_both_numbers() -> None:
    async def run() -> None:
        play = await connected(A)
        instance = play.pair.instance(A)
        epoch = instance.record.epoch
        for other in (epoch - 1, epoch + 1):
            with pytest.raises(PairStateError, match=f"is in epoch {epoch}, not {other}; connect again"):
                await instance.go(other, 0.0)
            with pytest.raises(PairStateError, match=f"is in epoch {epoch}, not {other}; connect again"):
                await instance.register(other, 0, instance.reports[0])

    asyncio.run(run())


def test_a_rank_that_waits_hears_of_its_own_epoch_alone() -> None:
    """The next one may have begun before it was woken."""

    async def run() -> None:
        play = await connected(A)
        instance = play.pair.instance(A)
        epoch = instance.record.epoch
        play.pair.give(instance, Order(Action.PREPARE, epoch, first(2)))
        waiting = asyncio.create_task(instance.go(epoch, 5.0))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        for order in (Order(Action.END, epoch, first(2)), Order(Action.REGISTER, epoch + 1)):
            play.pair.give(instance, order)
        answer = await waiting
        assert answer is not None
        assert (answer[1].action, answer[1].epoch) == (Action.END, epoch)

    asyncio.run(run())
