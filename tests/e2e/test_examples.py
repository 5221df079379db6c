"""Every example runs and says what its first lines promise."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from gateway_support import running_gateway
from safetensors.torch import save_file
from spawn_support import free_port

from weightcast.gateway.client import TOKEN_VARIABLE


def run(*command: str, **environment: str) -> list[str]:
    """Lines that a Python program prints."""
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=180, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def run_two_ranks(program: Path, folder: Path) -> list[str]:
    """Lines of both, each from a file of its own: in a common pipe they would be torn."""
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))
    run(*launch, "--redirects", "1", "--log-dir", str(folder), str(program))
    return sorted(line for file in folder.rglob("stdout.log") for line in file.read_text().splitlines())


@pytest.mark.slow
def test_fsdp_source(root: Path, tmp_path: Path) -> None:
    lines = run_two_ranks(root / "examples" / "fsdp_source.py", tmp_path)
    assert "0 model.layers.0.mlp.experts.2.gate_proj.weight (0, 0) (32, 64)" in lines
    assert "1 model.layers.0.mlp.experts.3.gate_proj.weight (0, 0) (32, 64)" in lines
    assert "1 model.embed_tokens.weight (128, 0) (128, 64)" in lines


@pytest.mark.megatron
@pytest.mark.slow
def test_megatron_source(root: Path, tmp_path: Path) -> None:
    lines = run_two_ranks(root / "examples" / "megatron_source.py", tmp_path)
    assert "1 model.layers.0.self_attn.k_proj.weight (16, 0) (16, 64)" in lines
    assert "1 model.embed_tokens.weight (128, 0) (122, 64)" in lines


def test_checkpoint_source(root: Path, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4, 3), "b": torch.zeros(())}, tmp_path / "model.safetensors")
    lines = run(str(root / "examples" / "checkpoint_source.py"), str(tmp_path))
    assert sorted(lines) == ["a (0, 0) (4, 3)", "b () ()"]


@pytest.mark.slow
def test_own_engine_and_trainer(root: Path) -> None:
    with running_gateway() as (url, token):
        environment = {**os.environ, TOKEN_VARIABLE: token, "PYTHONUNBUFFERED": "1"}
        names = (url, "main", "rollout-1")
        command = [sys.executable, str(root / "examples" / "own_engine.py"), *names]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as engine:
            try:
                lines = run(str(root / "examples" / "own_trainer.py"), *names, **{TOKEN_VARIABLE: token})
                assert [line.split()[0] for line in lines] == ["1", "2", "3"]
                assert engine.stdout is not None
                assert [engine.stdout.readline().strip() for _ in range(3)] == [
                    f"serving version {version}" for version in (1, 2, 3)
                ]
            finally:
                engine.terminate()


@pytest.mark.slow
def test_http_controller(root: Path) -> None:
    with running_gateway() as (url, token), ExitStack() as started:
        environment = {**os.environ, TOKEN_VARIABLE: token, "PYTHONUNBUFFERED": "1"}
        names = (url, "main", "rollout-1")

        def start(example: str, *more: str) -> subprocess.Popen[str]:
            command = [sys.executable, str(root / "examples" / example), *names, *more]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
            started.enter_context(process)
            started.callback(process.kill)
            return process

        controller = start("http_controller.py", "3")
        start("own_engine.py")
        start("own_trainer.py")
        said, _ = controller.communicate(timeout=120)
        assert said.splitlines() == [
            "connected",
            *(f"version {version} rollout-1 committed" for version in (1, 2, 3)),
            "serving {'rollout-1': 3}",
        ]
        assert controller.returncode == 0


@pytest.mark.slow
def test_ray_training_loop(root: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    lines = run(str(root / "examples" / "ray_training_loop.py"), RAY_AUTH_MODE="disabled")
    weights = "{{'model.layers.0.weight': {0}.0, 'model.layers.1.weight': {0}.0}}"
    assert lines == [f"{step} ['rollout-0'] {weights.format(step)}" for step in (1, 2, 3)]
