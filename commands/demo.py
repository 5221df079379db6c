"""`weightcast demo`: the main job on one machine."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from weightcast.commands.options import Commands
from weightcast.demo.config import DEFAULT_SERVERS, DemoConfig, MegatronConfig, ServerConfig, VersionOutcome
from weightcast.gateway.reminder import SAY_SECONDS
from weightcast.transfer.errors import InputError
from weightcast.transfer.transports.addresses import bare

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["Steps", "add"]

_OPTIONS = ("model", "prelude", "versions", "steps", "dtype", "deadline", "ray", "share")
"""Options that the settings of the demo have by the same names."""


def add(commands: Commands) -> None:
    """Adds the parser of `weightcast demo`."""
    parser = commands.add_parser("demo", help="train, sync and compare on this machine, with real SGLang servers")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="checkpoint folder; a small Qwen3-MoE is made otherwise"
    )
    parser.add_argument("--work", type=Path, metavar="DIR", help="folder for model and logs; a temporary one otherwise")
    parser.add_argument("--trainer", choices=("fsdp", "megatron"), default="fsdp", help="what trains (fsdp)")
    parser.add_argument("--trainers", type=int, metavar="N", help="trainer processes (2, or what the layout takes)")
    parser.add_argument(
        "--trainer-layout",
        metavar="JSON",
        help='of a Megatron trainer ({"tp": 2, "pp": 2, "ep": 2, "etp": 1}); ranks beyond it are data-parallel',
    )
    parser.add_argument(
        "--trainer-prelude",
        dest="prelude",
        type=Path,
        metavar="FILE",
        help="Python file that each trainer process runs first; Megatron needs one to run on the CPU",
    )
    parser.add_argument("--versions", type=int, default=3, help="versions to sync (3)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps a version (20)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the engines (float32)")
    parser.add_argument(
        "--instance",
        action="append",
        metavar="JSON",
        help='an SGLang server, repeatable: {"name": "rollout-0", "tp": 2, "ep": 2, "map": [0,1,2,3,3,0]}',
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help="as actors of the Ray cluster at ADDRESS, or of one on this machine that ends with the demo",
    )
    parser.add_argument(
        "--colocated",
        dest="share",
        nargs="?",
        const="in_place",
        choices=("in_place", "staged"),
        help="engines read the trainer's weights where they lie in memory (in_place), or a staging buffer, and the "
        "trainer's weights are offloaded while they generate (staged)",
    )
    parser.add_argument("--host", type=bare, help="address of this machine to use (127.0.0.1)")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds for each step (300)")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.set_defaults(run=_run)


def _config(arguments: argparse.Namespace, work: Path) -> DemoConfig:
    servers = tuple(ServerConfig.given(text, f"instance {text!r}") for text in arguments.instance or ())
    layout, megatron = arguments.trainer_layout, None
    if arguments.trainer == "megatron":
        layout = '{"tp": 2, "pp": 2, "ep": 2}' if layout is None else layout
        megatron = MegatronConfig.given(layout, f"trainer layout {layout!r}")
    elif layout is not None:
        raise InputError("--trainer-layout is for --trainer megatron; FSDP2 shards over all trainer processes")
    trainers = arguments.trainers if arguments.trainers is not None else megatron.ranks if megatron else 2
    options = {name: getattr(arguments, name) for name in _OPTIONS}
    if arguments.host is not None:
        if arguments.ray is not None:
            raise InputError("--host is for plain processes; with --ray they are at the addresses of Ray's nodes")
        options["host"] = arguments.host
    return DemoConfig(work=work, trainers=trainers, megatron=megatron, servers=servers or DEFAULT_SERVERS, **options)


def _run(arguments: argparse.Namespace) -> int:
    config = _config(arguments, arguments.work or Path(tempfile.gettempdir()) / f"weightcast-demo-{os.getpid()}")
    from weightcast.demo.run import run_demo

    start = time.monotonic()
    with _progress(4 + len(config.servers) + config.versions) as (progress, task):

        def show(text: str) -> None:
            progress.console.print(f"[{time.monotonic() - start:5.1f} s] {text}", markup=False, highlight=False)

        def say(text: str) -> None:
            steps.say(text)
            progress.update(task, advance=1)

        with Steps(show) as steps:
            outcomes, faults = run_demo(config, say)
    seconds = time.monotonic() - start
    if arguments.json:
        print(json.dumps({"outcomes": [asdict(o) for o in outcomes], "faults": faults, "seconds": seconds}))
    else:
        _print(config, outcomes)
        print(f"{seconds:.0f} s; logs in {config.work}")
    for fault in faults:
        print(f"weightcast demo: {fault}", file=sys.stderr)
    return 4 if faults else 0


class Steps:
    """Steps of a run. Shows each, and again whenever it has taken `seconds` more: servers take a minute to start."""

    def __init__(self, show: Callable[[str], None], seconds: float = SAY_SECONDS) -> None:
        self._show, self._seconds = show, seconds
        self._step, self._over = "", False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._remind, name="weightcast-demo-steps", daemon=True)

    def __enter__(self) -> Steps:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._over = True
            self._changed.notify()
        self._thread.join()

    def say(self, step: str) -> None:
        """Shows a step that begins."""
        with self._changed:
            self._step = step
            self._show(step)
            self._changed.notify()

    def _remind(self) -> None:
        with self._changed:
            while not self._over:
                if not self._changed.wait(self._seconds) and self._step:
                    self._show(f"still at: {self._step.partition(';')[0]}")


@contextmanager
def _progress(steps: int) -> Iterator[tuple[Progress, TaskID]]:
    """A bar on stderr while it is a terminal, and lines above it in any case."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True, soft_wrap=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress, progress.add_task("demo", total=steps)


def _print(config: DemoConfig, outcomes: list[VersionOutcome]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 130, highlight=False)
    trainer = f"Megatron-Core trainer ranks, {config.megatron}" if config.megatron else "FSDP2 trainer ranks"
    console.print(f"{config.trainers} {trainer}; engines in {config.dtype}", markup=False)
    for server in config.servers:
        console.print(f"  {server.name}: SGLang, {server}", markup=False)
    rows = [_row(outcome, with_bytes=config.share is not None) for outcome in outcomes]
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in rows[0]:
        table.add_column(column, justify="left" if column == "instance" else "right")
    for row in rows:
        table.add_row(*row.values())
    console.print(table)


def _row(o: VersionOutcome, *, with_bytes: bool) -> dict[str, str]:
    """The cells of an outcome by column."""
    row = {
        "version": str(o.version),
        "instance": o.instance,
        "served as": o.weight_version,
        "digests equal": str(o.verified.get("regions", "-")),
        "of slots": str(o.verified.get("slot_regions", "-")),
        "replicas": str(o.verified.get("replicas", "-")),
        "tokens equal": f"{o.equal}/{o.prompts}",
        "changed": f"{o.changed}/{o.prompts}",
        "|Δ logprob|": f"{o.logprob_gap:.1e}",
        "update": f"{o.seconds:.2f} s",
    }
    return row | {"sockets": f"{o.sent} B", "memory": f"{o.shared} B"} if with_bytes else row
