"""Processes of our own on one host: started with a log, waited for, and ended with all their children."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from weightcast.transfer.errors import EngineError
from weightcast.transfer.transports.addresses import listen

__all__ = ["end_process", "free_port", "running", "start_process", "tail", "wait_up"]


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port that is free now on an address of this host; on all of them for 0.0.0.0 or ::."""
    with listen(address) as probe:
        return int(probe.getsockname()[1])


def start_process(command: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Starts a process with its own session that writes to `log`."""
    with log.open("wb") as out:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=os.environ | environment,
            start_new_session=True,
        )


@contextmanager
def running(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its own session; it and its children are ended on leaving."""
    process = start_process(command, log, environment)
    try:
        yield process
    finally:
        end_process(process)


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Ends a process of `start_process` and its children."""
    for number, seconds in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
        # The leader is gone; its children get the same signal once more, in case they outlived it.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return


def tail(log: Path, lines: int = 5) -> str:
    """The last lines of a log, joined into one."""
    return " | ".join(log.read_text(errors="replace").strip().splitlines()[-lines:])


def wait_up(
    process: subprocess.Popen[bytes], url: str, log: Path, seconds: float, headers: dict[str, str] | None = None
) -> None:
    """Waits until `url` answers. Raises EngineError with the end of the log when the process ends or time is over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EngineError(f"{url}: the process ended with {process.returncode}; see {log}: {tail(log)}")
        try:
            if httpx.get(url, headers=headers, timeout=5.0, trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.25)
    raise EngineError(f"{url} was not up within {seconds:g} s; see {log}: {tail(log)}")
