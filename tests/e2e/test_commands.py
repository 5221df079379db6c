"""`weightcast status`, `inspect` and `gateway` with a real gateway process: what they print, and their exit status."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gateway_support import running_gateway
from layout_support import TINY, moe_report
from loopback_support import LOOPBACKS
from spawn_support import free_port

from weightcast.cli import main
from weightcast.commands import pairs as pairs_command
from weightcast.commands import status as status_command
from weightcast.commands.options import show_update
from weightcast.gateway.client import TOKEN_VARIABLE, GatewayClient, Seat
from weightcast.transfer.errors import ControlError, EngineError
from weightcast.transfer.layout.placement import ExpertPlacement
from weightcast.transfer.layout.tables import RankReport, Region, RegionTable
from weightcast.transfer.transports.addresses import host_port, listen

PAIR_MAP = ExpertPlacement(np.array([[0, 1, 2, 3, 3, 0]] * TINY.layers), num_logical=TINY.experts, ep_size=2)
"""Two replicas of expert 3 on rank 1 of two."""


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[str, str]]:
    with running_gateway() as found:
        yield found


@pytest.fixture
def gateway(running: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of the gateway; its token is in the environment, and terminals are wide."""
    url, token = running
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    monkeypatch.setenv("COLUMNS", "200")
    return url


Said = tuple[int, str, str]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Runs a command: exit status, stdout, stderr."""

    def run(*arguments: str) -> Said:
        status = main(arguments)
        out, err = capsys.readouterr()
        return status, out, err

    return run


def whole(reports: list[RankReport]) -> RankReport:
    """The report of a trainer of one rank that has every tensor of an instance."""
    specs = {name: spec for report in reports for name, spec in report.table.tensors.specs().items()}
    regions = [Region(name, (0,) * len(spec.shape), spec.shape) for name, spec in specs.items()]
    return RankReport(0, 1, "trainer", RegionTable.from_regions(specs, regions))


def register(url: str, pair: str, error: Exception | None = None) -> None:
    """A trainer and an instance of two ranks that register and go no further; `error` is what one of them says."""
    reports = [moe_report(TINY, rank, PAIR_MAP) for rank in range(2)]
    with GatewayClient(url) as client, GatewayClient(url) as engine:
        client.create_pair(pair, 1, {"rollout-0": {"kind": "worker", "world_size": 2}}, {"join": 1.0})
        client.register_trainer(pair, whole(reports))
        if error is not None:
            engine.fail(Seat(pair, "rollout-0", 1, "instance", 1), error)
        else:
            for report in reports:
                engine.register_instance(Seat(pair, "rollout-0", 1, "instance", report.rank), report)
        client.start_connect(pair)
        limit = time.monotonic() + 30.0
        while client.pair_status(pair)["instances"]["rollout-0"]["phase"] != "failed":
            assert time.monotonic() < limit
            time.sleep(0.05)


def lines_of(text: str) -> list[list[str]]:
    """Cells of the rows of a table, borders gone."""
    rows = [line.replace("┃", "│").strip().removeprefix("│").removesuffix("│") for line in text.splitlines()]
    return [[cell.strip() for cell in row.split("│")] for row in rows]


def test_status_of_no_pairs(monkeypatch: pytest.MonkeyPatch, say: Callable[..., Said]) -> None:
    with running_gateway() as (url, token):
        monkeypatch.setenv(TOKEN_VARIABLE, token)
        assert say("status", "--gateway", url) == (0, "no pairs\n", "")
        assert say("status", "--gateway", url, "--json") == (0, '{"pairs": []}\n', "")


def test_status(gateway: str, say: Callable[..., Said]) -> None:
    with GatewayClient(gateway) as client:
        instances = {name: {"kind": "worker", "world_size": 2} for name in ("rollout-0", "rollout-1")}
        client.create_pair("idle", 3, instances)
        register(gateway, "busy")
    status, out, err = say("status", "--gateway", gateway)
    assert (status, err) == (0, "")
    rows = lines_of(out)
    heads = [row[:7] for row in rows]
    assert ["instance", "phase", "version", "serves", "fenced", "ranks", "epoch"] in heads
    assert ["rollout-0", "registering", "-", "no", "waiting", "0 of 2", "1"] in heads
    assert ["rollout-0", "failed", "-", "no", "FENCED", "2 of 2", "1"] in heads
    assert [row[7] for row in rows if row[:2] == ["rollout-0", "registering"]] == ["never"]
    assert "pair idle: 0 of 3 trainer ranks registered" in out
    assert "pair busy: 1 of 1 trainer ranks registered" in out
    assert "pair busy: instance rollout-0: rollout-0 rank 0, rollout-0 rank 1, trainer rank 0 did not join" in out

    status, out, err = say("status", "--gateway", gateway, "--json")
    assert (status, err) == (0, "")
    found = {pair["pair"]: pair for pair in json.loads(out)["pairs"]}
    assert found["idle"]["trainer"] == {"world_size": 3, "registered": [], "silent": [], "heard": None}
    assert list(found["idle"]["instances"]) == ["rollout-0", "rollout-1"]
    assert found["busy"]["instances"]["rollout-0"]["registered"] == [0, 1]
    assert found["busy"]["instances"]["rollout-0"]["version"] is None


def test_status_is_watched_until_it_is_interrupted(gateway: str) -> None:
    command = [sys.executable, "-m", "weightcast", "status", "--gateway", gateway, "--watch", "0.2"]
    ours, theirs = os.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(command, stdout=theirs, env=environment, preexec_fn=_heed_interrupts) as process:
        os.close(theirs)
        try:
            with GatewayClient(gateway) as client:
                for pair in ("watched-first", "watched-next"):
                    client.create_pair(pair, 3, {"rollout-9": {"kind": "worker", "world_size": 2}})
                    _read_until(ours, f"pair {pair}: 0 of 3 trainer ranks registered")
                for pair in ("watched-first", "watched-next"):
                    client.delete_pair(pair)
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
        finally:
            process.kill()
            os.close(ours)


def _heed_interrupts() -> None:
    """A shell that runs tests in the background has them inherit that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _read_until(terminal: int, text: str) -> None:
    """Reads what is shown on a terminal until the text comes."""
    shown = b""
    while text.encode() not in shown:
        assert select.select([terminal], [], [], 30.0)[0], f"{text!r} was not shown, but {shown!r}"
        shown += os.read(terminal, 65536)


