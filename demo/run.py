"""Runs the demo: starts the processes, follows version after version, and compares."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from weightcast.demo.config import LOSS_LIMIT, DemoConfig, ServerConfig, VersionOutcome
from weightcast.demo.megatron_training import check_megatron
from weightcast.demo.model import PROMPTS, make_model, prompt_ids
from weightcast.demo.processes import ServerProcess, free_port, start_gateway
from weightcast.demo.trainer import Reference, train
from weightcast.gateway.app import make_token
from weightcast.gateway.client import TOKEN_VARIABLE, GatewayClient
from weightcast.transfer.errors import EngineError, InputError

__all__ = ["reference_faults", "run_demo"]

Say = Callable[[str], None]


def run_demo(config: DemoConfig, say: Say) -> tuple[list[VersionOutcome], list[str]]:
    """Every version on every instance, and what is wrong with them (empty when all is proven).

    `say` gets one line a step. Raises WeightcastError when a step fails; all processes are ended in any case.
    """
    if config.trainers < 1 or config.versions < 1 or not config.servers:
        raise InputError("the demo needs at least one trainer, one version and one instance")
    if config.prelude is not None and not config.prelude.is_file():
        raise InputError(f"--trainer-prelude {config.prelude} is not a file")
    config.work.mkdir(parents=True, exist_ok=True)
    model = _model(config, say)
    if config.megatron is not None:
        check_megatron(config, config.megatron, model)
    token = make_token()
    os.environ[TOKEN_VARIABLE] = token  # read by the trainer processes; never on a command line
    with ExitStack() as stack:
        stack.enter_context(_ending_on_sigterm())
        say("starting the gateway and " + ", ".join(f"{s.name} ({describe_server(s)})" for s in config.servers))
        url = stack.enter_context(start_gateway(config, token))
        servers = [stack.enter_context(ServerProcess.start(s, config, model, token)) for s in config.servers]
        for server in servers:
            server.wait_up(config.deadline)
            say(f"{server.spec.name} is up")
        _create_pair(config, url, token, servers)
        trainers = stack.enter_context(_trainers(config, model, url))
        return _follow(config, model, servers, trainers, say)


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """SIGTERM like Ctrl-C: what was started has to be ended, and a process that is killed could not."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _model(config: DemoConfig, say: Say) -> Path:
    if config.model is not None:
        if not (config.model / "config.json").exists():
            raise InputError(f"{config.model} is not a checkpoint folder: it has no config.json")
        return config.model.resolve()
    model = config.work / "model"
    if not (model / "config.json").exists():
        say(f"making a small Qwen3-MoE in {model}")
        make_model(model)
    return model.resolve()


def _create_pair(config: DemoConfig, url: str, token: str, servers: list[ServerProcess]) -> None:
    instances = {s.spec.name: {"kind": "sglang", "url": s.url, "world_size": s.spec.world_size} for s in servers}
    deadlines = dict.fromkeys(("register", "join", "prepare", "transfer", "verify", "engine"), config.deadline)
    with GatewayClient(url, token) as client:
        client.create_pair("demo", config.trainers, instances, deadlines)


class _Trainers:
    """The trainer processes. Rank 0 speaks for all; an end or error of any of them is raised here."""

    def __init__(self, processes: Sequence[BaseProcess], pipes: Sequence[Connection], seconds: float) -> None:
        self._processes, self._pipes, self._seconds = processes, pipes, seconds

    def send(self, what: object) -> None:
        """To rank 0."""
        try:
            self._pipes[0].send(what)
        except OSError:
            self.receive()

    def receive(self) -> object:
        """The next thing from rank 0. Raises EngineError when it does not come, and the error of any rank."""
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
            found = pipe.recv()
        except (EOFError, OSError):
            raise EngineError(f"trainer rank {self._pipes.index(pipe)} ended without a word") from None
        if isinstance(found, Exception):
            raise found
        return found


@contextmanager
def _trainers(config: DemoConfig, model: Path, url: str) -> Iterator[_Trainers]:
    """Starts the trainer processes; they are ended on leaving."""
    context = multiprocessing.get_context("spawn")
    port = free_port()
    pipes = [context.Pipe() for _ in range(config.trainers)]
    processes = [
        context.Process(target=train, args=(rank, config, model, url, port, pipes[rank][1]), daemon=True)
        for rank in range(config.trainers)
    ]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()  # else the end of a process would not end its pipe
    try:
        yield _Trainers(processes, [ours for ours, _ in pipes], config.deadline)
        for process in processes:
            process.join(30.0)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def _follow(
    config: DemoConfig, model: Path, servers: list[ServerProcess], trainers: _Trainers, say: Say
) -> tuple[list[VersionOutcome], list[str]]:
    vocabulary = int(json.loads((model / "config.json").read_text())["vocab_size"])
    prompts = prompt_ids(model, vocabulary)
    before: dict[str, list[list[int]]] = {}
    outcomes: list[VersionOutcome] = []
    faults: list[str] = []
    for version in range(config.versions + 1):
        reference = trainers.receive()
        if not isinstance(reference, Reference):
            raise EngineError(f"trainer rank 0 sent {type(reference).__name__}, expected a Reference")
        faults += reference_faults(reference)
        say(
            f"version {version}: trained, loss {reference.loss:.3f}, transferred"
            if version
            else "version 0: the checkpoint"
        )
        for server in servers:
            outcome, tokens = _compare(config, server, reference, prompts, before.get(server.spec.name), trainers)
            before[server.spec.name] = tokens
            if version:
                outcomes.append(outcome)
        trainers.send(None)
    return outcomes, faults + [fault for outcome in outcomes for fault in outcome.faults(config)]


def reference_faults(reference: Reference) -> list[str]:
    """The expectation is worth something only if it is what the trainer itself computes."""
    trainer, gathered = reference.trainer_loss, reference.reference_loss
    if abs(trainer - gathered) <= LOSS_LIMIT:
        return []
    return [
        f"version {reference.version}: the trainer's own loss is {trainer:.6f}, that of its gathered weights "
        f"{gathered:.6f}"
    ]


def _compare(
    config: DemoConfig,
    server: ServerProcess,
    reference: Reference,
    prompts: list[list[int]],
    before: list[list[int]] | None,
    trainers: _Trainers,
) -> tuple[VersionOutcome, list[list[int]]]:
    begun = time.monotonic()
    tokens, scores, weight_version = server.generate(prompts, config.new_tokens)
    trainers.send(tokens)
    trainer_scores = trainers.receive()
    if not isinstance(trainer_scores, list):
        raise EngineError(f"trainer rank 0 sent {type(trainer_scores).__name__}, expected log-probabilities")
    gaps = [
        abs(a - b)
        for ours, theirs in zip(scores, trainer_scores, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    record = reference.result.get(server.spec.name, {})
    outcome = VersionOutcome(
        version=reference.version,
        instance=server.spec.name,
        prompts=len(PROMPTS),
        equal=sum(a == b for a, b in zip(tokens, reference.tokens, strict=True)),
        changed=0 if before is None else sum(a != b for a, b in zip(tokens, before, strict=True)),
        logprob_gap=sum(gaps) / len(gaps),
        weight_version=weight_version,
        seconds=float(record.get("seconds", time.monotonic() - begun)),
        verified=dict(record.get("verified") or {}),
    )
    return outcome, tokens


def describe_server(server: ServerConfig) -> str:
    """One line about a server's layout, for the table."""
    text = f"tp{server.tp}/ep{server.ep}" + (f"/pp{server.pp}" if server.pp > 1 else "")
    return text + (f" map {list(server.placement)}" if server.placement else "")
