"""How a connect and an update proceed: the order of steps, the deadlines, and what a failure leads to.

Each instance goes its own way: the failure of one touches no other. From the order "run" until its commit an instance
is fenced; when an update fails after that point its engine stays paused, and only a full verified update resumes it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from weightcast.gateway.merge import InstanceLayout, TrainerLayout, merge_instance, merge_trainer
from weightcast.gateway.pairs import Event, Phase, check_version
from weightcast.gateway.service import Instance, Order, Pair, UpdateRecord, as_weightcast_error, elapsed
from weightcast.gateway.verify import DigestCounts, compare_digests
from weightcast.transfer.errors import PairStateError, StalePlanError, VersionError, WeightcastError
from weightcast.transfer.parts import PlanParts
from weightcast.transfer.replan import Planner
from weightcast.transfer.topology import Hosts

__all__ = ["connect", "update"]

log = logging.getLogger("weightcast.gateway")

CLEAN_UP_SECONDS = 30.0
"""How long each call to an engine may take after an update has failed."""
MAX_ATTEMPTS = 3
"""How often an update starts anew because a placement changed before a byte was written."""


async def connect(pair: Pair, gateway_host: str, gateway_port: int) -> None:
    """Connects every instance to the trainer as it registered last. Failures stay with their instance."""
    instances = [i for i in pair.instances.values() if i.record.phase is not Phase.LEFT]
    try:
        await _merge_trainer(pair)
    except WeightcastError as error:
        for instance in instances:
            await _connect_failed(pair, instance, error)
        return
    await connect_instances(pair, instances, gateway_host, gateway_port)


async def connect_instances(pair: Pair, instances: Sequence[Instance], host: str, port: int) -> None:
    """One new epoch for each of `instances`; planned together so that the trainer's load is spread over all."""
    calls = {}
    for instance in instances:
        if instance.record.phase is not Phase.REGISTERING:
            instance.on(Event.REJOIN)
            instance.clear_epoch()
        await pair.give(instance, Order("register", instance.record.epoch))
        calls[instance.name] = _watched(pair, _engine_connect(pair, instance, host, port))
    layouts = await asyncio.gather(*(_merge_instance(pair, i) for i in instances), return_exceptions=True)
    good: dict[str, InstanceLayout] = {}
    for instance, layout in zip(instances, layouts, strict=True):
        if isinstance(layout, BaseException):
            await _connect_failed(pair, instance, as_weightcast_error(layout))
        else:
            good[instance.name] = instance.layout = layout
    if good:
        await _plan(pair, good)
    await asyncio.gather(*(_finish_connect(pair, i, calls[i.name]) for i in instances))


async def _engine_connect(pair: Pair, instance: Instance, host: str, port: int) -> None:
    """The engine's own call; its failure is kept as the failure of the instance unless a rank told a better one."""
    try:
        await instance.driver.connect(host, port, instance.group(pair.spec.name))
    except WeightcastError as error:
        if instance.failure is None:
            instance.failure = error


async def _merge_trainer(pair: Pair) -> None:
    if pair.trainer_layout is None:
        await pair.wait(
            lambda: len(pair.trainer_reports) == pair.spec.trainer_world,
            pair.spec.deadlines.register,
            lambda: f"trainer ranks {_absent(pair.trainer_reports, pair.spec.trainer_world)} did not register",
        )
        reports = list(pair.trainer_reports.values())
        pair.trainer_layout = await asyncio.to_thread(merge_trainer, reports)


async def _merge_instance(pair: Pair, instance: Instance) -> InstanceLayout:
    world = instance.spec.world_size
    await _wait(
        pair,
        instance,
        lambda: len(instance.reports) == world,
        pair.spec.deadlines.register,
        lambda: f"instance {instance.name} ranks {_absent(instance.reports, world)} did not register",
    )
    catalog = _trainer_layout(pair).tensors
    return await asyncio.to_thread(merge_instance, instance.name, list(instance.reports.values()), catalog)


