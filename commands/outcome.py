"""Output of the commands that make an update."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["show_update"]


def show_update(version: int, instances: Mapping[str, Mapping[str, Any]], as_json: bool) -> None:
    """Prints a version that every instance serves: the gateway's record of each, as JSON or a line each."""
    if as_json:
        print(json.dumps({"version": version, "instances": instances}))
        return
    for name, record in instances.items():
        regions = record["verified"]["regions"]
        print(f"{name}: version {version}, {regions} regions verified, {record['seconds']:.2f} s")
