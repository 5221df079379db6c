"""Brings a Ray cluster to what a cluster file describes, and takes it back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

from weightcast.cluster.placement_group import give_back
from weightcast.cluster.ray_actors import EngineActor, Launch, answered, spawn, stop_actor
from weightcast.cluster.spec import ClusterSpec, InstanceSpec
from weightcast.cluster.trainer_ranks import kept_spec, start_trainer
from weightcast.gateway.client import TOKEN_VARIABLE, GatewayClient
from weightcast.gateway.ray_address import NAMESPACE, find_actor
from weightcast.gateway.server.ray_actor import WORKER_VARIABLE, start_gateway, stop_gateway, worker_token
from weightcast.gateway.settings import Settings
from weightcast.transfer.errors import AuthorizationError, ControlError, WeightcastError

__all__ = ["down", "moved", "on_ray", "up"]

Say = Callable[[str], None]

_DRAIN = 60.0
_MOVE = 900.0
"""Seconds that an update under way may take before an engine at another address can join."""
_PLACED = 10.0
"""Seconds after which it is said that an engine waits for a node."""


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

    Of a pair that is up the instances may be others than in the file: those that are new to it are started and join,
    those that an earlier call has started and that are no longer in it leave and are stopped. Raises ControlError where
    anything else differs. All that is started outlives this program, and is stopped again if any step fails. `seconds`
    is for how long each step may take, a node for an engine included.
    """
    operator = os.environ.get(TOKEN_VARIABLE, "")
    with ExitStack() as undo:
        if spec.gateway.url is None and find_actor(spec.gateway.name) is None:
            start_gateway(spec.gateway.name, state=spec.gateway.state, port=spec.gateway.port, detached=True)
            undo.callback(stop_gateway, spec.gateway.name)
            say(f"gateway ray://{spec.gateway.name} is up")
        token = _token_for_ranks(spec, operator, say)
        with GatewayClient(spec.gateway_url) as client:
            known = _known(client, spec, seconds)
            started = _start_engines(spec, token, operator, undo, say, seconds)
            urls = {one.name: one.url or _where(spec, one, seconds) for one in spec.instances}
            records = {one.name: one.record(urls[one.name]) for one in spec.instances}
            if known is None:
                settings, world = spec.settings, spec.trainer.ranks
                client.create_pair(spec.pair, world, records, settings, commit=spec.commit, topology=spec.topology)
                undo.callback(_forget, spec)
            else:
                for one in spec.instances:
                    _let_in(client, spec, one, urls[one.name], known, started, undo)
                _let_go(client, spec, known, say)
        if kept_spec(spec.pair, seconds) is None:
            start_trainer(spec, token, undo, seconds)
            say(f"{spec.trainer.ranks} trainer ranks are connected")
        undo.pop_all()
    return urls


def _token_for_ranks(spec: ClusterSpec, operator: str, say: Say) -> str:
    """What ranks and engines show to the gateway: a token that is good for no more than being a rank."""
    if spec.gateway.url is not None and not os.environ.get(WORKER_VARIABLE):
        say(f"ranks get the operator's token; set {WORKER_VARIABLE} to the gateway's for workers")
        return operator
    token = worker_token(operator)
    try:
        with GatewayClient(spec.gateway_url, token) as client:
            client.status()
    except AuthorizationError:
        raise ControlError(
            f"gateway {spec.gateway_url} takes no worker's token of ours: set {WORKER_VARIABLE} to what it has, and "
            f"{TOKEN_VARIABLE} to the operator's"
        ) from None
    return token


def _known(client: GatewayClient, spec: ClusterSpec, seconds: float) -> set[str] | None:
    """The instances of a pair that is there, None if there is none. Raises ControlError if it is not that of `spec`."""
    found = next((pair for pair in client.status() if pair["pair"] == spec.pair), None)
    kept = kept_spec(spec.pair, seconds)
    if found is None:
        if kept is not None:
            raise ControlError(f"pair {spec.pair} has trainer ranks, but gateway {spec.gateway_url} does not know it")
        return None
    there = (found["trainer"]["world_size"], found["commit"], found["settings"])
    wanted = (spec.trainer.ranks, spec.commit, asdict(Settings.given(spec.settings)))
    if there != wanted or (kept is not None and replace(kept, instances=()) != replace(spec, instances=())):
        raise ControlError(
            f"pair {spec.pair} is up, and differs from the file in more than its instances; take it down first"
        )
    return {name for name, instance in found["instances"].items() if instance["phase"] != "left"}


def _engine_name(pair: str, instance: str) -> str:
    return f"{pair}/{instance}"


