"""Mistakes at the command line, and packages that are not there: one line that says what to do, never a traceback.

Each case is named by its mistake. Commands run in processes of their own wherever their environment matters.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gateway_support import running_gateway
from spawn_support import free_port

from weightcast.cli import main
from weightcast.gateway.client import TOKEN_VARIABLE, GatewayClient
from weightcast.gateway.server.tokens import VARIABLES, make_token
from weightcast.transfer.errors import AuthorizationError

TOKEN = "a-token-of-enough-length"

ABSENCE = '''
import sys


class Absent:
    """Finds none of the packages that are to be absent."""

    def find_spec(self, name, path=None, target=None):
        if name.startswith(tuple(f"{package}." for package in ABSENT)) or name in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Absent())
'''
"""A `sitecustomize` of a process in which packages are not there."""

CLUSTER = """
pair = "main"
[trainer]
ranks = 1
entry = "somewhere:source"
[[instance]]
name = "rollout-0"
world_size = 1
kind = "worker"
"""

Absence = Callable[..., dict[str, str]]


@pytest.fixture
def without(tmp_path: Path) -> Absence:
    """The environment of a process in which these packages cannot be imported."""

    def environment(*packages: str) -> dict[str, str]:
        folder = tmp_path / "absent"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(f"ABSENT = {packages!r}\n{ABSENCE}")
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {**os.environ, "PYTHONPATH": path, TOKEN_VARIABLE: TOKEN}

    return environment


RAY = "Ray is not installed: pip install 'weightcast[ray]'"
INSTANCE = json.dumps({"name": "rollout-0", "kind": "worker", "world_size": 1})
ABSENT: dict[str, tuple[str, list[str], str]] = {
    "demo without SGLang": ("sglang", ["demo"], "SGLang is not installed: pip install 'weightcast[sglang]'"),
    "demo without Transformers": (
        "transformers",
        ["demo"],
        "Transformers is not installed: pip install 'weightcast[sglang]'",
    ),
    "demo without Megatron-Core": (
        "megatron",
        ["demo", "--trainer", "megatron"],
        "Megatron-Core is not installed: pip install 'weightcast[megatron]'",
    ),
    "demo without Ray": ("ray", ["demo", "--ray"], RAY),
    "up without Ray": ("ray", ["up", "FILE"], RAY),
    "down without Ray": ("ray", ["down", "FILE"], RAY),
    "update without Ray": ("ray", ["update", "main", "--version", "1"], RAY),
    "status without Ray": ("ray", ["status", "--gateway", "ray://weightcast"], RAY),
    "inspect without Ray": ("ray", ["inspect", "main", "rollout-0", "--gateway", "ray://weightcast"], RAY),
    "load without Ray": ("ray", ["load", "FOLDER", "--instance", INSTANCE, "--gateway", "ray://weightcast"], RAY),
}


@pytest.mark.parametrize("mistake", ABSENT)
def test_a_command_names_the_package_that_it_needs(mistake: str, without: Absence, tmp_path: Path) -> None:
    package, command, message = ABSENT[mistake]
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    (tmp_path / "a.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    places = {"FILE": str(tmp_path / "cluster.toml"), "FOLDER": str(tmp_path)}
    work = ["--work", str(tmp_path / "work")] if command[0] == "demo" else []
    done = subprocess.run(
        [sys.executable, "-m", "weightcast", *(places.get(word, word) for word in command), *work],
        env=without(package), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr == f"weightcast {command[0]}: {message}\n"
    assert not (tmp_path / "work").exists(), "nothing was begun"


CALLS = {
    "GatewayClient": 'weightcast.GatewayClient("ray://weightcast")',
    "TrainerWorker": 'weightcast.TrainerWorker("ray://weightcast", "main", source, rank=0, world_size=1)',
    "InstanceWorker": 'weightcast.InstanceWorker("ray://weightcast", "main", "e", sink, rank=0, world_size=1)',
    "start_gateway": "weightcast.start_gateway()",
    "MegatronSource": 'weightcast.MegatronSource(model, family="qwen3_moe", vocab_size=8)',
}

PROGRAM = """
import json, sys, torch, weightcast
model = torch.nn.Linear(2, 2)
source, sink = weightcast.PlainSource({}), weightcast.FsdpSource(model)
said = {"names": [type(getattr(weightcast, name)).__name__ != "" for name in weightcast.__all__]}
for name, call in json.loads(sys.argv[1]).items():
    try:
        eval(call)
    except weightcast.WeightcastError as error:
        said[name] = f"{type(error).__name__}: {error}"
