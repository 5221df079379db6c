"""The demo's processes beside the trainer: the gateway and the SGLang servers. Each logs to a file of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from weightcast.demo.config import DemoConfig, ServerConfig
from weightcast.gateway.client import TOKEN_VARIABLE
from weightcast.transfer.errors import EngineError

__all__ = ["ServerProcess", "free_port", "running", "start_gateway"]


def free_port() -> int:
    """A TCP port on the loopback address that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its own session; it and its children are ended on leaving."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=os.environ | environment,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    for how, seconds in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, how)
        except ProcessLookupError:
            return
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
        # The leader is gone; its children get the same signal once more, in case they outlived it.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return


def _tail(log: Path, lines: int = 5) -> str:
    return " | ".join(log.read_text(errors="replace").strip().splitlines()[-lines:])


def _wait_up(process: subprocess.Popen[bytes], url: str, log: Path, seconds: float, headers: dict[str, str]) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EngineError(f"{url}: the process ended with {process.returncode}; see {log}: {_tail(log)}")
        try:
            if httpx.get(url, headers=headers, timeout=5.0, trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.25)
    raise EngineError(f"{url} was not up within {seconds:g} s; see {log}: {_tail(log)}")


@contextmanager
def start_gateway(config: DemoConfig, token: str) -> Iterator[str]:
    """A gateway on a free port; its URL once it answers."""
    port = free_port()
    log = config.work / "gateway.log"
    command = [sys.executable, "-m", "weightcast", "gateway", "--port", str(port)]
    with running(command, log, {TOKEN_VARIABLE: token}) as process:
        url = f"http://127.0.0.1:{port}"
        _wait_up(process, f"{url}/pairs", log, config.deadline, {"Authorization": f"Bearer {token}"})
        yield url


class ServerProcess:
    """A real SGLang server on the CPU."""

    def __init__(self, spec: ServerConfig, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.spec, self.url, self._process, self._log = spec, url, process, log

    @classmethod
    @contextmanager
    def start(cls, spec: ServerConfig, config: DemoConfig, model: Path, token: str) -> Iterator[ServerProcess]:
        """Starts it without waiting: call `wait_up` when all are started."""
        port = free_port()
        log = config.work / f"{spec.name}.log"
        with running(_command(spec, config, model, port), log, _environment(spec, token)) as process:
            yield cls(spec, f"http://127.0.0.1:{port}", process, log)

    def wait_up(self, seconds: float) -> None:
        """Raises EngineError with the end of its log when it does not come up."""
        _wait_up(self._process, f"{self.url}/health", self._log, seconds, {})

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
                f"{self.spec.name}: generate failed: {error}; see {self._log}: {_tail(self._log)}"
            ) from error
        return dict(response.json())


def _environment(spec: ServerConfig, token: str) -> dict[str, str]:
    return {
        TOKEN_VARIABLE: token,
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        # One entry a rank; ranks share cores where there are fewer cores than ranks.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(spec.world_size)),
    }


def _command(spec: ServerConfig, config: DemoConfig, model: Path, port: int) -> list[str]:
    command = [
        sys.executable, "-m", "sglang.launch_server",
        "--model-path", str(model), "--host", "127.0.0.1", "--port", str(port),
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
