"""Bodies of the Ray actors that hold an engine's server process, or run a trainer rank.

They are plain classes: `spawn` makes actors of them. Ray is imported when it is used.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from weightcast.cluster.processes import end_process, start_process, wait_up
from weightcast.cluster.tether import tethered
from weightcast.gateway.ray_actor import NAMESPACE
from weightcast.transfer.errors import EngineError, InputError, WeightcastError

__all__ = ["EngineActor", "RankActor", "spawn"]


def spawn(body: type, name: str, *arguments: Any, detached: bool = False, **options: Any) -> Any:
    """An actor of this project with a name; its handle. `options` are Ray's. Raises InputError for a name in use."""
    import ray

    settings = {"num_cpus": 0, "max_concurrency": 16, **options}
    try:
        return (
            ray.remote(body)
            .options(name=name, namespace=NAMESPACE, lifetime="detached" if detached else None, **settings)
            .remote(*arguments)
        )
    except ValueError as error:
        raise InputError(f"Ray actor {name!r}: {' '.join(str(error).split())[:300]}") from None


class _OnNode:
    """What every actor can say of where it is."""

    def address(self) -> str:
        """The IP address of its node."""
        import ray

        return str(ray.util.get_node_ip_address())

    def free_port(self) -> int:
        """A port that is free on its node now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])


class EngineActor(_OnNode):
    """A server process on the actor's node. It ends with the actor, however that ends."""

    def __init__(self) -> None:
        self._process: Any = None
        self._log = Path()
        self._url = ""

    def start(self, command: list[str], environment: dict[str, str], log: str | None, health: str) -> str:
        """Starts it without waiting; its address. `{host}`, `{port}` and `{python}` as parts of the command are filled
        in; a log without a name goes to the node's temporary folder."""
        host, port = self.address(), self.free_port()
        self._url = f"http://{host}:{port}"
        known = {"{host}": host, "{port}": str(port), "{python}": sys.executable}
        filled = [known.get(part, part) for part in command]
        self._log = Path(log or tempfile.mkstemp(prefix="weightcast-engine-", suffix=".log")[1])
        self._health = health
        self._process = start_process(tethered(filled), self._log, environment)
        return self._url

    def wait_up(self, seconds: float) -> str:
        """Its address, once it answers at its health path, if it has one. Raises EngineError with the end of its log
        when it does not come up."""
        if self._health:
            wait_up(self._process, self._url + self._health, self._log, seconds, {})
        return self._url

    def stop(self) -> None:
        """Ends it."""
        if self._process is not None:
            end_process(self._process)


class _Mailbox:
    """One end of a conversation between the body of a rank and whoever asks its actor; like a Connection."""

    def __init__(self) -> None:
        self.said: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.told: queue.SimpleQueue[object] = queue.SimpleQueue()

    def send(self, what: object) -> None:
        self.said.put(what)

    def recv(self) -> object:
        return self.told.get()


class RankActor(_OnNode):
    """One rank: runs a function of a module in a thread, and carries what it says and is told."""

    def __init__(self, environment: dict[str, str]) -> None:
        os.environ.update(environment)
        self._mail = _Mailbox()
        self._thread: threading.Thread | None = None

    def begin(self, function: str, *arguments: object) -> None:
        """Runs `module:name` with the arguments and a mailbox that has `send` and `recv`, and returns at once."""
        body = _function(function)

        def run() -> None:
            try:
                body(*arguments, self._mail)
            except BaseException as error:
                if isinstance(error, WeightcastError):
                    self._mail.send(error)
                elif not isinstance(error, SystemExit):  # who leaves so has said why
                    self._mail.send(EngineError(f"{function}: {type(error).__name__} {' '.join(str(error).split())}"))

        self._thread = threading.Thread(target=run, name=function, daemon=True)
        self._thread.start()

    def tell(self, what: object) -> None:
        """Gives the body something to receive."""
        self._mail.told.put(what)

    def hear(self, seconds: float) -> tuple[bool, object]:
        """The next thing that the body said, and whether there was one within the time."""
        with suppress(queue.Empty):
            return True, self._mail.said.get(timeout=seconds)
        return False, None

    def finish(self, seconds: float) -> bool:
        """Whether the body came to its end within the time."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()


def _function(name: str) -> Callable[..., object]:
    """Imports `module:name`. Raises InputError."""
    module, _, attribute = name.partition(":")
    try:
        found: Callable[..., object] = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"{name!r} cannot be imported as module:function: {error}") from None
    return found
