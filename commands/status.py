"""`weightcast status`: the pairs of a gateway and the state of their instances."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from weightcast.commands.options import Commands, add_gateway_option
from weightcast.transfer.errors import TransferError

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

    from weightcast.gateway.client import GatewayClient

__all__ = ["add"]

_OLD_SECONDS = 3600.0
"""Seconds without a sign of life after which a pair is folded away."""


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
    parser.add_argument("--all", action="store_true", help="show pairs without a sign of life for over an hour, too")
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
            _watch(client, arguments.watch, as_json=arguments.json, show_all=arguments.all)
            return
        pairs = client.status()
    if arguments.json:
        print(json.dumps({"pairs": pairs}))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for part in _shown(pairs, show_all=arguments.all).renderables:
        console.print(part, soft_wrap=isinstance(part, Text))


def _watch(client: GatewayClient, seconds: float, as_json: bool, show_all: bool) -> None:
    """Shows the pairs anew until Ctrl-C. While the gateway is gone they stay as they were, with the time and reason."""
    from rich.live import Live

    from weightcast.transfer.deadline import utc

    with suppress(KeyboardInterrupt):
        pairs, trouble = client.status(), ""  # a wrong address or token ends the command here
        answered_at = utc(time.time())
        live = None if as_json else Live(auto_refresh=False, vertical_overflow="visible")
        with live or nullcontext():
            while True:
                if live is None:
                    print(json.dumps({"pairs": pairs, **({"trouble": trouble} if trouble else {})}), flush=True)
                else:
                    live.update(_shown(pairs, trouble, show_all), refresh=True)
                time.sleep(seconds)
                trouble = ""
                try:
                    pairs, answered_at = client.status(), utc(time.time())
                except TransferError as error:
                    trouble = f"as it was at {answered_at[11:19]} UTC: {error}"


def _shown(pairs: list[dict[str, Any]], trouble: str = "", show_all: bool = False) -> Group:
    """A table for each pair, and under it a line for each wait, and each instance of which there is something to say.

    Pairs without a sign of life for over an hour are folded into one line, unless `show_all`.
    """
    from rich.console import Group
    from rich.text import Text

    from weightcast.gateway.records import WaitRecord

    parts: list[RenderableType] = []
    old_names = [] if show_all else [pair["pair"] for pair in pairs if _is_old(pair)]
    for pair in pairs:
        if pair["pair"] in old_names:
            continue
        parts.append(_table(pair))
        waits = [{name: value for name, value in wait.items() if name != "instance"} for wait in pair["waiting"]]
        parts += [Text(str(WaitRecord(**wait))) for wait in waits]
        parts += [Text(f"{name}: {i['reason']}") for name, i in pair["instances"].items() if i["reason"]]
        parts += [Text(f"{name}: {text}") for name, i in pair["instances"].items() if (text := _values(i))]
    if old_names:
        noun = "pair" if len(old_names) == 1 else "pairs"
        remedy = "(weightcast status --all; weightcast delete PAIR)"
        text = f"{len(old_names)} {noun} without a sign of life for over an hour: {', '.join(old_names)} {remedy}"
        parts.append(Text(text))
    if not pairs:
        parts.append(Text("no pairs"))
    if trouble:
        parts.append(Text(trouble))
    return Group(*parts)


def _is_old(pair: dict[str, Any]) -> bool:
    """True if no rank of a pair was heard for over an hour, nor the pair made since, and nobody waits for it."""
    signs = [pair["since"], pair["trainer"]["heard"], *(i["heard"] for i in pair["instances"].values())]
    last_sign = max(sign for sign in signs if sign is not None)
    return not pair["waiting"] and _age(pair["now"], last_sign) > _OLD_SECONDS


def _age(now: str, moment: str) -> float:
    return (datetime.fromisoformat(now) - datetime.fromisoformat(moment)).total_seconds()


def _ago(now: str, moment: str | None) -> str:
    """The age of a time of the gateway, in words; empty where there is none."""
    if moment is None:
        return ""
    seconds = max(0.0, _age(now, moment))
    if seconds < 120:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 7200 else f"{seconds / 3600:.0f} h ago"


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

    table = Table(title=_title(pair))
    for column in ("instance", "phase", "version", "serves", "fenced", "ranks", "epoch", "heard"):
        table.add_column(column)
    for name, i in pair["instances"].items():
        committed = _ago(pair["now"], i["committed"])
        version = "-" if i["version"] is None else str(i["version"])
        table.add_row(
            name,
            i["phase"],
            f"{version}, {committed}" if committed else version,
            "yes" if i["serves"] else "no",
            "waiting" if i["state"] == "waiting" else "FENCED" if i["fenced"] else "no",
            f"{len(i['registered'])} of {i['world_size']}{_silent(i)}",
            str(i["epoch"]),
            _ago(pair["now"], i["heard"]) or "never",
        )
    return table


def _silent(side: dict[str, Any]) -> str:
    """The ranks of a trainer or an instance that are missed, in words; empty if there are none."""
    from weightcast.transfer.layout.summaries import number_ranges

    return f", ranks {number_ranges(side['silent'])} SILENT" if side["silent"] else ""


def _title(pair: dict[str, Any]) -> str:
    """The pair and its trainer ranks: how many have registered, and which of them are silent since when."""
    trainer = pair["trainer"]
    title = f"pair {pair['pair']}: {len(trainer['registered'])} of {trainer['world_size']} trainer ranks registered"
    title += _silent(trainer)
    heard = _ago(pair["now"], trainer["heard"])
    return f"{title}, last heard {heard}" if heard else title
