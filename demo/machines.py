"""Machines that run the demo's processes: this one, or a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from weightcast.cluster.launch import on_ray
from weightcast.cluster.processes import free_port
from weightcast.cluster.ray_actors import EngineActor, RankActor, RankPlace, answered, end_actor, spawn
from weightcast.cluster.trainer_ranks import begin, heard
from weightcast.demo.config import DemoConfig, ServerConfig
from weightcast.demo.processes import HOST, Server, server_launch, start_gateway, start_server
from weightcast.demo.trainer import train
from weightcast.gateway.client import TOKEN_VARIABLE
from weightcast.gateway.server import ray_actor
from weightcast.transfer.errors import EngineError

__all__ = ["LocalMachines", "Machines", "RayMachines", "Trainers"]

_NAME = "weightcast-demo"


class Trainers(ABC):
    """The trainer ranks. Rank 0 speaks for all; an end or error of any of them is raised here."""

    def __init__(self, ranks: int, seconds: float) -> None:
        self._ranks, self._seconds = ranks, seconds

    @abstractmethod
    def send(self, message: object) -> None:
        """Sends a message to rank 0."""

    @abstractmethod
    def _hear(self, rank: int, seconds: float) -> object:
        """The next message of a rank, None if it sends none within the time. Raises its error."""

    def receive(self) -> object:
        """The next message of rank 0. Raises EngineError when it does not come, and the error of any rank."""
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline:
            for rank in range(self._ranks):
                # Rank 0 is waited for; of the others only an error is expected.
                if (message := self._hear(rank, 0.0 if rank else 0.5)) is not None:
                    return message
        raise EngineError(f"trainer rank 0 said nothing for {self._seconds:g} s")


class Machines(ExitStack, ABC):
    """Starts the demo's processes. They are ended on leaving."""

    def __init__(self, config: DemoConfig, model: Path, token: str) -> None:
        super().__init__()
        self._config, self._model, self._token = config, model, token

    @abstractmethod
    def start_gateway(self) -> str:
        """Starts the gateway; returns its address for trainers, once it answers."""

    @abstractmethod
    def start_server(self, spec: ServerConfig) -> Server:
        """Starts a server without waiting: call its `wait_up` when all are started."""

    @abstractmethod
    def start_trainers(self, url: str) -> Trainers:
        """Starts all trainer ranks with the gateway's address."""


class LocalMachines(Machines):
    """Processes of this machine."""

    def start_gateway(self) -> str:
        return self.enter_context(start_gateway(self._config, self._token))

    def start_server(self, spec: ServerConfig) -> Server:
        return self.enter_context(start_server(spec, self._config, self._model, self._token))

    def start_trainers(self, url: str) -> Trainers:
        context = multiprocessing.get_context("spawn")
        rendezvous = f"{HOST}:{free_port()}"
        ranks = []
        for rank in range(self._config.trainers):
            pipe, child_end = context.Pipe()
            place = RankPlace(rank, HOST, rendezvous)
            arguments = (place, self._config, self._model, url, child_end)
            process = context.Process(target=train, args=arguments, daemon=True)
            process.start()
            self.enter_context(_ending(process))
            child_end.close()  # else the end of a process would not end its pipe
            ranks.append((process, pipe))
        return _TrainerProcesses(ranks, self._config.deadline)


@contextmanager
def _ending(process: BaseProcess) -> Iterator[None]:
    """Waits for the end of a process, and kills it when it does not come or after an error."""
    try:
        yield
        process.join(30.0)
    finally:
        process.kill()
        process.join()


class _TrainerProcesses(Trainers):
    """The trainer ranks as processes of this machine, each with our end of its pipe."""

    def __init__(self, ranks: Sequence[tuple[BaseProcess, Connection]], seconds: float) -> None:
        super().__init__(len(ranks), seconds)
        self._processes = ranks

    def send(self, message: object) -> None:
        try:
            self._processes[0][1].send(message)
        except OSError:
            self.receive()

    def _hear(self, rank: int, seconds: float) -> object:
        process, pipe = self._processes[rank]
        try:
            message = pipe.recv() if pipe.poll(seconds) else None
        except (EOFError, OSError):
            process.join(5.0)
            raise EngineError(f"trainer rank {rank} ended without a word, with status {process.exitcode}") from None
        if isinstance(message, Exception):
            raise message
        return message


class RayMachines(Machines):
    """Actors of a cluster: of the one at `config.ray`, or for "local" of one that ends with the demo."""

    def start_gateway(self) -> str:
        local = {"num_cpus": os.cpu_count(), "_node_ip_address": HOST, "include_dashboard": False}
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
            answered(actor.wait_up.remote(seconds), spec.name, seconds + 30.0)

        return Server(spec, url, self._config.log(spec.name), wait_up)

    def start_trainers(self, url: str) -> Trainers:
        environment = {TOKEN_VARIABLE: ray_actor.worker_token(self._token), "OMP_NUM_THREADS": "1"}
        ranks = [self._spawn(RankActor, f"trainer-{rank}", environment) for rank in range(self._config.trainers)]
        begin(ranks, self._config.deadline, "weightcast.demo.trainer:train", self._config, self._model, url)
        return _RayTrainers(ranks, self._config.deadline)

    def _spawn(self, body: type, name: str, *arguments: object) -> Any:
        actor = spawn(body, f"{_NAME}-{name}", *arguments)
        self.callback(end_actor, actor)
        return actor


class _RayTrainers(Trainers):
    """The trainer ranks as actors."""

    def __init__(self, actors: list[Any], seconds: float) -> None:
        super().__init__(len(actors), seconds)
        self._actors = actors

    def send(self, message: object) -> None:
        answered(self._actors[0].tell.remote(message), "trainer rank 0", self._seconds)

    def _hear(self, rank: int, seconds: float) -> object:
        return heard(self._actors[rank].hear.remote(seconds), rank)