said["regions"] = len(sink.describe().table)
print(json.dumps(said))
"""


def test_a_class_names_the_package_that_it_needs(without: Absence) -> None:
    """All others do without: no package but those that weightcast depends on has to be there."""
    environment = without("ray", "megatron", "transformers", "sglang", "numba")
    command = [sys.executable, "-c", PROGRAM, json.dumps(CALLS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said.pop("regions") == 2, "FsdpSource needs Transformers for its models alone"
    assert all(said.pop("names"))
    megatron = "InputError: Megatron-Core is not installed: pip install 'weightcast[megatron]'"
    assert said == {name: f"InputError: {RAY}" for name in CALLS} | {"MegatronSource": megatron}


def test_an_update_without_numba_is_slower_and_says_so(without: Absence, root: Path) -> None:
    """The example's whole pair in processes that have neither numba nor another package that may be absent."""
    environment = without("numba", "ray", "transformers", "sglang", "megatron")
    with running_gateway() as (url, token):
        environment |= {TOKEN_VARIABLE: token, "PYTHONUNBUFFERED": "1"}

        def command(example: str) -> list[str]:
            return [sys.executable, str(root / "examples" / example), url, "main", "rollout-1"]

        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command("own_engine.py"), env=environment, **pipes) as engine:  # type: ignore[call-overload]
            try:
                done = subprocess.run(
                    command("own_trainer.py"), env=environment, capture_output=True, text=True, timeout=300
                )
                assert (done.returncode, len(done.stdout.splitlines())) == (0, 3), done.stderr
                assert engine.stdout.readline() == "serving version 1\n"
            finally:
                engine.terminate()
            assert engine.stderr.read().count("several times slower without numba (weightcast[cpu])") == 1
        assert done.stderr.count("several times slower without numba (weightcast[cpu])") == 1
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("variable", VARIABLES.values())
@pytest.mark.parametrize(
    ("mistake", "token"), [("not ASCII", "token-with-\u00e9-of-enough-length"), ("a space", "token of enough length")]
)
def test_a_token_that_no_header_can_carry(variable: str, mistake: str, token: str) -> None:
    environment = {**os.environ, TOKEN_VARIABLE: TOKEN, variable: token}
    command = [sys.executable, "-m", "weightcast", "gateway", "--port", str(free_port())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), mistake
    assert f"({variable}) has a character that is not printable ASCII, number " in done.stderr
    assert token not in done.stderr


COMMANDS = {
    "status": ["status"],
    "inspect": ["inspect", "main", "rollout-0"],
    "load": ["load", "FOLDER", "--instance", INSTANCE],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("", f"no bearer token for {{url}}: {TOKEN_VARIABLE} is empty; set {TOKEN_VARIABLE} to the gateway's"),
        ("t\u00f6ken-of-enough-length", f"of {TOKEN_VARIABLE} has a character that is not printable ASCII, number 2"),
    ],
)
def test_a_command_with_a_token_that_is_none(
    command: str,
    token: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No command has an option for it, so the variable is named."""
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    (tmp_path / "a.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    url = f"http://127.0.0.1:{free_port()}"
    words = [str(tmp_path) if word == "FOLDER" else word for word in COMMANDS[command]]
    assert main([*words, "--gateway", url]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message.format(url=url) in err


@pytest.fixture(scope="module")
def scopes() -> Iterator[tuple[str, dict[str, str]]]:
    """A gateway, and its token of each scope."""
    tokens = {scope: make_token() for scope in VARIABLES}
    with pytest.MonkeyPatch.context() as patch:
        for scope in ("worker", "read"):
            patch.setenv(VARIABLES[scope], tokens[scope])
        with running_gateway(token=tokens["operator"]) as (url, _):
            yield url, tokens


@pytest.mark.parametrize(
    ("call", "needed", "found"),
    [
        (lambda client: client.create_pair("p", 1, {}), "operator", "worker"),
        (lambda client: client.delete_pair("p"), "operator", "read"),
        (lambda client: client.restarted("p", "i", 0), "worker", "read"),
    ],
)
def test_a_token_of_too_small_a_scope(
    scopes: tuple[str, dict[str, str]], call: Callable[[GatewayClient], None], needed: str, found: str
) -> None:
    url, tokens = scopes
    with GatewayClient(url, tokens[found]) as client, pytest.raises(AuthorizationError) as caught:
        call(client)
    assert str(caught.value) == (
        f"this needs a token of scope {needed}; the one given has scope {found}; set {TOKEN_VARIABLE} to the "
        f"gateway's {needed} token"
    )


FOLDERS = {
    "demo": (["demo", "--work"], 2, "weightcast demo: cannot make --work {place}: Not a directory"),
    "gateway": (
        ["gateway", "--state"],
        4,
        "weightcast gateway: state file {place}: there is no folder {folder}; make it first",
    ),
}


@pytest.mark.parametrize("command", FOLDERS)
def test_a_folder_that_there_is_not(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    words, status, message = FOLDERS[command]
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "place"
    assert main([*words, str(place)]) == status
    out, err = capsys.readouterr()
    assert (out, err) == ("", message.format(place=place, folder=place.parent) + "\n")


@pytest.mark.parametrize("bundle", ["random-101.json", "two-instances-two-shards.json"])
def test_a_reader_that_has_seen_enough(bundle: str, root: Path) -> None:
    """As `weightcast plan --json | head`: more output than a pipe holds breaks while it is written, less at the end."""
    command = [
        sys.executable,
        "-m",
        "weightcast",
        "plan",
        "--json",
        "--layouts",
        str(root / "tests" / "cases" / bundle),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 141


USAGES = {
    "an option that there is not": (["status", "--colour"], "status", "unrecognized arguments: --colour"),
    "an argument too many": (["inspect", "a", "b", "c"], "inspect", "unrecognized arguments: c"),
    "an argument too few": (["inspect", "a"], "inspect", "the following arguments are required: instance"),
    "a number that is none": (["update", "main", "--version", "new"], "update", "invalid int value: 'new'"),
    "a choice that there is not": (["plan", "--shape", "gpt"], "plan", "invalid choice: 'gpt'"),
    "a file that is left out": (["up"], "up", "the following arguments are required: FILE"),
}


@pytest.mark.parametrize("mistake", USAGES)
def test_a_mistake_in_arguments_shows_the_usage_of_the_command(
    mistake: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words, command, message = USAGES[mistake]
    with pytest.raises(SystemExit) as caught:
        main(words)
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (2, "")
    assert err.startswith(f"usage: weightcast {command} ")
    assert err.splitlines()[-1].startswith(f"weightcast {command}: error: ")
    assert message in err


def test_a_command_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["stauts"])
    assert "invalid choice: 'stauts' (choose from" in capsys.readouterr().err
