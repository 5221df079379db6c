"""Machines that run the demo's processes: this one, or a Ray cluster (`ray_machines`)."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Protocol

from weightcast.cluster.processes import free_port
from weightcast.demo.config import DemoConfig, ServerConfig
from weightcast.demo.processes import Server, ServerProcess, start_gateway
from weightcast.demo.trainer import RankPlace, train
from weightcast.transfer.errors import EngineError

__all__ = ["LocalMachines", "Machines", "Trainers"]

_HOST = "127.0.0.1"


class Trainers(Protocol):
    """The trainer ranks. Rank 0 speaks for all; an end or error of any of them is raised here."""

    def send(self, what: object) -> None:
        """Sends a message to rank 0."""

    def receive(self) -> object:
        """The next message of rank 0. Raises EngineError when it does not come, and the error of any rank."""


class Machines(Protocol):
    """Starts the demo's processes. What was started is ended on leaving."""

    def start_gateway(self) -> str:
        """Starts the gateway; returns its address for trainers, once it answers."""

    def start_server(self, spec: ServerConfig) -> Server:
        """Starts a server without waiting: call its `wait_up` when all are started."""

    def start_trainers(self, url: str) -> Trainers:
        """Starts all trainer ranks with the gateway's address."""


class LocalMachines:
    """Processes of this machine."""

    def __init__(self, config: DemoConfig, model: Path, token: str) -> None:
        self._config, self._model, self._token = config, model, token
        self._stack = ExitStack()

    def __enter__(self) -> LocalMachines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, tb)

    def start_gateway(self) -> str:
        return self._stack.enter_context(start_gateway(self._config, self._token))

    def start_server(self, spec: ServerConfig) -> Server:
        return self._stack.enter_context(ServerProcess.start(spec, self._config, self._model, self._token))

    def start_trainers(self, url: str) -> Trainers:
        return self._stack.enter_context(_trainers(self._config, self._model, url))


class _TrainerProcesses:
    """The trainer processes. Rank 0 speaks for all; an end or error of any of them is raised here."""

    def __init__(self, processes: Sequence[BaseProcess], pipes: Sequence[Connection], seconds: float) -> None:
        self._processes, self._pipes, self._seconds = processes, pipes, seconds

    def send(self, what: object) -> None:
        """Sends a message to rank 0."""
        try:
            self._pipes[0].send(what)
        except OSError:
            self.receive()

    def receive(self) -> object:
        """The next message of rank 0. Raises EngineError when it does not come, and the error of any rank."""
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline:
            ready = wait([*self._pipes, *(p.sentinel for p in self._processes)], 1.0)
            for pipe in self._pipes:
                if pipe in ready:
                    return self._read(pipe)
            for rank, process in enumerate(self._processes):
                if process.exitcode not in (None, 0):
                    raise EngineError(f"trainer rank {rank} ended with status {process.exitcode}")
        raise EngineError(f"trainer rank 0 said nothing for {self._seconds:g} s")

    def _read(self, pipe: Connection) -> object:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            raise EngineError(f"trainer rank {self._pipes.index(pipe)} ended without a word") from None
        if isinstance(message, Exception):
            raise message
        return message


@contextmanager
def _trainers(config: DemoConfig, model: Path, url: str) -> Iterator[_TrainerProcesses]:
    """Starts the trainer processes; they are ended on leaving."""
    context = multiprocessing.get_context("spawn")
    port = free_port()
    pipes = [context.Pipe() for _ in range(config.trainers)]
    processes = [
        context.Process(
            target=train,
            args=(RankPlace(rank, _HOST, f"{_HOST}:{port}"), config, model, url, pipes[rank][1]),
            daemon=True,
        )
        for rank in range(config.trainers)
    ]
    for process in processes:
        process.start()
    for _, child_end in pipes:
        child_end.close()  # else the end of a process would not end its pipe
    try:
        yield _TrainerProcesses(processes, [parent_end for parent_end, _ in pipes], config.deadline)
        for process in processes:
            process.join(30.0)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
