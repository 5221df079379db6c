"""Brings a Ray cluster to the state that a cluster file describes, and takes it back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from weightcast.cluster.ray_actors import EngineActor, Launch, answered, spawn, stop_actor
from weightcast.cluster.spec import ClusterSpec, InstanceSpec
from weightcast.cluster.trainer_ranks import Say, give_back, kept_spec, start_trainer, who_is_missing
from weightcast.gateway.client import TOKEN_VARIABLE, GatewayClient
from weightcast.gateway.ray_address import NAMESPACE, find_actor, import_ray
from weightcast.gateway.server.ray_actor import WORKER_VARIABLE, start_gateway, stop_gateway, worker_token
from weightcast.transfer.errors import (
    AbsentError,
    AuthorizationError,
    ControlError,
    DeadlineError,
    EngineError,
    WeightcastError,
)

__all__ = ["down", "moved", "on_ray", "up"]

_DRAIN = 60.0
_MOVE = 900.0
"""Seconds that an update under way may take before an engine at another address can join."""
_PLACED = 10.0
"""Seconds after which it is said that an engine waits for a node."""


@contextmanager
def on_ray(address: str, **settings: Any) -> Iterator[None]:
    """A context in which Ray is connected to the cluster at an address. Raises ControlError if there is none.

    "local" begins a cluster of its own, with Ray's `settings`.
    """
    ray = import_ray()
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="error", **settings)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ControlError(f"no Ray cluster at {address!r}: {' '.join(str(error).split())[:300]}") from None
    try:
        yield
    finally:
        ray.shutdown()


def up(spec: ClusterSpec, say: Say, seconds: float) -> dict[str, str]:
    """Starts gateway, engines and trainer ranks, and connects them; returns the URL of each engine.

    A pair that is up may differ from the file in its instances. Those that are new to the pair are started and join.
    Those that an earlier call has started, and that are no longer in the file, leave and are stopped. Raises
    ControlError where anything else differs.

    All that is started outlives this program, and is stopped again if any step fails. It stays where only engines are
    missing that somebody else starts: EngineError names them. `seconds` limits each step, the wait for an engine's node
    included.
    """
    operator_token = os.environ.get(TOKEN_VARIABLE, "")
    with ExitStack() as undo:
        if spec.gateway.url is None and find_actor(spec.gateway.name) is None:
            start_gateway(spec.gateway.name, state=spec.gateway.state, port=spec.gateway.port, detached=True)
            undo.callback(stop_gateway, spec.gateway.name)
            say(f"gateway ray://{spec.gateway.name} is up")
        token = _token_for_ranks(spec, operator_token, say)
        with GatewayClient(spec.gateway_url) as client:
            members = _known(client, spec, seconds)
            engines = _start_engines(spec, token, operator_token, undo, say, seconds)
            urls = {instance.name: instance.url or _where(spec, instance, seconds) for instance in spec.instances}
            if members is None:
                records = {instance.name: instance.record(urls[instance.name]) for instance in spec.instances}
                settings, topology = asdict(spec.settings), spec.topology.document if spec.topology else None
                client.create_pair(
                    spec.pair,
                    spec.trainer.ranks,
                    records,
                    settings,
                    commit=spec.commit,
                    topology=topology,
                    min_instances=spec.min_instances,
                )
                undo.callback(_withdraw, spec, partial(GatewayClient.delete_pair, force=True))
            else:
                _let_in(client, spec, urls, members, engines, undo)
                _let_go(client, spec, members, say)
            if kept_spec(spec.pair, seconds) is None:
                _start_trainer(client, spec, token, undo, say, seconds)
            else:
                absentees = [f"the engine of instance {name} has not come yet" for name in _awaited(client, spec)]
                for line in who_is_missing(spec) or absentees:
                    say(f"pair {spec.pair}: {line}")
        undo.pop_all()
    return urls


def _start_trainer(
    client: GatewayClient, spec: ClusterSpec, token: str, undo: ExitStack, say: Say, seconds: float
) -> None:
    """Starts and connects the trainer. Raises EngineError, and undoes nothing, if only others' engines are missing."""
    try:
        start_trainer(spec, token, undo, say, seconds)
    except DeadlineError as error:
        names = ", ".join(_awaited(client, spec))
        if not names:
            raise
        undo.pop_all()
        raise EngineError(
            f"{error}; all that 'up' started stays: start {names}, then run weightcast update {spec.pair} --version N; "
            "weightcast down takes it back"
        ) from None
    say(f"{spec.trainer.ranks} trainer ranks are connected")