def _trainer_layout(pair: Pair) -> TrainerLayout:
    if pair.trainer_layout is None:
        raise PairStateError(f"pair {pair.spec.name}: the trainer has not registered; connect first")
    return pair.trainer_layout


async def _plan(pair: Pair, layouts: Mapping[str, InstanceLayout]) -> None:
    trainer = _trainer_layout(pair)
    tables = {name: layout.tables for name, layout in layouts.items()}
    # Instances that connect anew after their experts moved are planned from what changed.
    planner = pair.planners.setdefault(tuple(tables), Planner())
    try:
        hosts = Hosts.by_name(trainer.hosts, [layout.hosts for layout in layouts.values()])
        planned = await asyncio.to_thread(planner.plan, trainer.tables, tables, hosts=hosts)
        plan = await asyncio.to_thread(lambda: planned.plan)
        parts = await asyncio.to_thread(PlanParts, plan, pair.spec.bucket_bytes)
    except WeightcastError as error:
        for name in layouts:
            await _connect_failed(pair, pair.instances[name], error)
        return
    for name in layouts:
        instance = pair.instances[name]
        instance.plan, instance.parts = plan, parts
        instance.on(Event.PLAN)
        await pair.give(instance, Order("join", instance.record.epoch))


async def _finish_connect(pair: Pair, instance: Instance, call: asyncio.Task[None]) -> None:
    if instance.plan is None:
        await call  # the ranks were told of the failure, so the engine's call comes back
        return
    members = set(members_of(instance))
    try:
        await _wait(
            pair,
            instance,
            lambda: members <= instance.joined,
            pair.spec.deadlines.join,
            lambda: f"instance {instance.name}: {', '.join(sorted(members - instance.joined))} did not join",
        )
        await call
        if instance.failure is not None:
            raise instance.failure
        instance.on(Event.CONNECT)
        await pair.give(instance, Order("connected", instance.record.epoch))
    except WeightcastError as error:
        await _connect_failed(pair, instance, error)


async def _connect_failed(pair: Pair, instance: Instance, error: WeightcastError) -> None:
    log.error("pair %s instance %s: connect failed: %s", pair.spec.name, instance.name, error)
    if instance.failure is None:
        instance.failure = error
    instance.on(Event.FAIL, reason=str(error))
    await pair.give(instance, Order("failed", instance.record.epoch, reason=str(error)))


def members_of(instance: Instance) -> Iterable[str]:
    """Labels of the members of an instance's communicator: the trainer ranks that send to it, then all its ranks."""
    if instance.parts is None:
        raise PairStateError(f"instance {instance.name} has no plan")
    for rank in instance.parts.trainer_ranks(instance.name):
        yield f"trainer rank {rank}"
    for rank in range(instance.spec.world_size):
        yield f"{instance.name} rank {rank}"


async def update(pair: Pair, version: int, host: str, port: int) -> None:
    """Brings every instance to `version`, each by itself, once all trainer ranks have offered it; the records tell."""
    try:
        await pair.offered(version)
    except WeightcastError as error:
        records = [await _refuse(pair, instance, version, error) for instance in pair.instances.values()]
    else:
        records = await asyncio.gather(
            *(_update_instance(pair, instance, version, host, port) for instance in pair.instances.values())
        )
    pair.decide(version, dict(zip(pair.instances, records, strict=True)))
    await pair.notify()


async def _refuse(pair: Pair, instance: Instance, version: int, error: WeightcastError) -> UpdateRecord:
    """Tells the ranks that have offered that there will be no update; the instance is as it was."""
    log.error("pair %s instance %s: version %d refused: %s", pair.spec.name, instance.name, version, error)
    record = UpdateRecord(version, False, instance.record.fenced, str(error), 0.0)
    await pair.give(instance, Order("end", instance.record.epoch, version, reason=str(error)))
    return record


