"""Runs a command that must not outlive whoever started it: `python -m weightcast.cluster.die_with_parent COMMAND ...`.

An actor of Ray that is killed cannot end its children. This process stands between: it ends the whole process group
when its parent is gone, or when it is told to end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

__all__ = ["tethered"]

_LOOK_SECONDS = 0.5
_GRACE_SECONDS = 5.0


def tethered(command: list[str]) -> list[str]:
    """The command that runs `command` and dies with this process. It has to be started in a session of its own."""
    return [sys.executable, "-m", "weightcast.cluster.die_with_parent", str(os.getpid()), *command]


def main(parent: int, command: list[str]) -> int:
    """Runs a command until it ends, or until the parent does; returns the command's exit status."""
    _watch(os.getpid())
    child = subprocess.Popen(command)
    signals = []
    signal.signal(signal.SIGTERM, lambda *_: signals.append(True))
    while child.poll() is None:
        if signals or os.getppid() != parent:
            _end_group(child)
        time.sleep(_LOOK_SECONDS)
    return child.returncode


def _watch(tether: int) -> None:
    """Starts a process that ends the group when this one is gone.

    A worker of Ray that loses its node kills its children, and this process is one of them.
    """
    if os.fork():
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while os.getppid() == tether:
        time.sleep(_LOOK_SECONDS)
    os.killpg(tether, signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    os.killpg(tether, signal.SIGKILL)  # itself, too


def _end_group(child: subprocess.Popen[bytes]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # this process is of the group, and stays to see it end
    os.killpg(os.getpgrp(), signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        child.wait(_GRACE_SECONDS)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
