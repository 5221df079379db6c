"""Several hosts for real: the trainer on one, two instances on two others, and a link that is cut in mid-update.

Skipped where network namespaces cannot be made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from netns_support import Switch, switch, why_not

from weightcast.gateway.client import TOKEN_VARIABLE

TOKEN = "a-token-for-the-tests-of-several-hosts"
RANKS = Path(__file__).parents[2] / "support" / "netns_ranks.py"
PORT = 8900
MIB = 1 << 20
PATIENCE = {"heartbeat": 1, "silence": 5, "outage": 4, "transfer": 100, "join": 20}


class Hosts:
    """Processes on the hosts of a switch."""

    def __init__(self, net: Switch, folder: Path, undo: ExitStack) -> None:
        self._net, self._folder, self._undo = net, folder, undo
        self.url = f"http://{net.address(0)}:{PORT}"

    def start(self, host: int, name: str, *command: str) -> subprocess.Popen[str]:
        log = self._undo.enter_context((self._folder / f"{name}.log").open("w"))
        process = subprocess.Popen(
            [*self._net.on(host), sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, TOKEN_VARIABLE: TOKEN, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )
        self._undo.enter_context(process)
        self._undo.callback(process.kill)
        return process

    def rank(self, host: int, role: str, which: object) -> subprocess.Popen[str]:
        return self.start(host, f"{role}-{which}", str(RANKS), role, self.url, self._net.address(host), str(which))

    def ask(self, *request: str) -> dict[str, object]:
        """A request to the gateway, made on its host."""
        program = (
            "import httpx, sys; m, u, t, *b = sys.argv[1:]\n"
            "print(httpx.request(m, u, content=b[0] if b else None, trust_env=False,"
            " headers={'Authorization': 'Bearer ' + t, 'Content-Type': 'application/json'}).text)"
        )
        method, path, *body = request
        command = [*self._net.on(0), sys.executable, "-c", program, method, self.url + path, TOKEN, *body]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        assert "error" not in found, found
        return dict(found)

    def wait_heard(self, instance: str) -> None:
        """Until the ranks of an instance beat again."""
        for _ in range(60):
            found = self.ask("GET", "/pairs/main")["instances"]
            assert isinstance(found, dict)
            if not found[instance]["silent"]:
                return
            time.sleep(0.5)
        raise AssertionError(f"{instance} is not heard from")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Switch, Hosts]]:
    if reason := why_not():
        pytest.skip(reason)
    with switch(3) as net, ExitStack() as undo:
        yield net, Hosts(net, tmp_path, undo)


def heard(process: subprocess.Popen[str]) -> object:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "it has ended"
    return json.loads(line)


def update(trainers: list[subprocess.Popen[str]], version: int) -> list[object]:
    for process in trainers:
        assert process.stdin is not None
        process.stdin.write(f"{version}\n")
        process.stdin.flush()
    return [heard(process) for process in trainers]


@pytest.mark.cluster
@pytest.mark.slow
def test_a_link_cut_in_mid_update_fences_one_instance_and_the_next_update_repairs_it(hosts: tuple[Switch, Hosts]):
    net, on = hosts
    gateway = on.start(0, "gateway", "-m", "weightcast", "gateway", "--host", net.address(0), "--port", str(PORT))
    assert gateway.stdout is not None
    assert gateway.stdout.readline()
    instances = {name: {"kind": "worker", "world_size": 1} for name in ("rollout-0", "rollout-1")}
    on.ask("PUT", "/pairs/main", json.dumps({"trainer_world": 2, "instances": instances, "settings": PATIENCE}))
    engines = [on.rank(1 + i, "engine", name) for i, name in enumerate(instances)]
    trainers = [on.rank(0, "trainer", rank) for rank in range(2)]
    assert [heard(process) for process in trainers] == ["connected"] * 2

    assert update(trainers, 1) == [["rollout-0", "rollout-1"]] * 2
    assert [heard(engine) for engine in engines] == [[1, True, False]] * 2

    cutting = net.cut_after(1, 8 * MIB)
    before = time.monotonic()
    said = update(trainers, 2)
    seconds = time.monotonic() - before
    assert cutting.communicate(timeout=5)[0] == "cut\n"
    for text in map(str, said):
        assert text.startswith("UpdateError: version 2 is not served everywhere: rollout-0"), text
        assert "rollout-1" not in text
    assert heard(engines[1]) == [2, True, False]
    found = on.ask("GET", "/pairs/main")["instances"]
    assert isinstance(found, dict)
    states = {name: (i["version"], i["fenced"], i["serves"]) for name, i in found.items()}
    assert states == {"rollout-0": (1, True, False), "rollout-1": (2, False, True)}
    assert found["rollout-1"]["updates"][-1]["seconds"] < seconds  # it did not wait for the other
    assert seconds < PATIENCE["silence"] + 10  # and the trainer does not wait for who is gone until `transfer` is over

    net.mend(1)
    on.wait_heard("rollout-0")
    assert update(trainers, 3) == [["rollout-0", "rollout-1"]] * 2
    assert [heard(engine) for engine in engines] == [[3, True, False]] * 2


@pytest.mark.cluster
@pytest.mark.slow
def test_hosts_that_are_cut_off_between_updates_wait_no_longer_than_the_outage(hosts: tuple[Switch, Hosts]):
    """All packets are lost and no connection breaks: once the trainer's host, once the engine's."""
    net, on = hosts
    gateway = on.start(0, "gateway", "-m", "weightcast", "gateway", "--host", net.address(0), "--port", str(PORT))
    assert gateway.stdout is not None
    assert gateway.stdout.readline()
    instances = {"rollout-0": {"kind": "worker", "world_size": 1}}
    on.ask("PUT", "/pairs/main", json.dumps({"trainer_world": 2, "instances": instances, "settings": PATIENCE}))
    engine = on.rank(1, "waits", "rollout-0")
    trainers = [on.rank(2, "trainer", rank) for rank in range(2)]
    assert [heard(process) for process in trainers] == ["connected"] * 2
    assert update(trainers, 1) == [["rollout-0"]] * 2
    assert heard(engine) == [1, True, False]

    net.cut(2)
    before = time.monotonic()
    for text in map(str, update(trainers, 2)):
        assert text.startswith("TransferError: gateway "), text
    assert time.monotonic() - before < PATIENCE["outage"] + 10
    net.mend(2)

    net.cut(1)
    said = heard(engine)
    assert isinstance(said, list)
    assert said[0] == "asked in vain"
    assert said[1] < PATIENCE["outage"] + 10
    again = heard(engine)
    assert isinstance(again, list)
    assert again[0] == "asked in vain"
    assert again[1] < PATIENCE["outage"], "while the link stays cut an engine is not kept from generating"
    net.mend(1)

    on.wait_heard("rollout-0")
    found = on.ask("GET", "/pairs/main")
    while found["trainer"]["silent"]:  # type: ignore[index]
        time.sleep(0.5)
        found = on.ask("GET", "/pairs/main")
    assert update(trainers, 3) == [["rollout-0"]] * 2
    while (told := heard(engine)) != [3, True, False]:
        assert isinstance(told, list)
        assert told[0] == "asked in vain", told
