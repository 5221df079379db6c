"""`weightcast status`: the pairs of a gateway and the state of their instances."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

from weightcast.commands.options import Commands, add_gateway_option
from weightcast.transfer.errors import TransferError

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

    from weightcast.gateway.client import GatewayClient

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds the parser of `weightcast status`."""
    parser = commands.add_parser("status", help="show the pairs of a gateway")
    add_gateway_option(parser)
    parser.add_argument(
        "--watch",
        type=_seconds,
        nargs="?",
        const=2.0,
        metavar="SECONDS",
        help="show it anew every SECONDS (2) until Ctrl-C; with --json a line each time",
    )
    parser.set_defaults(run=_run)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not in 0.1..3600 seconds")
    return seconds


def _run(arguments: argparse.Namespace) -> None:
    from weightcast.gateway.client import GatewayClient

    with GatewayClient(arguments.gateway) as client:
        if arguments.watch is not None:
            _watch(client, arguments.watch, as_json=arguments.json)
            return
        pairs = client.status()
    if arguments.json:
        print(json.dumps({"pairs": pairs}))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for part in _shown(pairs).renderables:
        console.print(part, soft_wrap=isinstance(part, Text))


def _watch(client: GatewayClient, seconds: float, as_json: bool) -> None:
    """Shows the pairs anew until Ctrl-C. While the gateway is gone they stay as they were last, with the reason."""
    from rich.live import Live

    with suppress(KeyboardInterrupt):
        pairs, trouble = client.status(), ""  # a wrong address or token ends the command here
        live = None if as_json else Live(_shown(pairs), auto_refresh=False, vertical_overflow="visible")
        with live or nullcontext():
            while True:
                if live is None:
                    print(json.dumps({"pairs": pairs, **({"trouble": trouble} if trouble else {})}), flush=True)
                else:
                    live.update(_shown(pairs, trouble), refresh=True)
                time.sleep(seconds)
                trouble = ""
                try:
                    pairs = client.status()
                except TransferError as error:
                    trouble = f"as it was last: {error}"


def _shown(pairs: list[dict[str, Any]], trouble: str = "") -> Group:
    """A table for each pair, and under it a line for each instance of which there is something to say."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for pair in pairs:
        parts.append(_table(pair))
        parts += [Text(f"{name}: {i['reason']}") for name, i in pair["instances"].items() if i["reason"]]
        parts += [Text(f"{name}: {text}") for name, i in pair["instances"].items() if (text := _values(i))]
    if not pairs:
        parts.append(Text("no pairs"))
    if trouble:
        parts.append(Text(trouble))
    return Group(*parts)


def _values(instance: dict[str, Any]) -> str:
    """A text on values that are not finite in the last update, if it was committed with them; else empty."""
    last = instance["updates"][-1] if instance["updates"] else None
    if last is None or not last["committed"] or not last["non_finite"]:
        return ""
    first, count = last["non_finite"][0], last["non_finite_tensors"] - 1
    counts = f"{first['nan']} NaN, {first['inf']} infinite, {first['overflow']} too large"
    suffix = f", and {count} tensors more" if count else ""
    return f"version {last['version']} has values that are not finite: {first['tensor']!r}: {counts}{suffix}"


def _table(pair: dict[str, Any]) -> RenderableType:
    from rich.table import Table

    trainer = pair["trainer"]
    table = Table(
        title=f"pair {pair['pair']}: {len(trainer['registered'])} of {trainer['world_size']} trainer ranks registered"
    )
    for column in ("instance", "phase", "version", "serves", "fenced", "ranks", "epoch"):
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
        )
    return table
