"""Starts and stops what a cluster file describes, as actors of Ray, and tells its trainer ranks to update."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from weightcast.cluster.ray_actors import CONNECTED, EngineActor, Launch, RankActor, spawn
from weightcast.cluster.spec import ClusterSpec, InstanceSpec
from weightcast.gateway.client import TOKEN_VARIABLE, GatewayClient
from weightcast.gateway.ray_actor import NAMESPACE, find_actor, gateway_url, start_gateway, stop_gateway
from weightcast.transfer.errors import ControlError, EngineError, WeightcastError

__all__ = ["down", "moved", "on_ray", "up", "update"]

Say = Callable[[str], None]

_DRAIN = 60.0
_MOVE = 900.0
"""Seconds that an update under way may take before an engine at another address can join."""


@contextmanager
def on_ray(address: str) -> Iterator[None]:
    """In the Ray cluster at an address. Raises ControlError if there is none."""
    import ray

    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ControlError(f"no Ray cluster at {address!r}: {' '.join(str(error).split())[:300]}") from None
    try:
        yield
    finally:
        ray.shutdown()


def up(spec: ClusterSpec, say: Say, seconds: float) -> dict[str, str]:
    """Starts gateway, engines and trainer ranks, and connects them; returns where each engine is.

    All that it starts outlives this program, and is stopped again if any step fails. `seconds` is for how long each
    step may take.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    with ExitStack() as undo:
        if spec.gateway.url is None and find_actor(spec.gateway.name) is None:
            start_gateway(spec.gateway.name, state=spec.gateway.state, port=spec.gateway.port, detached=True)
            undo.callback(stop_gateway, spec.gateway.name)
            say(f"gateway ray://{spec.gateway.name} is up")
        gateway = spec.gateway.url or gateway_url(spec.gateway.name)
        undo.callback(_stop_actors, spec.pair)
        engines, urls = {}, {one.name: one.url or "" for one in spec.instances}
        for one in spec.instances:
            if one.command:
                command = [gateway if part == "{gateway}" else part for part in one.command]
                launch = Launch(command, {TOKEN_VARIABLE: token, **one.environment}, one.log, one.health)
                again = (launch, "weightcast.cluster.launch:moved", (spec, one, token))
                name, restarts = f"{spec.pair}/{one.name}", one.restarts
                engine = spawn(EngineActor, name, again, detached=True, **{"max_restarts": restarts, **one.options})
                engines[one.name] = engine
                urls[one.name] = _get(engine.start.remote(launch), f"engine {one.name}", seconds)
        for name, engine in engines.items():
            _get(engine.wait_up.remote(seconds), f"engine {name}", seconds + _DRAIN)
            say(f"{name} is up at {urls[name]}")
        records = {one.name: one.record(urls[one.name]) for one in spec.instances}
        with GatewayClient(spec.gateway_url) as client:
            client.create_pair(
                spec.pair, spec.trainer.ranks, records, spec.settings, commit=spec.commit, topology=spec.topology
            )
            undo.callback(_forget, spec)
        _start_trainer(spec, token, seconds)
        say(f"{spec.trainer.ranks} trainer ranks are connected")
        undo.pop_all()
    return urls


def moved(url: str, spec: ClusterSpec, one: InstanceSpec, token: str) -> None:
    """An engine was started again, at another address: for the gateway it has left, and a new one joins.

    An engine that follows the gateway by itself says that it is a new one.
    """
    if one.kind == "worker":
        return
    with GatewayClient(spec.gateway_url, token, outage=_DRAIN) as client:
        deadline = time.monotonic() + _MOVE
        while True:
            try:
                client.leave_instance(spec.pair, one.name)
                return client.join_instance(spec.pair, one.name, one.record(url))
            except WeightcastError:  # an update is under way, which has deadlines
                if time.monotonic() > deadline:
                    raise
                time.sleep(1.0)


def _start_trainer(spec: ClusterSpec, token: str, seconds: float) -> None:
    environment = {TOKEN_VARIABLE: token, **spec.trainer.environment}
    options = {"max_restarts": spec.trainer.restarts, **spec.trainer.options}
    actors = [
        spawn(RankActor, _trainer_name(spec.pair, rank), environment, spec, detached=True, **options)
        for rank in range(spec.trainer.ranks)
    ]
    _begin(actors, spec, seconds)


def _begin(actors: list[Any], spec: ClusterSpec, seconds: float) -> None:
    """Has every rank describe itself and connect."""
    import ray

    addresses = ray.get([actor.address.remote() for actor in actors])
    rendezvous = f"{addresses[0]}:{ray.get(actors[0].free_port.remote())}"
    for rank, (actor, address) in enumerate(zip(actors, addresses, strict=True)):
        ray.get(actor.begin.remote("weightcast.cluster.trainer_rank:serve", spec, rank, address, rendezvous))
    _hear_all(actors, CONNECTED, seconds)


