"""`weightcast inspect`: coverage, slots, replicas and same-rank pairs of an instance, as its ranks reported them."""

from __future__ import annotations

import argparse
import json

from weightcast.commands.options import Commands, add_gateway_option
from weightcast.transfer.errors import CoverageError

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds the parser of `weightcast inspect`."""
    parser = commands.add_parser("inspect", help="show what the ranks of an instance hold")
    parser.add_argument("pair")
    parser.add_argument("instance")
    add_gateway_option(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from weightcast.gateway.client import GatewayClient

    with GatewayClient(arguments.gateway) as client:
        table = client.inspect(arguments.pair, arguments.instance)
        if arguments.json:
            print(json.dumps(table))
        else:
            print(client.inspect_text(arguments.pair, arguments.instance))
    return 0 if table["complete"] else CoverageError.exit_status
