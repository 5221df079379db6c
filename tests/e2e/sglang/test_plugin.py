"""The plugin inside real SGLang servers: the main job, and failures as answers of a server that goes on serving."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from loopback_support import has_ipv6
from spawn_support import free_port

from weightcast.cli import main
from weightcast.demo.config import DemoConfig, ServerConfig
from weightcast.demo.model import make_model, prompt_ids
from weightcast.demo.processes import Server, start_gateway, start_server
from weightcast.gateway.client import TOKEN_VARIABLE, GatewayClient
from weightcast.gateway.server.tokens import make_token

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

TOKEN = make_token()


def test_the_demo_proves_every_version(tmp_path: Path) -> None:
    """The whole main job as a user runs it: two versions on tp2/ep2 with a same-rank pair and on tp1.

    All of it is at ::1 where there is that; the other tests are at 127.0.0.1.
    """
    command = [sys.executable, "-m", "weightcast", "demo", "--versions", "2", "--json", "--work", str(tmp_path)]
    command += ["--host", "::1"] if has_ipv6() else []
    done = subprocess.run(command, capture_output=True, timeout=540, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["faults"] == []
    assert [(o["version"], o["instance"]) for o in found["outcomes"]] == [
        (1, "rollout-0"),
        (1, "rollout-1"),
        (2, "rollout-0"),
        (2, "rollout-1"),
    ]
    for outcome in found["outcomes"]:
        assert (outcome["equal"], outcome["changed"], outcome["prompts"]) == (8, 8, 8)
        assert outcome["weight_version"] == str(outcome["version"])
        # 2 layers x 6 slots, or 2 x 4, each with gate, up and down.
        assert outcome["verified"]["slot_regions"] == (36 if outcome["instance"] == "rollout-0" else 24)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    work = tmp_path_factory.mktemp("server")
    make_model(work / "model")
    config = DemoConfig(work=work)
    with start_server(ServerConfig("rollout-0"), config, work / "model", TOKEN) as started:
        started.wait_up(300.0)
        yield started


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start_gateway(DemoConfig(work=tmp_path_factory.mktemp("gateway")), TOKEN) as url:
        yield url


def post(server: Server, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    answer = httpx.post(server.url + path, json=body, timeout=120.0, trust_env=False)
    return answer.status_code, answer.json()


def init_group(server: Server, url: str, group: str, world_size: int = 1) -> tuple[int, dict[str, Any]]:
    """What comes of a connect: the call says that it began, and when it is made again how it goes on."""
    host, port = url.removeprefix("http://").split(":")
    group = group.replace("CALL", uuid.uuid4().hex[:8]) if group.count("/") == 5 else group
    body = {"master_address": host, "master_port": int(port), "rank_offset": 0, "world_size": world_size}
    while True:
        status, answer = post(server, "/init_weights_update_group", **body, group_name=group, backend="gloo")
        if answer["message"] != "connecting":
            return status, answer
        time.sleep(0.1)


def still_serves(server: Server) -> bool:
    tokens, _, version = server.generate([prompt_ids(Path(), 256)[0]], 4)
    return len(tokens[0]) == 4 and version == "0"


@pytest.mark.parametrize(
    ("group", "world_size", "said"),
    [
        ("weightcast/nope/rollout-0/1/abort/CALL", 1, "AbsentError: there is no pair 'nope'"),
        ("weightcast/nope/rollout-0/1", 1, "is not weightcast/PAIR/INSTANCE/EPOCH/PAUSE/CALL"),
        ("weightcast/nope/rollout-0/1/stop/CALL", 1, "is not weightcast/PAIR/INSTANCE/EPOCH/PAUSE/CALL"),
        ("weightcast/main/rollout-0/1/abort/CALL", 2, "instance rollout-0 has 1 ranks, the pair says 2"),
        ("weightcast/main/rollout-9/1/abort/CALL", 1, "pair main has no instance 'rollout-9'; it has rollout-0"),
        ("weightcast/main/rollout-0/7/abort/CALL", 1, "PairStateError: instance rollout-0 is in epoch 1, not 7"),
    ],
)
def test_a_failed_connect_is_an_answer(server: Server, gateway: str, group: str, world_size: int, said: str) -> None:
    with GatewayClient(gateway, TOKEN) as client:
        client.create_pair("main", 1, {"rollout-0": {"kind": "worker", "world_size": 1}})
    status, answer = init_group(server, gateway, group, world_size)
    assert (status, answer["success"]) == (400, False)
    assert said in answer["message"]
    assert "\n" not in answer["message"]
    assert still_serves(server)


def test_a_gateway_that_is_not_there_is_an_answer(server: Server) -> None:
    status, answer = init_group(server, f"http://127.0.0.1:{free_port()}", "weightcast/main/rollout-0/1/retract/CALL")
    assert (status, answer["success"]) == (400, False)
    assert "is it up?" in answer["message"]
    assert still_serves(server)


def test_a_transfer_out_of_place_is_an_answer(server: Server) -> None:
    """Outside a session, and inside one without a group; the session can be closed and the server serves as before."""
    body = {"names": [], "dtypes": [], "shapes": [], "group_name": "weightcast/a/b/1", "load_format": "weightcast"}
    status, answer = post(server, "/update_weights_from_distributed", **body)
    assert (status, answer["success"]) == (400, False)
    assert "between begin_weight_update and end_weight_update" in answer["message"]
    assert post(server, "/begin_weight_update")[0] == 200
    status, answer = post(server, "/update_weights_from_distributed", **body)
    assert (status, answer["success"]) == (400, False)
    assert "init the group first" in answer["message"]
    assert post(server, "/end_weight_update")[0] == 200
    assert still_serves(server)


def test_other_groups_are_left_to_sglang(server: Server) -> None:
    status, answer = post(server, "/destroy_weights_update_group", group_name="somebody-else")
    assert (status, answer["message"]) == (400, "The group to be destroyed does not exist.")
    assert still_serves(server)


def test_a_checkpoint_is_loaded_without_a_trainer(
    server: Server, gateway: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other weights than the server started with, in several files: it must then say what Transformers says of them."""
    import torch
    from transformers import AutoModelForCausalLM

    make_model(tmp_path / "start")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "start", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.flip(0) * 1.1)
    model.save_pretrained(tmp_path / "other", max_shard_size="100KB")
    assert len(list((tmp_path / "other").glob("*.safetensors"))) > 2
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    instance = json.dumps({"name": "rollout-0", "url": server.url, "world_size": 1})
    before = server.generate(prompt_ids(Path(), 256), 12)[0]
    assert main(["load", str(tmp_path / "other"), "--instance", instance, "--version", "5", "--gateway", gateway]) == 0
    tokens, _, version = server.generate(prompt_ids(Path(), 256), 12)
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompt_ids(Path(), 256)
    ]
    assert version == "5"
    assert tokens == expected
    assert tokens != before
