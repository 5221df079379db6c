"""Nobody waits in silence: who is missing is said by the trainer, by the gateway and by `weightcast status`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from gateway_support import running_gateway
from life_support import soon
from safetensors.torch import save_file

from weightcast.cli import main
from weightcast.gateway.client import TOKEN_VARIABLE, GatewayClient

PARTS = Path(__file__).resolve().parents[1] / "support" / "silence_parts.py"
MISSING = "instance rollout-1 ranks 0 did not register yet; rollout-1 rank 0 was never heard of; start the engine"


@contextmanager
def part(role: str, url: str, log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of `silence_parts` that writes to a log."""
    with log.open("wb") as out:
        command = [sys.executable, str(PARTS), role, url, *arguments]
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_connect_without_an_engine_names_it_everywhere_and_goes_on_when_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real interval of 10 s, without any logging set up in the trainer."""
    gateway_log, trainer_log, engine_log = (tmp_path / name for name in ("gateway.log", "trainer.log", "engine.log"))
    monkeypatch.setenv("COLUMNS", "200")
    with gateway_log.open("wb") as out, running_gateway(stderr=out) as (url, token):
        monkeypatch.setenv(TOKEN_VARIABLE, token)
        with GatewayClient(url, token) as client:
            client.create_pair("main", 1, {"rollout-1": {"kind": "worker", "world_size": 1}}, {"register": 200.0})
        with part("trainer", url, trainer_log) as trainer:
            soon(lambda: MISSING in trainer_log.read_text(), 120.0)
            assert "trainer rank 0: pair main: waiting, " in trainer_log.read_text()
            assert " s of 200 s: " in trainer_log.read_text()
            soon(lambda: MISSING in gateway_log.read_text(), 30.0)
            assert main(["status", "--gateway", url, "--json"]) == 0
            (pair,) = json.loads(capsys.readouterr().out)["pairs"]
            (wait,) = pair["waiting"]
            assert (wait["instance"], wait["limit"]) == ("rollout-1", 200.0)
            assert wait["missing"].startswith(MISSING)
            assert wait["seconds"] > 5
            assert (pair["instances"]["rollout-1"]["state"], pair["trainer"]["silent"]) == ("waiting", [])
            assert main(["status", "--gateway", url]) == 0
            shown = capsys.readouterr().out
            assert MISSING in shown
            assert "FENCED" not in shown
            with part("engine", url, engine_log):
                assert trainer.wait(120) == 0
                assert "connected" in trainer_log.read_text()


def test_load_says_whom_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"t": torch.ones(8)}, tmp_path / "model.safetensors")
    instance = json.dumps({"name": "rollout-1", "kind": "worker", "world_size": 1})
    with running_gateway() as (url, token), ExitStack() as processes:
        monkeypatch.setenv(TOKEN_VARIABLE, token)
        log = tmp_path / "load.log"
        out = processes.enter_context(log.open("wb"))
        command = ["load", str(tmp_path), "--instance", instance, "--pair", "main", "--gateway", url]
        load = subprocess.Popen([sys.executable, "-m", "weightcast", *command], stdout=out, stderr=out)
        processes.callback(load.wait)
        processes.callback(load.kill)
        soon(lambda: MISSING in log.read_text(), 120.0)
        processes.enter_context(part("engine", url, tmp_path / "engine.log"))
        assert load.wait(120) == 0
        assert "rollout-1: version 1, 1 regions verified" in log.read_text()


def test_two_processes_for_one_engine_rank_are_both_named_to_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = [tmp_path / f"engine-{number}.log" for number in range(2)]
    with running_gateway() as (url, token), ExitStack() as processes:
        monkeypatch.setenv(TOKEN_VARIABLE, token)
        with GatewayClient(url, token) as client:
            client.create_pair("main", 1, {"rollout-1": {"kind": "worker", "world_size": 1}})
        engines = [processes.enter_context(part("engine", url, log)) for log in logs]
        soon(lambda: all("serving" in log.read_text() for log in logs), 120.0)
        trainer = processes.enter_context(part("trainer", url, tmp_path / "trainer.log"))
        assert trainer.wait(120) == 1
        (error,) = [line for line in (tmp_path / "trainer.log").read_text().splitlines() if "Error: rollout-1" in line]
        assert all(f"process {engine.pid} on " in error for engine in engines), error
        assert "which still beats, was displaced by" in error
        assert "end one of the two if both run" in error
