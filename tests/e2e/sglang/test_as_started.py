"""Real SGLang servers as people start them: by a name of the hub, with keys, without weights, on two nodes; and those
that cannot be updated, which are told so before anything is asked of them.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_support import running_gateway
from safetensors.torch import load_file, save_file
from sglang_updates import Weights, start_engine
from spawn_support import free_port

from weightcast.adapters.unsharded import PlainSource
from weightcast.cluster.processes import running, wait_up
from weightcast.demo.config import DemoConfig, ServerConfig
from weightcast.demo.model import make_model
from weightcast.demo.processes import server_launch
from weightcast.gateway.client import GatewayClient
from weightcast.gateway.ranks.trainer import TrainerWorker
from weightcast.transfer.errors import ControlError, CoverageError, EngineError, WeightcastError

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PROMPTS = [[(7 + 11 * number + step * (3 + number)) % 250 for step in range(12)] for number in range(3)]
COUNT = 8
VOCABULARY = 250
"""Not a multiple of 64, so that SGLang's loader pads the embedding."""
API_KEY, ADMIN_KEY = "the-key-of-clients", "the-key-of-admins"
VARIABLES = {"WEIGHTCAST_ENGINE_KEY": API_KEY, "WEIGHTCAST_ENGINE_KEY_ADMIN": ADMIN_KEY}


class Server:
    """A server that runs."""

    def __init__(self, url: str, log: Path, key: str = "", nodes: Sequence[str] = ()) -> None:
        self.url, self.log, self.nodes = url, log, nodes
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def ask(self, prompt: list[int]) -> tuple[list[int], str]:
        """Greedy tokens, and the version that they are stamped with."""
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": COUNT, "temperature": 0, "ignore_eos": True}}
        answer = httpx.post(f"{self.url}/generate", json=body, headers=self._headers, timeout=300.0, trust_env=False)
        assert answer.status_code == 200, answer.text
        said = answer.json()
        return [int(token) for token in said["output_ids"]], str(said["meta_info"]["weight_version"])


@contextmanager
def started(
    model: str | Path, work: Path, token: str, *options: str, nodes: int = 1, key: str = "", **environment: str
) -> Iterator[Server]:
    """A server of `model`, which may be a name, with a process and a rank for each of its nodes."""
    work.mkdir(exist_ok=True)
    launch = server_launch(ServerConfig("rollout-0", nodes, nodes), DemoConfig(work=work), Path(model), token)
    address, ports = f"127.0.0.1:{free_port()}", [free_port() for _ in range(nodes)]
    with ExitStack() as processes:
        for node, port in enumerate(ports):
            place = ("--nnodes", str(nodes), "--node-rank", str(node), "--dist-init-addr", address) if nodes > 1 else ()
            command, log = [*launch.filled("127.0.0.1", port), *place, *options], work / f"node-{node}.log"
            process = processes.enter_context(running(command, log, launch.environment | environment))
            if node == 0:
                first = process
        url, log = f"http://127.0.0.1:{ports[0]}", work / "node-0.log"
        wait_up(first, f"{url}/health", log, 600.0, {})
        yield Server(url, log, key, [f"http://127.0.0.1:{port}" for port in ports])