def _awaited(client: GatewayClient, spec: ClusterSpec) -> list[str]:
    """Instances whose ranks have not registered, if somebody else is to start them and all else is well."""
    status = client.pair_status(spec.pair)
    trainer = status["trainer"]
    instances = {name: i for name, i in status["instances"].items() if i["phase"] != "left"}
    names = [name for name, i in instances.items() if len(i["registered"]) < i["world_size"]]
    started_here = {instance.name for instance in spec.instances if instance.command}
    is_well = len(trainer["registered"]) == trainer["world_size"] and not trainer["silent"]
    is_well = is_well and not any(i["phase"] == "failed" for name, i in instances.items() if name not in names)
    return names if is_well and not started_here.intersection(names) else []


def _token_for_ranks(spec: ClusterSpec, operator: str, say: Say) -> str:
    """The token that ranks and engines show to the gateway: a worker's, or the operator's if no other is known."""
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
    """Names of the pair's instances, None if there is no such pair. Raises ControlError if it is not that of `spec`."""
    record = next((pair for pair in client.status() if pair["pair"] == spec.pair), None)
    trainer_spec = kept_spec(spec.pair, seconds)
    if record is None:
        if trainer_spec is not None:
            raise ControlError(f"pair {spec.pair} has trainer ranks, but gateway {spec.gateway_url} does not know it")
        return None
    state = (record["trainer"]["world_size"], record["commit"], record.get("min_instances"), record["settings"])
    target = (spec.trainer.ranks, spec.commit, spec.min_instances, asdict(spec.settings))
    if state != target or (
        trainer_spec is not None and replace(trainer_spec, instances=()) != replace(spec, instances=())
    ):
        raise ControlError(
            f"pair {spec.pair} is up, and differs from the file in more than its instances; take it down first"
        )
    return {name for name, instance in record["instances"].items() if instance["phase"] != "left"}


def _engine_name(pair: str, instance: str) -> str:
    return f"{pair}/{instance}"


def _start_engines(spec: ClusterSpec, token: str, operator: str, undo: ExitStack, say: Say, seconds: float) -> set[str]:
    """Starts missing engines, all at once, so that an autoscaler sees their wants together; returns their names."""
    engines, starts = {}, {}
    for instance in spec.instances:
        name = _engine_name(spec.pair, instance.name)
        if not instance.command or find_actor(name) is not None:
            continue
        environment = {TOKEN_VARIABLE: token, **instance.environment}
        launch = Launch(
            instance.command, environment, instance.log_file, instance.health, instance.name, spec.gateway_url
        )
        restart = (launch, "weightcast.cluster.launch:moved", (spec, instance, operator))
        engine = spawn(
            EngineActor, name, restart, detached=True, **{"max_restarts": instance.restarts, **instance.options}
        )
        undo.callback(stop_actor, name)
        engines[instance.name], starts[instance.name] = engine, engine.start.remote(launch)
    _say_who_waits(spec, starts, say)
    for name, url in starts.items():
        answered(url, f"engine {name}", seconds)
    for name, engine in engines.items():
        url = answered(engine.wait_up.remote(seconds), f"engine {name}", seconds + _DRAIN)
        say(f"{name} is up at {url}")
    return set(engines)