def update(pair: str, version: int, seconds: float) -> dict[str, Any]:
    """Tells every trainer rank of a pair that `up` started to send its weights as `version`; the gateway's record by
    instance. If one of them was started again, all begin and connect anew before it.

    Raises what the update raised, and ControlError if there are no such ranks.
    """
    import ray

    actors: list[Any] = []
    while (actor := find_actor(_trainer_name(pair, len(actors)))) is not None:
        actors.append(actor)
    if not actors:
        raise ControlError(f"no trainer ranks of pair {pair!r} were started by 'weightcast up' in this cluster")
    if not all([_answer(actor, "runs", seconds) for actor in actors]):
        ray.get([actor.tell.remote(None) for actor in actors])
        if not all(ray.get([actor.finish.remote(seconds) for actor in actors])):
            raise EngineError(f"pair {pair}: trainer ranks do not end within {seconds:g} s")
        _begin(actors, _answer(actors[0], "kept", seconds), seconds)
    ray.get([actor.tell.remote(version) for actor in actors])
    found = _hear_all(actors, version, seconds)[0]
    assert isinstance(found, dict)
    return found


def _answer(actor: Any, method: str, seconds: float) -> Any:
    """What an actor says, which may be starting again. Raises EngineError for one that is gone for good."""
    import ray

    deadline = time.monotonic() + seconds
    while True:
        try:
            return ray.get(getattr(actor, method).remote(), timeout=max(0.1, deadline - time.monotonic()))
        except ray.exceptions.RayError as error:
            if not isinstance(error, ray.exceptions.ActorUnavailableError) or time.monotonic() > deadline:
                raise EngineError(f"a trainer rank has ended: {' '.join(str(error).split())[:300]}") from None
            time.sleep(0.2)


def down(spec: ClusterSpec, say: Say) -> None:
    """Stops what `up` started for a pair, and nothing else; the gateway too, once it has no pair left."""
    if spec.gateway.url is not None or find_actor(spec.gateway.name) is not None:
        _forget(spec)
    for name in _stop_actors(spec.pair):
        say(f"{name} is stopped")
    if spec.gateway.url is None and find_actor(spec.gateway.name) is not None:
        with GatewayClient(spec.gateway_url) as client:
            left = [pair["pair"] for pair in client.status()]
        if left:
            say(f"gateway ray://{spec.gateway.name} stays for {', '.join(left)}")
        else:
            stop_gateway(spec.gateway.name)
            say(f"gateway ray://{spec.gateway.name} is stopped")


def _trainer_name(pair: str, rank: int) -> str:
    return f"{pair}/trainer/{rank}"


def _forget(spec: ClusterSpec) -> None:
    with suppress(WeightcastError), GatewayClient(spec.gateway_url) as client:
        client.delete_pair(spec.pair)


def _stop_actors(pair: str) -> list[str]:
    """Ends all actors of a pair, engines in good order; their names."""
    import ray

    names = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == NAMESPACE]
    mine = sorted(name for name in names if name.startswith(f"{pair}/"))
    for name in mine:
        actor = find_actor(name)
        if actor is None:
            continue
        with suppress(ray.exceptions.RayError, AttributeError):
            ray.get(actor.stop.remote(), timeout=_DRAIN)
        ray.kill(actor, no_restart=True)
    return mine


def _hear_all(actors: list[Any], about: object, seconds: float) -> list[object]:
    """What each rank says about something; what it said late about something else is passed over.

    Raises what one of them says was wrong, and EngineError for one that has ended or says nothing.
    """
    import ray

    said: dict[int, object] = {}
    deadline = time.monotonic() + seconds
    while len(said) < len(actors) and time.monotonic() < deadline:
        asked = {rank: actor.hear.remote(1.0) for rank, actor in enumerate(actors) if rank not in said}
        for rank, answer in asked.items():
            try:
                there, what = ray.get(answer)
            except ray.exceptions.RayError as error:
                raise EngineError(f"trainer rank {rank} ended: {' '.join(str(error).split())[:300]}") from None
            if isinstance(what, Exception):
                raise what
            if there and isinstance(what, tuple) and what[0] == about:
                said[rank] = what[1]
    for what in said.values():
        if isinstance(what, Exception):
            raise what
    missing = [rank for rank in range(len(actors)) if rank not in said]
    if missing:
        raise EngineError(f"trainer ranks {', '.join(map(str, missing))} said nothing for {seconds:g} s")
    return [said[rank] for rank in range(len(actors))]


def _get(what: Any, who: str, seconds: float) -> Any:
    import ray

    try:
        return ray.get(what, timeout=seconds)
    except ray.exceptions.RayTaskError as error:
        raise (
            error.cause if isinstance(error.cause, WeightcastError) else EngineError(f"{who}: {error.cause}")
        ) from None
    except ray.exceptions.RayError as error:
        raise EngineError(f"{who}: {' '.join(str(error).split())[:300]}") from None