def test_status_is_watched_as_json(gateway: str) -> None:
    command = [sys.executable, "-m", "weightcast", "status", "--gateway", gateway, "--json", "--watch", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=_heed_interrupts) as process:
        assert process.stdout is not None
        assert [list(json.loads(process.stdout.readline())) for _ in range(2)] == [["pairs"]] * 2
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_status_that_is_watched_as_json_outlives_the_gateway() -> None:
    port = free_port()
    with ExitStack() as stack:
        with running_gateway(port=port) as (url, token):
            command = [sys.executable, "-m", "weightcast", "status", "--gateway", url, "--json", "--watch", "0.1"]
            environment = {**os.environ, TOKEN_VARIABLE: token}
            process = stack.enter_context(
                subprocess.Popen(
                    command, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=_heed_interrupts
                )
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            assert json.loads(process.stdout.readline()) == {"pairs": []}
        while "trouble" not in (shown := json.loads(process.stdout.readline())):
            assert shown == {"pairs": []}
        assert shown["pairs"] == []
        assert re.match(r"as it was at \d\d:\d\d:\d\d UTC: gateway http://127.0.0.1:", shown["trouble"])
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_status_tells_of_values_that_were_not_finite() -> None:
    found = {"tensor": "w", "dtype": "bfloat16", "nan": 1, "inf": 0, "overflow": 2, "ranks": [0]}
    update = {"version": 4, "committed": True, "non_finite": [found], "non_finite_tensors": 3}
    expected = "version 4 has values that are not finite: 'w': 1 NaN, 0 infinite, 2 too large, and 2 tensors more"
    assert status_command._values({"updates": [update]}) == expected
    assert (
        status_command._values({"updates": []})
        == status_command._values({"updates": [{**update, "committed": False}]})
        == ""
    )


def test_status_shows_a_reason_as_it_is(gateway: str, say: Callable[..., Said]) -> None:
    """Boxes, lists and paths in brackets are no markup."""
    register(gateway, "marked", EngineError("tensor 'w' box [a:b] in [some/x] [red]is lost"))
    status, out, _ = say("status", "--gateway", gateway)
    assert status == 0
    assert "rollout-0 rank 1: tensor 'w' box [a:b] in [some/x] [red]is lost" in " ".join(out.split())


def test_status_shows_ranks_that_are_silent(gateway: str, say: Callable[..., Said]) -> None:
    """All had registered, and all are dead: that they had registered was all that was shown."""
    with GatewayClient(gateway) as client, GatewayClient(gateway) as engine:
        settings = {"heartbeat": 0.1, "silence": 0.5}
        client.create_pair("dead", 1, {"rollout-0": {"kind": "worker", "world_size": 1}}, settings)
        client.register_trainer("dead", whole([moe_report(TINY, rank, PAIR_MAP) for rank in range(2)]))
        client.beat("dead/trainer/0", "")
        engine.beat("dead/instances/rollout-0/ranks/0", "")
        limit = time.monotonic() + 30.0
        while not all(side["silent"] for side in sides(client.pair_status("dead"))):
            assert time.monotonic() < limit
            time.sleep(0.05)
    status, out, _ = say("status", "--gateway", gateway)
    assert status == 0
    assert re.search(r"pair dead: 1 of 1 trainer ranks registered, ranks 0 SILENT, last heard \d+ s ago", out)
    assert re.search(r"rollout-0 .* 0 of 1, ranks 0 SILENT ", out)


def sides(pair: dict[str, Any]) -> list[dict[str, Any]]:
    """The trainer of a pair, and its instances."""
    return [pair["trainer"], *pair["instances"].values()]


def test_a_pair_whose_trainer_lives_is_deleted_by_force_alone(gateway: str, say: Callable[..., Said]) -> None:
    """It was deleted between two updates, and its trainer ended at the next one."""
    with GatewayClient(gateway) as client:
        client.create_pair("alive", 2, {"rollout-0": {"kind": "worker", "world_size": 1}})
        client.register_trainer(
            "alive", replace(whole([moe_report(TINY, rank, PAIR_MAP) for rank in range(2)]), rank=1, world_size=2)
        )
        status, _, err = say("delete", "alive", "--gateway", gateway)
        assert status == 4
        assert "pair alive: trainer ranks 1 are alive; end them first, or delete it all the same with --force" in err
        assert client.pair_status("alive")["trainer"]["registered"] == [1]
        assert say("delete", "alive", "--force", "--gateway", gateway)[0] == 0


def test_pairs_without_a_sign_of_life_fold_into_a_line(gateway: str, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    def shown(**options: bool) -> str:
        Console().print(*status_command._shown(pairs, **options).renderables, soft_wrap=True)
        return capsys.readouterr().out

    with GatewayClient(gateway) as client:
        for name in ("old-a", "old-b", "fresh"):
            client.create_pair(name, 1, {"rollout-0": {"kind": "worker", "world_size": 1}})
        pairs = [pair for pair in client.status() if pair["pair"] in ("old-a", "old-b", "fresh")]
    for pair in pairs:
        if pair["pair"] != "fresh":
            pair["now"] = f"{int(pair['now'][:4]) + 1}{pair['now'][4:]}"  # a year has gone by
    text = shown()
    assert (
        "2 pairs without a sign of life for over an hour: old-a, old-b "
        "(weightcast status --all; weightcast delete PAIR)\n" in text
    )
    assert "pair fresh: 0 of 1 trainer ranks registered" in text
    assert "pair old-a" not in text
    assert "pair old-a: 0 of 1 trainer ranks registered" in shown(show_all=True)
    assert "without a sign of life" not in shown(show_all=True)
    pairs[0]["trainer"]["heard"] = pairs[0]["now"]
    assert "1 pair without a sign of life for over an hour: old-b (" in shown()


def test_times_are_shown_as_ages() -> None:
    now = "2026-12-01T12:00:00Z"
    moments = ["2026-12-01T12:00:00Z", "2026-12-01T11:59:48Z", "2026-12-01T11:30:00Z", "2026-11-30T12:00:00Z", None]
    assert [status_command._ago(now, moment) for moment in moments] == [
        "0 s ago",
        "12 s ago",
        "30 min ago",
        "24 h ago",
        "",
    ]


def test_inspect_after_a_connect_without_a_layout(gateway: str, say: Callable[..., Said]) -> None:
    """It repeated the error: now it says what each rank has reported."""
    reports = [moe_report(TINY, rank, PAIR_MAP) for rank in range(2)]
    with GatewayClient(gateway) as client, GatewayClient(gateway) as engine:
        settings = {"register": 1.0}
        client.create_pair("partly", 1, {"rollout-0": {"kind": "worker", "world_size": 2}}, settings)
        client.register_trainer("partly", whole(reports))
        engine.register_instance(Seat("partly", "rollout-0", 1, "instance", 1), reports[1])
        client.start_connect("partly")
        limit = time.monotonic() + 30.0
        while client.pair_status("partly")["instances"]["rollout-0"]["phase"] != "failed":
            assert time.monotonic() < limit
            time.sleep(0.05)
    status, out, err = say("inspect", "partly", "rollout-0", "--gateway", gateway)
    assert (status, err) == (3, "")
    assert out.startswith("instance rollout-0 has no layout: pair partly: instance rollout-0 ranks 0 did not register")
    assert "ranks that have not reported: 0\n" in out
    (row,) = [cells for line in out.splitlines() if (cells := line.split())[:1] == ["1"]]
    assert row[3] == str(len(reports[1].table)), "its regions"
    assert "\nrank 1 holds " in out
    status, out, err = say("inspect", "partly", "rollout-0", "--gateway", gateway, "--json")
    assert (status, err) == (3, "")
    table = json.loads(out)
    assert (table["complete"], table["missing"], [rank["rank"] for rank in table["ranks"]]) == (False, [0], [1])


def test_an_update_that_one_instance_has_missed(capsys: pytest.CaptureFixture[str]) -> None:
    """As with `min_instances`: what is printed says which, and why."""
    served = {"committed": True, "reason": "", "verified": {"regions": 3}, "seconds": 0.25}
    missed = {"committed": False, "fenced": True, "reason": "it was not reached", "verified": None, "seconds": 0.0}
    paused = served | {"fenced": False, "reason": "its engine stands still"}
    show_update("7", {"rollout-0": served, "rollout-1": missed, "rollout-2": paused}, as_json=False)
    assert capsys.readouterr().out == (
        "rollout-0: version 7, 3 regions verified, 0.25 s\n"
        "rollout-1 is fenced: it was not reached\n"
        "rollout-2 is not resumed: its engine stands still\n"
    )


def test_inspect(gateway: str, say: Callable[..., Said]) -> None:
    register(gateway, "shown")
    status, out, err = say("inspect", "shown", "rollout-0", "--gateway", gateway, "--json")
    assert (status, err) == (0, "")
    table = json.loads(out)
    assert (table["instance"], table["complete"], len(table["ranks"])) == ("rollout-0", True, 2)
    assert table["slots"] == {"layers": 2, "logical_experts": 4, "physical_slots": 6, "ep_size": 2, "replicated": 4}
    assert table["same_rank_pairs"] == [{"layer": i, "expert": 3, "rank": 1, "slots": [0, 1]} for i in range(2)]
    assert table["dispatch"] == {"ranks": 2, "entries": 24, "shared": True}

    status, out, err = say("inspect", "shown", "rollout-0", "--gateway", gateway)
    assert (status, err) == (0, "")
    assert f"instance rollout-0, layout {table['fingerprint']}" in out
    assert "coverage: complete, 29 tensors of 2.8 KiB" in out
    assert ["1", "3", "1", "0,1"] in [line.split() for line in out.splitlines()]
    assert "dispatch audit: 24 entries of 2 ranks agree, all ranks have the same table" in out


ENGINE = '{"kind": "worker", "world_size": 2}'
COMMANDS = [
    ("status",),
    ("inspect", "some", "rollout-0"),
    ("pairs",),
    ("delete", "some"),
    ("delete", "some", "--force"),
]
COMMANDS += [("leave", "some", "rollout-0"), ("join", "some", "rollout-0", ENGINE)]
COMMANDS += [(*command, "--json") for command in COMMANDS]


def one_line(said: Said, status: int, *words: str) -> None:
    """Nothing on stdout, one line on stderr with these words."""
    assert said[:2] == (status, "")
    assert said[2].count("\n") == 1
    assert all(word in said[2] for word in words), said[2]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_gateway_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, say: Callable[..., Said], command: tuple[str, ...]
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "a-token-of-enough-length")
    url = f"http://127.0.0.1:{free_port()}"
    one_line(say(*command, "--gateway", url), 4, f"weightcast {command[0]}: gateway {url}", "is it up?")


@pytest.mark.parametrize("url", ["nonsense", "http://[::1", "http://"])
def test_a_gateway_that_cannot_be(monkeypatch: pytest.MonkeyPatch, say: Callable[..., Said], url: str) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "a-token-of-enough-length")
    one_line(say("status", "--gateway", url), 2, f"gateway url is {url!r}, expected http://host:port of the gateway")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_token(
    gateway: str, monkeypatch: pytest.MonkeyPatch, say: Callable[..., Said], command: tuple[str, ...]
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "wrong-token-wrong-token")
    one_line(say(*command, "--gateway", gateway), 4, "bearer token", TOKEN_VARIABLE)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_token(
    gateway: str, monkeypatch: pytest.MonkeyPatch, say: Callable[..., Said], command: tuple[str, ...]
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE)
    one_line(say(*command, "--gateway", gateway), 2, "no bearer token", TOKEN_VARIABLE)


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_what_the_gateway_does_not_know(gateway: str, say: Callable[..., Said], options: tuple[str, ...]) -> None:
    with GatewayClient(gateway) as client:
        client.create_pair("new", 1, {"rollout-0": {"kind": "worker", "world_size": 1}})
    ask = ("--gateway", gateway, *options)
    one_line(say("inspect", "nope", "rollout-0", *ask), 2, "there is no pair 'nope'; there are ", "new")
    one_line(say("inspect", "new", "rollout-9", *ask), 2, "pair new has no instance 'rollout-9'; it has rollout-0")
    one_line(say("inspect", "new", "rollout-0", *ask), 4, "instance rollout-0 of pair new has not registered yet")


