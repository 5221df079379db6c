"""The demo's processes beside the trainer: the gateway and the SGLang servers. Each logs to a file of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from weightcast.cluster.processes import free_port, running, tail, wait_up
from weightcast.cluster.ray_actors import Launch
from weightcast.demo.config import DemoConfig, ServerConfig
from weightcast.gateway.addresses import http_url
from weightcast.gateway.client import TOKEN_VARIABLE
from weightcast.transfer.errors import EngineError

__all__ = ["Server", "server_launch", "start_gateway", "start_server"]


@contextmanager
def start_gateway(config: DemoConfig, token: str) -> Iterator[str]:
    """Runs a gateway on a free port; yields its URL once it answers."""
    port, log = free_port(config.host), config.log("gateway")
    command = [sys.executable, "-m", "weightcast", "gateway", "--host", config.host, "--port", str(port)]
    with running(command, log, {TOKEN_VARIABLE: token}) as process:
        url = http_url(config.host, port)
        wait_up(process, f"{url}/pairs", log, config.deadline, {"Authorization": f"Bearer {token}"})
        yield url


@contextmanager
def start_server(spec: ServerConfig, config: DemoConfig, model: Path, token: str) -> Iterator[Server]:
    """Starts a server without waiting: call `wait_up` when all are started."""
    port, log = free_port(config.host), config.log(spec.name)
    launch, url = server_launch(spec, config, model, token), http_url(config.host, port)
    with running(launch.filled(config.host, port), log, launch.environment) as process:
        yield Server(spec, url, log, partial(wait_up, process, f"{url}/health", log))


@dataclass(frozen=True, slots=True)
class Server:
    """A real SGLang server on the CPU.

    `wait_up` waits at most so many seconds until it is up. It raises EngineError with the end of its log when it does
    not come up.
    """

    spec: ServerConfig
    url: str
    log: Path
    wait_up: Callable[[float], object]

    def generate(self, prompts: list[list[int]], count: int) -> tuple[list[list[int]], list[list[float]], str]:
        """Greedy tokens and their log-probabilities for each prompt, and the weight version all answers carry."""
        tokens, scores, versions = [], [], set()
        for prompt in prompts:
            answer = self._generate(prompt, count)
            meta = answer["meta_info"]
            tokens.append([int(t) for t in answer["output_ids"]])
            scores.append([float(entry[0]) for entry in meta["output_token_logprobs"]])
            versions.add(str(meta["weight_version"]))
        return tokens, scores, ",".join(sorted(versions))

    def _generate(self, prompt: list[int], count: int) -> dict[str, Any]:
        body = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
        }
        try:
            response = httpx.post(f"{self.url}/generate", json=body, timeout=120.0, trust_env=False)
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise EngineError(f"{self.spec.name}: generate failed: {error}; see {self.log}: {tail(self.log)}") from None
        return dict(response.json())


def server_launch(spec: ServerConfig, config: DemoConfig, model: Path, token: str) -> Launch:
    """The command that starts a server, and the variables that it needs beside this process's environment."""
    command = [
        "{python}", "-m", "sglang.launch_server",
        "--model-path", str(model), "--host", "{host}", "--port", "{port}",
        "--device", "cpu", "--dtype", config.dtype,
        "--tp-size", str(spec.tp), "--ep-size", str(spec.ep), "--pp-size", str(spec.pp),
        "--skip-tokenizer-init", "--skip-server-warmup", "--attention-backend", "torch_native",
        "--sampling-backend", "pytorch", "--disable-cuda-graph", "--disable-overlap-schedule",
        "--max-total-tokens", "2048", "--max-running-requests", "4", "--chunked-prefill-size", "-1",
        "--mem-fraction-static", "0.3", "--sleep-on-idle", "--weight-version", "0",
    ]  # fmt: skip
    if spec.placement:
        layers = int(json.loads((model / "config.json").read_text())["num_hidden_layers"])
        experts = len(set(spec.placement))
        command += ["--ep-num-redundant-experts", str(len(spec.placement) - experts)]
        command += ["--init-expert-location", json.dumps({"physical_to_logical_map": [list(spec.placement)] * layers})]
    environment = {
        TOKEN_VARIABLE: token,
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        # One entry a rank; ranks share cores where there are fewer cores than ranks.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(spec.world_size)),
    }
    return Launch(command, environment, str(config.log(spec.name)))
