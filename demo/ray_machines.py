"""The demo on Ray: the gateway, the trainer ranks and the servers are actors of a cluster."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from weightcast.cluster.ray_actors import EngineActor, Launch, RankActor, spawn
from weightcast.demo.config import DemoConfig, ServerConfig
from weightcast.demo.machines import Trainers
from weightcast.demo.processes import Server, server_command, server_environment
from weightcast.demo.trainer import RankPlace
from weightcast.gateway.client import TOKEN_VARIABLE
from weightcast.gateway.server.ray_actor import start_gateway, worker_token
from weightcast.transfer.errors import EngineError

__all__ = ["RayMachines"]

_NAME = "weightcast-demo"


class RayMachines:
    """A cluster: the one at `config.ray`, or for "local" one on this machine that ends with the demo."""

    def __init__(self, config: DemoConfig, model: Path, token: str) -> None:
        self._config, self._model, self._token = config, model, token
        self._stack = ExitStack()

    def __enter__(self) -> RayMachines:
        import ray

        settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "include_dashboard": False}
        if self._config.ray == "local":
            settings |= {"num_cpus": os.cpu_count(), "_node_ip_address": "127.0.0.1"}
        else:
            settings = {"address": self._config.ray, "log_to_driver": False}
        ray.init(**settings)
        self._stack.callback(ray.shutdown)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, tb)

    def start_gateway(self) -> str:
        state = self._config.work / "gateway.db"
        handle = start_gateway(_NAME, tokens={"operator": self._token}, state=state)
        self._stack.callback(_kill, handle)
        return f"ray://{_NAME}"

    def start_server(self, spec: ServerConfig) -> Server:
        import ray

        log = self._config.work / f"{spec.name}.log"
        actor = spawn(EngineActor, f"{_NAME}-{spec.name}")
        self._stack.callback(_stop, actor)
        command = server_command(spec, self._config, self._model, "{python}", "{host}", "{port}")
        environment = server_environment(spec, worker_token(self._token))
        return _RayServer(spec, ray.get(actor.start.remote(Launch(command, environment, str(log)))), log, actor)

    def start_trainers(self, url: str) -> Trainers:
        import ray

        environment = {TOKEN_VARIABLE: worker_token(self._token)}
        actors = [spawn(RankActor, f"{_NAME}-trainer-{rank}", environment) for rank in range(self._config.trainers)]
        for actor in actors:
            self._stack.callback(_kill, actor)
        addresses = ray.get([actor.address.remote() for actor in actors])
        rendezvous = f"{addresses[0]}:{ray.get(actors[0].free_port.remote())}"
        for rank, (actor, address) in enumerate(zip(actors, addresses, strict=True)):
            location = RankPlace(rank, address, rendezvous)
            ray.get(actor.begin.remote("weightcast.demo.trainer:train", location, self._config, self._model, url))
        return _RayTrainers(actors, self._config.deadline)


def _kill(actor: Any) -> None:
    import ray

    ray.kill(actor, no_restart=True)


def _stop(actor: Any) -> None:
    import ray

    with suppress(ray.exceptions.RayError):
        ray.get(actor.stop.remote(), timeout=30.0)
    _kill(actor)


class _RayServer(Server):
    """A server that an actor holds."""

    def __init__(self, spec: ServerConfig, url: str, log: Path, actor: Any) -> None:
        super().__init__(spec, url, log)
        self._actor = actor

    def wait_up(self, seconds: float) -> None:
        import ray

        ray.get(self._actor.wait_up.remote(seconds))


class _RayTrainers:
    """The trainer ranks' actors."""

    def __init__(self, actors: list[Any], seconds: float) -> None:
        self._actors, self._seconds = actors, seconds

    def send(self, what: object) -> None:
        import ray

        ray.get(self._actors[0].tell.remote(what))

    def receive(self) -> object:
        import ray

        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline:
            for rank, actor in enumerate(self._actors):
                # Rank 0 is waited for; of the others only an error is expected.
                try:
                    is_message, message = ray.get(actor.hear.remote(0.0 if rank else 0.5))
                except ray.exceptions.RayError as error:
                    raise EngineError(f"trainer rank {rank} ended: {' '.join(str(error).split())[:300]}") from None
                if is_message and isinstance(message, Exception):
                    raise message
                if is_message:
                    return message
        raise EngineError(f"trainer rank 0 said nothing for {self._seconds:g} s")