def test_pairs_are_listed_changed_and_deleted(monkeypatch: pytest.MonkeyPatch, say: Callable[..., Said]) -> None:
    with running_gateway() as (url, token):
        monkeypatch.setenv(TOKEN_VARIABLE, token)
        ask = ("--gateway", url)
        assert say("pairs", *ask) == (0, "no pairs\n", "")
        assert say("pairs", *ask, "--json") == (0, '{"pairs": []}\n', "")
        with GatewayClient(url) as client:
            client.create_pair("main", 1, {"rollout-0": {"kind": "worker", "world_size": 1}})
            client.create_pair("old", 3, {"rollout-0": {"kind": "worker", "world_size": 1}})
        assert say("join", "main", "rollout-1", ENGINE, *ask) == (
            0, "instance rollout-1 has joined pair main; the next update brings it up\n", ""
        )  # fmt: skip
        joined = '{"name": "rollout-2", "kind": "worker", "world_size": 2}'
        status, out, _ = say("join", "main", "rollout-2", joined, *ask, "--json")
        assert (status, json.loads(out)) == (0, {"pair": "main", "instance": "rollout-2"})
        one_line(say("join", "main", "rollout-3", joined, *ask), 2, "has the name 'rollout-2', expected 'rollout-3'")
        one_line(say("join", "main", "rollout-3", "[]", *ask), 2, "instance '[]' is not a JSON object")
        one_line(say("join", "main", "rollout-3", '{"worldsize": 1}', *ask), 2, "worldsize is not known")
        assert say("leave", "main", "rollout-0", *ask) == (0, "instance rollout-0 leaves pair main\n", "")
        one_line(say("leave", "main", "rollout-9", *ask), 2, "pair main has no instance 'rollout-9'")
        assert say("pairs", *ask) == (
            0,
            "main: 1 trainer rank, no version, instances rollout-1, rollout-2\n"
            "old: 3 trainer ranks, no version, instances rollout-0\n",
            "",
        )
        assert say("delete", "old", *ask) == (0, "pair old is deleted\n", "")
        one_line(say("delete", "old", *ask), 2, "there is no pair 'old'; there are main")
        one_line(say("delete", "old", "--force", *ask), 2, "there is no pair 'old'; there are main")
        status, out, _ = say("pairs", *ask, "--json")
        found = {"pair": "main", "trainer_world": 1, "instances": ["rollout-1", "rollout-2"], "version": None}
        assert (status, json.loads(out)) == (0, {"pairs": [found]})
        status, out, _ = say("delete", "main", "--force", "--json", *ask)
        assert (status, json.loads(out)) == (0, {"pair": "main"})


