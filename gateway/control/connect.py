"""Steps of a connect: describe, register, merge, plan, join. Those of the update itself are in `update`.

Each instance goes its own way: the failure of one touches no other.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from weightcast.gateway.addresses import UNKNOWN, Place, check_reachable
from weightcast.gateway.control.instance import Instance, Step, absent
from weightcast.gateway.control.instance_state import Event, Phase
from weightcast.gateway.control.pair import Pair, as_weightcast_error
from weightcast.gateway.layouts.digest_check import DigestCheck
from weightcast.gateway.layouts.merge import InstanceLayout, TrainerLayout, merge_instance, merge_trainer
from weightcast.gateway.records import Action, Order
from weightcast.transfer.deadline import Deadline
from weightcast.transfer.errors import AddressError, ControlError, PairStateError, WeightcastError
from weightcast.transfer.plan.parts import PlanParts
from weightcast.transfer.planner.planner import plan_transfer
from weightcast.transfer.planner.topology import Hosts

__all__ = ["connect", "connect_instances", "glance", "merge_trainer_reports", "watched"]

log = logging.getLogger("weightcast.gateway")

_SHOWN_MEMBERS = 8
"""Number of missing members of a communicator that a message names."""
_GLANCE = 1.0
"""Seconds to see if an engine is there again whose host refused connections."""


async def connect(pair: Pair, generation: int, gateway_host: str, gateway_port: int) -> None:
    """Connects every instance to a generation of the trainer. Failures stay with their instance.

    Each is released as soon as it is connected, or leaves. If the trainer has started anew before this connect's turn,
    nothing is done: another connect follows.
    """
    step = Step(generation)
    instances = await pair.hold(step)
    if not instances:
        return
    try:
        try:
            await merge_trainer_reports(pair)
            await glance(instances)
            pair.check_open()
            if generation != pair.generation:  # what told the instances so is forgotten by a connect
                raise PairStateError(f"pair {pair.spec.name}: the trainer started anew before its instances connected")
        except Exception as error:  # whatever it is, the ranks have to be told
            for instance in instances:
                _connect_failed(pair, instance, as_weightcast_error(error))
        else:
            pair.release(step, [instance for instance in instances if not instance.present])
            instances = [instance for instance in instances if instance.present]
            await connect_instances(pair, instances, gateway_host, gateway_port, lambda i: pair.release(step, [i]))
    finally:
        pair.release(step, instances)


async def glance(instances: Sequence[Instance]) -> None:
    """Asks engines whose hosts refused connections once more if they are there, which costs nothing."""
    await asyncio.gather(
        *(i.driver.probe(_GLANCE) for i in instances if i.driver.absence is not None and i.driver.absence.refused)
    )


async def connect_instances(
    pair: Pair,
    instances: Sequence[Instance],
    host: str,
    port: int,
    ended: Callable[[Instance], None] = lambda instance: None,
) -> None:
    """Starts a new epoch for each of `instances`, planned together so that the trainer's load is spread over all.

    `ended` is told of each instance that is connected, or has failed.
    """
    calls = {}
    for instance in instances:
        if (death := instance.death) is not None:  # nobody waits for it
            instance.failure = None
            _connect_failed(pair, instance, death)
            ended(instance)
    instances = [instance for instance in instances if instance.death is None]
    for instance in instances:
        if instance.record.phase is not Phase.REGISTERING:
            instance.on(Event.REJOIN)
            instance.clear_epoch()
        try:
            await instance.save()  # a later life of the gateway must not count this epoch again
            pair.check_open()  # what a new epoch has forgotten
        except ControlError as error:
            instance.stop(error)
        pair.give(instance, Order(Action.REGISTER, instance.record.epoch, instance.updating))
        calls[instance.name] = watched(instance, _engine_connect(instance, host, port))
    layouts = await asyncio.gather(*(_merge_instance(pair, i) for i in instances), return_exceptions=True)
    merged_layouts: dict[str, InstanceLayout] = {}
    for instance, layout in zip(instances, layouts, strict=True):
        if isinstance(layout, BaseException):
            _connect_failed(pair, instance, as_weightcast_error(layout))
        else:
            merged_layouts[instance.name] = instance.layout = layout
    if merged_layouts:
        try:
            with pair.waiting(math.inf, lambda: f"the plan for {_listed(list(merged_layouts))} was not made"):
                await _plan(pair, merged_layouts)
        except Exception as error:
            for name in merged_layouts:
                _connect_failed(pair, pair.instances[name], as_weightcast_error(error))

    async def finish(instance: Instance) -> None:
        await _finish_connect(pair, instance, calls[instance.name])
        ended(instance)

    await asyncio.gather(*map(finish, instances))


async def _engine_connect(instance: Instance, host: str, port: int) -> None:
    """Makes the engine's own call. Its failure becomes that of the instance, unless a rank has told a better one."""
    try:
        await instance.driver.connect(host, port, instance.group)
    except WeightcastError as error:
        if instance.failure is None:
            instance.failure = error


async def merge_trainer_reports(pair: Pair, deadline: Deadline | None = None) -> None:
    """Merges the trainer's layout, once all of its ranks have registered.

    `deadline` is that of the update which needs the layout. Raises DeadlineError naming ranks that have not registered.
    """
    if pair.trainer_layout is None:
        seconds = pair.spec.settings.register
        await pair.wait(
            lambda: pair.closed is not None or len(pair.trainer_reports) == pair.spec.trainer_world,
            seconds if deadline is None else min(seconds, deadline.left),
            lambda: f"trainer ranks {absent(pair.trainer_reports, pair.spec.trainer_world)} did not register",
            lambda: pair.accounts(r for r in range(pair.spec.trainer_world) if r not in pair.trainer_reports),
        )
        pair.check_open()
        generation, reports = pair.generation, list(pair.trainer_reports.values())
        layout = await asyncio.to_thread(merge_trainer, reports)
        if generation == pair.generation:  # else it is that of a trainer that has started anew meanwhile
            pair.trainer_layout = layout