async def _update_instance(pair: Pair, instance: Instance, version: int, host: str, port: int) -> UpdateRecord:
    begun = time.monotonic()
    try:
        check_version(instance.record, version)
    except VersionError as error:
        return await _refuse(pair, instance, version, error)
    attempts, reason = 0, ""
    verified: DigestCounts | None = None
    try:
        while verified is None:
            attempts += 1
            try:
                await _reconnect_if_needed(pair, instance, host, port)
                verified = await _attempt(pair, instance, version)
            except StalePlanError as stale:
                if instance.record.phase is not Phase.PREPARING:
                    raise  # bytes were written: only a full update can clear the fence
                await _best_effort(instance, "end the session", instance.driver.end())
                instance.on(Event.CANCEL, reason=str(stale))
                log.warning("pair %s instance %s: %s; planning anew", pair.spec.name, instance.name, stale)
                if attempts == MAX_ATTEMPTS:
                    raise
                await _leave_epoch(pair, instance)
    except Exception as error:  # whatever it is, the ranks have to be told and the pair has to take offers again
        failure = as_weightcast_error(error)
        reason = str(failure)
        await _update_failed(pair, instance, failure)
    committed = verified is not None
    if committed:
        reason = await _resume(instance)
    record = UpdateRecord(version, committed, instance.record.fenced, reason, elapsed(begun), verified, attempts)
    instance.updates.append(record)
    await pair.give(instance, Order("end", instance.record.epoch, version, committed=committed, reason=reason))
    return record


async def _resume(instance: Instance) -> str:
    """Lets the engine go on with the committed version; what kept it from that, in one line, or nothing."""
    try:
        await instance.driver.resume()
    except WeightcastError as error:
        log.error("instance %s: committed, but not resumed: %s", instance.name, error)
        return f"the version is committed, but the engine did not go on: {error}"
    instance.paused = False
    return ""


async def _reconnect_if_needed(pair: Pair, instance: Instance, host: str, port: int) -> None:
    if instance.record.phase is Phase.CONNECTED:
        return
    await connect_instances(pair, [instance], host, port)
    if instance.failure is not None:
        raise instance.failure


async def _leave_epoch(pair: Pair, instance: Instance) -> None:
    """Closes the communicator, so that the next attempt describes, plans and joins anew."""
    await _best_effort(instance, "disconnect", instance.driver.disconnect(instance.group(pair.spec.name)))
    instance.on(Event.FAIL, reason=instance.record.reason)


async def _attempt(pair: Pair, instance: Instance, version: int) -> DigestCounts:
    """One pass through prepare, transfer, verify and commit. Raises StalePlanError only while nothing was written."""
    deadlines, group, epoch = pair.spec.deadlines, instance.group(pair.spec.name), instance.record.epoch
    world = instance.spec.world_size
    instance.clear_update()
    instance.on(Event.PREPARE, version=version)
    instance.paused = True  # also if the call fails: a pause that timed out may have been heard
    await instance.driver.pause()
    await instance.driver.begin()
    await pair.give(instance, Order("prepare", epoch, version))
    call = _watched(pair, instance.driver.transfer(group))
    try:
        await _wait(
            pair,
            instance,
            lambda: len(instance.ready) == world or bool(instance.stale) or _refused(call),
            deadlines.prepare,
            lambda: f"instance {instance.name} ranks {_absent(instance.ready, world)} did not get ready",
        )
        if instance.stale:
            await pair.give(instance, Order("end", epoch, None, reason=instance.stale))
            raise StalePlanError(f"instance {instance.name}: {instance.stale}")
        if len(instance.ready) < world:
            raise StalePlanError(str(call.exception()))
        instance.on(Event.TRANSFER)
        await pair.give(instance, Order("run", epoch, version))
        await _transfer(pair, instance, call)
    finally:
        # The engine's call must be over before anything else is asked of the engine.
        await asyncio.gather(call, return_exceptions=True)
    await instance.driver.end()
    verified = await _verify(pair, instance)
    await instance.driver.publish(version)
    instance.on(Event.COMMIT, version=version)
    return verified


