"""The command line: `weightcast COMMAND`. Every command has `--json`.

Exit status: 0 done, 2 bad input, 3 incomplete, 4 a run that failed. An error is one line on stderr.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from weightcast import __version__
from weightcast.commands import cluster, demo, gateway, inspect, load, pairs, plan, status
from weightcast.transfer.errors import WeightcastError

__all__ = ["main"]

COMMANDS = (demo, gateway, plan, inspect, load, cluster, status, pairs)
"""Modules whose `add` adds the parser of a command. Its default `run` takes the arguments. It returns the exit status
where that may be another than 0."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and gives its exit status."""
    parser = argparse.ArgumentParser(prog="weightcast", description="Weight sync that can prove it wrote every slot.")
    parser.add_argument("--version", action="version", version=f"weightcast {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add(commands)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:  # told by the command's own parser, which shows the usage of the command
        commands.choices[arguments.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        status: int | None = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has seen enough, as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except WeightcastError as error:
        print(f"weightcast {arguments.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print(f"weightcast {arguments.command}: interrupted", file=sys.stderr)
        return 130
    return status or 0


if __name__ == "__main__":
    sys.exit(main())
