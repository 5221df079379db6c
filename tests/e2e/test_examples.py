"""Every example runs and says what its first lines promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from gateway_support import running_gateway
from safetensors.torch import save_file
from spawn_support import free_port

from weightcast.adapters.unsharded import PlainSource
from weightcast.gateway.client import TOKEN_VARIABLE, GatewayClient
from weightcast.gateway.ranks.trainer import TrainerWorker
from weightcast.gateway.server.tokens import make_token


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


class RouterRoutes(BaseHTTPRequestHandler):
    """The routes for workers of SGLang's router 0.3.2, which answers at once and works on it afterwards."""

    workers: dict[str, str]

    def do_GET(self) -> None:
        self.answer({"workers": [{"id": number, "url": url} for number, url in self.workers.items()]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.workers[str(len(self.workers))] = body["url"]
        self.answer({"status": "accepted"}, 202)

    def do_DELETE(self) -> None:
        del self.workers[self.path.rpartition("/")[2]]
        self.answer({"status": "accepted"}, 202)

    def answer(self, body: object, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def router() -> Iterator[tuple[str, dict[str, str]]]:
    """URL and workers of a router."""
    RouterRoutes.workers = {}
    with ThreadingHTTPServer(("127.0.0.1", 0), RouterRoutes) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", RouterRoutes.workers
        server.shutdown()


def readiness(root: Path, gateway: str, token: str, instance: str) -> subprocess.CompletedProcess[str]:
    """The outcome of the probe of an engine in the manifest, run as Kubernetes would."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    objects = list(yaml.safe_load_all((root / "examples" / "kubernetes.yaml").read_text()))
    (engine,) = (o for o in objects if o["kind"] == "StatefulSet" and o["metadata"]["name"] == "rollout")
    (container,) = engine["spec"]["template"]["spec"]["containers"]
    *shell, script = container["readinessProbe"]["exec"]["command"]
    environment = {"PATH": os.environ["PATH"], "WEIGHTCAST_READY_TOKEN": token, "HOSTNAME": instance}
    command = [*shell, script.replace("http://weightcast:8900", gateway)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


@pytest.mark.slow
def test_readiness(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers to Kubernetes and to a router about an engine that is fenced, serves, and dies."""
    ready, url_of_engine = make_token(), "http://10.0.0.7:30000"
    monkeypatch.setenv("WEIGHTCAST_READY_TOKEN", ready)
    with running_gateway() as (url, token), router() as (router_url, workers), ExitStack() as started:
        environment = {**os.environ, "WEIGHTCAST_READY_TOKEN": ready, "PYTHONUNBUFFERED": "1"}

        def start(example: str, *arguments: str, **more: str) -> subprocess.Popen[str]:
            command = [sys.executable, str(root / "examples" / example), *arguments]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment | more)
            started.enter_context(process)
            started.callback(process.kill)
            return process

        follower = start("router_follower.py", url, "main", router_url, f"rollout-1={url_of_engine}")
        assert follower.stdout is not None
        with GatewayClient(url, token) as client:
            client.create_pair(
                "main", 1, {"rollout-1": {"kind": "worker", "world_size": 1}}, {"heartbeat": 0.5, "silence": 10.0}
            )
        probe = readiness(root, url, ready, "rollout-1")
        assert probe.returncode != 0
        assert json.loads(probe.stdout)["message"].endswith("does not serve: no version was committed yet")
        assert workers == {}
        engine = start("own_engine.py", url, "main", "rollout-1", **{TOKEN_VARIABLE: token})
        source = PlainSource({"model.norm.weight": torch.ones(64)})
        trainer = TrainerWorker(url, "main", source, rank=0, world_size=1, token=token)
        trainer.connect()
        trainer.update(1)
        assert follower.stdout.readline() == "rollout-1 in: it serves\n"
        assert list(workers.values()) == [url_of_engine]
        assert readiness(root, url, ready, "rollout-1").returncode == 0
        engine.kill()
        dead = "rollout-1 ranks 0 were not heard from for 10 s"
        expected = f"rollout-1 out: instance rollout-1 of pair main does not serve: {dead}\n"
        assert follower.stdout.readline() == expected
        assert workers == {}
        trainer.close()


@pytest.mark.slow
def test_ray_training_loop(root: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    lines = run(str(root / "examples" / "ray_training_loop.py"), RAY_AUTH_MODE="disabled")
    weights = "{{'model.layers.0.weight': {0}.0, 'model.layers.1.weight': {0}.0}}"
    assert lines == [f"{step} ['rollout-0'] {weights.format(step)}" for step in (1, 2, 3)]
