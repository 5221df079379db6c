"""Steps of an update: their order, their deadlines, and what a failure leads to.

The order "run" is given when every trainer rank has digested its weights, and ranks digest them again after it. So both
passes have the state of one moment, or differ. Values that must not be served are refused before it.

From the order "run" until its commit an instance is fenced. When an update fails after that point its engine stays
paused, and only a full verified update resumes it. A placement that changes before a byte was written is planned anew.
One that changes under the transfer makes the layers concerned go out again, within the same update.

Each instance goes its own way, unless the pair commits all of them together. Then `Agreement` makes them wait for one
another: before the first byte, before the version is stamped, and before it is committed. An instance that is dead when
the update begins takes no part in it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from weightcast.gateway.control.barrier import Agreement
from weightcast.gateway.control.connect import connect_instances, glance, merge_trainer_reports, watched
from weightcast.gateway.control.instance import Instance, Step, absent
from weightcast.gateway.control.instance_state import Event, Phase, advance
from weightcast.gateway.control.pair import Pair, as_weightcast_error
from weightcast.gateway.layouts.merge import InstanceLayout
from weightcast.gateway.records import Action, DigestCounts, NonFinite, Order, UpdateRecord
from weightcast.gateway.versions import Version
from weightcast.transfer.deadline import Deadline
from weightcast.transfer.errors import (
    ControlError,
    DeadlineError,
    NonFiniteError,
    PairStateError,
    StalePlanError,
    TransferError,
    UpdateError,
    VersionError,
    WeightcastError,
)
from weightcast.transfer.plan.verification import Verify

__all__ = ["update"]

log = logging.getLogger("weightcast.gateway")

_SHOWN = 4
"""Number of tensors that a message names."""
_NAMED_TENSORS = 20
"""Number of tensors with values that are not finite that a record names."""
_HEARING = 0.3
"""Seconds that other ranks have to tell what they saw, after one has told its failure."""


class _MovedError(UpdateError):
    """The placement of some layers changed while they were sent."""


async def update(pair: Pair, version: Version, host: str, port: int) -> None:
    """Brings every instance to `version` once all trainer ranks have offered it; the records tell how it ended."""
    deadline = Deadline.after(pair.spec.settings.update)
    step = Step(pair.generation, version)
    try:
        await pair.begin_lineage(version.lineage)
        await pair.offered(version, deadline)
        await merge_trainer_reports(pair, deadline)
    except WeightcastError as error:
        records = {i.name: _refuse(pair, i, step, version, error) for i in pair.present or pair.evicted}
    else:
        members = await pair.begin(version)
        groups, refusals = await _grouped(pair, members)
        records = {i.name: _left_out(pair, i, step, version, error) for i, error in refusals.items()}
        steps = (_update(pair, group, step, version, deadline, host, port) for group in groups)
        for outcome in await asyncio.gather(*steps):
            records |= outcome
        if not members:  # a trainer is not told that all is well
            records = {i.name: _gone(i, version, i.record.reason) for i in pair.evicted}
    pair.decide(version, records)
    pair.notify()


async def _grouped(
    pair: Pair, members: Sequence[Instance]
) -> tuple[list[list[Instance]], dict[Instance, WeightcastError]]:
    """The instances that go through the update, in groups that commit together, and why the others do not.

    Nobody waits for an instance that is dead when the update begins.
    """
    await glance(members)
    deaths = {i: death for i in members if (death := i.death) is not None}
    alive = [instance for instance in members if instance not in deaths]
    if pair.spec.commit == "each":
        return [[instance] for instance in alive], deaths
    if deaths and len(alive) < pair.spec.needed(len(members)):
        names = ", ".join(i.name for i in deaths)
        needed = f"{pair.spec.needed(len(members))} of {len(members)} instances have to commit together"
        text = f"pair {pair.spec.name}: {needed}, and dead are {names}: {next(iter(deaths.values()))}"
        return [], deaths | dict.fromkeys(alive, UpdateError(text))
    text = "all instances that are alive commit together without this one: "
    return [alive] if alive else [], {i: type(death)(f"{text}{death}") for i, death in deaths.items()}


def _left_out(pair: Pair, instance: Instance, step: Step, version: Version, error: WeightcastError) -> UpdateRecord:
    """The record of an instance that takes no part in an update, which counts as one that it has had."""
    record = _refuse(pair, instance, step, version, error)
    instance.updates.append(record)
    pair.updated(instance.pair, instance.name, record)
    return record


async def _update(
    pair: Pair, group: Sequence[Instance], step: Step, version: Version, deadline: Deadline, host: str, port: int
) -> dict[str, UpdateRecord]:
    """Updates instances that commit together, once no connect holds any of them. Returns their records by name."""
    start = time.monotonic()
    try:
        members = await pair.hold(step, group, deadline)
    except WeightcastError as error:
        return {i.name: _refuse(pair, i, step, version, error, time.monotonic() - start) for i in group}
    try:
        agreement = Agreement(members)
        updates = (_Update(pair, i, step, version, host, port, agreement) for i in members)
        records = await asyncio.gather(*(each.run() for each in updates))
    finally:
        pair.release(step, members)
    outcomes = {i.name: record for i, record in zip(members, records, strict=True)}
    for instance in group:
        reason = f"instance {instance.name} left pair {pair.spec.name}"
        outcomes.setdefault(instance.name, _gone(instance, version, reason))
    return outcomes


def _gone(instance: Instance, version: Version, reason: str) -> UpdateRecord:
    """The record of an instance that is not in the pair."""
    return UpdateRecord(version, False, instance.record.fenced, reason, 0.0)


def _refuse(
    pair: Pair, instance: Instance, step: Step, version: Version, error: WeightcastError, seconds: float = 0.0
) -> UpdateRecord:
    """Tells the ranks that have offered that there will be no update; the instance is as it was."""
    fields = {"pair": pair.spec.name, "instance": instance.name, "version": version.as_json()}
    log.error(
        "pair %s instance %s: version %s refused: %s", pair.spec.name, instance.name, version, error, extra=fields
    )
    if instance.present:  # one that has left had its last order
        pair.give(instance, Order(Action.END, instance.record.epoch, version, reason=str(error)), step)
    return UpdateRecord(version, False, instance.record.fenced, str(error), seconds)


class _Update:
    """One update of one instance, from its first step to its record."""

    def __init__(
        self, pair: Pair, instance: Instance, step: Step, version: Version, host: str, port: int, together: Agreement
    ) -> None:
        self._pair, self._instance, self._step, self._version = pair, instance, step, version
        self._host, self._port, self._together = host, port, together
        self._attempts = self._resends = self._retries = 0
        self._where = {"pair": pair.spec.name, "instance": instance.name, "version": version.as_json()}

    async def run(self) -> UpdateRecord:
        """Goes through the steps as often as it takes; whatever happens, the ranks are told how it ended."""
        pair, instance, version = self._pair, self._instance, self._version
        start = time.monotonic()
        verified: DigestCounts | None = None
        reason = ""
        try:
            instance.check_newer(version)
            verified = await self._until_committed()
        except Exception as error:  # whatever it is, the ranks have to be told and the pair has to take offers again
            failure = await self._heard(as_weightcast_error(error))
            reason = str(failure)
            if isinstance(failure, VersionError):
                self._together.give_up(instance, failure)
                return _refuse(pair, instance, self._step, version, failure)
            await self._fail(failure)
        committed = verified is not None
        if committed:
            reason = await self._resume()
        record = UpdateRecord(
            version,
            committed,
            instance.record.fenced,
            reason,
            time.monotonic() - start,
            verified,
            self._attempts,
            self._resends,
            instance.non_finite[:_NAMED_TENSORS],
            len(instance.non_finite),
        )
        instance.updates.append(record)
        pair.updated(instance.pair, instance.name, record)
        self._give(Action.END, version, committed=committed, reason=reason)
        return record

    def _give(self, action: Action, version: Version | None = None, **fields: Any) -> None:
        self._pair.give(self._instance, Order(action, self._instance.record.epoch, version, **fields))

    async def _until_committed(self) -> DigestCounts:
        instance, settings = self._instance, self._pair.spec.settings
        instance.resend = None
        while True:
            self._attempts += 1
            try:
                await self._reconnect_if_needed()
                instance.check_newer(self._version)  # ranks that registered just now may hold a newer one
                return await self._attempt()
            except StalePlanError as stale_plan:
                if instance.record.phase is not Phase.PREPARING:
                    raise  # the layers are unknown: only a full update can clear the fence
                await self._best_effort("end the session", instance.driver.end())
                instance.on(Event.CANCEL, reason=str(stale_plan))
                if self._attempts - self._resends - self._retries > settings.replans:
                    raise
                log.warning("instance %s: %s; planning anew", instance.name, stale_plan, extra=self._where)
                await self._best_effort("disconnect", instance.driver.disconnect(instance.group))
                instance.on(Event.FAIL, reason=str(stale_plan))
                if instance.resend is not None:
                    layers = instance.stale_layers
                    instance.resend = None if layers is None else instance.resend | layers
            except _MovedError as move:
                if self._resends == settings.resends:
                    raise
                self._resends += 1
                log.warning("instance %s: %s; sending them again", instance.name, move, extra=self._where)
                layers = set().union(*instance.moved.values())
                instance.resend = layers if instance.resend is None else instance.resend | layers
                await self._send_again(move)
            except TransferError as loss:
                if isinstance(loss, DeadlineError) or instance.record.phase is not Phase.TRANSFERRING:
                    raise  # a rank that is late would be late again
                if self._retries == settings.retries:
                    raise
                self._retries += 1
                log.warning("instance %s: %s; connecting anew", instance.name, loss, extra=self._where)
                instance.resend = None
                await self._best_effort("end the session", instance.driver.end())
                await self._send_again(loss)

    async def _send_again(self, why: WeightcastError) -> None:
        """Makes the instance be described, planned and joined anew. It stays fenced, and the update goes on."""
        instance = self._instance
        await self._best_effort("disconnect", instance.driver.disconnect(instance.group))
        instance.on(Event.RESEND, reason=str(why))
        instance.clear_epoch()

    async def _reconnect_if_needed(self) -> None:
        pair, instance = self._pair, self._instance
        if self._step.generation != pair.generation:
            raise ControlError(f"pair {pair.spec.name}: the trainer started anew; it has to connect first")
        pair.check_wanted()  # a connect forgets what the instance was told to stop for
        is_current = instance.generation == pair.generation and instance.failure is None
        if is_current and instance.record.phase is Phase.CONNECTED and not instance.silent:
            return  # ranks of an engine that answers may be silent: it was started again
        old_layout = instance.layout
        await connect_instances(pair, [instance], self._host, self._port)
        if instance.failure is not None:
            raise instance.failure
        if instance.resend is not None:
            moved_layers = _moved_layers(old_layout, instance.layout)
            instance.resend = None if moved_layers is None else instance.resend | moved_layers

    async def _attempt(self) -> DigestCounts:
        """Makes one pass through all steps, the same for every kind of engine: its driver is behind them.

        Raises StalePlanError while nothing was written, and _MovedError afterwards. `run` resumes the engine.
        """
        driver = self._instance.driver
        await self._begin()
        await self._asked("pause", driver.pause())
        await self._asked("begin the update", driver.begin())
        async with self._engine_transfer() as call:
            await self._prepare(call)
            await self._first_pass()
            await self._reach("ready")
            await self._fence()
            await self._transfer(call)
        await self._asked("end the update", driver.end())
        verified = await self._verify()
        await self._reach("verified")
        await self._asked("publish the version", driver.publish(self._version))
        await self._reach("published")
        await self._commit()
        return verified

    async def _begin(self) -> None:
        instance = self._instance
        instance.clear_update()
        instance.on(Event.PREPARE, version=self._version)
        instance.paused = True  # also if the call fails: a pause that timed out may have been heard
        await instance.save()

    @asynccontextmanager
    async def _engine_transfer(self) -> AsyncIterator[asyncio.Task[None]]:
        """Makes the ranks prepare. The engine's own call is over when this is left, before anything else is asked."""
        instance = self._instance
        self._give(Action.PREPARE, self._version)
        call = watched(instance, instance.driver.transfer(instance.group))
        try:
            yield call
        except Exception as error:
            # Ranks that are ready wait for the order to begin, and ranks that run wait for others that may be gone.
            self._give(Action.END, reason=str(error))
            raise
        finally:
            await self._over(call)

    async def _reach(self, stage: str) -> None:
        """Returns when all instances that commit together have reached a stage."""
        await self._together.reach(self._instance, stage, self._instance.left(self._pair.spec.settings.longest))

    async def _fence(self) -> None:
        """Fences the instance on the disk, then lets its ranks run."""
        instance = self._instance
        record = advance(instance.record, Event.TRANSFER)
        await instance.store.save(instance.saved(record))  # before the first byte, not after it
        instance.adopt(record, Event.TRANSFER)
        self._give(
            Action.RUN, self._version, layers=None if instance.resend is None else tuple(sorted(instance.resend))
        )

    async def _asked(self, what: str, step: Coroutine[Any, Any, None]) -> None:
        """Runs a step of the engine, within the time for the whole update."""
        instance = self._instance
        await instance.in_update(self._answered(step), lambda: f"the engine of instance {instance.name} did not {what}")

    async def _answered(self, step: Coroutine[Any, Any, None]) -> None:
        """Runs a step of the engine. Raises DeadlineError when its ranks fall silent, as if it stands still.

        In a pair that is closed the step has little time, and then raises the reason for that.
        """
        pair, instance, call = self._pair, self._instance, watched(self._instance, step)
        try:
            await instance.poll(lambda: call.done() or bool(instance.silent) or pair.closed is not None, math.inf)
            await instance.poll(lambda: call.done() or bool(instance.silent), instance.settings.clean_up)
            if not call.done():
                pair.check_open()
                raise DeadlineError(f"pair {instance.pair}: {instance.silence()}")
            await call
        finally:
            call.cancel()

    async def _prepare(self, call: asyncio.Task[None]) -> None:
        instance, world = self._instance, self._instance.world
        await instance.until(
            lambda: len(instance.ready_ranks) == world or bool(instance.stale) or _refused(call),
            instance.settings.prepare,
            lambda: f"instance {instance.name} ranks {absent(instance.ready_ranks, world)} did not get ready",
            lambda: instance.accounts(rank for rank in range(world) if rank not in instance.ready_ranks),
        )
        if instance.stale:
            raise StalePlanError(f"instance {instance.name}: {instance.stale}")
        if len(instance.ready_ranks) < world:
            instance.stale_layers = None
            raise StalePlanError(str(call.exception()))

    async def _first_pass(self) -> None:
        """Waits until every trainer rank has digested its weights, and looks at the values that they have counted.

        Raises NonFiniteError naming tensors, ranks and counts of values that the instance does not take.
        """
        instance, senders, checks = self._instance, self._pair.spec.trainer_world, self._instance.checks
        if self._pair.spec.verify is Verify.OFF or checks is None:
            return
        await instance.until(
            lambda: len(instance.first_digests) == senders,
            instance.settings.verify,
            lambda: (
                f"instance {instance.name}: trainer ranks {absent(instance.first_digests, senders)} did not digest "
                "their weights before the transfer"
            ),
            lambda: self._pair.accounts(rank for rank in range(senders) if rank not in instance.first_digests),
        )
        reports = dict(instance.first_digests)
        if not any(len(report.values.row) for report in reports.values()):
            return
        instance.non_finite = await asyncio.to_thread(checks.non_finite, reports, instance.name)
        entries = instance.spec.refused(instance.non_finite)
        if entries:
            raise NonFiniteError(
                f"instance {instance.name}: values are not finite: {_listed(entries)}; version {self._version} was not "
                "sent, and the one before goes on; mend the weights, or allow these tensors by allow_non_finite"
            )
        if instance.non_finite:
            text = _listed(instance.non_finite)
            log.warning("instance %s: values are not finite: %s", instance.name, text, extra=self._where)

    async def _transfer(self, call: asyncio.Task[None]) -> None:
        instance, senders = self._instance, self._pair.spec.trainer_world
        # The call of an engine ends when its ranks have received. The digests that trainer ranks make then are waited
        # for with its own. Where there is no engine to call, digests alone tell the end of the transfer.
        has_engine = instance.spec.kind != "worker"

        def missing() -> str:
            ranks = "" if has_engine else absent(instance.trainer_digests, senders)
            party = f"trainer ranks {ranks}" if ranks else "the engine"
            return f"instance {instance.name}: {party} did not finish the transfer"

        await instance.until(
            lambda: call.done() and (has_engine or len(instance.trainer_digests) == senders),
            instance.settings.transfer,
            missing,
        )
        await call

    async def _verify(self) -> DigestCounts:
        instance, senders = self._instance, self._pair.spec.trainer_world

        def missing() -> str:
            ranks = absent(instance.digests.keys() | instance.moved.keys(), instance.world)
            party = f"its ranks {ranks}" if ranks else f"trainer ranks {absent(instance.trainer_digests, senders)}"
            return f"instance {instance.name}: no digests of {party}"

        def answered() -> bool:
            ranks = len(instance.digests.keys() | instance.moved.keys()) == instance.world
            return ranks and (bool(instance.moved) or len(instance.trainer_digests) == senders)

        await instance.until(answered, instance.settings.verify, missing)
        if instance.moved:
            raise self._moved()
        instance.on(Event.VERIFY)
        checks, layout = instance.checks, instance.layout
        if checks is None or layout is None:
            raise PairStateError(f"instance {instance.name} has no plan")
        if self._pair.spec.verify is Verify.OFF:
            return DigestCounts(0, 0, 0, 0, 0)
        slots = {rank: table.slot for rank, table in enumerate(layout.tables)}
        # Copies: reports that come while these are compared change nothing.
        first, second, reports = dict(instance.first_digests), dict(instance.trainer_digests), dict(instance.digests)

        def compare() -> DigestCounts:
            checks.check_unchanged(first, second)
            return checks.compare(second, instance.name, reports, slots)

        return await asyncio.to_thread(compare)

    async def _over(self, call: asyncio.Task[None]) -> None:
        """Waits for the end of the engine's call, before anything else is asked of the engine.

        The wait is short for an engine that is not heard from, and in a pair that is closed.
        """
        settings = self._pair.spec.settings
        seconds = settings.clean_up
        if self._pair.closed is None:
            seconds = max(self._instance.left(settings.engine), seconds)
        await self._instance.poll(lambda: call.done() or bool(self._instance.silent), seconds)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(call, return_exceptions=True), settings.clean_up)

    def _moved(self) -> _MovedError:
        instance = self._instance
        rank = min(instance.moved)
        layers = ", ".join(map(str, sorted(set().union(*instance.moved.values()))))
        text = f"instance {instance.name}: rank {rank}: the expert placement of layers {layers} changed"
        if not self._resends:
            return _MovedError(f"{text} during the transfer")
        return _MovedError(
            f"{text} during the transfer, and went on changing while they were sent {self._resends} "
            "times more; let the engine rest and update it in full"
        )

    async def _commit(self) -> None:
        """Commits the version by a write to the disk; in one write for all instances that commit together."""
        members = self._together.committing(self._instance)
        for member in members:
            if member.failure is not None:
                raise member.failure
        records = [advance(member.record, Event.COMMIT, version=self._version) for member in members]
        if records:  # of all instances for the first, and of none for the others
            await self._pair.store.save(
                *(member.saved(record) for member, record in zip(members, records, strict=True))
            )
        for member, record in zip(members, records, strict=True):
            member.adopt(record, Event.COMMIT)
            if member.suspect:  # a rank started anew in this very moment, with other memory
                member.on(Event.DISTRUST, reason=str(member.failure))
                member.store.save_soon(member.saved())
        await self._together.committed(self._instance, self._pair.spec.settings.longest)

    async def _resume(self) -> str:
        """Lets the engine go on with the committed version.

        Returns what kept it from that, in one line; an empty text if nothing did.
        """
        instance = self._instance
        if instance.record.fenced:
            reason = instance.failure or instance.record.reason
            return f"the version is committed, but the instance was fenced meanwhile: {reason}"
        seconds = max(instance.left(instance.settings.engine), instance.settings.clean_up)
        try:
            async with asyncio.timeout(seconds):
                await self._answered(instance.driver.resume())
        except (WeightcastError, TimeoutError) as failure:
            error = str(failure) or f"it did not answer within {seconds:g} s"
            log.error("instance %s: committed, but not resumed: %s", instance.name, error, extra=self._where)
            return f"the version is committed, but the engine did not go on: {error}"
        instance.resumed()
        return ""

    async def _heard(self, error: WeightcastError) -> WeightcastError:
        """The cause of a failure. If a rank told it, other ranks get a moment to tell what they saw."""
        if error is not self._instance.failure or not self._instance.told:
            return error
        await asyncio.sleep(_HEARING)
        return self._instance.cause() or error

    async def _fail(self, error: WeightcastError) -> None:
        """Logs the failure, closes the engine's session, and resumes the engine only if it holds one whole version."""
        instance = self._instance
        log.error("pair %s instance %s: update failed: %s", instance.pair, instance.name, error, extra=self._where)
        self._together.give_up(instance, error)
        untouched = isinstance(error, NonFiniteError) and instance.record.phase is Phase.PREPARING
        if untouched:  # nothing is wrong with the instance, so it stays as it is
            instance.on(Event.CANCEL, reason=str(error))
        elif instance.record.phase is not Phase.FAILED:
            instance.on(Event.FAIL, reason=str(error))
        await self._best_effort("end the session", instance.driver.end())
        if not untouched:
            await self._best_effort("disconnect", instance.driver.disconnect(instance.group))
        # Only what was paused here is resumed: an engine may have been left paused by somebody who knew why.
        if instance.paused and not instance.record.fenced:
            await self._best_effort("resume", instance.driver.resume())
            instance.resumed()

    async def _best_effort(self, what: str, step: Awaitable[None]) -> None:
        """Runs a step after a failure. One more refusal, or no answer at all, is logged and changes nothing."""
        try:
            await asyncio.wait_for(step, self._pair.spec.settings.clean_up)
        except Exception as refusal:  # the first failure is the one to report
            name = type(refusal).__name__
            log.warning("instance %s: could not %s: %s %s", self._instance.name, what, name, refusal, extra=self._where)


def _listed(values: Sequence[NonFinite]) -> str:
    """The first values in words, and the number of tensors beyond them."""
    suffix = f" and {len(values) - _SHOWN} tensors more" if len(values) > _SHOWN else ""
    return "; ".join(map(str, values[:_SHOWN])) + suffix


def _moved_layers(before: InstanceLayout | None, now: InstanceLayout | None) -> set[int] | None:
    """Layers whose placement differs between two descriptions; None if more than that differs."""
    old = before.placement if before else None
    new = now.placement if now else None
    if old is None and new is None:
        return set()
    if old is None or new is None or old.physical_to_logical.shape != new.physical_to_logical.shape:
        return None
    return set(new.changed_layers(old).tolist())


def _refused(call: asyncio.Task[None]) -> bool:
    """True if an engine's call ended with an error; then nobody else needs to be waited for."""
    return call.done() and not call.cancelled() and call.exception() is not None
