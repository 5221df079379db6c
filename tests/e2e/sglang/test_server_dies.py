"""A real SGLang server outlives its gateway, and one that is killed is refused at once until it is there again."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from gateway_support import running_gateway
from life_support import soon
from spawn_support import free_port

from weightcast.adapters.unsharded import CheckpointSource
from weightcast.cluster.processes import running, wait_up
from weightcast.demo.config import DemoConfig, ServerConfig
from weightcast.demo.model import make_model, prompt_ids
from weightcast.demo.processes import Server, server_launch
from weightcast.gateway.client import GatewayClient
from weightcast.gateway.ranks.trainer import TrainerWorker
from weightcast.gateway.server.tokens import make_token
from weightcast.transfer.errors import UpdateError

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

NAME = "rollout-0"


def test_a_server_outlives_its_gateway_and_comes_back(tmp_path: Path) -> None:
    token, server_port, port = make_token(), free_port(), free_port()
    make_model(tmp_path / "model")
    config, spec, url = DemoConfig(work=tmp_path), ServerConfig(NAME), f"http://127.0.0.1:{server_port}"
    launch = server_launch(spec, config, tmp_path / "model", token)

    def start(life: ExitStack) -> Server:
        command, log = launch.filled(config.host, server_port), config.log(NAME)
        process = life.enter_context(running(command, log, launch.environment))
        server = Server(spec, url, log, partial(wait_up, process, f"{url}/health", log))
        server.wait_up(300.0)
        return server

    def stamp(server: Server) -> str:
        return server.generate([prompt_ids(Path(), 256)[0]], 2)[2]

    state = ("--state", str(tmp_path / "state"))
    with ExitStack() as undo, ExitStack() as first_life:
        server = start(first_life)
        with running_gateway(*state, port=port, token=token) as (gateway, _):
            client = undo.enter_context(GatewayClient(gateway, token, outage=60.0))
            settings = {"heartbeat": 0.5, "silence": 5.0}
            client.create_pair("main", 1, {NAME: {"url": url, "world_size": 1}}, settings)
            source = CheckpointSource(tmp_path / "model")
            trainer = TrainerWorker(gateway, "main", source, rank=0, world_size=1, token=token)
            undo.callback(trainer.close)
            trainer.connect()
            trainer.update(1)
            assert stamp(server) == "1"
        assert stamp(server) == "1", "without a gateway"
        with running_gateway(*state, port=port, token=token):
            trainer.update(2)
            assert stamp(server) == "2"
            first_life.close()
            soon(lambda: client.pair_status("main")["instances"][NAME]["silent"], 60.0)
            for version in (3, 4):
                with pytest.raises(UpdateError, match=r"ConnectError|was not reached since"):
                    trainer.update(version)
            record = client.pair_status("main")["instances"][NAME]["updates"][-1]
            assert (record["version"], record["seconds"]) == (4, 0.0)
            server = start(undo)
            trainer.update(5)
            assert stamp(server) == "5"
