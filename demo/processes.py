"""The demo's processes beside the trainer: the gateway and the SGLang servers. Each logs to a file of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from weightcast.cluster.processes import free_port, running, tail, wait_up
from weightcast.demo.config import DemoConfig, ServerConfig
from weightcast.gateway.client import TOKEN_VARIABLE
from weightcast.transfer.errors import EngineError

__all__ = ["Server", "ServerProcess", "server_command", "server_environment", "start_gateway"]


@contextmanager
def start_gateway(config: DemoConfig, token: str) -> Iterator[str]:
    """Runs a gateway on a free port; yields its URL once it answers."""
    port = free_port()
    log = config.work / "gateway.log"
    command = [sys.executable, "-m", "weightcast", "gateway", "--port", str(port)]
    with running(command, log, {TOKEN_VARIABLE: token}) as process:
        url = f"http://127.0.0.1:{port}"
        wait_up(process, f"{url}/pairs", log, config.deadline, {"Authorization": f"Bearer {token}"})
        yield url


class Server(ABC):
    """A real SGLang server on the CPU, whose process a subclass holds."""

    def __init__(self, spec: ServerConfig, url: str, log: Path) -> None:
        self.spec, self.url, self.log = spec, url, log

    @abstractmethod
    def wait_up(self, seconds: float) -> None:
        """Waits until it is up. Raises EngineError with the end of its log when it does not come up."""

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
            raise EngineError(
                f"{self.spec.name}: generate failed: {error}; see {self.log}: {tail(self.log)}"
            ) from error
        return dict(response.json())


class ServerProcess(Server):
    """A server that is a process of this machine."""

    def __init__(self, spec: ServerConfig, url: str, log: Path, process: subprocess.Popen[bytes]) -> None:
        super().__init__(spec, url, log)
        self._process = process

    @classmethod
    @contextmanager
    def start(cls, spec: ServerConfig, config: DemoConfig, model: Path, token: str) -> Iterator[ServerProcess]:
        """Starts it without waiting: call `wait_up` when all are started."""
        port = free_port()
        log = config.work / f"{spec.name}.log"
        command = server_command(spec, config, model, sys.executable, "127.0.0.1", str(port))
        with running(command, log, server_environment(spec, token)) as process:
            yield cls(spec, f"http://127.0.0.1:{port}", log, process)

    def wait_up(self, seconds: float) -> None:
        wait_up(self._process, f"{self.url}/health", self.log, seconds, {})


def server_environment(spec: ServerConfig, token: str) -> dict[str, str]:
    """The variables that a server process needs beside this one's environment."""
    return {
        TOKEN_VARIABLE: token,
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        # One entry a rank; ranks share cores where there are fewer cores than ranks.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(spec.world_size)),
    }


def server_command(spec: ServerConfig, config: DemoConfig, model: Path, python: str, host: str, port: str) -> list[str]:
    """The command that starts a server."""
    command = [
        python, "-m", "sglang.launch_server",
        "--model-path", str(model), "--host", host, "--port", port,
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
    return command
