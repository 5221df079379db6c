"""The trainer ranks of a pair on Ray: started, told to update, and made to begin anew when one was started again."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, cast

from weightcast.cluster.ray_actors import CONNECTED, RankActor, RankPlace, answered, spawn, stop_actor
from weightcast.cluster.spec import ClusterSpec
from weightcast.gateway.client import TOKEN_VARIABLE, GatewayClient
from weightcast.gateway.ray_address import find_actor
from weightcast.gateway.records import wait_lines
from weightcast.gateway.reminder import SAY_SECONDS, Reminder
from weightcast.transfer.errors import ControlError, DeadlineError, EngineError, WeightcastError
from weightcast.transfer.layout.summaries import number_ranges
from weightcast.transfer.transports.addresses import host_port

if TYPE_CHECKING:
    from weightcast.gateway.ranks.trainer import UpdateResult

__all__ = ["Say", "begin", "give_back", "heard", "kept_spec", "start_trainer", "update", "who_is_missing"]

Say = Callable[[str], None]
_ASKED = 5.0
"""Seconds that a gateway may take to say who is missing."""
_LEAST = 0.001
"""CPUs of a bundle for ranks that ask for nothing: Ray has no empty ones."""


def _name(pair: str, rank: int) -> str:
    return f"{pair}/trainer/{rank}"


def kept_spec(pair: str, seconds: float) -> ClusterSpec | None:
    """The cluster file by which the trainer of a pair was started, None if there is no such trainer."""
    first = find_actor(_name(pair, 0))
    if first is None:
        return None
    spec: ClusterSpec = _answer(first, "kept", seconds)
    return spec


def start_trainer(spec: ClusterSpec, token: str, undo: ExitStack, say: Say, seconds: float) -> None:
    """Starts all ranks and connects them; `token` is what they show to the gateway. `undo` gets what stops them.

    Meanwhile `say` is told who is missing. Raises DeadlineError naming them.
    """
    environment = {TOKEN_VARIABLE: token, **spec.trainer.environment}
    options = {"max_restarts": spec.trainer.restarts, **spec.trainer.options}
    undo.callback(give_back, spec.pair)
    actors = []
    for rank, placement in enumerate(_reserve(spec, seconds)):
        name = _name(spec.pair, rank)
        actors.append(spawn(RankActor, name, environment, spec, detached=True, **{**options, **placement}))
        undo.callback(stop_actor, name)
    _begin(actors, spec, say, seconds)


def _reserve(spec: ClusterSpec, seconds: float) -> list[dict[str, Any]]:
    """Ray's options for each rank's place: none where the file names no strategy.

    Raises EngineError where the cluster has no room for all within `seconds`.
    """
    strategy, ranks = spec.trainer.strategy, spec.trainer.ranks
    if strategy is None:
        return [{}] * ranks
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle = _bundle(spec.trainer.options)
    group = ray.util.placement_group([bundle] * ranks, strategy, _group_name(spec.pair), lifetime="detached")
    if not group.wait(seconds):
        ray.util.remove_placement_group(group)
        raise EngineError(
            f"pair {spec.pair}: no room for {ranks} trainer ranks of {bundle} each by {strategy} within {seconds:g} s"
        )
    return [{"scheduling_strategy": PlacementGroupSchedulingStrategy(group, rank)} for rank in range(ranks)]


def give_back(pair: str) -> None:
    """Ends the reservation of a pair, if there is one."""
    import ray

    with suppress(ValueError):  # there is none
        ray.util.remove_placement_group(ray.util.get_placement_group(_group_name(pair)))


def _group_name(pair: str) -> str:
    return f"{pair}/trainer"


def _bundle(options: Mapping[str, Any]) -> dict[str, float]:
    """The resources that an actor with these options takes, by name."""
    counts = {"CPU": options.get("num_cpus", 0), "GPU": options.get("num_gpus", 0), **options.get("resources", {})}
    return {name: count for name, count in counts.items() if count} or {"CPU": _LEAST}


def _begin(actors: list[Any], spec: ClusterSpec, say: Say, seconds: float) -> None:
    """Has every rank describe itself and connect."""
    begin(actors, seconds, "weightcast.cluster.trainer_rank:serve", spec)
    _hear_all(actors, CONNECTED, spec, say, seconds)


def begin(actors: list[Any], seconds: float, function: str, *arguments: object) -> None:
    """Runs `module:name` on every rank, with its place, the arguments and a Mail, and returns at once."""
    futures = [actor.address.remote() for actor in actors]
    addresses = [answered(future, f"trainer rank {rank}", seconds) for rank, future in enumerate(futures)]
    rendezvous = host_port(addresses[0], answered(actors[0].free_port.remote(), "trainer rank 0", seconds))
    for rank, (actor, address) in enumerate(zip(actors, addresses, strict=True)):
        call = actor.begin.remote(function, RankPlace(rank, address, rendezvous), *arguments)
        answered(call, f"trainer rank {rank}", seconds)


def update(pair: str, version: int, say: Say, seconds: float, *, restart: bool = False) -> UpdateResult:
    """Has trainer ranks that `up` started send their weights as `version`, of a new lineage with `restart`.

    Meanwhile `say` is told who is missing. If one of them was started again, all begin and connect anew first. Raises
    what the update raised, and ControlError if there are no such ranks.
    """
    import ray

    spec = kept_spec(pair, seconds)
    if spec is None:
        raise ControlError(f"no trainer ranks of pair {pair!r} were started by 'weightcast up' in this cluster")
    actors = [find_actor(_name(pair, rank)) for rank in range(spec.trainer.ranks)]
    if None in actors:
        raise EngineError(f"pair {pair}: trainer rank {actors.index(None)} has ended for good; run down and up again")
    if not all([_answer(actor, "runs", seconds) for actor in actors]):
        ray.get([actor.tell.remote(None) for actor in actors])
        if not all(ray.get([actor.finish.remote(seconds) for actor in actors])):
            raise EngineError(f"pair {pair}: trainer ranks do not end within {seconds:g} s")
        _begin(actors, spec, say, seconds)
    call = uuid.uuid4().hex  # a late answer to an earlier call of the same version is not one to this
    ray.get([actor.tell.remote((call, version, restart)) for actor in actors])
    return cast("UpdateResult", _hear_all(actors, call, spec, say, seconds)[0])


def _answer(actor: Any, method: str, seconds: float) -> Any:
    """The answer of an actor that may be starting again. Raises EngineError for one that is gone for good."""
    import ray

    deadline = time.monotonic() + seconds
    while True:
        try:
            return ray.get(getattr(actor, method).remote(), timeout=max(0.1, deadline - time.monotonic()))
        except ray.exceptions.RayError as error:
            if not isinstance(error, ray.exceptions.ActorUnavailableError) or time.monotonic() > deadline:
                raise EngineError(f"a trainer rank has ended: {' '.join(str(error).split())[:300]}") from None
            time.sleep(0.2)


def _hear_all(actors: list[Any], about: object, spec: ClusterSpec, say: Say, seconds: float) -> list[object]:
    """The message of each rank about something; late messages about something else are passed over.

    Meanwhile `say` is told who is missing. Raises the error that a rank sends, EngineError for a rank that has ended,
    and DeadlineError naming who is missing.
    """
    messages: dict[int, object] = {}

    def silent_ranks() -> str:
        return number_ranges(rank for rank in range(len(actors)) if rank not in messages)

    def remind() -> None:
        for line in who_is_missing(spec) or [f"trainer ranks {silent_ranks()} have not answered yet"]:
            say(f"pair {spec.pair}: {line}")

    reminder = Reminder(remind, SAY_SECONDS, SAY_SECONDS)
    deadline = time.monotonic() + seconds
    while len(messages) < len(actors) and time.monotonic() < deadline:
        futures = {rank: actor.hear.remote(1.0) for rank, actor in enumerate(actors) if rank not in messages}
        for rank, future in futures.items():
            message = heard(future, rank, seconds)
            if isinstance(message, tuple) and message[0] == about:
                messages[rank] = message[1]
        reminder.tick()
    for message in messages.values():
        if isinstance(message, Exception):
            raise message
    if len(messages) < len(actors):
        lines = who_is_missing(spec) or [f"trainer ranks {silent_ranks()} said nothing"]
        raise DeadlineError(f"pair {spec.pair}: not done within {seconds:g} s: {'; '.join(lines)}")
    return [messages[rank] for rank in range(len(actors))]


def who_is_missing(spec: ClusterSpec) -> list[str]:
    """The waits of a pair under way, a line each; empty if there are none, or the gateway does not tell."""
    with suppress(WeightcastError), GatewayClient(spec.gateway_url, timeout=_ASKED) as client:
        return wait_lines(client.waiting(spec.pair))
    return []


def heard(future: Any, rank: int, seconds: float) -> object:
    """The message of a rank for which its actor was asked, None if it has sent none.

    Raises the error that the rank has sent, and EngineError for one that has ended or whose actor does not answer.
    """
    _, message = answered(future, f"trainer rank {rank}", seconds)
    if isinstance(message, Exception):
        raise message
    return message
