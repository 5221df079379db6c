"""SGLang's own RayEngine: its schedulers are actors of Ray, with our sink in them. GPUs are numbers to Ray here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from cluster_support import instances, ray_cluster, weightcast
from gateway_support import running_gateway
from safetensors.torch import load_file, save_file
from sglang_models import write_checkpoint
from spawn_support import free_port

from weightcast.cluster.processes import running, wait_up
from weightcast.gateway.client import TOKEN_VARIABLE

ray = pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = [pytest.mark.cluster, pytest.mark.sglang, pytest.mark.slow]

CPU = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
OPTIONS = """
    --device cpu --dtype bfloat16 --skip-tokenizer-init --skip-server-warmup
    --attention-backend torch_native --sampling-backend pytorch --disable-cuda-graph --disable-overlap-schedule
    --max-total-tokens 2048 --max-running-requests 4 --chunked-prefill-size -1 --mem-fraction-static 0.3
    --sleep-on-idle --weight-version 0
"""
ACTORS = "--use-ray --tp-size 2 --ep-size 2 --host 127.0.0.1"
SPEC = """
pair = "main"

[gateway]
state = "{folder}/gateway.db"

[trainer]
ranks = 1
checkpoint = "{trained}"

[[instance]]
name = "rollout-0"
world_size = 1
command = ["{{python}}", "-m", "sglang.launch_server", "--host", "{{host}}", "--port", "{{port}}", {arguments}]
log = "{folder}/server.log"
"""


@pytest.fixture
def cluster() -> Iterator[str]:
    """A node that says that it has two GPUs. What an actor of it gets from its environment is no token."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name, value in CPU.items():
            patch.setenv(name, value)
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(2)))
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # Ray counts those
        patch.delenv(TOKEN_VARIABLE, raising=False)
        node = {"num_cpus": 4, "num_gpus": 2, "include_dashboard": False}
        made = Cluster(initialize_head=True, head_node_args=node)
        try:
            yield made.address
        finally:
            made.shutdown()


def trained(folder: Path, to: Path) -> Path:
    """The same checkpoint with other weights."""
    to.mkdir()
    for file in folder.glob("*.safetensors"):
        save_file({name: torch.roll(tensor, 1, -1) for name, tensor in load_file(file).items()}, to / file.name)
    return to


def generated(url: str) -> dict[str, object]:
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    return dict(httpx.post(f"{url}/generate", json=body, timeout=60.0, trust_env=False).raise_for_status().json())


def test_a_checkpoint_goes_into_the_actors(cluster: str, tmp_path: Path):
    model = write_checkpoint("qwen3-moe", tmp_path)
    url, log = f"http://127.0.0.1:{free_port()}", tmp_path / "server.log"
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", url.split(":")[-1]]
    with ExitStack() as stack:
        gateway, token = stack.enter_context(running_gateway())
        environment = {TOKEN_VARIABLE: token, "WEIGHTCAST_ADDRESS": "127.0.0.1", "RAY_ADDRESS": cluster}
        arguments = [*OPTIONS.split(), *ACTORS.split()]
        server = stack.enter_context(running([*command, *arguments], log, environment))
        wait_up(server, f"{url}/health", log, 300.0, {})
        before = generated(url)
        instance = json.dumps({"name": "rollout-0", "kind": "sglang", "url": url, "world_size": 2})
        load = ["load", str(trained(model, tmp_path / "next")), "--instance", instance, "--gateway", gateway, "--json"]
        ran = subprocess.run(
            [sys.executable, "-m", "weightcast", *load],
            env={**os.environ, TOKEN_VARIABLE: token},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ran.returncode == 0, ran.stderr
        record = json.loads(ran.stdout)["instances"]["rollout-0"]
        assert record["committed"]
        assert record["verified"]["regions"] > 0
        after = generated(url)
    assert before["meta_info"]["weight_version"] == "0"  # type: ignore[index]
    assert after["meta_info"]["weight_version"] == "1"  # type: ignore[index]
    assert after["output_ids"] != before["output_ids"]


def where(actor: Any) -> str:
    """Where an engine is that was killed, once it has joined again."""
    limit = time.monotonic() + 300.0
    while True:
        try:
            return str(ray.get(actor.where.remote(), timeout=300.0))
        except ray.exceptions.ActorUnavailableError:  # between two lives
            assert time.monotonic() < limit
            time.sleep(0.5)


def test_a_server_that_ray_starts_again_is_fenced_until_the_next_update(tmp_path: Path):
    model = write_checkpoint("qwen3", tmp_path)
    arguments = ", ".join(f'"{part}"' for part in ["--model-path", str(model), *OPTIONS.split()])
    file = tmp_path / "cluster.toml"
    file.write_text(SPEC.format(folder=tmp_path, trained=trained(model, tmp_path / "next"), arguments=arguments))
    with ray_cluster({**CPU, "SGLANG_CPU_OMP_THREADS_BIND": "0"}):
        first = json.loads(weightcast("up", str(file), "--json"))["engines"]["rollout-0"]
        before = generated(first)["output_ids"]
        weightcast("update", "main", "--version", "1")
        after = generated(first)["output_ids"]
        assert after != before
        assert instances()["rollout-0"]["serves"]

        actor = ray.get_actor("main/rollout-0", namespace="weightcast")
        ray.kill(actor, no_restart=False)
        second = where(actor)
        with pytest.raises(httpx.TransportError):
            generated(first)
        joined = instances()["rollout-0"]
        assert (joined["fenced"], joined["serves"]) == (True, False)
        assert generated(second)["output_ids"] == before

        weightcast("update", "main", "--version", "2")
        assert generated(second)["output_ids"] == after
        assert generated(second)["meta_info"]["weight_version"] == "2"  # type: ignore[index]
        assert instances()["rollout-0"]["serves"]
        weightcast("down", str(file))
