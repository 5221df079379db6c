"""Runs the demo: starts the processes, follows version after version, and compares."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from weightcast.demo.config import DemoConfig, ServerConfig, VersionOutcome
from weightcast.demo.model import PROMPTS, make_model, prompt_ids
from weightcast.demo.processes import ServerProcess, free_port, start_gateway
from weightcast.demo.trainer import Reference, train
from weightcast.gateway.app import make_token
from weightcast.gateway.client import TOKEN_VARIABLE, GatewayClient
from weightcast.transfer.errors import EngineError, InputError

__all__ = ["run_demo"]

Say = Callable[[str], None]


def run_demo(config: DemoConfig, say: Say) -> tuple[list[VersionOutcome], list[str]]:
    """Every version on every instance, and what is wrong with them (empty when all is proven).

    `say` gets one line a step. Raises WeightcastError when a step fails; all processes are ended in any case.
    """
    if config.trainers < 1 or config.versions < 1 or not config.servers:
        raise InputError("the demo needs at least one trainer, one version and one instance")
    config.work.mkdir(parents=True, exist_ok=True)
    model = _model(config, say)
    token = make_token()
    os.environ[TOKEN_VARIABLE] = token  # read by the trainer processes; never on a command line
    with ExitStack() as stack:
        say("starting the gateway and " + ", ".join(f"{s.name} (tp{s.tp}/ep{s.ep})" for s in config.servers))
        url = stack.enter_context(start_gateway(config, token))
        servers = [stack.enter_context(ServerProcess.start(s, config, model, token)) for s in config.servers]
        for server in servers:
            server.wait_up(config.deadline)
            say(f"{server.spec.name} is up")
        _create_pair(config, url, token, servers)
        pipe = stack.enter_context(_trainers(config, model, url))
        return _follow(config, model, servers, pipe, say)


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
    instances = {s.spec.name: {"kind": "sglang", "url": s.url, "world_size": s.spec.tp} for s in servers}
    deadlines = dict.fromkeys(("register", "join", "prepare", "transfer", "verify", "engine"), config.deadline)
    with GatewayClient(url, token) as client:
        client.create_pair("demo", config.trainers, instances, deadlines)


@contextmanager
def _trainers(config: DemoConfig, model: Path, url: str) -> Iterator[Connection]:
    """The trainer processes, and the pipe to rank 0."""
    context = multiprocessing.get_context("spawn")
    port = free_port()
    pipes = [context.Pipe() for _ in range(config.trainers)]
    processes = [
        context.Process(target=train, args=(rank, config, model, url, port, pipes[rank][1]), daemon=True)
        for rank in range(config.trainers)
    ]
    for process in processes:
        process.start()
    try:
        yield pipes[0][0]
        for process in processes:
            process.join(30.0)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def _receive(pipe: Connection, seconds: float) -> object:
    """The next thing from trainer rank 0; its error is raised here."""
    if not pipe.poll(seconds):
        raise EngineError(f"trainer rank 0 said nothing for {seconds:g} s")
    try:
        found = pipe.recv()
    except EOFError:
        raise EngineError("trainer rank 0 ended without a word") from None
    if isinstance(found, Exception):
        raise found
    return found


def _follow(
    config: DemoConfig, model: Path, servers: list[ServerProcess], pipe: Connection, say: Say
) -> tuple[list[VersionOutcome], list[str]]:
    import json

    vocabulary = int(json.loads((model / "config.json").read_text())["vocab_size"])
    prompts = prompt_ids(model, vocabulary)
    before: dict[str, list[list[int]]] = {}
    outcomes: list[VersionOutcome] = []
    for version in range(config.versions + 1):
        reference = _receive(pipe, config.deadline)
        if not isinstance(reference, Reference):
            raise EngineError(f"trainer rank 0 sent {type(reference).__name__}, expected a Reference")
        say(
            f"version {version}: trained, loss {reference.loss:.3f}, transferred"
            if version
            else "version 0: the checkpoint"
        )
        for server in servers:
            outcome, tokens = _compare(config, server, reference, prompts, before.get(server.spec.name), pipe)
            before[server.spec.name] = tokens
            if version:
                outcomes.append(outcome)
        pipe.send(None)
    faults = [fault for outcome in outcomes for fault in outcome.faults(config)]
    return outcomes, faults


def _compare(
    config: DemoConfig,
    server: ServerProcess,
    reference: Reference,
    prompts: list[list[int]],
    before: list[list[int]] | None,
    pipe: Connection,
) -> tuple[VersionOutcome, list[list[int]]]:
    begun = time.monotonic()
    tokens, scores, weight_version = server.generate(prompts, config.new_tokens)
    pipe.send(tokens)
    trainer_scores = _receive(pipe, config.deadline)
    assert isinstance(trainer_scores, list)
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
    text = f"tp{server.tp}/ep{server.ep}"
    return text + (f" map {list(server.placement)}" if server.placement else "")