def _say_who_waits(spec: ClusterSpec, starting: dict[str, Any], say: Say) -> None:
    import ray

    _, pending = ray.wait(list(starting.values()), num_returns=len(starting), timeout=_PLACED) if starting else ([], [])
    for instance in spec.instances:
        if starting.get(instance.name) in pending:
            say(f"{instance.name} waits for a node that has what it wants: {instance.options}")


def _where(spec: ClusterSpec, one: InstanceSpec, seconds: float) -> str:
    """The URL of an engine that `up` has started, now or before; empty if the engine comes by itself."""
    if not one.command:
        return ""
    actor = find_actor(_engine_name(spec.pair, one.name))
    return str(answered(actor.where.remote(), f"engine {one.name}", seconds))


def _let_in(
    client: GatewayClient, spec: ClusterSpec, urls: dict[str, str], known: set[str], started: set[str], undo: ExitStack
) -> None:
    """Brings the instances of the file into the pair."""
    for instance in spec.instances:
        name, url = instance.name, urls[instance.name]
        if name in known and name in started:  # an engine of that name has ended for good
            moved(url, spec, instance)
            continue
        client.join_instance(spec.pair, name, instance.record(url))
        if name not in known:
            undo.callback(_withdraw, spec, GatewayClient.leave_instance, name)


def _let_go(client: GatewayClient, spec: ClusterSpec, known: set[str], say: Say) -> None:
    """Stops the engines that are no longer in the file, after they have left. One that was evicted has left before."""
    names = {instance.name for instance in spec.instances}
    started = {actor.removeprefix(f"{spec.pair}/") for actor in _actors(spec.pair)}
    engines = {name for name in started if "/" not in name}
    for name in sorted((known | engines) - names):
        if name not in engines:
            say(f"{name} is in the pair, but neither in the file nor started from it; it stays")
            continue
        with suppress(AbsentError):
            client.leave_instance(spec.pair, name)
        stop_actor(_engine_name(spec.pair, name))
        say(f"{name} has left and is stopped")


def moved(url: str, spec: ClusterSpec, one: InstanceSpec, token: str | None = None) -> None:
    """Tells the gateway of an engine that was started again at another address: the old one leaves, a new one joins.

    `token` is the operator's, from WEIGHTCAST_TOKEN unless given. Does nothing for an engine that follows the gateway
    by itself: it says that it is a new one.
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
    """Stops what `up` started for a pair, and nothing else; the gateway, too, once it has no pair left."""
    if spec.gateway.url is not None or find_actor(spec.gateway.name) is not None:
        try:
            with suppress(AbsentError), GatewayClient(spec.gateway_url) as client:
                client.delete_pair(spec.pair, force=True)
        except WeightcastError as error:
            say(f"pair {spec.pair} is not deleted: {error}")
    for name in _actors(spec.pair):
        stop_actor(name)
        say(f"{name} is stopped")
    give_back(spec.pair)
    if spec.gateway.url is None and find_actor(spec.gateway.name) is not None:
        with GatewayClient(spec.gateway_url) as client:
            pairs = [pair["pair"] for pair in client.status()]
        if pairs:
            say(f"gateway ray://{spec.gateway.name} stays for {', '.join(pairs)}")
        else:
            stop_gateway(spec.gateway.name)
            say(f"gateway ray://{spec.gateway.name} is stopped")


def _withdraw(spec: ClusterSpec, call: Callable[..., object], *arguments: str) -> None:
    """Makes a call of the gateway's client about the pair, as far as there is such a gateway and pair."""
    with suppress(WeightcastError), GatewayClient(spec.gateway_url) as client:
        call(client, spec.pair, *arguments)


def _actors(pair: str) -> list[str]:
    """The names of all actors of a pair."""
    import ray

    names = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == NAMESPACE]
    return sorted(name for name in names if name.startswith(f"{pair}/"))