async def _transfer(pair: Pair, instance: Instance, call: asyncio.Task[None]) -> None:
    senders = set(range(pair.spec.trainer_world))
    await _wait(
        pair,
        instance,
        lambda: senders <= instance.transferred and call.done(),
        pair.spec.deadlines.transfer,
        lambda: (
            f"instance {instance.name}: "
            + (
                f"trainer ranks {_absent(instance.transferred, len(senders))}"
                if senders - instance.transferred
                else "the engine"
            )
            + " did not finish the transfer"
        ),
    )
    await call


def _watched(pair: Pair, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """An engine's call as a task whose end wakes the waits of the pair: it may be the last thing that they wait for."""

    task = asyncio.create_task(call)
    task.add_done_callback(lambda _: pair.notify_soon())
    return task


def _refused(call: asyncio.Task[None]) -> bool:
    """Whether an engine's call came back with an error; then nobody else needs to be waited for."""
    return call.done() and not call.cancelled() and call.exception() is not None


async def _verify(pair: Pair, instance: Instance) -> DigestCounts:
    world = instance.spec.world_size
    trainer_world = pair.spec.trainer_world

    def missing() -> str:
        absent = _absent(instance.digests, world)
        return f"instance {instance.name}: no digests of " + (
            f"its ranks {absent}" if absent else f"trainer ranks {_absent(instance.trainer_digests, trainer_world)}"
        )

    await _wait(
        pair,
        instance,
        lambda: len(instance.digests) == world and len(instance.trainer_digests) == trainer_world,
        pair.spec.deadlines.verify,
        missing,
    )
    instance.on(Event.VERIFY)
    plan, layout = instance.plan, instance.layout
    if plan is None or layout is None:
        raise PairStateError(f"instance {instance.name} has no plan")
    slots = {rank: table.slot for rank, table in enumerate(layout.tables)}
    return await asyncio.to_thread(
        compare_digests, plan, instance.trainer_digests, instance.name, instance.digests, slots
    )


async def _update_failed(pair: Pair, instance: Instance, error: WeightcastError) -> None:
    """Says what failed, closes the engine's session, and resumes the engine only if it holds one whole version."""
    log.error("pair %s instance %s: update failed: %s", pair.spec.name, instance.name, error)
    if instance.record.phase is not Phase.FAILED:
        instance.on(Event.FAIL, reason=str(error))
    await _best_effort(instance, "end the session", instance.driver.end())
    await _best_effort(instance, "disconnect", instance.driver.disconnect(instance.group(pair.spec.name)))
    # Only what was paused here is resumed: an engine may have been left paused by somebody who knew why.
    if instance.paused and not instance.record.fenced:
        await _best_effort(instance, "resume", instance.driver.resume())
        instance.paused = False


async def _best_effort(instance: Instance, what: str, step: Awaitable[None]) -> None:
    """After a failure: one more refusal changes nothing, but it is said; nor does an engine that answers no more."""
    try:
        await asyncio.wait_for(step, CLEAN_UP_SECONDS)
    except Exception as second:  # the first failure is the one to report
        log.warning("instance %s: could not %s: %s %s", instance.name, what, type(second).__name__, second)


async def _wait(
    pair: Pair, instance: Instance, ready: Callable[[], bool], seconds: float, missing: Callable[[], str]
) -> None:
    """Like Pair.wait, but ends at once with the failure of a rank of this instance."""
    await pair.wait(lambda: instance.failure is not None or ready(), seconds, missing)
    if instance.failure is not None:
        raise instance.failure


def _absent(present: Collection[int] | Mapping[int, object], world: int) -> str:
    return ", ".join(str(rank) for rank in range(world) if rank not in present)
