"""Machines that run the demo's processes: this one, or a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from weightcast.cluster.launch import on_ray
from weightcast.cluster.processes import free_port
from weightcast.cluster.ray_actors import EngineActor, RankActor, RankPlace, answered, end_actor, spawn
from weightcast.cluster.trainer_ranks import begin, heard
from weightcast.demo.config import DemoConfig, ServerConfig
from weightcast.demo.processes import Server, server_launch, start_gateway, start_server
from weightcast.demo.trainer import train
from weightcast.gateway.client import TOKEN_VARIABLE
from weightcast.gateway.server import ray_actor
from weightcast.transfer.errors import EngineError
from weightcast.transfer.transports.addresses import host_port

__all__ = ["Machines", "RayMachines", "Trainers"]

_NAME = "weightcast-demo"
_ANSWER = 60.0
"""Seconds for an actor to answer."""


class Rank(Protocol):
    """One trainer rank."""

    def send(self, message: object) -> None:
        """Sends it a message. Raises OSError when it has ended."""

    def hear(self, seconds: float) -> object:
        """Its next message, None if it sends none within the time. Raises the error that it sends or ends by."""


class Trainers:
    """The trainer ranks. Rank 0 speaks for all; an end or error of any of them is raised here."""

    def __init__(self, ranks: Sequence[Rank], seconds: float) -> None:
        self._ranks, self._seconds = ranks, seconds

    def send(self, message: object) -> None:
        """Sends a message to rank 0."""
        try:
            self._ranks[0].send(message)
        except OSError:
            self.receive()

    def receive(self) -> object:
        """The next message of rank 0. Raises EngineError when it does not come, and the error of any rank."""
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline:
            for number, rank in enumerate(self._ranks):
                # Rank 0 is waited for; of the others only an error is expected.
                if (message := rank.hear(0.0 if number else 0.5)) is not None:
                    return message
        raise EngineError(f"trainer rank 0 said nothing for {self._seconds:g} s")


class Machines(ExitStack):
    """Runs the demo's processes on this machine. They are ended on leaving."""

    def __init__(self, config: DemoConfig, model: Path, token: str) -> None:
        super().__init__()
        self._config, self._model, self._token = config, model, token

    def start_gateway(self) -> str:
        """Starts the gateway; returns its address for trainers, once it answers."""
        return self.enter_context(start_gateway(self._config, self._token))

    def start_server(self, spec: ServerConfig) -> Server:
        """Starts a server without waiting: call its `wait_up` when all are started."""
        return self.enter_context(start_server(spec, self._config, self._model, self._token))

    def start_trainers(self, url: str) -> Trainers:
        """Starts all trainer ranks with the gateway's address."""
        host = self._config.host
        rendezvous = host_port(host, free_port(host))
        places = [RankPlace(rank, host, rendezvous) for rank in range(self._config.trainers)]
        ranks = [self.enter_context(_RankProcess.start(place, self._config, self._model, url)) for place in places]
        return Trainers(ranks, self._config.deadline)


class _RankProcess:
    """A rank as a process of this machine, with our end of its pipe."""

    def __init__(self, rank: int, process: BaseProcess, pipe: Connection) -> None:
        self._rank, self._process, self._pipe = rank, process, pipe

    @classmethod
    @contextmanager
    def start(cls, place: RankPlace, config: DemoConfig, model: Path, url: str) -> Iterator[_RankProcess]:
        """Starts it. On leaving its end is waited for, and it is killed when that does not come or after an error."""
        context = multiprocessing.get_context("spawn")
        pipe, child_end = context.Pipe()
        process = context.Process(target=train, args=(place, config, model, url, child_end), daemon=True)
        process.start()
        child_end.close()  # else the end of a process would not end its pipe
        try:
            yield cls(place.rank, process, pipe)
            process.join(30.0)
        finally:
            process.kill()
            process.join()

    def send(self, message: object) -> None:
        self._pipe.send(message)

    def hear(self, seconds: float) -> object:
        try:
            message = self._pipe.recv() if self._pipe.poll(seconds) else None
        except (EOFError, OSError):
            self._process.join(5.0)
            status = self._process.exitcode
            raise EngineError(f"trainer rank {self._rank} ended without a word, with status {status}") from None
        if isinstance(message, Exception):
            raise message
        return message


class RayMachines(Machines):
    """Runs them as actors of a cluster: of the one at `config.ray`, or for "local" of one that ends with the demo."""

    def start_gateway(self) -> str:
        local = {"num_cpus": os.cpu_count(), "_node_ip_address": self._config.host, "include_dashboard": False}
        address = str(self._config.ray)
        self.enter_context(on_ray(address, **local if address == "local" else {}))
        state = self._config.work / "gateway.db"
        gateway = ray_actor.start_gateway(_NAME, tokens={"operator": self._token}, state=state)
        self.callback(end_actor, gateway)
        return f"ray://{_NAME}"

    def start_server(self, spec: ServerConfig) -> Server:
        actor = self._spawn(EngineActor, spec.name)
        launch = server_launch(spec, self._config, self._model, ray_actor.worker_token(self._token))
        url = answered(actor.start.remote(launch), spec.name, self._config.deadline)

        def wait_up(seconds: float) -> None:
            answered(actor.wait_up.remote(seconds), spec.name, seconds + _ANSWER)

        return Server(spec, url, self._config.log(spec.name), wait_up)

    def start_trainers(self, url: str) -> Trainers:
        environment = {TOKEN_VARIABLE: ray_actor.worker_token(self._token), "OMP_NUM_THREADS": "1"}
        actors = [self._spawn(RankActor, f"trainer-{rank}", environment) for rank in range(self._config.trainers)]
        begin(actors, self._config.deadline, "weightcast.demo.trainer:train", self._config, self._model, url)
        return Trainers([_RankActor(rank, actor) for rank, actor in enumerate(actors)], self._config.deadline)

    def _spawn(self, body: type, name: str, *arguments: object) -> Any:
        actor = spawn(body, f"{_NAME}-{name}", *arguments)
        self.callback(end_actor, actor)
        return actor


class _RankActor:
    """A rank as an actor."""

    def __init__(self, rank: int, actor: Any) -> None:
        self._rank, self._actor = rank, actor

    def send(self, message: object) -> None:
        answered(self._actor.tell.remote(message), f"trainer rank {self._rank}", _ANSWER)

    def hear(self, seconds: float) -> object:
        return heard(self._actor.hear.remote(seconds), self._rank, seconds + _ANSWER)
