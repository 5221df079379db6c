"""The world of `faults.py`: a gateway, trainer ranks and inference ranks in processes, and how to hurt them."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import fault_ranks
from fault_model import INSTANCES, TRAINERS, Seen, expected

from weightcast.gateway.client import TOKEN_VARIABLE, GatewayClient
from weightcast.gateway.server.tokens import make_token
from weightcast.transfer.errors import WeightcastError

__all__ = ["SETTINGS", "HungError", "Process", "World"]

SETTINGS: dict[str, float] = {
    "offer": 6.0,
    "register": 6.0,
    "join": 6.0,
    "prepare": 4.0,
    "transfer": 5.0,
    "verify": 5.0,
    "engine": 6.0,
    "clean_up": 2.0,
    "heartbeat": 0.5,
    "silence": 4.0,
    "outage": 10.0,
}
WRONG = 5_000
"""Added to a version it is one whose content no trainer that is believed ever holds."""
LONGEST = 45.0
"""Seconds within which every update is over: all deadlines that can follow one another in a run with one fault."""


class HungError(AssertionError):
    """Somebody waited longer than any deadline allows."""


class Process:
    """A process and the script's end of its pipe. `label` is its name in messages."""

    def __init__(self, context: Any, label: str, target: Callable[..., None], *arguments: Any) -> None:
        self.label = label
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.pid = int(self._process.pid)

    @property
    def alive(self) -> bool:
        return bool(self._process.is_alive())

    def send(self, *message: Any) -> None:
        with suppress(OSError):
            self.pipe.send(message)

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def stop(self) -> None:
        """SIGSTOP; returns when all of its threads stand still."""
        self.signal(signal.SIGSTOP)
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0] != "T":
            time.sleep(0.001)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.join()

    def receive(self, seconds: float) -> Any:
        """The next message, None from a process that has died. Raises HungError."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.pipe.poll(0.05):
                try:
                    return self.pipe.recv()
                except (EOFError, OSError):
                    return None
            if not self.alive and not self.pipe.poll(0.0):
                return None
        raise HungError(f"{self.label} said nothing for {seconds:g} s")


def serve_gateway(port: int, state: str, token: str, log: str, _: Connection) -> None:
    """The gateway as a user starts it."""
    os.environ[TOKEN_VARIABLE] = token
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    from weightcast.cli import main

    sys.exit(main(["gateway", "--port", str(port), *(("--state", state) if state else ()), "--log", "json"]))


class World:
    """All processes. Everything is started on entry and ended on exit.

    `zombies` are trainer processes that others have replaced and that still live, by rank. `options` are those of
    `TrainerWorker`; `settings` are the pair's, `remembers` gives the gateway a state file.
    """

    def __init__(
        self,
        work: Path,
        commit: str = "each",
        *,
        bucket_bytes: int = 64 << 10,
        settings: dict[str, float] = SETTINGS,
        remembers: bool = True,
        **options: Any,
    ) -> None:
        self._context = get_context("forkserver")
        # Imported once and inherited by all: torch alone takes seconds.
        self._context.set_forkserver_preload(
            ["torch", "fault_ranks", "weightcast.cli", "uvicorn", "weightcast.gateway.server.app"]
        )
        self._work, self._commit, self._bucket_bytes = work, commit, bucket_bytes
        self._settings, self._remembers, self._options = settings, remembers, options
        self._token = make_token()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.version = 0
        self.frozen: Process | None = None
        self.zombies: dict[int, Process] = {}
        self._renewed: set[int] = set()
        self.torn: dict[int, int | None] = {}
        """Trainer ranks whose weights change within the next update, and a seed for those that do so by themselves."""
        self.maps = dict.fromkeys(INSTANCES, 0)

    def __enter__(self) -> World:
        self.client = GatewayClient(self.url, self._token, timeout=20.0)
        self.start_gateway()
        self.create_pair()
        self.trainers = [self.start_trainer(rank) for rank in range(TRAINERS)]
        self.engines = {
            (name, rank): self.start_engine(name, rank) for name in INSTANCES for rank in range(INSTANCES[name])
        }
        return self

    def create_pair(self) -> None:
        """As whoever starts a trainer does; the same again changes nothing."""
        backend = self._options.get("backend", "tcp")
        instances = {n: {"kind": "worker", "world_size": world, "backend": backend} for n, world in INSTANCES.items()}
        self.client.create_pair(fault_ranks.PAIR, TRAINERS, instances, self._settings, self._bucket_bytes, self._commit)

    def __exit__(self, *_: object) -> None:
        self.client.close()
        for process in (*self.trainers, *self.zombies.values(), *self.engines.values(), self.gateway):
            process.signal(signal.SIGCONT)
            process.kill()

    def start_gateway(self) -> None:
        state = str(self._work / "state") if self._remembers else ""
        arguments = (self.port, state, self._token, str(self._work / "gateway.log"))
        self.gateway = Process(self._context, "the gateway", serve_gateway, *arguments)
        limit = time.monotonic() + 30.0
        while True:
            try:
                self.client.status()
                return
            except WeightcastError:
                assert time.monotonic() < limit, "the gateway did not start"
                time.sleep(0.05)

    def recreate_pair(self) -> None:
        """The pair is deleted, and created again as it was; ranks live on and are told by nobody."""
        self.client.delete_pair(fault_ranks.PAIR)
        self.create_pair()

    def copy_state(self) -> dict[str, bytes]:
        """The gateway's state as its file has it now, over a restart: a file in use cannot be copied."""
        self.gateway.kill()
        files = {file.name: file.read_bytes() for file in self._work.glob("state*")}
        self.start_gateway()
        return files

    def put_back(self, files: dict[str, bytes]) -> None:
        """A gateway begins with the state of an earlier time."""
        self.gateway.kill()
        for file in self._work.glob("state*"):
            file.unlink()
        for name, content in files.items():
            (self._work / name).write_bytes(content)
        self.start_gateway()

    def start_trainer(self, rank: int) -> Process:
        arguments = (rank, TRAINERS, self.url, self._token, self._options)
        return Process(self._context, f"trainer rank {rank}", fault_ranks.run_trainer, *arguments)

    def start_engine(self, name: str, rank: int) -> Process:
        backend = self._options.get("backend", "tcp")
        arguments = (name, rank, INSTANCES[name], self.maps[name], self.url, self._token, backend)
        return Process(self._context, f"{name} rank {rank}", fault_ranks.run_engine, *arguments)

    def everyone(self) -> list[Process]:
        return [*self.trainers, *self.engines.values()]

    def instance(self, name: str) -> list[Process]:
        return [process for (owner, _), process in self.engines.items() if owner == name]

    def replace(self, *ranks: int) -> None:
        """Stops trainer ranks, and starts a process in place of each, which connects: what a supervisor does that has
        lost sight of them. Those that are stopped are the zombies.
        """
        for rank in ranks:
            self.trainers[rank].stop()
        self._renewed.update(ranks)
        for rank in ranks:
            self.zombies[rank], self.trainers[rank] = self.trainers[rank], self.start_trainer(rank)
            self.trainers[rank].send("connect")

    def haunt(self, version: int) -> None:
        """The zombies go on where they were; then they send other weights than the trainer's as `version`."""
        for zombie in self.zombies.values():
            zombie.signal(signal.SIGCONT)
            zombie.send("go")
            zombie.send("update", version, version + WRONG)
            zombie.send("connect")
            zombie.send("update", version, version + WRONG)
            zombie.send("ended?")

    def lay(self, seconds: float = LONGEST) -> list[list[Any]]:
        """Ends the zombies; what each said at the end of what it was in, and of the three things that `haunt` made it
        do.
        """
        said: list[list[Any]] = []
        for zombie in self.zombies.values():
            said.append([])
            while (answer := zombie.receive(seconds)) not in (None, ("ended",)):
                if answer[0] == "at":
                    zombie.send("go")
                else:
                    said[-1].append(answer)
            zombie.kill()
        self.zombies.clear()
        return said

    def connect(self, seconds: float = LONGEST) -> list[Any]:
        """All trainer ranks connect; what each said."""
        for trainer in self.trainers:
            trainer.send("connect")
        return [trainer.receive(seconds) for trainer in self.trainers]

    def arm(self, process: Process, phase: str, instance: str = "") -> None:
        """Makes a process stop at a phase; a trainer's at that of an instance."""
        process.send("arm", phase, instance)
        while (answer := process.receive(LONGEST)) is not None and answer != ("armed",):
            if answer[0] == "at":
                process.send("go")

    def begin(self) -> int:
        """All trainer ranks begin to bring a new version; it ends with `end`."""
        self.version += 1
        for rank, trainer in enumerate(self.trainers):
            if rank in self.torn:
                trainer.send("torn", self.version, self.torn.pop(rank))
            else:
                trainer.send("update", self.version, self.version)
        return self.version

    def end(self, at: Callable[[Process, str], None], seconds: float = LONGEST) -> list[Any]:
        """What each trainer rank says at the end of an update, None for one that died.

        `at` is called with every process that stops at the phase that it is armed with.
        """
        said: dict[int, Any] = {}
        self._renewed.clear()
        deadline = time.monotonic() + seconds
        while len(said) < len(self.trainers):
            if {rank for rank, t in enumerate(self.trainers) if t is not self.frozen} <= said.keys():
                self.thaw()
            processes = {p.pipe: p for p in self.everyone() if p.alive or p.pipe.poll(0.0)}
            for pipe in wait(list(processes), 0.1):
                self._hear(processes[pipe], at, said)
            for rank in self._renewed:  # what counts is what the process says that is there now
                said.pop(rank, None)
            self._renewed.clear()
            if time.monotonic() > deadline:
                late = [self.trainers[rank].label for rank in range(len(self.trainers)) if rank not in said]
                raise HungError(f"{', '.join(late)} did not end the update within {seconds:g} s")
        return [said[rank] for rank in range(len(self.trainers))]

    def _hear(self, process: Process, at: Callable[[Process, str], None], said: dict[int, Any]) -> None:
        try:
            message = process.pipe.recv()
        except (EOFError, OSError):
            message = None
        if message is not None and message[0] == "at":
            at(process, message[1])
        elif process in self.trainers:
            said.setdefault(self.trainers.index(process), message)

    def freeze(self, process: Process) -> None:
        """SIGSTOP, until everybody else is done."""
        self.frozen = process
        process.stop()

    def thaw(self) -> None:
        """It goes on."""
        if self.frozen is not None:
            self.frozen.signal(signal.SIGCONT)
            self.frozen = None

    def rest(self, seconds: float = LONGEST) -> None:
        """Until no update or connect is under way. Raises HungError."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            status = self.status()
            busy = {"planned", "preparing", "transferring", "verifying"}
            if not status["offers"] and not any(i["phase"] in busy for i in status["instances"].values()):
                return
            time.sleep(0.1)
        raise HungError(f"the pair did not come to rest within {seconds:g} s")

    def status(self) -> dict[str, Any]:
        return self.client.pair_status(fault_ranks.PAIR)

    def see(self, seconds: float = LONGEST) -> dict[tuple[str, int], tuple[int | None, list[Seen]]]:
        """(version that it reports or None, what its memory holds) of every inference rank that lives."""
        found = {}
        for key, process in self.engines.items():
            if not process.alive:
                continue
            process.send("see")
            while (answer := process.receive(seconds)) is not None and answer[0] != "saw":
                if answer[0] == "at":
                    process.send("go")
            if answer is not None:
                found[key] = (answer[1], answer[3])
        return found

    def wrong(self) -> list[str]:
        """Memory that does not hold the version that is reported for it, by its rank or by the gateway."""
        faults = self._dead_that_serve()
        seen = self.see()
        for name, status in self.status()["instances"].items():
            for rank in range(INSTANCES[name]):
                found = seen.get((name, rank))
                if found is None:
                    continue
                claims = ({found[0]} | ({status["version"]} if status["serves"] else set())) - {None}
                for version in claims:
                    bad = [one for one in found[1] if one.hash != expected(one, int(version or 0))]
                    faults += [f"{name} rank {rank} reports {version}: {s.tensor} slot {s.slot} is not" for s in bad]
        return faults

    def _dead_that_serve(self) -> list[str]:
        """Instances of which a rank is dead, and which serve all the same when it should have been missed."""
        dead = {name for (name, _), process in self.engines.items() if not process.alive}
        limit = time.monotonic() + SETTINGS["silence"] + 3.0
        while True:
            serving = [name for name, i in self.status()["instances"].items() if i["serves"] and name in dead]
            if not serving or time.monotonic() > limit:
                return [f"{name} serves, though a rank of it is dead" for name in serving]
            time.sleep(0.1)

    def heal(self) -> None:
        """Starts what has died. Nobody else is restarted."""
        if not self.gateway.alive:
            self.start_gateway()
        self.trainers = [t if t.alive else self.start_trainer(rank) for rank, t in enumerate(self.trainers)]
        for (name, rank), process in self.engines.items():
            if not process.alive:
                self.engines[name, rank] = self.start_engine(name, rank)
        for _ in range(2):  # who answers twice has asked the gateway for orders in between
            self.see()
        limit = time.monotonic() + 30.0
        while any(i["silent"] for i in self.status()["instances"].values()):  # until those that started have spoken
            if time.monotonic() > limit:
                raise HungError("a rank that was started did not speak for 30 s")
            time.sleep(0.1)

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """No file of the gateway grows."""
        before = resource.prlimit(self.gateway.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.gateway.pid, resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                resource.prlimit(self.gateway.pid, resource.RLIMIT_FSIZE, before)
