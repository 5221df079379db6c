"""The name of the host that a rank is on, and of its process. Names of hosts serve the planner, which prefers sources
on the receiver's host; those of processes tell two that say they are one rank.
"""

from __future__ import annotations

import os
import socket
import sys
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["HOST_VARIABLE", "host_name", "name_of_node", "process_identity"]

HOST_VARIABLE = "WEIGHTCAST_HOST"
"""Environment variable with the name of the host, for ranks that have another idea of it than their peers."""


def host_name() -> str:
    """What WEIGHTCAST_HOST says; else the name of this process's Ray node, if it has one; else of this machine."""
    if given := os.environ.get(HOST_VARIABLE):
        return given
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return socket.gethostname()
    return name_of_node(ray.get_runtime_context().get_node_id(), ray.nodes())


def process_identity() -> str:
    """A text for this process and none other, with its host and its number: HOST~PID~RANDOM, at most 120 characters."""
    return f"{host_name()[:80]}~{os.getpid()}~{uuid.uuid4().hex[:16]}"


def name_of_node(node: str, nodes: Iterable[Mapping[str, Any]]) -> str:
    """The name of the machine of a Ray node, of all those that `ray.nodes()` tells of.

    Ranks outside of Ray on that machine have the same. Where nodes have one name, as containers may, or several nodes
    on one machine, each has its number behind it.
    """
    names = {one["NodeID"]: one["NodeManagerHostname"] for one in nodes if one["Alive"] or one["NodeID"] == node}
    name = names.get(node) or socket.gethostname()
    return f"{name}/{node}" if list(names.values()).count(name) > 1 else str(name)
