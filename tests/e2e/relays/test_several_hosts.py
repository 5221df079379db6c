"""Several hosts for real: the trainer on one, two instances on two others, and a link that is cut in mid-update.

Skipped where network namespaces cannot be made.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from netns_support import PORT, Hosts, Switch, heard, switch, update, why_not

MIB = 1 << 20
PATIENCE = {"heartbeat": 1, "silence": 5, "outage": 4, "transfer": 100, "join": 20}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Switch, Hosts]]:
    if reason := why_not():
        pytest.skip(reason)
    with switch(3) as net, ExitStack() as undo:
        yield net, Hosts(net, tmp_path, undo)


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
