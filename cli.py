"""The command line: `weightcast COMMAND`. Every command has `--json`.

Exit status: 0 done, 2 bad input, 3 incomplete, 4 a run that failed. An error is one line on stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from weightcast import __version__
from weightcast.transfer.bundle import plan_document, read_bundle
from weightcast.transfer.errors import InputError, WeightcastError
from weightcast.transfer.plan import TransferPlan
from weightcast.transfer.planner import plan_transfer
from weightcast.transfer.summary import Traffic, traffic_of

__all__ = ["main"]

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and gives its exit status."""
    parser = argparse.ArgumentParser(prog="weightcast", description="Weight sync that can prove it wrote every slot.")
    parser.add_argument("--version", action="version", version=f"weightcast {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except WeightcastError as error:
        print(f"weightcast {arguments.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_status
    return status


def _add_plan(commands: Commands) -> None:
    parser = commands.add_parser("plan", help="plan a transfer offline, from a layout bundle")
    parser.add_argument("--layouts", type=Path, required=True, metavar="FILE", help="layout bundle, JSON or msgpack")
    parser.add_argument("--json", action="store_true", help="print all operations as JSON")
    parser.add_argument("--no-check", dest="check", action="store_false", help="do not prove the plan's invariants")
    parser.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    path: Path = arguments.layouts
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from None
    bundle = read_bundle(data)
    begin = time.perf_counter()
    plan = plan_transfer(bundle.trainer, bundle.instances, check=arguments.check, required=bundle.tensors.names)
    seconds = time.perf_counter() - begin
    traffic = traffic_of(plan)
    if arguments.json:
        json.dump(plan_document(plan, traffic, seconds), sys.stdout)
        print()
    else:
        print(_plan_table(plan, traffic, seconds, checked=arguments.check))
    return 0


def _plan_table(plan: TransferPlan, traffic: Traffic, seconds: float, *, checked: bool) -> str:
    rows: list[tuple[str, ...]] = [("rank", "bytes sent", "bytes received", "bytes copied")]
    rows += [(f"trainer {rank}", f"{sent:,}", "", "") for rank, sent in enumerate(traffic.trainer_sent.tolist())]
    for name, *columns in zip(plan.instances, traffic.sent, traffic.received, traffic.copied, strict=True):
        for rank, numbers in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            rows.append((f"{name} {rank}", *(f"{number:,}" if number else "" for number in numbers)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    lines.append("")
    lines.append(
        f"{traffic.sends:,} sends, {traffic.copies:,} copies, {traffic.relays:,} relays of "
        f"{len(plan.tensors):,} tensors"
    )
    lines.append(f"planned{' and checked' if checked else ''} in {seconds:.3f} s")
    return "\n".join(line.rstrip() for line in lines)


COMMANDS: list[Callable[[Commands], None]] = [_add_plan]
"""What adds each command's parser; the parser's default `run` takes the parsed arguments and gives the exit status."""


if __name__ == "__main__":
    sys.exit(main())
