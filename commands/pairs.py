"""`weightcast pairs`, `delete`, `leave` and `join`: the pairs of a gateway and their instances, listed and changed."""

from __future__ import annotations

import argparse
import json
from typing import Any

from weightcast.commands.options import Commands, add_gateway_option, read_engine
from weightcast.gateway.versions import Version
from weightcast.transfer.errors import ControlError
from weightcast.transfer.layout.summaries import number_ranges

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds the parsers of `weightcast pairs`, `delete`, `leave` and `join`."""
    parser = commands.add_parser("pairs", help="list the pairs of a gateway")
    add_gateway_option(parser)
    parser.set_defaults(run=_pairs)
    parser = commands.add_parser("delete", help="make a gateway forget a pair; engines are left as they are")
    parser.add_argument("pair")
    parser.add_argument(
        "--force", action="store_true", help="though its trainer is alive; a connect or update is ended"
    )
    add_gateway_option(parser)
    parser.set_defaults(run=_delete)
    parser = commands.add_parser("leave", help="take an instance out of a pair")
    parser.add_argument("pair")
    parser.add_argument("instance")
    add_gateway_option(parser)
    parser.set_defaults(run=_leave)
    parser = commands.add_parser("join", help="add an instance to a pair; the next update brings it up")
    parser.add_argument("pair")
    parser.add_argument("instance")
    parser.add_argument(
        "engine", metavar="JSON", help='its engine: {"kind": "sglang", "url": "http://...", "world_size": 2}'
    )
    add_gateway_option(parser)
    parser.set_defaults(run=_join)


def _pairs(arguments: argparse.Namespace) -> None:
    from weightcast.gateway.client import GatewayClient

    with GatewayClient(arguments.gateway) as client:
        pairs = [_summary(pair) for pair in client.status()]
    if arguments.json:
        print(json.dumps({"pairs": pairs}))
    for pair in pairs if not arguments.json else ():
        version = "no version" if pair["version"] is None else f"version {pair['version']}"
        ranks = f"{pair['trainer_world']} trainer rank{'s' if pair['trainer_world'] != 1 else ''}"
        print(f"{pair['pair']}: {ranks}, {version}, instances {', '.join(pair['instances']) or 'none'}")
    if not pairs and not arguments.json:
        print("no pairs")


def _summary(pair: dict[str, Any]) -> dict[str, Any]:
    """Name, ranks and instances of a pair from its status, and the newest version that an instance has."""
    present = {name: record for name, record in pair["instances"].items() if record["phase"] != "left"}
    versions = [Version.parse(i["version"]) for i in present.values() if i["version"] is not None]
    return {
        "pair": pair["pair"],
        "trainer_world": pair["trainer"]["world_size"],
        "instances": list(present),
        "version": max(versions).as_json() if versions else None,
    }


def _delete(arguments: argparse.Namespace) -> None:
    from weightcast.gateway.client import GatewayClient

    with GatewayClient(arguments.gateway) as client:
        trainer = client.pair_status(arguments.pair)["trainer"]
        ranks = set(trainer["registered"]) - set(trainer["silent"])
        if ranks and not arguments.force:
            raise ControlError(
                f"pair {arguments.pair}: trainer ranks {number_ranges(ranks)} are alive; end them first, or delete it "
                "all the same with --force"
            )
        client.delete_pair(arguments.pair, force=arguments.force)
    _say(arguments, f"pair {arguments.pair} is deleted", pair=arguments.pair)


def _leave(arguments: argparse.Namespace) -> None:
    from weightcast.gateway.client import GatewayClient

    with GatewayClient(arguments.gateway) as client:
        client.leave_instance(arguments.pair, arguments.instance)
    text = f"instance {arguments.instance} leaves pair {arguments.pair}"
    _say(arguments, text, pair=arguments.pair, instance=arguments.instance)


def _join(arguments: argparse.Namespace) -> None:
    from weightcast.gateway.client import GatewayClient

    name, engine = read_engine(arguments.engine, arguments.instance)
    with GatewayClient(arguments.gateway) as client:
        client.join_instance(arguments.pair, name, engine)
    text = f"instance {name} has joined pair {arguments.pair}; the next update brings it up"
    _say(arguments, text, pair=arguments.pair, instance=name)


def _say(arguments: argparse.Namespace, text: str, **document: str) -> None:
    print(json.dumps(document) if arguments.json else text)
