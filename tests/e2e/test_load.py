"""`weightcast load` into an engine of one rank, with a real gateway. With a real server: test_plugin.py."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from gateway_support import running_gateway
from life_support import soon
from loopback_support import LOOPBACKS
from plain_support import Piece, PlainSink
from safetensors.torch import save_file

from weightcast.cli import main
from weightcast.gateway.client import TOKEN_VARIABLE, GatewayClient
from weightcast.gateway.ranks.instance import InstanceWorker


@pytest.fixture(scope="module", params=LOOPBACKS)
def running(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    with running_gateway(host=request.param) as found:
        yield found


@pytest.fixture
def gateway(running: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(TOKEN_VARIABLE, running[1])
    return running[0]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file(
        {"a": torch.arange(12.0).view(4, 3), "b": torch.ones(5, dtype=torch.bfloat16)}, tmp_path / "x.safetensors"
    )
    return tmp_path


def _serve(url: str, pair: str, sink: PlainSink, served: list[int]) -> None:
    """An engine that waits for its pair, and serves one version."""
    worker = InstanceWorker(url, pair, "rollout-0", sink, rank=0, world_size=1)
    try:
        while not served:
            if (version := worker.serve(wait=1.0)) is not None:
                served.append(version)
    finally:
        worker.close()


def test_an_engine_gets_a_checkpoint(gateway: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = {"a": torch.full((4, 3), float("nan")), "b": torch.zeros(5)}
    sink = PlainSink([Piece(name, tuple(view.shape), (0,) * view.dim(), view) for name, view in memory.items()])
    served: list[int] = []
    engine = threading.Thread(target=_serve, args=(gateway, "first", sink, served), daemon=True)
    engine.start()
    instance = json.dumps({"name": "rollout-0", "kind": "worker", "world_size": 1})
    arguments = ["load", str(checkpoint), "--instance", instance, "--version", "7", "--gateway", gateway]
    topology = checkpoint / "topology.toml"
    assert main([*arguments, "--topology", str(topology)]) == 2
    assert f"cannot read {str(topology)!r}: No such file" in capsys.readouterr().err
    topology.write_text("nic_gbps = 0")
    assert main([*arguments, "--topology", str(topology)]) == 2
    assert capsys.readouterr().err.endswith("topology: nic_gbps is 0, expected a number from 1e-06 to 1e+09\n")
    topology.write_text("nic_gbps = 400")
    arguments += ["--topology", str(topology)]
    assert main([*arguments, "--pair", "first", "--json"]) == 0
    engine.join(30.0)
    said = json.loads(capsys.readouterr().out)
    assert said["version"] == 7
    assert said["instances"]["rollout-0"]["verified"]["regions"] == 2
    assert served == [7]
    assert torch.equal(memory["a"], torch.arange(12.0).view(4, 3))
    assert torch.equal(memory["b"], torch.ones(5))
    with GatewayClient(gateway) as client:
        assert client.status() == []


@pytest.mark.parametrize(
    ("instance", "message"),
    [
        ("rollout-0", "instance 'rollout-0' is not a JSON object with a name"),
        ('{"kind": "worker"}', "is not a JSON object with a name"),
        ("[]", "is not a JSON object with a name"),
    ],
)
def test_bad_instances_are_refused(
    gateway: str, checkpoint: Path, instance: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["load", str(checkpoint), "--instance", instance, "--gateway", gateway]) == 2
    assert message in capsys.readouterr().err


def test_a_pair_that_is_there_is_left_alone(gateway: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    instance = {"kind": "worker", "world_size": 1}
    with GatewayClient(gateway) as client:
        client.create_pair("main", 2, {"rollout-0": instance})
        text = json.dumps({"name": "rollout-0", **instance})
        assert main(["load", str(checkpoint), "--instance", text, "--pair", "main", "--gateway", gateway]) == 2
        assert "there is a pair 'main' already" in capsys.readouterr().err
        assert client.pair_status("main")["trainer"]["world_size"] == 2
        client.delete_pair("main")


def test_a_load_that_is_interrupted_leaves_no_pair(gateway: str, checkpoint: Path) -> None:
    """While it waits for an engine that does not come; else the next run would find the name taken."""
    instance = json.dumps({"name": "rollout-0", "kind": "worker", "world_size": 1})
    command = [
        sys.executable,
        "-m",
        "weightcast",
        "load",
        str(checkpoint),
        "--instance",
        instance,
        "--gateway",
        gateway,
    ]
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with (
        GatewayClient(gateway) as client,
        subprocess.Popen(command, stderr=subprocess.PIPE, preexec_fn=heed) as process,
    ):
        assert process.stderr is not None
        while not [pair for pair in client.status() if pair["pair"] == "load" and pair["trainer"]["registered"]]:
            assert process.poll() is None
        while not client.status()[0]["instances"]["rollout-0"]["orders"]:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(60.0) == 130
        assert "load" not in [pair["pair"] for pair in client.status()]


def test_a_folder_that_is_no_checkpoint_is_told_first(
    gateway: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    instance = json.dumps({"name": "rollout-0", "kind": "worker", "world_size": 1})
    assert main(["load", str(tmp_path), "--instance", instance, "--gateway", gateway]) == 2
    assert "has no *.safetensors file" in capsys.readouterr().err


def test_a_load_whose_pair_is_deleted_says_so(
    gateway: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not that the pair, which it takes back as well, is no longer there."""
    instance = json.dumps({"name": "rollout-0", "kind": "worker", "world_size": 1})
    status: list[int] = []
    arguments = ["load", str(checkpoint), "--instance", instance, "--pair", "gone", "--gateway", gateway]
    load = threading.Thread(target=lambda: status.append(main(arguments)), daemon=True)
    load.start()
    with GatewayClient(gateway) as client:
        soon(lambda: [p for p in client.status() if p["pair"] == "gone" and p["instances"]["rollout-0"]["orders"]])
        client.delete_pair("gone", force=True)
    load.join(60.0)
    assert status == [4]
    assert "pair gone is deleted, which ends what is under way" in capsys.readouterr().err
