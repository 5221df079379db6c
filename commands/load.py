"""`weightcast load`: a checkpoint from disk into engines, proven like an update from a trainer."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path

from weightcast.commands.options import Commands, add_gateway_option, read_engine, read_file, show_update
from weightcast.transfer.errors import InputError, WeightcastError
from weightcast.transfer.planner.topology import read_topology

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds the parser of `weightcast load`."""
    parser = commands.add_parser("load", help="load a safetensors checkpoint into engines, without a trainer")
    parser.add_argument("checkpoint", type=Path, metavar="DIR", help="folder of safetensors files")
    parser.add_argument(
        "--instance",
        action="append",
        required=True,
        metavar="JSON",
        help='an engine, repeatable: {"name": "rollout-0", "kind": "sglang", "url": "http://...", "world_size": 2}',
    )
    parser.add_argument("--version", type=int, default=1, help="version to stamp (1)")
    parser.add_argument(
        "--pair", default="load", help="name of the pair that is made for it, and forgotten after (load)"
    )
    parser.add_argument(
        "--topology",
        type=Path,
        metavar="FILE",
        help="speeds of links as for 'weightcast plan --simulate': ranks of an engine forward weights that they share",
    )
    parser.add_argument("--address", help="where engines reach this process (its end of the gateway's connection)")
    add_gateway_option(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    from weightcast.adapters.unsharded import CheckpointSource
    from weightcast.gateway.client import GatewayClient
    from weightcast.gateway.ranks.trainer import TrainerWorker

    instances = dict(read_engine(text) for text in arguments.instance)
    source = CheckpointSource(arguments.checkpoint)
    topology = read_topology(read_file(arguments.topology)).document if arguments.topology else None
    source.describe()  # a fault of the checkpoint is told before anything is asked of an engine
    with GatewayClient(arguments.gateway) as client:
        if arguments.pair in [pair["pair"] for pair in client.status()]:
            raise InputError(
                f"there is a pair {arguments.pair!r} already; give another name as --pair, or remove what an earlier "
                f"run has left with 'weightcast delete {arguments.pair} --force'"
            )
        client.create_pair(arguments.pair, 1, instances, topology=topology)
        worker = TrainerWorker(
            arguments.gateway, arguments.pair, source, rank=0, world_size=1, address=arguments.address
        )
        try:
            worker.connect()
            result = worker.update(arguments.version)
        except BaseException:
            with suppress(WeightcastError):  # what has failed before says more than that this fails, too
                client.delete_pair(arguments.pair, force=True)
            raise
        finally:
            worker.close()
        client.delete_pair(arguments.pair, force=True)
    show_update(result.stamp, result.instances, arguments.json)
