"""`weightcast up`, `down` and `update`: a pair on a Ray cluster, from a file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from weightcast.commands.options import Commands, show_update

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds the parsers of `weightcast up`, `down` and `update`."""
    for name, help_text, run in (
        ("up", "start gateway, engines and trainer ranks of a cluster file on Ray", _up),
        ("down", "stop what 'up' started, and nothing else", _down),
    ):
        parser = commands.add_parser(name, help=help_text)
        parser.add_argument("spec", type=Path, metavar="FILE", help="cluster file (docs/clusters.md)")
        parser.add_argument("--deadline", type=float, default=900.0, help="seconds for each step (900)")
        parser.add_argument("--json", action="store_true", help="print JSON")
        parser.set_defaults(run=run)
    parser = commands.add_parser("update", help="have the trainer ranks that 'up' started send their weights")
    parser.add_argument("pair")
    parser.add_argument("--version", type=int, required=True)
    parser.add_argument(
        "--restart", action="store_true", help="begin a new lineage: for a trainer that resumes from an older step"
    )
    parser.add_argument("--ray", default="auto", metavar="ADDRESS", help="the Ray cluster (auto)")
    parser.add_argument("--deadline", type=float, default=900.0, help="seconds (900)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_update)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _up(arguments: argparse.Namespace) -> None:
    from weightcast.cluster.launch import on_ray, up
    from weightcast.cluster.spec import read_spec

    spec = read_spec(arguments.spec)
    with on_ray(spec.ray.address):
        engines = up(spec, _say, arguments.deadline)
    if arguments.json:
        print(json.dumps({"pair": spec.pair, "gateway": spec.gateway_url, "engines": engines}))
    else:
        print(f"pair {spec.pair} is up; next: weightcast update {spec.pair} --version 1")


def _down(arguments: argparse.Namespace) -> None:
    from weightcast.cluster.launch import down, on_ray
    from weightcast.cluster.spec import read_spec

    spec = read_spec(arguments.spec)
    with on_ray(spec.ray.address):
        down(spec, _say)
    if arguments.json:
        print(json.dumps({"pair": spec.pair}))


def _update(arguments: argparse.Namespace) -> None:
    from weightcast.cluster.launch import on_ray
    from weightcast.cluster.trainer_ranks import update

    with on_ray(arguments.ray):
        result = update(arguments.pair, arguments.version, _say, arguments.deadline, restart=arguments.restart)
    show_update(result.stamp, result.instances, arguments.json)