@contextmanager
def gateway_with_keys(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[tuple[str, str]]:
    """URL and token of a gateway that has the keys of servers in its environment, and a state file."""
    for variable, key in VARIABLES.items():
        monkeypatch.setenv(variable, key)
    with running_gateway("--state", str(folder / "state.db")) as found:
        for variable in VARIABLES:
            monkeypatch.delenv(variable)  # it is the gateway that needs them
        yield found


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[str, str]]:
    with gateway_with_keys(monkeypatch, tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    folder = tmp_path_factory.mktemp("weights") / "model"
    make_model(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:VOCABULARY].contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": VOCABULARY}))
    return Weights(folder)


def delete(client: GatewayClient) -> None:
    """Deletes the pair, as soon as a connect that has failed is over."""
    limit = time.monotonic() + 120.0
    while True:
        try:
            client.delete_pair("main")
        except ControlError:
            assert time.monotonic() < limit
            time.sleep(0.1)
        else:
            return


@contextmanager
def paired(
    gateway: tuple[str, str], server: Server, weights: Weights, lacks: str = "", **record: Any
) -> Iterator[TrainerWorker]:
    """A trainer that has not connected yet, and perhaps lacks a tensor; the pair is gone afterwards."""
    url, token = gateway
    engine = {"url": server.url, "world_size": 1, "pause": "retract", **record}
    with GatewayClient(url, token) as client, ExitStack() as ending:
        client.create_pair("main", 1, {"rollout-0": engine}, {"silence": 60.0})
        ending.callback(delete, client)
        source = PlainSource({name: t for name, t in weights.tensors.items() if name != lacks})
        trainer = TrainerWorker(url, "main", source, rank=0, world_size=1, token=token)
        ending.callback(trainer.close)
        yield trainer


def refusal(gateway: tuple[str, str], server: Server, weights: Weights, **record: Any) -> str:
    """The error of a connect."""
    with paired(gateway, server, weights, **record) as trainer, pytest.raises(WeightcastError) as caught:
        trainer.connect()
    assert isinstance(caught.value, EngineError), caught.value
    assert "\n" not in str(caught.value)
    return str(caught.value)


def updated(trainer: TrainerWorker, server: Server, weights: Weights, version: int) -> None:
    """Updates, and compares what the server says with what the trainer's weights say."""
    weights.become(version)
    trainer.update(version)
    for prompt in PROMPTS:
        assert server.ask(prompt) == (weights.says(prompt, COUNT), str(version))


def hub_of(folder: Path, cache: Path, name: str) -> None:
    """A cache of the hub as its client keeps it, in which `name` is the model of a folder."""
    entry, commit = cache / "hub" / f"models--{name.replace('/', '--')}", "0123456789abcdef0123456789abcdef01234567"
    snapshot = entry / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        (snapshot / file.name).symlink_to(file)
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text(commit)


def test_a_name_of_the_hub_and_keys(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, weights: Weights, tmp_path: Path
) -> None:
    hub_of(weights.folder, tmp_path / "cache", "weightcast/tiny")
    hub = {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    keys = ("--api-key", API_KEY, "--admin-api-key", ADMIN_KEY)
    reads = {"api_key_variable": "WEIGHTCAST_ENGINE_KEY"}
    both = {**reads, "admin_api_key_variable": "WEIGHTCAST_ENGINE_KEY_ADMIN"}
    with (
        gateway_with_keys(monkeypatch, tmp_path) as gateway,
        started("weightcast/tiny", tmp_path / "engine", gateway[1], *keys, key=API_KEY, **hub) as server,
    ):
        messages = [refusal(gateway, server, weights)]
        assert "/server_info answered 401: the server wants a key: set api_key_variable; " in messages[0]
        messages.append(refusal(gateway, server, weights, api_key_variable="WEIGHTCAST_ENGINE_KEY_B"))
        assert "variable WEIGHTCAST_ENGINE_KEY_B is not set in the environment of the gateway" in messages[1]
        messages.append(refusal(gateway, server, weights, **reads))
        told = "/init_weights_update_group answered 401: the server does not take the key of variable "
        assert f"{told}WEIGHTCAST_ENGINE_KEY; " in messages[2]
        norm = "model.norm.weight"
        with (
            paired(gateway, server, weights, norm, **both) as trainer,
            pytest.raises(CoverageError, match=norm),  # it is in the checkpoint of that name
        ):
            trainer.connect()
        with paired(gateway, server, weights, **both) as trainer:
            trainer.connect()
            updated(trainer, server, weights, 1)
            updated(trainer, server, weights, 2)
            with GatewayClient(*gateway) as client:
                messages += [json.dumps(client.status()), client.inspect_text("main", "rollout-0")]
            messages += [file.read_bytes().decode("latin-1") for file in tmp_path.glob("state.db*")]
    log = "".join(capfd.readouterr())
    assert "/server_info answered 401" in log
    assert not any(key in message for message in (*messages, log) for key in (API_KEY, ADMIN_KEY))


def test_a_folder_with_a_config_alone(gateway: tuple[str, str], weights: Weights, tmp_path: Path) -> None:
    """Names come from the trainer, and what SGLang's loader would pad is padded, though it has never run."""
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "config.json").write_text((weights.folder / "config.json").read_text())
    with start_engine(folder, tmp_path / "engine", gateway[1], 0.0, "--load-format", "dummy") as engine:
        server = Server(engine.url, engine.log)
        with paired(gateway, server, weights) as trainer:
            trainer.connect()
            for version in (1, 2):
                updated(trainer, server, weights, version)
                assert [kept["padding"] for kept in engine.kept(version)] == [0.0]


def test_a_server_without_the_plugin(gateway: tuple[str, str], weights: Weights, tmp_path: Path) -> None:
    with started(weights.folder, tmp_path / "engine", gateway[1], SGLANG_PLUGINS="none") as server:
        assert refusal(gateway, server, weights).endswith(
            f"instance rollout-0: the server at {server.url} runs without the weightcast plugin: install weightcast in "
            "its environment, and see that SGLANG_PLUGINS does not exclude it"
        )
        left_as_it_was(server)


def test_data_parallel_replicas(gateway: tuple[str, str], weights: Weights, tmp_path: Path) -> None:
    threads = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with started(weights.folder, tmp_path / "engine", gateway[1], "--dp-size", "2", **threads) as server:
        for world_size in (1, 2):
            message = refusal(gateway, server, weights, world_size=world_size)
            assert f"the server at {server.url} has dp_size 2, expected 1, because " in message
            assert message.endswith("start a server for each replica, and make each an instance of the pair")
        left_as_it_was(server)


def test_two_nodes(gateway: tuple[str, str], weights: Weights, tmp_path: Path) -> None:
    """Each process has one of two ranks; the second one serves no API."""
    with started(weights.folder, tmp_path / "engine", gateway[1], nodes=2) as server:
        message = refusal(gateway, Server(server.nodes[1], server.log), weights, world_size=2)
        assert " answered 404 to /server_info, and not as SGLang 0.5.23 does; " in message
        assert message.endswith("is this the url of such a server's first node?")
        message = refusal(gateway, server, weights, world_size=4)
        assert "has 2 ranks (tp_size 2 x pp_size 1), the pair says 4; correct world_size" in message
        left_as_it_was(server)
        with paired(gateway, server, weights, world_size=2) as trainer:
            trainer.connect()
            updated(trainer, server, weights, 1)
            updated(trainer, server, weights, 2)


def left_as_it_was(server: Server) -> None:
    """Checks that the server was asked for nothing that changes it, and answers."""
    asked = set(re.findall(r'"(?:GET|POST) (/\S+)', server.log.read_text()))
    assert "/server_info" in asked
    assert asked <= {"/health", "/server_info", "/freeze_gc"}, "SGLang calls the last one itself"
    assert server.ask(PROMPTS[0])[1] == "0"
