"""Hosts that are network namespaces of this machine, each with a link of its own to a switch that can be cut."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

__all__ = ["Switch", "switch", "why_not"]

_NET = "10.217.83"
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
