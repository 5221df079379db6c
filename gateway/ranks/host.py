"""Names of a rank's host, of its network and of its process.

Names of hosts serve the planner, which prefers sources on the receiver's host. Names of processes tell two apart that
say they are one rank. Names of networks tell which ranks share a loopback device.
"""

from __future__ import annotations

import os
import socket
import sys
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["HOST_VARIABLE", "host_name", "name_of_node", "network_name", "process_identity"]

HOST_VARIABLE = "WEIGHTCAST_HOST"
"""Environment variable with the name of the host, for ranks that have another idea of it than their peers."""


def host_name() -> str:
    """Name of this host: from WEIGHTCAST_HOST, else of this process's Ray node, if it has one, else of this machine."""
    if name := os.environ.get(HOST_VARIABLE):
        return name
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return socket.gethostname()
    return name_of_node(ray.get_runtime_context().get_node_id(), ray.nodes())


def network_name() -> str:
    """Name of the network of this process: BOOT:NAMESPACE, equal for processes that share a loopback device.

    It is that of one boot of the kernel, and of one network namespace: containers of a machine may have one each.
    Empty where the system has neither.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""


def process_identity() -> str:
    """A text for this process and none other, with its host and number: HOST~PID~RANDOM, at most 120 characters."""
    return f"{host_name()[:80]}~{os.getpid()}~{uuid.uuid4().hex[:16]}"


def name_of_node(node: str, nodes: Iterable[Mapping[str, Any]]) -> str:
    """Name of the machine of Ray node `node`; `nodes` is what `ray.nodes()` returns.

    Ranks outside of Ray on that machine have the same. Nodes that share a name, as containers or several nodes on one
    machine may, have their number behind it.
    """
    names = {
        record["NodeID"]: record["NodeManagerHostname"]
        for record in nodes
        if record["Alive"] or record["NodeID"] == node
    }
    name = names.get(node) or socket.gethostname()
    return f"{name}/{node}" if list(names.values()).count(name) > 1 else str(name)
