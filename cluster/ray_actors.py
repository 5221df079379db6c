"""Bodies of the Ray actors that hold an engine's server process, or run a trainer rank.

They are plain classes: `spawn` makes actors of them. Ray is imported when it is used.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from weightcast.cluster.die_with_parent import tethered
from weightcast.cluster.processes import end_process, free_port, start_process, wait_up
from weightcast.gateway.addresses import ADDRESS_VARIABLE, http_url
from weightcast.gateway.ranks.host import HOST_VARIABLE, host_name
from weightcast.gateway.ray_address import NAMESPACE, find_actor, http_address, node_address
from weightcast.transfer.errors import EngineError, InputError, WeightcastError

__all__ = [
    "CONNECTED",
    "EngineActor",
    "Launch",
    "Mail",
    "RankActor",
    "RankPlace",
    "answered",
    "end_actor",
    "import_function",
    "spawn",
    "stop_actor",
]

CONNECTED = "connected"
"""The subject of a trainer rank's first message."""

_DRAIN = 60.0
_RESTART = 1800.0
"""Seconds for an engine that is started again."""


def spawn(body: type, name: str, *arguments: Any, detached: bool = False, **options: Any) -> Any:
    """Starts an actor with a name; returns its handle. `options` are Ray's. Raises InputError for a name in use."""
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


def answered(what: Any, who: str, seconds: float) -> Any:
    """Waits for the return value of an actor's call. Raises the error of ours that the call raised.

    Raises EngineError for any other error, and for an actor that has ended or does not answer in time.
    """
    import ray

    try:
        return ray.get(what, timeout=seconds)
    except ray.exceptions.RayTaskError as error:
        raise (
            error.cause if isinstance(error.cause, WeightcastError) else EngineError(f"{who}: {error.cause}")
        ) from None
    except ray.exceptions.GetTimeoutError:
        raise EngineError(f"{who} did not answer within {seconds:g} s; is there a node for it?") from None
    except ray.exceptions.RayError as error:
        raise EngineError(f"{who}: {' '.join(str(error).split())[:300]}") from None


def stop_actor(name: str) -> None:
    """Ends the actor of this name for good, if there is one, after the process that it holds."""
    if (actor := find_actor(name)) is not None:
        end_actor(actor)


def end_actor(actor: Any) -> None:
    """Ends an actor for good, after the process that it holds."""
    import ray

    with suppress(ray.exceptions.RayError, AttributeError):
        ray.get(actor.stop.remote(), timeout=_DRAIN)
    ray.kill(actor, no_restart=True)