@pytest.mark.parametrize(("numbers", "newest"), [([3, None, 12], 12), ([100, "81@2", "9@2"], "81@2"), ([None], None)])
def test_the_newest_version_of_a_pair(numbers: list[int | str | None], newest: int | str | None) -> None:
    instances = {str(index): {"phase": "connected", "version": version} for index, version in enumerate(numbers)}
    instances["gone"] = {"phase": "left", "version": "99@9"}
    summary = pairs_command._summary({"pair": "main", "trainer": {"world_size": 1}, "instances": instances})
    assert summary["version"] == newest


def run_gateway(*arguments: str, **environment: str) -> Said:
    command = [sys.executable, "-m", "weightcast", "gateway", *arguments]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("options", [(), ("--json",)])
@pytest.mark.parametrize("host", LOOPBACKS)
def test_a_port_in_use(host: str, options: tuple[str, ...]) -> None:
    """Neither address nor token is printed for a gateway that does not listen."""
    with listen(host) as listener:
        port = int(listener.getsockname()[1])
        said = run_gateway("--host", host, "--port", str(port), *options)
    text = f"cannot listen on {host_port(host, port)}: port {port} of {host} is in use; choose another port"
    one_line(said, ControlError.exit_status, f"weightcast gateway: {text}")


@pytest.mark.parametrize("host", ["192.0.2.1", pytest.param("2001:db8::1", marks=pytest.mark.ipv6)])
def test_a_host_that_is_not_ours(say: Callable[..., Said], host: str) -> None:
    text = f"cannot listen on {host_port(host, 8900)}: {host} is no address of this machine; give one that is"
    one_line(say("gateway", "--host", host, "--port", "8900"), 4, text)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "0"])
