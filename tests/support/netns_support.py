"""Hosts that are network namespaces of this machine, each with a link of its own to a switch that can be cut."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from weightcast.gateway.addresses import http_url
from weightcast.gateway.client import TOKEN_VARIABLE

__all__ = ["PORT", "RANKS", "TOKEN", "Hosts", "Switch", "heard", "switch", "update", "why_not"]

TOKEN = "a-token-for-the-tests-of-several-hosts"
RANKS = Path(__file__).parent / "netns_ranks.py"
PORT = 8900
_NET = "10.217.83"
_NET6 = "fd00:d9:53::"
_RATE = ("rate", "200mbit", "burst", "256kb", "latency", "400ms")
_CUT = "f=/sys/class/net/{0}/statistics/tx_bytes; end=$(($(cat $f)+{1})); echo armed; \
while [ $(cat $f) -lt $end ]; do sleep 0.01; done; ip link set {0} down; echo cut"


class Switch:
    """A bridge in a namespace, and `hosts` of them with addresses, at 25 MB/s towards each host."""

    def __init__(self, hosts: int) -> None:
        self._name = f"wct{os.getpid()}"
        self.hosts = hosts

    def address(self, host: int) -> str:
        return f"{_NET}.{host + 1}"

    def address6(self, host: int) -> str:
        return f"{_NET6}{host + 1:x}"

    def on(self, host: int) -> list[str]:
        """What a command begins with that runs on a host."""
        return ["ip", "netns", "exec", f"{self._name}-{host}"]

    def cut_after(self, host: int, size: int) -> subprocess.Popen[str]:
        """Cuts the link of a host once so many more bytes went to it; says "armed" and "cut"."""
        script = _CUT.format(f"p{host}", size)
        command = ["ip", "netns", "exec", f"{self._name}-hub", "sh", "-c", script]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "armed\n"
        return process

    def cut(self, host: int) -> None:
        """From now on every packet to and from a host is lost."""
        self._ip("-n", f"{self._name}-hub", "link", "set", f"p{host}", "down")

    def mend(self, host: int) -> None:
        self._ip("-n", f"{self._name}-hub", "link", "set", f"p{host}", "up")

    def build(self, undo: ExitStack) -> None:
        hub = f"{self._name}-hub"
        self._namespace(hub, undo)
        self._ip("-n", hub, "link", "add", "br0", "type", "bridge")
        self._ip("-n", hub, "link", "set", "br0", "up")
        for host in range(self.hosts):
            name, port = f"{self._name}-{host}", f"p{host}"
            self._namespace(name, undo)
            self._ip("-n", hub, "link", "add", port, "type", "veth", "peer", "name", "e0", "netns", name)
            self._ip("-n", hub, "link", "set", port, "master", "br0", "up")
            self._ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", "e0")
            self._ip("-n", name, "-6", "address", "add", f"{self.address6(host)}/64", "dev", "e0", "nodad")
            self._ip("-n", name, "link", "set", "lo", "up")
            self._ip("-n", name, "link", "set", "e0", "up")
            _run("tc", "-n", hub, "qdisc", "add", "dev", port, "root", "tbf", *_RATE)

    def _namespace(self, name: str, undo: ExitStack) -> None:
        self._ip("netns", "add", name)
        undo.callback(subprocess.run, ["ip", "netns", "delete", name], check=False)

    def _ip(self, *arguments: str) -> None:
        _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def why_not() -> str:
    """What keeps namespaces from being made on this machine; empty if nothing does."""
    try:
        with ExitStack() as undo:
            Switch(1).build(undo)
    except FileNotFoundError as error:
        return f"{error.filename} is not installed"
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made: {' '.join(error.cmd[:4])}: {error.stderr.strip()}"
    return ""


@contextmanager
def switch(hosts: int) -> Iterator[Switch]:
    """A switch with hosts; it and its namespaces are gone afterwards."""
    with ExitStack() as undo:
        made = Switch(hosts)
        made.build(undo)
        yield made


class Hosts:
    """Processes on the hosts of a switch."""

    def __init__(self, net: Switch, folder: Path, undo: ExitStack) -> None:
        self._net, self._folder, self._undo = net, folder, undo
        self.url = http_url(net.address(0), PORT)

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

    def rank(
        self, host: int, role: str, which: object, url: str | None = None, address: str | None = None
    ) -> subprocess.Popen[str]:
        """A rank of `netns_ranks.py`; an empty address is the worker's own choice."""
        address = self._net.address(host) if address is None else address
        return self.start(host, f"{role}-{which}", str(RANKS), role, url or self.url, address, str(which))

    def serve(self, listening: str, *options: str) -> None:
        """Starts the gateway on host 0; returns when it listens."""
        command = ["-m", "weightcast", "gateway", "--host", listening, "--port", str(PORT), *options]
        gateway = self.start(0, "gateway", *command)
        assert gateway.stdout is not None
        assert gateway.stdout.readline()

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