async def _merge_instance(pair: Pair, instance: Instance) -> InstanceLayout:
    world = instance.world
    await instance.until(
        lambda: len(instance.reports) == world,
        pair.spec.settings.register,
        lambda: f"instance {instance.name} ranks {absent(instance.reports, world)} did not register",
        instance.unregistered,
    )
    catalog = _trainer_layout(pair).tensors
    return await asyncio.to_thread(merge_instance, instance.name, list(instance.reports.values()), catalog)


def _trainer_layout(pair: Pair) -> TrainerLayout:
    if pair.trainer_layout is None:
        raise PairStateError(f"pair {pair.spec.name}: the trainer has not registered; connect first")
    return pair.trainer_layout


async def _plan(pair: Pair, layouts: Mapping[str, InstanceLayout]) -> None:
    trainer = _trainer_layout(pair)
    joined = {name: layout.joined for name, layout in layouts.items()}
    topology = pair.spec.topology
    if topology is not None:
        topology = replace(topology, between_instances=False)  # instances share no communicator
    hosts = Hosts.of(trainer.hosts, [layout.hosts for layout in layouts.values()], topology)
    plan = await asyncio.to_thread(plan_transfer, trainer.joined, joined, hosts=hosts, topology=topology)
    share = pair.spec.bucket_bytes // max(1, len(pair.instances))
    parts = await asyncio.to_thread(PlanParts, plan, share, verify=pair.spec.verify)
    checks = DigestCheck(plan)
    for name in layouts:
        instance = pair.instances[name]
        try:
            check_reachable(name, _places(pair, instance, parts))
        except AddressError as error:
            _connect_failed(pair, instance, error)
            continue
        instance.parts, instance.checks = parts, checks
        instance.on(Event.PLAN)
        pair.give(instance, Order(Action.JOIN, instance.record.epoch))


def _places(pair: Pair, instance: Instance, parts: PlanParts) -> dict[str, Place]:
    """Places of the members of an instance's communicator, with the addresses at which others have to reach them.

    All reach the first, where they meet. NCCL finds the addresses of the others by itself.
    """
    senders = parts.trainer_ranks(instance.name)
    places = {f"trainer rank {rank}": pair.trainer_places.get(rank, UNKNOWN) for rank in senders}
    places |= {f"{instance.name} rank {rank}": place for rank, place in sorted(instance.places.items())}
    if instance.spec.backend == "nccl":
        for member in tuple(places)[1:]:
            places[member] = places[member]._replace(address="")
    return places


async def _finish_connect(pair: Pair, instance: Instance, call: asyncio.Task[None]) -> None:
    def missing() -> str:
        return f"the engine of instance {instance.name} did not connect"

    if instance.parts is None:
        await _give_up(call)
        return
    members = set(instance.members)
    try:
        await instance.until(
            lambda: members <= instance.joined,
            pair.spec.settings.join,
            lambda: f"instance {instance.name}: {_listed(sorted(members - instance.joined))} did not join",
            lambda: _unjoined(pair, instance),
        )
        await instance.in_update(call, missing)
        if instance.failure is not None:
            raise instance.failure
        instance.on(Event.CONNECT)
        instance.generation = instance.step.generation if instance.step is not None else 0
        pair.give(instance, Order(Action.CONNECTED, instance.record.epoch, instance.updating))
    except Exception as error:  # whatever it is, the ranks have to be told
        await _give_up(call)
        _connect_failed(pair, instance, as_weightcast_error(error))


def _listed(members: Sequence[str]) -> str:
    """The first members of a communicator, and the number of the others."""
    more = f" and {len(members) - _SHOWN_MEMBERS} more" if len(members) > _SHOWN_MEMBERS else ""
    return ", ".join(members[:_SHOWN_MEMBERS]) + more


def _unjoined(pair: Pair, instance: Instance) -> str:
    """Accounts of the ranks of both sides that have not joined."""
    if instance.parts is None:
        return ""
    senders = [r for r in instance.parts.trainer_ranks(instance.name) if f"trainer rank {r}" not in instance.joined]
    ranks = [r for r in range(instance.world) if f"{instance.name} rank {r}" not in instance.joined]
    return ", ".join(filter(None, [pair.accounts(senders), instance.accounts(ranks)]))


async def _give_up(call: asyncio.Task[None]) -> None:
    """Cancels the questions to an engine about a connect that is over."""
    call.cancel()
    await asyncio.wait([call])


def _connect_failed(pair: Pair, instance: Instance, error: WeightcastError) -> None:
    fields = {"pair": pair.spec.name, "instance": instance.name}
    log.error("pair %s instance %s: connect failed: %s", pair.spec.name, instance.name, error, extra=fields)
    instance.stop(error)
    instance.on(Event.FAIL, reason=str(error))
    pair.give(instance, Order(Action.FAILED, instance.record.epoch, instance.updating, reason=str(error)))


def watched(instance: Instance, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Starts an engine's call as a task whose end wakes the waits of the instance.

    The call may be the last thing that they wait for.
    """
    task = asyncio.create_task(call)
    task.add_done_callback(lambda _: instance.notify())
    return task