def test_every_address_without_one_to_tell_engines(host: str) -> None:
    """SGLang was told that its gateway is at 0.0.0.0, without a word."""
    text = f"--host {host.strip('[]')} is every address, and engines have to be told one: give --advertise HOST"
    one_line(run_gateway("--host", host), 2, text)
    one_line(run_gateway("--host", host, "--advertise", host), 2, "--advertise", "is every address")


@pytest.mark.parametrize(
    ("advertise", "text"),
    [
        ("[::1", "'[::1' is no host; expected HOST, HOST:PORT, or an IPv6 address with a port as [::1]:8900"),
        ("ftp://gateway", "--advertise: url is 'ftp://gateway', expected http://host:port of the gateway"),
        ("http://gateway/path", "--advertise is 'http://gateway/path', which has a path; give engines that URL as"),
    ],
)
def test_an_address_that_engines_cannot_be_told(advertise: str, text: str) -> None:
    one_line(run_gateway("--advertise", advertise), 2, text)


@pytest.mark.parametrize("port", ["0", "-1", "65536"])
def test_a_port_out_of_range(say: Callable[..., Said], port: str) -> None:
    one_line(say("gateway", "--port", port), 2, f"port {port} is not in 1..65535")


def test_a_token_that_is_too_short() -> None:
    said = run_gateway("--port", str(free_port()), **{TOKEN_VARIABLE: "short"})
    one_line(said, 2, "shorter than 16 characters")


def test_a_token_is_made_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is printed once, and it is the one that the gateway wants."""
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    port = free_port()
    command = [sys.executable, "-m", "weightcast", "gateway", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"weightcast gateway on http://127.0.0.1:{port}\n"
            name, _, token = process.stdout.readline().strip().partition("=")
            assert name == TOKEN_VARIABLE
            assert len(token) >= 32
            with GatewayClient(f"http://127.0.0.1:{port}", token) as client:
                assert client.status() == []
        finally:
            process.terminate()
            process.wait(10)
