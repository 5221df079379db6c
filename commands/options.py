"""Options and output that several commands share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from weightcast.gateway.records import shortfall
from weightcast.gateway.versions import Version
from weightcast.transfer.errors import InputError

__all__ = ["Commands", "add_gateway_option", "read_engine", "read_file", "show_update"]

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_gateway_option(parser: argparse.ArgumentParser) -> None:
    """Adds the options of every command that asks a gateway."""
    parser.add_argument(
        "--gateway",
        default="http://127.0.0.1:8900",
        metavar="URL",
        help="of the gateway (%(default)s); the token is taken from WEIGHTCAST_TOKEN",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def read_engine(text: str, name: str = "") -> tuple[str, dict[str, Any]]:
    """The name and the record of an engine, from JSON, which may leave out a name that is given. Raises InputError."""
    try:
        record = json.loads(text)
        named = record.pop("name", name)
    except (ValueError, AttributeError, TypeError):
        record, named = {}, ""
    if not isinstance(named, str) or not named:
        raise InputError(f"instance {text!r} is not a JSON object with a name")
    if name not in ("", named):
        raise InputError(f"instance {text!r} has the name {named!r}, expected {name!r}")
    return named, record


def read_file(path: Path) -> bytes:
    """The content of a file. Raises InputError for one that cannot be read."""
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from None


def show_update(stamp: str, instances: Mapping[str, Mapping[str, Any]], as_json: bool) -> None:
    """Prints an update: the gateway's record of each instance, as JSON or a line each."""
    if as_json:
        print(json.dumps({"version": Version.parse(stamp).as_json(), "instances": instances}))
        return
    for name, record in instances.items():
        if text := shortfall(name, record):
            print(text)
            continue
        regions = record["verified"]["regions"]
        print(f"{name}: version {stamp}, {regions} regions verified, {record['seconds']:.2f} s")
