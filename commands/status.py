"""`weightcast status`: the pairs of a gateway and where their instances stand."""

from __future__ import annotations

import argparse
import json
from typing import Any, TypeAlias

__all__ = ["add", "add_gateway_option"]

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add(commands: Commands) -> None:
    """`weightcast status`."""
    parser = commands.add_parser("status", help="show the pairs of a gateway")
    add_gateway_option(parser)
    parser.set_defaults(run=_run)


def add_gateway_option(parser: argparse.ArgumentParser) -> None:
    """Options of every command that asks a gateway."""
    parser.add_argument(
        "--gateway", default="http://127.0.0.1:8900", metavar="URL", help="the token is WEIGHTCAST_TOKEN"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(arguments: argparse.Namespace) -> int:
    from weightcast.gateway.client import GatewayClient

    with GatewayClient(arguments.gateway) as client:
        pairs = client.status()
    if arguments.json:
        print(json.dumps({"pairs": pairs}))
        return 0
    _print(pairs)
    return 0


def _print(pairs: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not pairs:
        console.print("no pairs")
    for pair in pairs:
        trainer = pair["trainer"]
        table = Table(
            title=f"pair {pair['pair']}: "
            f"{len(trainer['registered'])} of {trainer['world_size']} trainer ranks registered"
        )
        for column in ("instance", "phase", "version", "serves", "fenced", "ranks", "epoch", "reason"):
            table.add_column(column)
        for name, i in pair["instances"].items():
            table.add_row(
                name,
                i["phase"],
                "-" if i["version"] is None else str(i["version"]),
                "yes" if i["serves"] else "no",
                "FENCED" if i["fenced"] else "no",
                f"{len(i['registered'])} of {i['world_size']}",
                str(i["epoch"]),
                i["reason"],
            )
        console.print(table)