def _start_engines(spec: ClusterSpec, token: str, operator: str, undo: ExitStack, say: Say, seconds: float) -> set[str]:
    """Starts the engines that are not there, all at once, so that an autoscaler sees what they want together."""
    engines, starting = {}, {}
    for one in spec.instances:
        name = _engine_name(spec.pair, one.name)
        if not one.command or find_actor(name) is not None:
            continue
        environment = {TOKEN_VARIABLE: token, **one.environment}
        launch = Launch(one.command, environment, one.log_file, one.health, one.name, spec.gateway_url)
        again = (launch, "weightcast.cluster.launch:moved", (spec, one, operator))
        engine = spawn(EngineActor, name, again, detached=True, **{"max_restarts": one.restarts, **one.options})
        undo.callback(stop_actor, name)
        engines[one.name], starting[one.name] = engine, engine.start.remote(launch)
    _say_who_waits(spec, starting, say)
    for name, url in starting.items():
        answered(url, f"engine {name}", seconds)
    for name, engine in engines.items():
        url = answered(engine.wait_up.remote(seconds), f"engine {name}", seconds + _DRAIN)
        say(f"{name} is up at {url}")
    return set(engines)


def _say_who_waits(spec: ClusterSpec, starting: dict[str, Any], say: Say) -> None:
    import ray

    _, waiting = ray.wait(list(starting.values()), num_returns=len(starting), timeout=_PLACED) if starting else ([], [])
    for one in spec.instances:
        if starting.get(one.name) in waiting:
            say(f"{one.name} waits for a node that has what it wants: {one.options}")


def _where(spec: ClusterSpec, one: InstanceSpec, seconds: float) -> str:
    """Where an engine is that `up` has started, now or before; nowhere if it comes by itself."""
    if not one.command:
        return ""
    actor = find_actor(_engine_name(spec.pair, one.name))
    return str(answered(actor.where.remote(), f"engine {one.name}", seconds))


def _let_in(
    client: GatewayClient,
    spec: ClusterSpec,
    one: InstanceSpec,
    url: str,
    known: set[str],
    started: set[str],
    undo: ExitStack,
) -> None:
    """Has an instance of the file in the pair."""
    if one.name not in known or one.name not in started:
        client.join_instance(spec.pair, one.name, one.record(url))
        if one.name not in known:
            undo.callback(_leave, spec, one.name)
    else:  # an engine of that name has ended for good
        moved(url, spec, one)


def _let_go(client: GatewayClient, spec: ClusterSpec, known: set[str], say: Say) -> None:
    """Stops the engines that are no longer in the file, after they have left."""
    wanted = {one.name for one in spec.instances}
    for name in sorted(known - wanted):
        if find_actor(_engine_name(spec.pair, name)) is None:
            say(f"{name} is in the pair, but neither in the file nor started from it; it stays")
            continue
        client.leave_instance(spec.pair, name)
        stop_actor(_engine_name(spec.pair, name))
        say(f"{name} has left and is stopped")


def moved(url: str, spec: ClusterSpec, one: InstanceSpec, token: str | None = None) -> None:
    """An engine was started again, at another address: for the gateway it has left, and a new one joins. `token` is the
    operator's, from WEIGHTCAST_TOKEN unless given.

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


def down(spec: ClusterSpec, say: Say) -> None:
    """Stops what `up` started for a pair, and nothing else; the gateway too, once it has no pair left."""
    if spec.gateway.url is not None or find_actor(spec.gateway.name) is not None:
        _forget(spec)
    for name in _actors(spec.pair):
        stop_actor(name)
        say(f"{name} is stopped")
    give_back(spec.pair)
    if spec.gateway.url is None and find_actor(spec.gateway.name) is not None:
        with GatewayClient(spec.gateway_url) as client:
            left = [pair["pair"] for pair in client.status()]
        if left:
            say(f"gateway ray://{spec.gateway.name} stays for {', '.join(left)}")
        else:
            stop_gateway(spec.gateway.name)
            say(f"gateway ray://{spec.gateway.name} is stopped")


def _forget(spec: ClusterSpec) -> None:
    with suppress(WeightcastError), GatewayClient(spec.gateway_url) as client:
        client.delete_pair(spec.pair)


def _leave(spec: ClusterSpec, instance: str) -> None:
    with suppress(WeightcastError), GatewayClient(spec.gateway_url) as client:
        client.leave_instance(spec.pair, instance)


def _actors(pair: str) -> list[str]:
    """The names of all actors of a pair."""
    import ray

    names = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == NAMESPACE]
    return sorted(name for name in names if name.startswith(f"{pair}/"))
