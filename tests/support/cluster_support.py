"""A Ray cluster on this machine, the commands against it, and what can be seen of its pair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

__all__ = ["PARTS", "TOKEN", "actors", "instances", "ray_cluster", "seen", "tried", "updated_at_last", "weightcast"]

TOKEN = "a-token-for-the-cluster-tests"
PARTS = Path(__file__).parent / "cluster_parts.py"


@contextmanager
def ray_cluster(environment: dict[str, str], **head: Any) -> Iterator[Any]:
    """A cluster of one node, to which others can be added; this process is in it, and its commands find it."""
    import ray
    from ray.cluster_utils import Cluster

    paths = [str(PARTS.parent), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    known = {"PYTHONPATH": os.pathsep.join(paths), "WEIGHTCAST_TOKEN": TOKEN, "RAY_AUTH_MODE": "disabled"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**known, **environment}.items():
            patch.setenv(name, value)
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **head})
        patch.setenv("RAY_ADDRESS", made.address)
        ray.init(address=made.address, namespace="tests", log_to_driver=False, logging_level="error")
        try:
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


def tried(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command."""
    command = [sys.executable, "-m", "weightcast", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, cwd="/", check=False)


def weightcast(*arguments: str, status: int = 0) -> str:
    """Runs the command; its standard output, or its error where it is to fail."""
    ran = tried(*arguments)
    assert ran.returncode == status, ran.stderr[-2000:]
    return ran.stdout if status == 0 else ran.stderr


def actors() -> set[str]:
    """The names of the actors of this project."""
    import ray

    return {a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == "weightcast"}


def instances() -> dict[str, Any]:
    """The instances of the one pair of ray://weightcast."""
    found = json.loads(weightcast("status", "--gateway", "ray://weightcast", "--json"))["pairs"][0]["instances"]
    return {name: one for name, one in found.items() if one["phase"] != "left"}


def seen(folder: Path, version: int, instance: str = "rollout-0") -> str:
    """What the engine found in its memory when it began to serve a version."""
    file = folder / f"{instance}-0-{version}"
    for _ in range(100):
        if file.exists() and file.read_text():
            return file.read_text()
        time.sleep(0.1)
    raise AssertionError(f"{instance}: version {version} is not served; it serves {sorted(folder.glob('rollout*'))}")


def updated_at_last(version: int) -> int:
    """The first version, from one on, that an engine takes which is being started again."""
    for number in range(version, version + 10):
        ran = tried("update", "main", "--version", str(number))
        if ran.returncode == 0:
            return number
        assert "rollout-" in ran.stderr
        time.sleep(2.0)
    raise AssertionError(ran.stderr)
