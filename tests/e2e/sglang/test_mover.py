"""SGLang's own runtime mover (`ExpertLocationUpdater`) rebalances experts between updates and in the middle of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mover_workers
import pytest
from gateway_support import running_gateway
from sglang_models import write_checkpoint
from sglang_nest import Nest
from sglang_support import map_arguments

from weightcast.gateway.client import GatewayClient

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

FIRST = [0, 1, 2, 3, 3, 0]
ROWS = [FIRST, [3, 2, 1, 0, 0, 1], [1, 1, 0, 2, 3, 3], *[[0, 1, 2, 3, 3, 0], [2, 2, 0, 1, 3, 1]] * 2]


@pytest.fixture(scope="module")
def nest() -> Iterator[Nest]:
    with Nest() as started:
        yield started


def test_layers_that_move_between_and_during_updates(nest: Nest, tmp_path: Path) -> None:
    """Version 2: moved before. 3: moved in the middle of one transfer. 4: of every transfer. 5: at rest again."""
    path = write_checkpoint("qwen3-moe", tmp_path)
    server = {"tp_size": 2, "ep_size": 2} | map_arguments(FIRST, 2)
    with running_gateway() as (url, token):
        with GatewayClient(url, token) as client:
            engine = {"kind": "worker", "world_size": 2}
            # So little memory for messages that a transfer has several rounds.
            client.create_pair("moving", 1, {"rollout-0": engine}, bucket_bytes=32 << 10)
        arguments = (str(path), server, url, token, [1, 2, 3, 4, 5], ROWS, [2], {3: 1, 4: 4})
        found = nest.run(mover_workers.play, 3, *arguments, timeout=300.0)
    first, second, third, fourth, fifth = found[2]
    assert (first["attempts"], first["resends"]) == (1, 0)
    assert (second["attempts"], second["resends"]) == (2, 0)
    assert (third["committed"], third["attempts"], third["resends"]) == (True, 2, 1)
    assert fourth.startswith("version 4 is not served everywhere: rollout-0 is fenced: instance rollout-0: rank 0: ")
    assert "the expert placement of layers 0 changed during the transfer, and went on changing" in fourth
    assert "while they were sent 3 times more" in fourth
    assert (fifth["committed"], fifth["fenced"]) == (True, False)
    assert found[:2] == [[[], [], [], "fenced", []]] * 2