def import_function(name: str, what: str = "") -> Any:
    """Imports `module:name`. Raises InputError where that fails, with `what` before the name."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"{what}{name!r} cannot be imported as module:function: {error}") from None


class _OnNode:
    """A base of all actors, which tells the address of their node."""

    def address(self) -> str:
        """The IP address of its node."""
        return node_address()

    def free_port(self) -> int:
        """A TCP port that is free on its node now."""
        return free_port("::" if ":" in self.address() else "0.0.0.0")


@dataclass(frozen=True, slots=True)
class Launch:
    """The command of an engine, its environment, and the file of its log.

    In the command the parts `{host}`, `{port}`, `{python}`, `{instance}`, `{gateway}` and `{gateway_http}`, the
    gateway's present HTTP address, are filled in. A log without a name goes to the node's temporary folder. `health` is
    a path that answers once the engine is up, "" if there is none.
    """

    command: list[str]
    environment: dict[str, str]
    log: str | None = None
    health: str = "/health"
    instance: str = ""
    gateway: str = ""

    def filled(self, host: str, port: int) -> list[str]:
        """The command, for a server at this address."""
        values = {
            "{host}": host,
            "{port}": str(port),
            "{python}": sys.executable,
            "{instance}": self.instance,
            "{gateway}": self.gateway,
        }
        if "{gateway_http}" in self.command:
            values["{gateway_http}"] = http_address(self.gateway)
        return [values.get(part, part) for part in self.command]


class EngineActor(_OnNode):
    """A server process on the actor's node. It ends with the actor, however that ends.

    `again` is (launch, `module:name`, arguments). With it the actor ends when its process does, and Ray starts it
    again, on whatever node, as often as its options say. Then it starts another process by itself, and calls
    `module:name` with the process's URL and the arguments.
    """

    def __init__(self, again: tuple[Launch, str, tuple[object, ...]] | None = None) -> None:
        import ray

        self._process: subprocess.Popen[bytes] | None = None
        self._log = Path()
        self._url = self._health = ""
        self._stopped = threading.Event()
        self._again = again
        if again is not None and ray.get_runtime_context().was_current_actor_reconstructed:
            launch, function, arguments = again
            self.start(launch)
            import_function(function)(self.wait_up(_RESTART), *arguments)

    def start(self, launch: Launch) -> str:
        """Starts the process without waiting; returns its URL."""
        import ray

        host, port = self.address(), self.free_port()
        self._url, self._health = http_url(host, port), launch.health
        self._log = Path(launch.log or tempfile.mkstemp(prefix="weightcast-engine-", suffix=".log")[1])
        # Its ranks are no actors, so they have to be told where they are.
        cluster = str(ray.get_runtime_context().gcs_address)
        environment = {ADDRESS_VARIABLE: host, HOST_VARIABLE: host_name(), "RAY_ADDRESS": cluster, **launch.environment}
        self._process = start_process(tethered(launch.filled(host, port)), self._log, environment)
        return self._url

    def where(self) -> str:
        """The URL of the process."""
        return self._url

    def wait_up(self, seconds: float) -> str:
        """Waits until the process answers at its health path, if it has one; returns its URL.

        Raises EngineError with the end of its log when it does not come up.
        """
        assert self._process is not None
        if self._health:
            wait_up(self._process, self._url + self._health, self._log, seconds)
        if self._again is not None:
            threading.Thread(target=self._end_with, args=(self._process,), daemon=True).start()
        return self._url

    def _end_with(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        if not self._stopped.is_set():
            os._exit(1)

    def stop(self) -> None:
        """Ends the process and its children."""
        self._stopped.set()
        if self._process is not None:
            end_process(self._process)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of a trainer rank: its number, its address, and HOST:PORT where rank 0 brings all together."""

    rank: int
    address: str
    rendezvous: str


class Mail:
    """Messages to a body and from it. Several callers of the actor may ask at once."""

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.said: queue.SimpleQueue[object] = queue.SimpleQueue()

    def send(self, what: object) -> None:
        self.said.put(what)

    def recv(self) -> Any:
        return self.told.get()


class RankActor(_OnNode):
    """One rank: runs a function of a module in a thread, and carries messages from it and to it.

    `kept` is for whoever begins the rank again; Ray hands it to an actor that it starts again, too.
    """

    def __init__(self, environment: dict[str, str], kept: object = None) -> None:
        os.environ.update(environment)
        self._kept = kept
        self._mail = Mail()
        self._thread: threading.Thread | None = None

    def begin(self, function: str, *arguments: object) -> None:
        """Runs `module:name` with the arguments and a Mail, and returns at once."""
        body = import_function(function)
        mail = self._mail = Mail()

        def run() -> None:
            try:
                body(*arguments, mail)
            except BaseException as error:
                if isinstance(error, WeightcastError):
                    mail.send(error)
                elif not isinstance(error, SystemExit):  # who leaves so has said why
                    mail.send(EngineError(f"{function}: {type(error).__name__} {' '.join(str(error).split())}"))

        self._thread = threading.Thread(target=run, name=function, daemon=True)
        self._thread.start()

    def kept(self) -> object:
        """The value `kept` that the actor was made with."""
        return self._kept

    def runs(self) -> bool:
        """True while the body runs. It does not in an actor that was started again."""
        return self._thread is not None and self._thread.is_alive()

    def tell(self, what: object) -> None:
        """Gives the body something to receive."""
        self._mail.told.put(what)

    def hear(self, seconds: float) -> tuple[bool, object]:
        """The next message of the body, as (True, message); (False, None) if there was none within the time."""
        with suppress(queue.Empty):
            return True, self._mail.said.get(timeout=seconds)
        return False, None

    def finish(self, seconds: float) -> bool:
        """True if the body came to its end within the time."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()
