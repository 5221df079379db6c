"""Runs the demo: starts the processes, follows version after version, and compares."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from weightcast.demo.colocated import describe_step
from weightcast.demo.config import LOSS_LIMIT, DemoConfig, VersionOutcome
from weightcast.demo.machines import Machines, RayMachines, Trainers
from weightcast.demo.megatron_training import check_megatron
from weightcast.demo.model import PROMPTS, make_model, prompt_ids
from weightcast.demo.processes import Server
from weightcast.demo.trainer import Reference
from weightcast.gateway.client import TOKEN_VARIABLE, GatewayClient
from weightcast.gateway.server.tokens import make_token
from weightcast.transfer.errors import EngineError, InputError
from weightcast.transfer.installed import check_installed

__all__ = ["reference_faults", "run_demo"]

Say = Callable[[str], None]


def run_demo(config: DemoConfig, say: Say) -> tuple[list[VersionOutcome], list[str]]:
    """Runs the demo: the outcome of every version on every instance, and the faults (empty when all is proven).

    `say` gets one line a step. Raises WeightcastError when a step fails; all processes are ended in any case.
    """
    if config.trainers < 1 or config.versions < 1 or not config.servers:
        raise InputError("the demo needs at least one trainer, one version and one instance")
    if config.prelude is not None and not config.prelude.is_file():
        raise InputError(f"--trainer-prelude {config.prelude} is not a file")
    check_installed("SGLang", "sglang")
    check_installed("Transformers", "sglang", "transformers")
    if config.ray is not None:
        check_installed("Ray", "ray")
    if config.megatron is not None:
        check_installed("Megatron-Core", "megatron", "megatron.core")
    try:
        config.work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make --work {config.work}: {error.strerror}") from None
    model = _model(config, say)
    if config.megatron is not None:
        check_megatron(config, config.megatron, model)
    token = make_token()
    # Read by the trainer processes; never on a command line.
    os.environ |= {TOKEN_VARIABLE: token, "OMP_NUM_THREADS": "1"}
    with _ending_on_sigterm(), (RayMachines if config.ray else Machines)(config, model, token) as machines:
        say(
            f"starting the gateway and {', '.join(f'{s.name} ({s})' for s in config.servers)}; servers take half a "
            f"minute to two, their logs are in {config.work}"
        )
        url = machines.start_gateway()
        servers = [machines.start_server(spec) for spec in config.servers]
        for server in servers:
            server.wait_up(config.deadline)
            say(f"{server.spec.name} is up")
        _create_pair(config, url, token, servers)
        say(
            f"starting {config.trainers} trainer ranks; then {config.versions} versions are trained, transferred and "
            "compared with a reference model, 5 to 20 s each"
        )
        trainers = machines.start_trainers(url)
        if config.share is not None:
            trainers.send({server.spec.name: server.url for server in servers})
        return _follow(config, model, servers, trainers, say)


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Treats SIGTERM like Ctrl-C: what was started has to be ended, and a killed process could not do so."""
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


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


def _create_pair(config: DemoConfig, url: str, token: str, servers: list[Server]) -> None:
    hold = config.share is not None  # the colocated cycle lets them go on
    instances = {}
    for server in servers:
        pause = "retract" if server.spec.pp == 1 else "abort"  # the one mode that stops pipeline stages
        record = {"kind": "sglang", "url": server.url, "world_size": server.spec.world_size}
        instances[server.spec.name] = {**record, "pause": pause, "hold": hold}
    deadlines = dict.fromkeys(("register", "join", "prepare", "transfer", "verify", "engine"), config.deadline)
    with GatewayClient(url, token) as client:
        client.create_pair("demo", config.trainers, instances, deadlines)


def _follow(
    config: DemoConfig, model: Path, servers: list[Server], trainers: Trainers, say: Say
) -> tuple[list[VersionOutcome], list[str]]:
    vocabulary = int(json.loads((model / "config.json").read_text())["vocab_size"])
    prompts = prompt_ids(model, vocabulary)
    answers: dict[str, list[list[int]]] = {}
    outcomes: list[VersionOutcome] = []
    faults: list[str] = []
    for version in range(config.versions + 1):
        reference = trainers.receive()
        if not isinstance(reference, Reference):
            raise EngineError(f"trainer rank 0 sent {type(reference).__name__}, expected a Reference")
        faults += reference_faults(reference)
        if version and config.share == "staged" and not reference.away:
            faults.append(f"version {version}: no weights of the trainer were away while the engines generated")
        for step in reference.steps:
            say(describe_step(step))
        say(
            f"version {version}: trained, loss {reference.loss:.3f}, transferred"
            if version
            else "version 0: the checkpoint"
        )
        if reference.away:
            say(f"the trainer's weights are offloaded, {reference.away / 1e6:.1f} MB; the engines generate")
        for server in servers:
            outcome, tokens = _compare(config, server, reference, prompts, answers.get(server.spec.name), trainers)
            answers[server.spec.name] = tokens
            if version:
                outcomes.append(outcome)
        trainers.send(None)
    return outcomes, faults + [fault for outcome in outcomes for fault in outcome.faults(config)]


def reference_faults(reference: Reference) -> list[str]:
    """The fault of a reference whose loss is not the trainer's own: it would be a worthless expectation."""
    trainer_loss, gathered_loss = reference.trainer_loss, reference.reference_loss
    if abs(trainer_loss - gathered_loss) <= LOSS_LIMIT:
        return []
    return [
        f"version {reference.version}: the trainer's own loss is {trainer_loss:.6f}, that of its gathered weights "
        f"{gathered_loss:.6f}"
    ]


def _compare(
    config: DemoConfig,
    server: Server,
    reference: Reference,
    prompts: list[list[int]],
    before: list[list[int]] | None,
    trainers: Trainers,
) -> tuple[VersionOutcome, list[list[int]]]:
    start = time.monotonic()
    tokens, scores, weight_version = server.generate(prompts, config.new_tokens)
    trainers.send(tokens)
    trainer_scores = trainers.receive()
    if not isinstance(trainer_scores, list):
        raise EngineError(f"trainer rank 0 sent {type(trainer_scores).__name__}, expected log-probabilities")
    record = reference.result.get(server.spec.name, {})
    sent_bytes, shared_bytes = reference.moved[server.spec.name]
    outcome = VersionOutcome(
        version=reference.version,
        instance=server.spec.name,
        prompts=len(PROMPTS),
        equal=sum(a == b for a, b in zip(tokens, reference.tokens, strict=True)),
        changed=0 if before is None else sum(a != b for a, b in zip(tokens, before, strict=True)),
        logprob_gap=float(np.abs(np.subtract(scores, trainer_scores)).mean()),
        weight_version=weight_version,
        seconds=float(record.get("seconds", time.monotonic() - start)),
        verified=dict(record.get("verified") or {}),
        sent=sent_bytes,
        shared=shared_bytes,
    )
    return outcome, tokens
